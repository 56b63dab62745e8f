"""How a product is differentiated: a linear map of the tangents, whose transpose is one call.

What is kept for the backward pass: relu's output, whose sign says where its derivative is 1, so that it is 0 at
exactly 0 as JAX's own is; for GELU the pre-activation, which its epilog gives beside the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from ..epilogs import Epilog
from .composite import Composite, through
from .product import product, product_p
from .product_spec import ProductSpec
from .unfused import aligned, compute_dtype, epilogue, gated

__all__: list[str] = []

Array = Any

_SAVING = {Epilog.GELU: Epilog.GELU_AUX, Epilog.GELU_BIAS: Epilog.GELU_AUX_BIAS}


def _jvp(
    primals: tuple[Array, ...], tangents: tuple[Any, ...], *, spec: ProductSpec, call: ClosedJaxpr | None
) -> tuple[list[Array], list[Any]]:
    if spec.bilinear:
        return product(spec, *primals), [_sum_of_products(spec, primals, tangents)]
    if spec.gives or spec.epilog.takes:
        return through(partial(_in_steps, spec), primals, tangents)
    saving = replace(spec, epilog=_SAVING.get(spec.epilog, spec.epilog))
    out, *preact = product(saving, *primals)
    residual = [preact[0][..., : out.shape[-1]]] if preact else [out] if spec.epilog.activation else []
    moving = {name: t for name, t in zip(_names(spec), tangents, strict=True) if type(t) is not ad.Zero}
    return [out], linear(_Linear(spec, tuple(moving)), *primals[:2], *residual, *moving.values())


ad.primitive_jvps[product_p] = _jvp


def _names(spec: ProductSpec) -> tuple[str, ...]:
    """Return the names of the operands of a product without residuals, in order."""
    return ("a", "b", *["bias"] * (spec.bias is not None), *["c"] * (spec.c is not None))


def _sum_of_products(spec: ProductSpec, primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> Array:
    (a, b), (da, db) = primals, tangents
    terms = [] if type(da) is ad.Zero else product(spec, da, b)
    terms += [] if type(db) is ad.Zero else product(spec, a, db)
    return reduce(add, terms)


def _in_steps(spec: ProductSpec, *operands: Array) -> list[Array]:
    """Return the results of a product whose epilog saves or reads a residual, in steps that can be differentiated."""
    alone = spec.product_alone(compute_dtype(operands[0]))
    return epilogue(spec, product(alone, *operands[:2])[0], operands)


# The linear map ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Linear:
    """What the linear map is about: the product, and of which of its operands there are tangents."""

    spec: ProductSpec
    moving: tuple[str, ...]


def _tangent(what: _Linear, a: Array, b: Array, *rest: Array) -> list[Array]:
    """Return ``act'(preact) * (alpha * (da @ b + a @ db) + beta * dc + dbias)``, from a residual if there is one."""
    spec = what.spec
    residual, *tangents = rest if spec.epilog.activation else (None, *rest)
    wide = compute_dtype(a)
    moved = dict(zip(what.moving, tangents, strict=True))
    of = partial(spec.of, spec.a, spec.b, spec.out)
    terms = product(of(wide), moved["a"], b) if "a" in moved else []
    terms += product(of(wide), a, moved["b"]) if "b" in moved else []
    if "bias" in moved:
        terms.append(aligned(spec.bias, spec.out, moved["bias"]).astype(wide))
    if "c" in moved:
        terms.append(aligned(spec.c, spec.out, moved["c"]).astype(wide) * jnp.asarray(spec.beta, wide))
    sizes = dict(zip(spec.a + spec.b, (*a.shape, *b.shape), strict=True))
    total = jnp.broadcast_to(reduce(add, terms), [sizes[letter] for letter in spec.out])
    return [gated(spec.epilog.activation, total, residual).astype(spec.out_dtype)]


linear = Composite("fusedops_linear", _tangent)


# Its transpose -------------------------------------------------------------------------------------------------------


def _transposed(cotangents: list[Any], *arrays: Any, what: _Linear, call: ClosedJaxpr) -> list[Any]:
    (dout,) = cotangents
    known = 2 + (what.spec.epilog.activation is not None)
    asked = [ad.is_undefined_primal(x) for x in arrays[known:]]
    if type(dout) is ad.Zero:
        return [None] * known + [ad.Zero(x.aval) if ask else None for x, ask in zip(arrays[known:], asked, strict=True)]
    names = tuple(name for name, ask in zip(what.moving, asked, strict=True) if ask)
    gradients = iter(fusedops_backward(dout, *arrays[:known], spec=what.spec, names=names))
    return [None] * known + [next(gradients) if ask else None for ask in asked]


ad.primitive_transposes[linear.primitive] = _transposed


@partial(jax.jit, static_argnames=("spec", "names"))
def fusedops_backward(
    dout: Array, a: Array, b: Array, *residual: Array, spec: ProductSpec, names: tuple[str, ...]
) -> list[Array]:
    """Return the gradients by name, in order, from the cotangent of the product's result."""
    activation = spec.epilog.activation
    wide = compute_dtype(a)
    dpreact = gated(activation, dout.astype(wide), residual[0]) if activation else dout
    rounded = dpreact.astype(a.dtype)
    dtype = str(a.dtype)
    gradients = []
    if "a" in names:
        gradients += product(spec.of(spec.out, spec.b, spec.a, dtype), rounded, b)
    if "b" in names:
        gradients += product(spec.of(spec.a, spec.out, spec.b, dtype), a, rounded)
    if "bias" in names:
        gradients.append(_summed(dpreact.astype(wide), spec.bias, spec.out).astype(spec.out_dtype))
    if "c" in names:
        total = _summed(dpreact.astype(wide), spec.c, spec.out) * jnp.asarray(spec.beta, wide)
        gradients.append(total.astype(spec.out_dtype))
    return gradients


def _summed(x: Array, letters: str | None, out: str) -> Array:
    """Return an array of the letters of ``out`` summed to some of them."""
    assert letters is not None
    return lax.reduce_sum(x, [i for i, letter in enumerate(out) if letter not in letters])
