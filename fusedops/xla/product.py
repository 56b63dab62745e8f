"""`product_p`: the primitive of a product with its epilog, and the rules by which JAX transforms it.

A primitive and not ``jax.custom_vjp``, which forbids forward mode. Batching adds a letter; the product alone is
transposed by letting its arrays change roles; how a product with an epilog is differentiated is in ``derivatives.py``.

It lowers to the custom call for CUDA and to JAX's own operations elsewhere, both where one program is lowered for
several platforms. The custom call's side is traced when the primitive is bound, and carried as a parameter, so that
``jax.jit`` sees the partitioned operation in it.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .handler import reason_or_warn
from .meshes import agreed, explicit_mesh, over_explicit_axes, over_mesh
from .product_spec import ProductSpec, new_letter
from .unfused import compute_dtype, epilogue, unfused, unfused_on_cpu

__all__ = ["PROGRAMS_KEPT", "lower_to_the_call", "product", "product_p"]

Array = Any
Avals = tuple[Any, ...]

PROGRAMS_KEPT = 4096
"""Traces kept at most, of each kind."""

product_p = Primitive("fusedops_product")
product_p.multiple_results = True


def product(spec: ProductSpec, *operands: Array) -> list[Array]:
    """Return the results of a product."""
    mesh = explicit_mesh(operands)
    if mesh is not None:
        return over_explicit_axes(spec, mesh, operands, product)
    return bound(spec, *agreed(operands))


def bound(spec: ProductSpec, *operands: Array) -> list[Array]:
    """Return the results of the primitive, for operands that vary over the same axes of a mesh."""
    avals = tuple(map(jax.typeof, operands))
    call = _on_cuda(spec, avals, jax.sharding.get_abstract_mesh())
    results: list[Array] = product_p.bind(*operands, spec=spec, call=call)
    return results


@lru_cache(PROGRAMS_KEPT)
def _on_cuda(spec: ProductSpec, avals: Avals, mesh: Any) -> ClosedJaxpr | None:
    """Return what runs on CUDA; None where an extent is a symbol, which no plan can be made for."""
    if not all(isinstance(extent, int) for aval in avals for extent in aval.shape):
        return None
    return jax.make_jaxpr(partial(over_mesh, spec, mesh))(*avals)


@lru_cache(PROGRAMS_KEPT)
def _types(spec: ProductSpec, avals: Avals, mesh: Any) -> list[Any]:
    """Return the types of the results, as JAX's own operations would give them."""
    return list(jax.make_jaxpr(partial(unfused, spec))(*avals).out_avals)


@partial(jax.jit, static_argnames="spec")
def _compiled(*operands: Array, spec: ProductSpec) -> list[Array]:
    return bound(spec, *operands)


def _impl(*operands: Array, spec: ProductSpec, call: ClosedJaxpr | None) -> list[Array]:
    """Run outside of any trace; compiled also under ``jax.disable_jit``, where it would never end."""
    with jax.disable_jit(False):
        results: list[Array] = _compiled(*operands, spec=spec)
        return results


def _abstract(*avals: Any, spec: ProductSpec, call: ClosedJaxpr | None) -> list[Any]:
    return _types(spec, avals, jax.sharding.get_abstract_mesh())


product_p.def_impl(_impl)
product_p.def_abstract_eval(_abstract)


# Lowering ------------------------------------------------------------------------------------------------------------


def _lowered(ctx: Any, *operands: Any, spec: ProductSpec, call: ClosedJaxpr | None) -> Any:
    return mlir.lower_fun(partial(unfused, spec), multiple_results=True)(ctx, *operands)


def _lowered_for_cpu(ctx: Any, *operands: Any, spec: ProductSpec, call: ClosedJaxpr | None) -> Any:
    return mlir.lower_fun(partial(unfused_on_cpu, spec), multiple_results=True)(ctx, *operands)


@cache
def _has_cuda() -> bool:
    """Return whether this process runs programs on CUDA; one that does not may still make them."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def _lowered_for_cuda(ctx: Any, *operands: Any, spec: ProductSpec, call: ClosedJaxpr | None) -> Any:
    """Lower to the custom call, where the handler runs or the program is for another machine."""
    if call is None or (_has_cuda() and reason_or_warn() is not None):
        return _lowered(ctx, *operands, spec=spec, call=call)
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *operands)


def lower_to_the_call(platform: str) -> None:
    """Let programs for a platform run the custom call, for which the handler must be registered with it."""
    mlir.register_lowering(product_p, _lowered_for_cuda, platform=platform)


mlir.register_lowering(product_p, _lowered)
mlir.register_lowering(product_p, _lowered_for_cpu, platform="cpu")
lower_to_the_call("cuda")


# Batching ------------------------------------------------------------------------------------------------------------


def _batched(
    operands: tuple[Array, ...], dims: tuple[int | None, ...], *, spec: ProductSpec, call: ClosedJaxpr | None
) -> tuple[list[Array], list[int]]:
    count = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    on = tuple(dim is not None for dim in dims)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)]
    if spec.epilog.takes and not on[-1]:
        moved[-1] = lax.broadcast(moved[-1], (count,))
    batched = spec.batched(new_letter(spec), on)
    if on[0] or on[1]:
        results = product(batched, *moved)
    else:  # one product, and its epilog for each item
        z = product(spec.product_alone(compute_dtype(moved[0])), *moved[:2])[0]
        results = epilogue(batched, lax.broadcast(z, (count,)), tuple(moved))
    return results, [0] * len(results)


batching.primitive_batchers[product_p] = _batched


# The product alone is linear in each of its operands -----------------------------------------------------------------


def _transposed(
    cotangents: list[Any], a: Any, b: Any, *, spec: ProductSpec, call: ClosedJaxpr | None
) -> list[Array | None]:
    (dout,) = cotangents
    of_a = ad.is_undefined_primal(a)
    if type(dout) is ad.Zero:
        return [ad.Zero(a.aval), None] if of_a else [None, ad.Zero(b.aval)]
    if of_a:
        dtype = str(a.aval.dtype)
        return [product(spec.of(spec.out, spec.b, spec.a, dtype), dout.astype(b.dtype), b)[0], None]
    dtype = str(b.aval.dtype)
    return [None, product(spec.of(spec.a, spec.out, spec.b, dtype), a, dout.astype(a.dtype))[0]]


ad.primitive_transposes[product_p] = _transposed
