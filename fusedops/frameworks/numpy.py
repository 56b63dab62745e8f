"""NumPy: arrays on the CPU, the framework of last resort for the lead."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Hashable
from functools import cache
from typing import Any

import array_api_compat.numpy
import numpy as np

from ..arrays import CPU, ArraySpec, ArrayView
from ..dlpack import numpy_dtype
from ..dtypes import name_of
from .base import Framework

Array = Any


@cache
def _erf() -> Any:
    """Return SciPy's ``erf`` where SciPy is installed, else ``math.erf`` element by element: right, and slow."""
    if importlib.util.find_spec("scipy"):
        from scipy.special import erf

        return erf
    elementwise = np.frompyfunc(math.erf, 1, 1)
    return lambda x: np.asarray(elementwise(x), dtype=np.float64).astype(x.dtype).reshape(x.shape)


class NumPy(Framework):
    name = "numpy"
    xp = array_api_compat.numpy

    def signature(self, x: Array) -> Hashable:
        return type(x), x.shape, x.strides, x.dtype

    def spec(self, x: Array) -> ArraySpec:
        if isinstance(x, (np.ma.MaskedArray, np.matrix)):
            raise TypeError(f"a {type(x).__name__} has rules of its own; pass a plain array, numpy.asarray(x).")
        if not x.dtype.isnative:
            raise TypeError(f"its dtype {x.dtype} is not in this machine's byte order; convert it with .astype.")
        strides = tuple(_in_elements(step, x.dtype.itemsize) for step in x.strides)
        return ArraySpec(x.shape, strides, name_of(x.dtype), CPU)

    def view(self, x: Array) -> ArrayView:
        return ArrayView(self.spec(x), self.pointer(x), self.is_readonly(x), x)

    def pointer(self, x: Array) -> int:
        # A NumPy scalar has no address of its own, and may not be written.
        return 0 if isinstance(x, np.generic) else int(x.__array_interface__["data"][0])

    def is_apart(self, written: Array, size: int, others: list[tuple[Array, int]]) -> bool:
        # An address in Python costs five times the question.
        return not any(np.may_share_memory(written, x) for x, _ in others)

    def is_readonly(self, x: Array) -> bool:
        return not x.flags.writeable

    def matmul(self, a: Array, b: Array, compute_dtype: str, precision: str | None) -> Array:
        return np.matmul(self.astype(a, compute_dtype), self.astype(b, compute_dtype))

    def dtype(self, name: str) -> Any:
        return numpy_dtype(name)

    def astype(self, x: Array, dtype: str) -> Array:
        return x.astype(dtype if dtype != "bfloat16" else numpy_dtype(dtype), copy=False)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        return np.zeros(shape, self.dtype(dtype))

    def erf(self, x: Array) -> Array:
        return _erf()(x)

    def relu(self, z: Array) -> Array:
        return np.maximum(z, 0)

    def pack_bits(self, bits: Array, length: int) -> Array:
        packed = np.packbits(bits, axis=-1, bitorder="little")
        return self.pad_last(packed, length)

    def unpack_bits(self, mask: Array, n: int) -> Array:
        return np.unpackbits(mask, axis=-1, count=n, bitorder="little").view(bool)


def _in_elements(step: int, itemsize: int) -> int:
    """Return a stride in elements; a field of a structured array may have one that is no whole number of them."""
    elements, rest = divmod(step, max(itemsize, 1))
    if rest:
        raise ValueError(f"its stride of {step} bytes is no multiple of its {itemsize}-byte elements; pass a copy.")
    return elements
