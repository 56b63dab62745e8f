"""PyTorch: tensors, their strides, streams and native activations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import array_api_compat.torch
import torch
import torch.nn.functional as F

from ..arrays import ArraySpec, ArrayView, Device
from ..dtypes import name_of
from .base import Framework

Array = Any


class Torch(Framework):
    name = "torch"
    xp = array_api_compat.torch

    def signature(self, x: Array) -> Hashable:
        if x.layout is not torch.strided:
            raise TypeError(f"its layout is {x.layout}; pass a dense tensor, x.to_dense().")
        return x.shape, x.stride(), x.dtype, x.device

    def spec(self, x: Array) -> ArraySpec:
        device = Device(x.device.type, x.device.index or 0)
        return ArraySpec(tuple(x.shape), tuple(x.stride()), name_of(x.dtype), device)

    def view(self, x: Array) -> ArrayView:
        return ArrayView(self.spec(x), x.data_ptr(), False, x)

    def requires_grad(self, x: Array) -> bool:
        return bool(x.requires_grad)

    def from_foreign(self, x: Array, foreign: Framework) -> Array:
        if foreign.name != "numpy":
            return torch.from_dlpack(x)
        if not x.flags.writeable:
            # A tensor over read-only memory would be writable; the copy protects it.
            raise TypeError("it is a read-only NumPy array, which PyTorch cannot hold; pass a writable copy.")
        if name_of(x.dtype) == "bfloat16":
            return torch.from_numpy(x.view("uint16")).view(torch.bfloat16)
        return torch.from_numpy(x)

    def write(self, value: Array, out: Array) -> None:
        out.copy_(value)

    def current_stream(self, device: Device) -> int:
        return int(torch.cuda.current_stream(device.ordinal).cuda_stream)

    def matmul(self, a: Array, b: Array, compute_dtype: str, precision: str | None) -> Array:
        wanted = getattr(torch, compute_dtype)
        if a.dtype != wanted:
            a, b = a.to(wanted), b.to(wanted)
        return torch.matmul(a, b)

    def dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def astype(self, x: Array, dtype: str) -> Array:
        return x.to(getattr(torch, dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        return like.new_zeros(shape, dtype=getattr(torch, dtype))

    def erf(self, x: Array) -> Array:
        return torch.erf(x)

    def relu(self, z: Array) -> Array:
        return torch.relu(z)

    def gelu_tanh(self, z: Array) -> Array:
        return F.gelu(z, approximate="tanh")

    def gelu_erf(self, z: Array) -> Array:
        return F.gelu(z)

    def silu(self, z: Array) -> Array:
        return F.silu(z)
