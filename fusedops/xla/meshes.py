"""A product over the devices of a mesh: by letters, so that nothing is gathered that need not be.

===================  ==================================================================================================
axes of the mesh     what is done
===================  ==================================================================================================
Auto                 ``custom_partitioning`` with the letters as Shardy's rule; the compiler chooses who holds what
Manual               the product of one device, inside ``jax.shard_map``; axes beside them that are Auto are gathered
Explicit             ``jax.shard_map`` by the operands' own types: no partitioned operation, so it can be exported
===================  ==================================================================================================

What one device computes is in ``parts.py``. An array has its padding on every device or on none, so residuals have
none between devices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding

from ..epilogs import Aux, Epilog
from .local import local_product
from .parts import (
    Axes,
    Product,
    assigned,
    extents,
    fitting,
    partition,
    parts,
    with_padding,
    without_excess,
    without_padding,
)
from .product_spec import ProductSpec
from .unfused import summed_operand

__all__ = ["agreed", "explicit_mesh", "over_explicit_axes", "over_mesh"]

Array = Any


def over_mesh(spec: ProductSpec, mesh: Any, *operands: Array) -> list[Array]:
    """Return the results over the devices of a program: as one device's, or partitioned by the compiler."""
    if AxisType.Manual in mesh.axis_types:  # XLA ends the process at a partitioned operation over the other axes
        return local_product(spec, *operands)
    n = extents(spec, operands)[spec.out[-1]]
    operands = (*operands[:-1], without_padding(spec.epilog.takes, operands[-1], n))
    # In the text of the program, and so in the key of the compilation cache: products that differ in their epilog only
    # would otherwise be one to it.
    with set_xla_metadata(fusedops_product=repr(spec)):
        results = _partitioned(spec, n % 8 == 0)(*operands)
    return [*results[:-1], with_padding(spec.gives, results[-1], n)]


# Auto ----------------------------------------------------------------------------------------------------------------


@cache
def _partitioned(spec: ProductSpec, whole_bytes: bool) -> Any:
    """Return the product as an operation that the compiler partitions by its letters."""
    operation = custom_partitioning(lambda *operands: tuple(parts(spec, {}, local_product, operands)))

    def partitioned(mesh: Any, arguments: Any, results: Any) -> Any:
        sizes = extents(spec, arguments)
        pairs = zip((*spec.results, *spec.operands), (*results, *arguments), strict=True)
        # A sharding that knows of no mesh, as the compiler's own, has no spec: such arrays are whole on each device.
        specs = [(letters, getattr(t.sharding, "spec", ())) for letters, t in pairs]
        axes = assigned(specs, fitting(spec, sizes, mesh.shape))

        def on_one_device(*operands: Array) -> tuple[Array, ...]:
            return tuple(parts(spec, axes, local_product, without_excess(spec, axes, sizes, operands)))

        shardings = tuple(NamedSharding(mesh, partition(axes, letters)) for letters in spec.operands)
        placed = tuple(NamedSharding(mesh, partition(axes, letters)) for letters in spec.results)
        return mesh, on_one_device, placed, shardings

    rule, sizes = _rule(spec, whole_bytes)
    operation.def_partition(partitioned, sharding_rule=rule, reduction_factors=tuple(spec.summed), **sizes)
    return operation


def _rule(spec: ProductSpec, whole_bytes: bool) -> tuple[str, dict[str, int]]:
    """Return Shardy's rule, and the extents that it cannot infer: a byte of a mask is eight elements along n."""
    n = spec.out[-1]
    in_bits = f"({n} bit)" if spec.has_mask and whole_bytes else n
    in_bytes = n if whole_bytes else "bytes"

    def factors(letters: str, aux: Aux | None) -> str:
        own = in_bytes if aux is not None and aux.format == "relu_mask" else in_bits
        return " ".join(own if letter == n else letter for letter in letters)

    *operands, last = spec.operands
    sides = (
        [*(factors(letters, None) for letters in operands), factors(last, spec.epilog.takes)],
        [factors(spec.out, None), *(factors(letters, spec.gives) for letters in spec.results[1:])],
    )
    return " -> ".join(map(", ".join, sides)), {"bit": 8} if in_bits != n else {}


# Explicit ------------------------------------------------------------------------------------------------------------


def explicit_mesh(operands: tuple[Array, ...]) -> Any:
    """Return the mesh whose axes are part of the arrays' types, None where there is none; no context need name it.

    None also inside ``jax.shard_map`` where no array is sharded further: JAX 0.10 cannot lower the gradient of a
    ``shard_map`` in another.
    """
    shardings = [jax.typeof(x).sharding for x in operands]
    for mesh in (sharding.mesh for sharding in shardings):
        if AxisType.Explicit in mesh.axis_types:
            inside = AxisType.Manual in mesh.axis_types
            return mesh if not inside or any(axes for sharding in shardings for axes in sharding.spec) else None
    return None


def over_explicit_axes(spec: ProductSpec, mesh: Any, operands: tuple[Array, ...], product: Product) -> list[Array]:
    """Return the results over a mesh whose axes are part of the arrays' types."""
    sizes = extents(spec, operands)
    n = sizes[spec.out[-1]]
    given = (*operands[:-1], without_padding(spec.epilog.takes, operands[-1], n))
    pairs = [(letters, jax.typeof(x).sharding.spec) for letters, x in zip(spec.operands, given, strict=True)]
    axes = assigned(pairs, fitting(spec, sizes, mesh.shape))
    if _repeats_a_sum(spec, axes):
        alone = replace(spec, epilog=Epilog.DEFAULT)
        return [*over_explicit_axes(alone, mesh, operands, product), summed_operand(spec, *operands[:2])]
    placed = [
        jax.sharding.reshard(x, NamedSharding(mesh, partition(axes, letters)))
        for x, letters in zip(given, spec.operands, strict=True)
    ]
    mapped = jax.shard_map(
        lambda *own: tuple(parts(spec, axes, product, own)),
        mesh=mesh,
        in_specs=tuple(partition(axes, letters) for letters in spec.operands),
        out_specs=tuple(partition(axes, letters) for letters in spec.results),
        axis_names=_explicit_axes(mesh),
    )
    results = mapped(*placed)
    return [*results[:-1], with_padding(spec.gives, results[-1], n)]


def _explicit_axes(mesh: Any) -> set[str]:
    """Return the axes that become manual; none stands for all, but for those over which ``vmap`` maps."""
    if all(kind is AxisType.Explicit for kind in mesh.axis_types):
        return set()
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit}


def _repeats_a_sum(spec: ProductSpec, axes: Axes) -> bool:
    """Return whether devices hold parts of the result and all of an operand's sum: no type says that it is one."""
    return spec.gives is not None and any(
        letter in axes and letter not in (spec.aux or "") + spec.summed_in_aux for letter in spec.out
    )


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
