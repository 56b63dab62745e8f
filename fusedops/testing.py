"""For tests, ours and yours: the float64 oracle and the tolerance rule.

The framework's own product is no oracle: on some GPUs the library underneath drops the tail of k without a word. So a
result is compared with a float64 product of the same rounded operands, and is accepted where its error is at most
twice that of the framework's own unfused computation in the same dtype, or a few roundings of the result where that is
larger.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .dtypes import dtype_named, name_of
from .epilogs import Epilog, epilog_named, forward_epilog
from .residuals import mask_bytes, padded_preact

__all__ = ["Expected", "assert_within", "epilog_oracle", "k_tail_operands", "matmul_oracle", "to_numpy", "tolerance"]

Array = Any
NDArray = np.ndarray[Any, Any]

_EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Unit roundoff: half the distance from 1 to the next larger number."""

_TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-132, "float32": 2.0**-148, "float64": 2.0**-1073}
"""Distance between the smallest numbers."""


class Expected(NamedTuple):
    """What a call should give, in float64.

    Attributes
    ----------
    out : ndarray
        The result.
    aux : ndarray or None
        The auxiliary output; ``relu_aux`` as uint8 with its padding 0.
    scale : ndarray
        For each element of ``out``, the sum of the magnitudes that were added: what rounding is relative to.
    aux_scale : ndarray or None
        The same for ``aux``.
    """

    out: NDArray
    aux: NDArray | None
    scale: NDArray
    aux_scale: NDArray | None


