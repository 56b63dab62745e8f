"""Libraries that meet in one call: how each makes an array over given memory, and where that memory lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import array_api_strict
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
import tvm_ffi

from fusedops.arrays import Device
from fusedops.testing import matmul_oracle

Array = Any

CPU = Device("cpu", 0)
ADDRESS = 0x7F00_0000_0100
"""Of memory that is not there."""


def _torch(x: np.ndarray) -> torch.Tensor:
    """Return a tensor over NumPy memory."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(x)


@dataclass(frozen=True)
class Library:
    """One that can take part in a call: how it makes an array over aligned memory, and where that lies."""

    name: str
    make: Callable[[np.ndarray], Array]
    address: Callable[[Array], int]


LIBRARIES = {
    library.name: library
    for library in (
        Library("numpy", lambda x: x, lambda x: x.ctypes.data),
        Library("torch", _torch, lambda x: x.data_ptr()),
        Library("jax", jnp.asarray, lambda x: x.unsafe_buffer_pointer()),
        Library("array_api_strict", array_api_strict.asarray, lambda x: x._array.ctypes.data),
        Library("tvm_ffi.Tensor", lambda x: tvm_ffi.from_dlpack(_torch(x)), lambda x: torch.from_dlpack(x).data_ptr()),
    )
}


def aligned(values: np.ndarray) -> np.ndarray:
    """Return a copy at an address that is a multiple of 64, which XLA asks for before it shares memory."""
    raw = np.zeros(values.nbytes + 64, "uint8")
    start = -raw.ctypes.data % 64
    copy = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


A, B = (np.random.default_rng(i).standard_normal((8, 8)).astype("float32") for i in range(2))
BIAS = np.linspace(-1, 1, 8, dtype="float32")
WANT = matmul_oracle(A, B, bias=BIAS)


def made(name: str, values: np.ndarray) -> Array:
    """Return a library's array of these values, over aligned memory."""
    return LIBRARIES[name].make(aligned(values))
