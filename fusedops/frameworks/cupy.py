"""CuPy: arrays on a GPU, with strides in bytes and a current stream a thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import array_api_compat.cupy
import cupy

from ..arrays import ArraySpec, ArrayView, Device
from ..cuda import is_capturing
from ..dlpack import numpy_dtype
from ..dtypes import name_of
from .base import Framework
from .numpy import _in_elements

Array = Any

_written_by_graphs: list[Array] = []
"""Workspaces of captured launches, never freed: a graph writes to its own at every replay, and CuPy's memory pool knows
nothing of graphs and would give it to others."""


class _Stream:
    """A stream's address, in the form in which libraries hand streams to each other."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


class CuPy(Framework):
    name = "cupy"
    xp = array_api_compat.cupy
    makes_own_streams = True

    def signature(self, x: Array) -> Hashable:
        return x.shape, x.strides, x.dtype, x.device.id

    def spec(self, x: Array) -> ArraySpec:
        strides = tuple(_in_elements(step, x.dtype.itemsize) for step in x.strides)
        return ArraySpec(x.shape, strides, name_of(x.dtype), Device("cuda", x.device.id))

    def view(self, x: Array) -> ArrayView:
        return ArrayView(self.spec(x), x.data.ptr, False, x)

    def current_stream(self, device: Device) -> int:
        return int(cupy.cuda.get_current_stream(device.ordinal).ptr)

    def on_stream(self, stream: int, device: Device) -> AbstractContextManager[Any]:
        if stream == 0:
            null: AbstractContextManager[Any] = cupy.cuda.Stream.null
            return null
        from_external = getattr(cupy.cuda.Stream, "from_external", None)  # CuPy 14.1; before it, `ExternalStream`
        known: AbstractContextManager[Any] = (
            from_external(_Stream(stream)) if from_external else cupy.cuda.ExternalStream(stream, device.ordinal)
        )
        return known

    def is_readonly(self, x: Array) -> bool:
        return False

    def pointer(self, x: Array) -> int:
        return int(x.data.ptr)

    def allocator(self, spec: ArraySpec) -> Callable[[Array], Array]:
        shape, dtype = spec.shape, self.dtype(spec.dtype)
        return lambda like: cupy.empty(shape, dtype)

    def scratch(self, size: int, like: Array) -> Array:
        workspace = cupy.empty(size, cupy.uint8)
        if is_capturing(cupy.cuda.get_current_stream().ptr):
            _written_by_graphs.append(workspace)
        return workspace

    def dtype(self, name: str) -> Any:
        return numpy_dtype(name) if name == "bfloat16" else cupy.dtype(name)

    def erf(self, x: Array) -> Array:
        from cupyx.scipy.special import erf

        return erf(x)

    def relu(self, z: Array) -> Array:
        return cupy.maximum(z, 0)
