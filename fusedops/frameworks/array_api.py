"""Any other library that follows the array-API standard: computed by its own namespace, read through DLPack."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..arrays import ArraySpec, ArrayView, Device
from ..dlpack import device_of, view_of
from .base import Framework

Array = Any


class ArrayApi(Framework):
    """One array-API namespace."""

    def __init__(self, namespace: Any) -> None:
        self.xp = namespace
        self.name = namespace.__name__.split(".")[0]

    def signature(self, x: Array) -> Hashable:
        return type(x), self.spec(x)

    def spec(self, x: Array) -> ArraySpec:
        return self.view(x).spec

    def device(self, x: Array) -> Device:
        return device_of(x)

    def view(self, x: Array) -> ArrayView:
        return view_of(x)
