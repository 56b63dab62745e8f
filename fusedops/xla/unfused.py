"""A product and its epilog as operations of JAX: what every fused result is compared with, and what a platform without
the custom call runs.

Products are summed in the compute dtype, the epilog is computed on that sum, and each result is rounded once. It is
also where the types of a product's results come from: shapes, dtypes, shardings and varying axes, as JAX's own
operations give them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..dtypes import dtype_named, name_of
from ..frameworks.jax import Jax
from ..residuals import mask_bytes, padded_preact
from .product_spec import ProductSpec

__all__ = ["aligned", "compute_dtype", "epilogue", "gated", "product", "summed_operand", "unfused", "unfused_on_cpu"]

Array = Any
Operands = tuple[Array, ...]

_jax = Jax()
_PRECISIONS = {None: None, "tf32": None, "ieee": lax.Precision.HIGHEST}
"""JAX's own default lets float32 be multiplied in TF32 on a GPU; its other values ask for passes of bfloat16."""


def compute_dtype(a: Array) -> str:
    """Return the dtype in which products of ``a`` are summed and epilogs computed."""
    return str(dtype_named(name_of(a.dtype)).compute)


def unfused(spec: ProductSpec, *operands: Array) -> list[Array]:
    """Return the results of a product, each operation on its own."""
    return epilogue(spec, product(spec, operands[0], operands[1]), operands)


def unfused_on_cpu(spec: ProductSpec, *operands: Array) -> list[Array]:
    """Return the same with operands of 16 bits widened before the product, which changes no value.

    XLA's CPU compiler of jaxlib 0.10 makes programs that it then cannot run ("Unsupported element type for
    DotThunk::Execute: BF16 x BF16 = F32") where the result of such a product is transposed.
    """
    wide = compute_dtype(operands[0])
    return epilogue(spec, product(spec, operands[0].astype(wide), operands[1].astype(wide)), operands)


def product(spec: ProductSpec, a: Array, b: Array) -> Array:
    """Return the product alone, in the compute dtype, with the letters of ``out``."""
    shared, summed = spec.shared, spec.summed
    dims = ([spec.a.index(x) for x in summed], [spec.b.index(x) for x in summed])
    batch = ([spec.a.index(x) for x in shared], [spec.b.index(x) for x in shared])
    z = lax.dot_general(
        a, b, (dims, batch), precision=_PRECISIONS[spec.precision], preferred_element_type=compute_dtype(a)
    )
    got = shared + "".join(x for x in spec.a if x not in shared + summed)
    got += "".join(x for x in spec.b if x not in shared + summed)
    return z if got == spec.out else lax.transpose(z, [got.index(x) for x in spec.out])


def epilogue(spec: ProductSpec, z: Array, operands: Operands) -> list[Array]:
    """Return the results of a product from the product alone, ``z``, in the compute dtype."""
    a, b, *rest = operands
    wide = z.dtype
    if spec.alpha != 1.0:
        z = z * jnp.asarray(spec.alpha, wide)
    bias = rest.pop(0) if spec.bias is not None else None
    if spec.c is not None:
        c = aligned(spec.c, spec.out, rest.pop(0)).astype(wide)
        z = z + (c if spec.beta == 1.0 else c * jnp.asarray(spec.beta, wide))
    if bias is not None:
        z = z + aligned(spec.bias, spec.out, bias).astype(wide)
    n = b.shape[spec.b.index(spec.out[-1])] if spec.out and spec.out[-1] in spec.b else 1
    aux = None
    if spec.epilog.takes:
        out = _backward(spec, z, rest.pop(0), n)
    else:
        out = getattr(_jax, spec.epilog.activation)(z) if spec.epilog.activation else z
    if spec.gives is not None:
        aux = _auxiliary(spec, z, out, a, b, n)
    results = [out.astype(spec.out_dtype)]
    return results if aux is None else [*results, aux]


def gated(activation: str | None, value: Array, residual: Array | None) -> Array:
    """Return ``value`` times an activation's derivative; relu's residual is its output, the others' what went in."""
    if activation is None or residual is None:
        return value
    if activation == "relu":
        return jnp.where(residual > 0, value, jnp.zeros_like(value))
    return value * _jax.activation_derivative(activation, residual.astype(value.dtype))


def aligned(letters: str | None, out: str, x: Array) -> Array:
    """Return an array with axes of 1 for the letters of ``out`` that it lacks."""
    assert letters is not None
    missing = [i for i, letter in enumerate(out) if letter not in letters]
    return lax.expand_dims(x, missing) if missing else x


def _backward(spec: ProductSpec, z: Array, residual: Array, n: int) -> Array:
    """Return ``z`` times the activation's derivative, read from a mask or a pre-activation."""
    assert spec.epilog.takes is not None
    if spec.epilog.takes.format == "relu_mask":
        return jnp.where(_jax.unpack_bits(residual, n), z, jnp.zeros_like(z))
    return gated("gelu_tanh", z, residual[..., :n])


def _auxiliary(spec: ProductSpec, z: Array, out: Array, a: Array, b: Array, n: int) -> Array:
    """Return the auxiliary output of a forward or backward epilog."""
    assert spec.gives is not None
    assert spec.aux is not None
    form = spec.gives.format
    if form == "relu_mask":
        return _jax.pack_bits(z >= 0, mask_bytes(n))
    if form == "preact":
        return _jax.pad_last(z, padded_preact(n)).astype(spec.out_dtype)
    if form == "sum_over_m":
        return jnp.sum(out, axis=-2).astype(spec.out_dtype)
    return summed_operand(spec, a, b)


def summed_operand(spec: ProductSpec, a: Array, b: Array) -> Array:
    """Return the sum over k of an operand, which BGRADA and BGRADB give, for each item of the batch."""
    assert spec.gives is not None
    assert spec.aux is not None
    sizes = dict(zip(spec.a + spec.b, (*a.shape, *b.shape), strict=True))
    x, letters = (a, spec.a) if spec.gives.format == "sum_a_over_k" else (b, spec.b)
    total = jnp.sum(x.astype(compute_dtype(a)), axis=[letters.index(k) for k in spec.summed])
    kept = "".join(letter for letter in letters if letter not in spec.summed)
    ordered = "".join(letter for letter in spec.aux if letter in kept)
    total = aligned(ordered, spec.aux, lax.transpose(total, [kept.index(letter) for letter in ordered]))
    return jnp.broadcast_to(total, [sizes[letter] for letter in spec.aux]).astype(spec.out_dtype)
