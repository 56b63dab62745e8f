"""The frameworks of a GPU under test: how each makes an array there with a case's memory layout."""

from __future__ import annotations

from typing import Any

import cupy
import jax
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


def address(x: Array) -> int:
    """Return where an array begins on the GPU."""
    return int(x.data_ptr() if isinstance(x, torch.Tensor) else x.data.ptr)


def placed(framework: TestFramework, values: np.ndarray, offset: int) -> tuple[Array, Array]:
    """Return an array that begins ``offset`` elements into a buffer, and the buffer, which holds 3 around it."""
    stored = np.full(values.size + 16, 3, values.dtype)
    stored[offset : offset + values.size] = values.ravel()
    buffer = framework.make(stored)
    x = buffer[offset : offset + values.size].reshape(values.shape)
    assert (address(x) - offset * values.itemsize) % 16 == 0
    return x, buffer


TORCH = TestFramework(
    "torch-cuda", torch.Tensor, to_torch, _ALL, True, unfused=lambda a, b, bias: torch.relu(a @ b + bias)
)
JAX = TestFramework(
    "jax-cuda", jax.Array, lambda x: jax.device_put(np.ascontiguousarray(x), jax.devices("cuda")[0]), _ALL, False
)
CUPY = TestFramework("cupy", cupy.ndarray, to_cupy, _ALL, True)

FRAMEWORKS = (TORCH, CUPY)
