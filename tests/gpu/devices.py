"""The frameworks of a GPU under test: how each makes an array there with a case's memory layout."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import torch
from frameworks import TestFramework, np_dtype

Array = Any

_ALL = ("float16", "bfloat16", "float32", "float64")


def _buffer(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the memory that an array is a view of, as bytes, and where the array begins in it."""
    owner = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start = owner.__array_interface__["data"][0]
    raw = np.frombuffer(owner.tobytes(order="K"), np.uint8)
    return raw, x.__array_interface__["data"][0] - start


def to_cupy(x: np.ndarray) -> Array:
    """Return a CuPy array over a copy of the whole buffer, with the strides and offset of ``x``."""
    if x.size == 0:
        return cupy.empty(x.shape, x.dtype)
    raw, offset = _buffer(x)
    memory = cupy.asarray(raw)
    return cupy.ndarray(x.shape, x.dtype, memptr=memory.data + offset, strides=x.strides)


def to_torch(x: np.ndarray) -> Array:
    """Return a CUDA tensor over a copy of the whole buffer, with the strides and offset of ``x``."""
    dtype = getattr(torch, "bfloat16" if x.dtype == np_dtype("bfloat16") else x.dtype.name)
    if x.size == 0:
        return torch.empty(x.shape, dtype=dtype, device="cuda")
    raw, offset = _buffer(x)
    memory = torch.from_numpy(raw.copy()).cuda().view(dtype)
    strides = [step // x.itemsize for step in x.strides]
    return torch.as_strided(memory, x.shape, strides, offset // x.itemsize)


TORCH = TestFramework(
    "torch-cuda", torch.Tensor, to_torch, _ALL, True, unfused=lambda a, b, bias: torch.relu(a @ b + bias)
)
CUPY = TestFramework("cupy", cupy.ndarray, to_cupy, _ALL, True)

FRAMEWORKS = (TORCH, CUPY)