def to_numpy(x: Array) -> NDArray:
    """Return an array of any framework, on any device, as NumPy, by way of a copy where there is no other."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach"):  # PyTorch, whose bfloat16 NumPy cannot take
        x = x.detach().cpu()
        return np.asarray(x.float() if name_of(x.dtype) == "bfloat16" else x)
    if hasattr(x, "get"):  # CuPy
        got: NDArray = x.get()
        return got
    if hasattr(x, "__array__"):
        array: NDArray = np.asarray(x)
        return array
    return np.from_dlpack(x)


def _f64(x: Array) -> NDArray:
    return to_numpy(x).astype(np.float64)


def _activate(z: NDArray, activation: str | None) -> NDArray:
    if activation is None:
        return z
    if activation == "relu":
        return np.where(z > 0, z, np.where(np.isnan(z), z, 0.0))
    if activation == "gelu_tanh":
        return 0.5 * z * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    if activation == "gelu_erf":
        return 0.5 * z * (1.0 + _erf(z / math.sqrt(2.0)))
    return z / (1.0 + np.exp(-z))


def _erf(z: NDArray) -> NDArray:
    return np.vectorize(math.erf, otypes=[np.float64])(z) if z.size else z


def _gelu_tanh_derivative(z: NDArray) -> NDArray:
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    slope = math.sqrt(2 / math.pi) * (1.0 + 3 * 0.044715 * z**2)
    derivative: NDArray = (
        0.5 * (1.0 + np.tanh(inner)) + 0.5 * z / np.cosh(np.minimum(np.abs(inner), 300.0)) ** 2 * slope
    )
    return derivative


def _stored(x: NDArray, transpose: bool) -> NDArray:
    return np.swapaxes(x, -1, -2) if transpose else x


def epilog_oracle(
    a: Array,
    b: Array,
    *,
    epilog: str | Epilog,
    bias: Array | None = None,
    relu_aux: Array | None = None,
    gelu_aux: Array | None = None,
    c: Array | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    second: str | None = None,
) -> Expected:
    """Return what `fusedops.epilog_matmul` should give, computed in float64 by NumPy.

    Parameters
    ----------
    a, b, epilog, bias, relu_aux, gelu_aux, c, alpha, beta, transpose_a, transpose_b
        As given to `fusedops.epilog_matmul`, from any framework; a and b with at least two axes.
    second : str, optional
        An activation applied after the epilog, as `fusedops.matmul` does for those that no epilog has.

    Returns
    -------
    Expected
        Result and auxiliary output, with the magnitudes that their rounding is relative to.
    """
    traits = epilog_named(epilog)
    x, y = _stored(_f64(a), transpose_a), _stored(_f64(b), transpose_b)
    z, scale = alpha * (x @ y), abs(alpha) * (np.abs(x) @ np.abs(y))
    if c is not None and beta != 0:
        z, scale = z + beta * _f64(c), scale + np.abs(beta * _f64(c))
    if bias is not None:
        z, scale = z + _f64(bias), scale + np.abs(_f64(bias))
    m, n, batch = z.shape[-2], z.shape[-1], z.shape[:-2]
    if traits.takes is None:
        out = _activate(_activate(z, traits.activation), second)
    elif traits.takes.name == "relu_aux":
        bits = np.unpackbits(to_numpy(relu_aux), axis=-1, count=n, bitorder="little")
        out, scale = z * bits, scale * bits
    else:
        slope = _gelu_tanh_derivative(_f64(gelu_aux)[..., :n])
        # The slope is a difference of terms of size 1, whose roundings in the compute dtype stay when they cancel.
        dtype = name_of(to_numpy(gelu_aux).dtype)
        floor = 16 * _EPS[str(dtype_named(dtype).compute)] / _EPS[dtype]
        if dtype in ("float16", "bfloat16"):
            floor = 0.05  # the epilogs' tanh is good to about 11 bits
        out, scale = z * slope, scale * np.maximum(np.abs(slope), floor)
    if traits.gives is None:
        return Expected(out, None, scale, None)
    keep = bool(batch)
    match traits.gives.format:
        case "relu_mask":
            packed = np.packbits(z >= 0, axis=-1, bitorder="little")
            aux = np.zeros((*batch, m, mask_bytes(n)), np.uint8)
            aux[..., : packed.shape[-1]] = packed
            aux_scale = scale
        case "preact":
            aux, aux_scale = np.zeros((2, *batch, m, padded_preact(n)))
            aux[..., :n], aux_scale[..., :n] = z, scale
        case "sum_over_m":
            aux, aux_scale = (v.sum(axis=-2, keepdims=keep) for v in (out, scale))
        case "sum_a_over_k":
            full = np.broadcast_to(x, (*batch, *x.shape[-2:]))
            aux, aux_scale = (v.sum(axis=-1, keepdims=keep) for v in (full, np.abs(full)))
        case _:
            full = np.broadcast_to(y, (*batch, *y.shape[-2:]))
            aux, aux_scale = (v.sum(axis=-2, keepdims=keep) for v in (full, np.abs(full)))
    return Expected(out, aux, scale, aux_scale)


def matmul_oracle(
    a: Array, b: Array, *, activation: str | None = None, bias: Array | None = None, **rest: Any
) -> Expected:
    """Return what `fusedops.matmul` should give, in float64; arguments as there, a and b with at least two axes."""
    fused = activation if activation in ("relu", "gelu_tanh") else None
    epilog = forward_epilog(bias is not None, fused)  # type: ignore[arg-type]
    return epilog_oracle(a, b, epilog=epilog, bias=bias, second=None if fused else activation, **rest)


def tolerance(scale: Array, dtype: str, k: int) -> NDArray:
    """Return the error that rounding explains: two roundings of the result, and sums over k in the compute dtype.

    Parameters
    ----------
    scale : array
        Magnitudes that were added, as in `Expected`.
    dtype : str
        Of the result.
    k : int
        Terms of the longest sum.
    """
    compute = dtype_named(dtype).compute or "float32"
    return np.asarray(scale) * (2 * _EPS[dtype] + 4 * math.sqrt(max(k, 1)) * _EPS[compute]) + _TINY[dtype]


def assert_within(
    result: Array,
    expected: Array,
    scale: Array,
    k: int,
    *,
    dtype: str | None = None,
    unfused: Array | None = None,
    what: str = "result",
) -> None:
    """Raise unless ``result`` is as near to ``expected`` as its dtype allows.

    Parameters
    ----------
    result : array
        Of any framework.
    expected, scale : array
        From the oracle.
    k : int
        Terms of the longest sum.
    dtype : str, optional
        The dtype whose roundings decide the tolerance; the default is that of ``result``.
    unfused : array, optional
        The framework's own unfused result; twice its largest error is allowed too.
    what : str
        For the message.

    Raises
    ------
    AssertionError
        With the worst element.
    """
    dtype = dtype or name_of(result.dtype)
    got, want = _f64(result), np.asarray(expected, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{what} has shape {got.shape}, expected {want.shape}")
    allowed = tolerance(scale, dtype, k)
    if unfused is not None:
        error = np.abs(_f64(unfused) - want)
        allowed = np.maximum(allowed, 2 * np.max(error, initial=0.0, where=np.isfinite(error)))
    same_oddity = (np.isnan(got) & np.isnan(want)) | (np.isinf(want) & (got == want))
    with np.errstate(invalid="ignore"):
        error = np.where(same_oddity, 0.0, np.abs(got - want))
    wrong = ~same_oddity & ~(error <= allowed)
    if wrong.any():
        worst = np.where(wrong, np.where(np.isnan(error), np.inf, error / allowed), -1.0)
        at = np.unravel_index(int(np.argmax(worst)), error.shape)
        raise AssertionError(
            f"{what} ({dtype}): {int(wrong.sum())} of {wrong.size} elements are off; worst at {tuple(map(int, at))}: "
            f"got {got[at]}, expected {want[at]}, allowed error {np.broadcast_to(allowed, error.shape)[at]:.3g}"
        )


def k_tail_operands(m: int, n: int, k: int, tail: int = 8) -> tuple[NDArray, NDArray]:
    """Return float32 operands whose product is ``tail`` everywhere, made by the last ``tail`` terms of k alone.

    A kernel that drops the end of k gives 0. Reported for cuBLASLt's split-K at ``k % 64 == 8`` (triton-lang, fork pull
    request 2767).
    """
    a = np.zeros((m, k), np.float32)
    a[:, max(k - tail, 0) :] = 1
    return a, np.ones((k, n), np.float32)
