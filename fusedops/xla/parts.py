"""One device's part of the results, and which letters the axes of a mesh may hold parts of.

Each device computes its part of the product; where a summed letter is sharded, the parts are added and bias and
activation come once, after it. A residual goes between devices without its padding, so that it is sharded as the
result is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..epilogs import Aux
from ..residuals import aux_shape
from .product_spec import ProductSpec
from .unfused import compute_dtype, epilogue

__all__ = [
    "Axes",
    "Product",
    "assigned",
    "extents",
    "fitting",
    "partition",
    "parts",
    "with_padding",
    "without_excess",
    "without_padding",
]

Array = Any
Axes = dict[str, tuple[str, ...]]
"""The axes of the mesh over which each letter is sharded."""

Product = Callable[..., list[Array]]
Fits = Callable[[str, tuple[str, ...]], bool]


def assigned(pairs: Iterable[tuple[str, Any]], fits: Fits) -> Axes:
    """Return the axes of each letter from arrays' letters and partition specs, each axis for one letter."""
    axes: Axes = {}
    used: set[str] = set()
    for letters, spec in pairs:
        for letter, names in zip(letters, spec, strict=False):
            found = () if names is None else names if isinstance(names, tuple) else (names,)
            if found and letter not in axes and not used & set(found) and fits(letter, found):
                axes[letter] = found
                used |= set(found)
    return axes


def partition(axes: Axes, letters: str) -> PartitionSpec:
    """Return how an array of these letters is sharded."""
    return PartitionSpec(*(axes.get(letter) for letter in letters))


def extents(spec: ProductSpec, operands: Sequence[Any]) -> dict[str, int]:
    """Return the extent of each letter from ``a`` and ``b``, the first of the operands."""
    pairs = zip(spec.operands[:2], operands, strict=False)
    return {letter: extent for letters, x in pairs for letter, extent in zip(letters, x.shape, strict=True)}


def fitting(spec: ProductSpec, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> Fits:
    """Return whether axes of a mesh may hold parts of a letter."""

    def fits(letter: str, names: tuple[str, ...]) -> bool:
        count = math.prod(mesh[name] for name in names)
        if letter in spec.summed_in_aux and letter not in spec.summed:  # what pads an uneven part would be added
            return sizes[letter] % count == 0
        if letter == spec.out[-1] and spec.has_mask:  # a byte of it is one device's
            return sizes[letter] % (8 * count) == 0
        return True

    return fits


def without_excess(spec: ProductSpec, axes: Axes, sizes: Mapping[str, int], operands: Sequence[Array]) -> list[Array]:
    """Return operands with zeros in what pads an uneven part of a summed letter, which may hold anything."""
    zeroed = list(operands)
    for i, letters in enumerate(spec.operands[:2]):
        for axis, letter in enumerate(letters):
            if letter in spec.summed and letter in axes:
                zeroed[i] = _zeroed_from(zeroed[i], axis, axes[letter], sizes[letter])
    return zeroed


def _zeroed_from(x: Array, axis: int, names: tuple[str, ...], extent: int) -> Array:
    """Return one device's part of an array with zeros where its index in the whole array is ``extent`` or more."""
    own = x.shape[axis]
    if own * lax.axis_size(names) == extent:
        return x
    index = lax.axis_index(names) * own + lax.broadcasted_iota("int32", x.shape, axis)
    return jnp.where(index < extent, x, jnp.zeros_like(x))


def parts(spec: ProductSpec, axes: Axes, product: Product, operands: Sequence[Array]) -> list[Array]:
    """Return one device's part of the results; residuals have no padding, as an operand and as a result."""
    wide = compute_dtype(operands[0])
    n = extents(spec, operands)[spec.out[-1]]
    operands = (*operands[:-1], with_padding(spec.epilog.takes, operands[-1], n))
    names = _over(axes, spec.summed)
    if names:
        part = product(spec.product_alone(wide), *operands[:2])[0]
        results = epilogue(spec, lax.psum(part, names), operands)
    else:
        results = product(spec, *operands)
    names = _over(axes, spec.summed_in_aux)
    if names:
        results[1] = lax.psum(results[1].astype(wide), names).astype(spec.out_dtype)
    return [*results[:-1], without_padding(spec.gives, results[-1], n)]


def _over(axes: Axes, letters: str) -> tuple[str, ...]:
    return tuple(name for letter in letters for name in axes.get(letter, ()))


# Padding -------------------------------------------------------------------------------------------------------------


def is_residual(aux: Aux | None) -> TypeGuard[Aux]:
    """Return whether an auxiliary array has the axes of the result, the last of them padded."""
    return aux is not None and aux.format in ("relu_mask", "preact")


def with_padding(aux: Aux | None, x: Array, n: int) -> Array:
    """Return an array with the padding of the residual that it is, unchanged where it is none."""
    return _to_length(x, aux_shape(aux, (), 1, n)[-1]) if is_residual(aux) else x


def without_padding(aux: Aux | None, x: Array, n: int) -> Array:
    """Return an array without the padding of the residual that it is, unchanged where it is none."""
    if not is_residual(aux):
        return x
    return _to_length(x, n if aux.format == "preact" else -(-n // 8))


def _to_length(x: Array, length: int) -> Array:
    """Return an array whose last axis is cut or padded; where its type says that it is sharded, it is gathered."""
    missing = length - x.shape[-1]
    if not missing:
        return x
    sharding = jax.typeof(x).sharding
    if sharding.spec[-1] is not None:
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], None)))
    if missing < 0:
        return lax.slice_in_dim(x, 0, length, axis=-1)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
