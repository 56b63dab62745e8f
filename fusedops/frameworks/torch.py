"""PyTorch: tensors, their strides, streams and native activations."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import array_api_compat.torch
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from ..arrays import ArraySpec, ArrayView, Device
from ..dtypes import name_of
from .base import Framework

Array = Any


def _stream_of(ordinal: int) -> int:
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


# The public way costs 4 us a call, PyTorch's own 0.1.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def _always(*_: Any) -> bool:
    return True


# The public questions about modes cost a microsecond each. Without the private ones every call takes the longer way.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _always)
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", _always)
_transforms: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", _always)
is_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _always)
_increment_version: Callable[[Any], None] = getattr(
    torch._C, "_increment_version", torch.autograd.graph.increment_version
)

_is_grad_enabled = torch.is_grad_enabled
_is_deterministic = torch.are_deterministic_algorithms_enabled


def _has_tangent(x: Array | None) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None


@lru_cache(maxsize=4096)
def _spec_of(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, device: Any) -> ArraySpec:
    return ArraySpec(tuple(shape), tuple(strides), name_of(dtype), Device(device.type, device.index or 0))


class Torch(Framework):
    name = "torch"
    xp = array_api_compat.torch
    makes_own_streams = True
    keeps_graph_memory = True
    has_rules = True

    def is_plain(self, x: Array) -> bool:
        return type(x) is torch.Tensor or type(x) is torch.nn.Parameter

    def signature(self, x: Array) -> Hashable:
        # A sparse tensor raises here, and `spec` says why.
        return x.shape, x.stride(), x.dtype, x.device

    def signatures(self, operands: tuple[Array, ...]) -> Hashable:
        # Spelled out: four calls of `signature` cost a microsecond.
        a, b, bias, c, relu_aux, gelu_aux = operands
        return (
            (a.shape, a.stride(), a.dtype, a.device),
            (b.shape, b.stride(), b.dtype, b.device),
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
            None if c is None else self.signature(c),
            None if relu_aux is None else self.signature(relu_aux),
            None if gelu_aux is None else self.signature(gelu_aux),
        )

    def spec(self, x: Array) -> ArraySpec:
        if x.layout is not torch.strided:
            raise TypeError(f"its layout is {x.layout}; pass a dense tensor, x.to_dense().")
        if x.is_nested:
            raise TypeError("it is a nested tensor; pass a plain one, x.to_padded_tensor(0.0).")
        return _spec_of(x.shape, x.stride(), x.dtype, x.device)

    def view(self, x: Array) -> ArrayView:
        return ArrayView(self.spec(x), x.data_ptr(), False, x)

    def is_readonly(self, x: Array) -> bool:
        return False

    def requires_grad(self, x: Array) -> bool:
        return bool(x.requires_grad) and torch.is_grad_enabled()

    def any_requires_grad(self, arrays: tuple[Array | None, ...]) -> bool:
        if torch.is_grad_enabled():
            for x in arrays:
                if x is not None and x.requires_grad:
                    return True
        return False

    def records(self, arrays: tuple[Array | None, ...]) -> bool:
        return self.any_requires_grad(arrays) or _transforms() or any(map(_has_tangent, arrays))

    def needs_rules(self, arrays: tuple[Array | None, ...]) -> bool:
        if _is_grad_enabled() and self.any_requires_grad(arrays):
            return True
        modes = _dispatch_modes() or _transforms() or is_any_autocast() or _function_modes()
        return bool(modes or forward_ad._current_level >= 0)

    def check_launch(self, operands: tuple[Array, ...], out: Array | None = None, aux_out: Array | None = None) -> None:
        # Spelled out for the operands that most calls have: a loop over them all costs a microsecond.
        a, b, bias, c, _, gelu_aux = operands
        negated = a.is_neg() or b.is_neg() or (bias is not None and bias.is_neg())
        if not (c is None and gelu_aux is None and out is None and aux_out is None):
            negated = negated or any(x is not None and x.is_neg() for x in (c, gelu_aux, out, aux_out))
        if negated:
            raise TypeError(
                "an array is a lazily negated view, whose memory holds the other sign; pass x.resolve_neg()."
            )

    def check_export(self, x: Array) -> None:
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            # FakeTensor, DTensor and their kind export address 0 or memory that is not theirs.
            raise TypeError(f"a {type(x).__name__} has no memory of its own; pass a plain tensor.")
        if x.is_neg() or x._is_zerotensor():
            raise TypeError("its values are not in its memory (a negated view, or a zero tensor); pass x.clone().")
        if _has_tangent(x):
            raise TypeError("it carries a forward-mode tangent, which would be lost; pass its primal.")

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

    def mark_written(self, *written: Array | None) -> None:
        # Autograd compares versions to refuse a backward pass over what was overwritten since it was saved.
        for x in written:
            if x is not None and not x.is_inference():
                _increment_version((x,))

    def current_stream(self, device: Device) -> int:
        return _raw_stream(device.ordinal)

    def stream_getter(self, device: Device) -> Callable[[], int]:
        return partial(_raw_stream, device.ordinal)

    def on_stream(self, stream: int, device: Device) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = torch.cuda.stream(
            torch.cuda.get_stream_from_external(stream, device.ordinal)
        )
        return block

    pointer = staticmethod(torch.Tensor.data_ptr)

    def allocator(self, spec: ArraySpec) -> Callable[[Array], Array]:
        shape, dtype = spec.shape, getattr(torch, spec.dtype)

        def empty(like: Array) -> Array:
            # Naming the dtype costs half a microsecond.
            return like.new_empty(shape) if like.dtype is dtype else like.new_empty(shape, dtype=dtype)

        return empty

    def scratch(self, size: int, like: Array) -> Array:
        return like.new_empty(size, dtype=torch.uint8)

    def settled(self, settings: Any, a: Array) -> Any:
        if not a.is_cuda:
            return settings
        if a.dtype is torch.float32 and settings.precision is None:
            tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
            settings = settings._replace(precision="tf32" if tf32 else "ieee")
        if settings.deterministic is None and _is_deterministic():
            settings = settings._replace(deterministic=True)
        return settings

    def apply_in_place(self, activation: str, x: Array) -> None:
        # PyTorch's own kernels compute 16-bit values in float32.
        x.copy_(getattr(self, activation)(x))

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
