"""CuPy: arrays on a GPU, with strides in bytes and a current stream a thread."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import array_api_compat.cupy
import cupy

from ..arrays import ArraySpec, ArrayView, Device
from ..dtypes import name_of
from .base import Framework
from .numpy import _bfloat16, _in_elements

Array = Any


class CuPy(Framework):
    name = "cupy"
    xp = array_api_compat.cupy

    def signature(self, x: Array) -> Hashable:
        return x.shape, x.strides, x.dtype, x.device.id

    def spec(self, x: Array) -> ArraySpec:
        strides = tuple(_in_elements(step, x.dtype.itemsize) for step in x.strides)
        return ArraySpec(x.shape, strides, name_of(x.dtype), Device("cuda", x.device.id))

    def view(self, x: Array) -> ArrayView:
        return ArrayView(self.spec(x), x.data.ptr, False, x)

    def current_stream(self, device: Device) -> int:
        return int(cupy.cuda.get_current_stream(device.ordinal).ptr)

    def dtype(self, name: str) -> Any:
        return _bfloat16() if name == "bfloat16" else cupy.dtype(name)

    def erf(self, x: Array) -> Array:
        from cupyx.scipy.special import erf

        return erf(x)

    def relu(self, z: Array) -> Array:
        return cupy.maximum(z, 0)
