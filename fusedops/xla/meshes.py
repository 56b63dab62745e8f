"""A product over the devices of a mesh: by letters, so that nothing is gathered that need not be.

===================  ==================================================================================================
axes of the mesh     what is done
===================  ==================================================================================================
Auto                 ``custom_partitioning`` with the letters as Shardy's rule; the compiler chooses who holds what
Manual               the product of one device, inside ``jax.shard_map``
Explicit             ``jax.shard_map`` by the operands' own types: no partitioned operation, so it can be exported
===================  ==================================================================================================

Where a letter is sharded that is summed over, each device computes its part of the product alone; the parts are added,
and bias and activation come once, after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .local import local_product
from .product_spec import ProductSpec
from .unfused import compute_dtype, epilogue

__all__ = ["agreed", "explicit_mesh", "over_explicit_axes", "over_mesh"]

Array = Any
Axes = dict[str, tuple[str, ...]]
"""The axes of the mesh over which each letter is sharded."""

Product = Callable[..., list[Array]]


def over_mesh(spec: ProductSpec, mesh: Any, *operands: Array) -> list[Array]:
    """Return the results over the devices of a program: as one device's, or partitioned by the compiler."""
    if AxisType.Manual in mesh.axis_types:
        return local_product(spec, *operands)
    # In the text of the program, and so in the key of the compilation cache: products that differ in their epilog only
    # would otherwise be one to it.
    with set_xla_metadata(fusedops_product=repr(spec)):
        return list(_partitioned(spec)(*operands))


def _assigned(pairs: Iterable[tuple[str, Any]], fits: Callable[[str, tuple[str, ...]], bool]) -> Axes:
    """Return the axes of each letter from arrays' letters and partition specs, each axis for one letter."""
    axes: Axes = {}
    used: set[str] = set()
    for letters, partition in pairs:
        for letter, names in zip(letters, partition, strict=False):
            found = () if names is None else names if isinstance(names, tuple) else (names,)
            if found and letter not in axes and not used & set(found) and fits(letter, found):
                axes[letter] = found
                used |= set(found)
    return axes


def _partition(axes: Axes, letters: str) -> PartitionSpec:
    return PartitionSpec(*(axes.get(letter) for letter in letters))


def _added(spec: ProductSpec, axes: Axes, alone: Product, whole: Product, operands: tuple[Array, ...]) -> list[Array]:
    """Return the results of one device, with the parts of other devices added where a summed letter is sharded."""
    names = tuple(name for letter in spec.summed for name in axes.get(letter, ()))
    if not names:
        return whole(spec, *operands)
    part = alone(spec.product_alone(compute_dtype(operands[0])), *operands[:2])[0]
    return epilogue(spec, jax.lax.psum(part, names), operands)


def _unsharded(spec: ProductSpec) -> str:
    """Return the letters that no device may hold a part of: a padded or a summed axis of an auxiliary array."""
    if spec.epilog.takes is None and spec.gives is None:
        return ""
    return spec.out[-2:] + spec.summed


# Auto ----------------------------------------------------------------------------------------------------------------


@cache
def _partitioned(spec: ProductSpec) -> Any:
    """Return the product as an operation that the compiler partitions by its letters."""
    operation = custom_partitioning(lambda *operands: tuple(local_product(spec, *operands)))
    whole = _unsharded(spec)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        extents = {
            x: n
            for own, t in zip(spec.operands[:2], arguments, strict=False)
            for x, n in zip(own, t.shape, strict=True)
        }

        def fits(letter: str, names: tuple[str, ...]) -> bool:
            # What pads an uneven part is not zero, so it must not be summed.
            parts = math.prod(mesh.shape[name] for name in names)
            return letter not in whole and not (letter in spec.summed and extents[letter] % parts)

        pairs = zip((*spec.results, *spec.operands), (*results, *arguments), strict=True)
        axes = _assigned([(letters, t.sharding.spec) for letters, t in pairs], fits)
        shardings = tuple(NamedSharding(mesh, _partition(axes, letters)) for letters in spec.operands)

        def on_one_device(*operands: Array) -> tuple[Array, ...]:
            return tuple(_added(spec, axes, local_product, local_product, operands))

        placed = tuple(NamedSharding(mesh, _partition(axes, letters)) for letters in spec.results)
        return mesh, on_one_device, placed, shardings

    operation.def_partition(partition, sharding_rule=_rule(spec), reduction_factors=tuple(spec.summed))
    return operation


def _rule(spec: ProductSpec) -> str:
    """Return Shardy's rule; the padded last axis of a residual is a factor of its own."""

    def factors(letters: str, padded: bool) -> str:
        return " ".join([*letters[:-1], f"{letters[-1]}_padded"] if padded else letters)

    takes, gives = spec.epilog.takes, spec.gives
    pads = gives is not None and not gives.format.startswith("sum")
    operands = [factors(x, bool(takes) and i == len(spec.operands) - 1) for i, x in enumerate(spec.operands)]
    results = [factors(x, pads and i == 1) for i, x in enumerate(spec.results)]
    return ", ".join(operands) + " -> " + ", ".join(results)


# Explicit ------------------------------------------------------------------------------------------------------------


def explicit_mesh(operands: tuple[Array, ...]) -> Any:
    """Return the mesh whose axes are part of the arrays' types, None where there is none; no context need name it."""
    for mesh in (jax.typeof(x).sharding.mesh for x in operands):
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def over_explicit_axes(spec: ProductSpec, mesh: Any, operands: tuple[Array, ...], product: Product) -> list[Array]:
    """Return the results over a mesh whose axes are part of the arrays' types."""
    whole = _unsharded(spec)
    pairs = [(letters, jax.typeof(x).sharding.spec) for letters, x in zip(spec.operands, operands, strict=True)]
    axes = _assigned(pairs[:2], lambda letter, names: letter not in whole)
    placed = [
        jax.sharding.reshard(x, NamedSharding(mesh, _partition(axes, letters)))
        for x, letters in zip(operands, spec.operands, strict=True)
    ]

    def on_one_device(*parts: Array) -> tuple[Array, ...]:
        return tuple(_added(spec, axes, product, product, parts))

    mapped = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=tuple(_partition(axes, letters) for letters in spec.operands),
        out_specs=tuple(_partition(axes, letters) for letters in spec.results),
    )
    return list(mapped(*placed))


# Manual --------------------------------------------------------------------------------------------------------------


def agreed(operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the operands, each varying over all axes of the mesh over which any of them does.

    Outside of what is differentiated, so that the transpose of the cast is the sum of a replicated operand's gradient.
    """
    each = [_varying(x) for x in operands]
    every = frozenset().union(*each)
    if all(own == every for own in each):
        return operands
    missing = [tuple(sorted(every - own)) for own in each]
    return tuple(jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(operands, missing, strict=True))


def _varying(x: Array) -> frozenset[str]:
    """Return the axes over which an array varies; JAX 0.10 keeps them elsewhere than other versions."""
    aval = jax.typeof(x)
    return frozenset(aval.mat.varying if hasattr(aval, "mat") else getattr(aval, "vma", ()))
