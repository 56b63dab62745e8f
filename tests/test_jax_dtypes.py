"""Gradients in 16 and 32 bits: no further from float64 than twice JAX's own in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import ACTIVATIONS, Product, compiled, weights

Array = Any

WIDE = Product("wide", (24, 33), (33, 40), bias=(40,), c=(24, 40), beta=0.5)
BATCH = Product("batch", (3, 16, 20), (24, 20), bias=(24,), transpose_b=True)
DTYPES = [("float16", None), ("bfloat16", None), ("float32", None), ("float16", "float32"), ("bfloat16", "float32")]


def value_and_gradients(f: Callable[..., Array], arrays: list[Array]) -> list[np.ndarray]:
    """Return the value and the gradient of each array by a fixed cotangent, compiled as one program."""

    def run(*arrays: Array) -> list[Array]:
        out, back = jax.vjp(f, *arrays)
        return [out, *back(jnp.asarray(weights(out.shape), out.dtype))]

    return compiled(run, *arrays)


@pytest.mark.parametrize("p", [WIDE, BATCH], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES, ids=str)
def test_errors_are_at_most_twice_those_of_jax(
    dtype: str, out_dtype: str | None, activation: str | None, p: Product
) -> None:
    arrays = p.arrays(dtype)
    arrays[2:] = [x.astype(out_dtype or dtype) for x in arrays[2:]]
    got = value_and_gradients(p.ours(activation, out_dtype=out_dtype), arrays)
    theirs = value_and_gradients(p.plain(activation, out_dtype), arrays)
    exact = value_and_gradients(p.plain(activation), [x.astype("float64") for x in arrays])
    for name, x, y, want in zip(("out", *p.shapes), got, theirs, exact, strict=True):
        assert x.dtype == y.dtype
        error, allowed = (np.abs(np.asarray(v, np.float64) - np.asarray(want)) for v in (x, y))
        rounding = float(jnp.finfo(x.dtype).eps) / 2 * np.max(np.abs(want))
        rounding *= 4 if x.dtype == "float32" else 1  # of the sum, whose order is each library's own
        assert np.max(error) <= max(2 * np.max(allowed), rounding), name
        assert np.sqrt(np.mean(error**2)) <= max(2 * np.sqrt(np.mean(allowed**2)), rounding / 8), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_not_rounded_between(dtype: str) -> None:
    """A bias gradient over many rows, and the two terms of a tangent, are summed in float32."""
    rows = 4096
    p = Product("rows", (rows, 2), (2, 3), bias=(3,))
    arrays = [jnp.ones((rows, 2), dtype), jnp.ones((2, 3), dtype), jnp.zeros(3, dtype)]
    grads = jax.grad(lambda *xs: jnp.sum(p.ours("relu")(*xs).astype("float32")), (1, 2))(*arrays)
    assert np.all(np.asarray(grads[0], np.float32) == rows)
    assert np.all(np.asarray(grads[1], np.float32) == rows)
    _, tangent = jax.jvp(p.ours(None), tuple(arrays), (arrays[0], arrays[1] * 0, arrays[2] + 2.0**-12))
    plain = np.asarray(2 + np.float32(2.0**-12), jnp.dtype(dtype))
    assert np.all(np.asarray(tangent) == plain)
