"""Arrays known by DLPack alone: read in place, computed by NumPy on the CPU, and given back in the producer's own type.

A producer with ``__dlpack_c_exchange_api__`` allocates the results itself; for any other the caller passes ``out=``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import numpy as np

from ..arrays import ArraySpec, ArrayView, Device
from ..cuda import Event
from ..dlpack import ExchangeApi, device_of, numpy_over, view_of
from ..dtypes import name_of
from .base import Framework
from .numpy import NumPy

Array = Any


_named_stream: ContextVar[int | None] = ContextVar("fusedops_named_stream", default=None)


def _gpu() -> Framework:
    """Return CuPy, which lends a workspace to producers without an allocator."""
    framework: Framework = import_module(".cupy", __package__).CuPy()
    return framework


class DLPackProducer(NumPy):
    """One class of arrays, by its DLPack methods."""

    def __init__(self, array_type: type) -> None:
        self.name = f"{array_type.__module__.split('.')[0]}.{array_type.__name__}"
        capsule = getattr(array_type, "__dlpack_c_exchange_api__", None)
        self._exchange = ExchangeApi(capsule) if capsule is not None else None
        self.makes_results = self._exchange is not None

    def signature(self, x: Array) -> Hashable:
        return type(x), self.spec(x)

    def spec(self, x: Array) -> ArraySpec:
        if isinstance(x, np.ndarray):
            return super().spec(x)
        return view_of(x).spec

    def device(self, x: Array) -> Device:
        return device_of(x)

    def view(self, x: Array) -> ArrayView:
        return super().view(x) if isinstance(x, np.ndarray) else view_of(x)

    def pointer(self, x: Array) -> int:
        return super().pointer(x) if isinstance(x, np.ndarray) else view_of(x).ptr

    def is_apart(self, written: Array, size: int, others: list[tuple[Array, int]]) -> bool:
        return Framework.is_apart(self, written, size, others)

    def is_readonly(self, x: Array) -> bool:
        return super().is_readonly(x) if isinstance(x, np.ndarray) else view_of(x).readonly

    def from_foreign(self, x: Array, foreign: Framework) -> Array:
        return x

    def enter(self, x: Array) -> Array:
        if isinstance(x, np.ndarray):
            return x
        if self.device(x).kind != "cpu":
            raise NotImplementedError(
                f"this problem is computed in steps, and {self.name} arrays on a GPU have no operations here. Pass "
                "arrays of PyTorch or CuPy."
            )
        return numpy_over(view_of(x))

    def leave(self, value: Array) -> Array:
        if self._exchange is None:
            raise TypeError(f"{self.name} cannot make results; pass out= (and aux_out=).")
        made = self._exchange.empty(ArraySpec.dense(value.shape, name_of(value.dtype)))
        self.write(value, made)
        return made

    def write(self, value: Array, out: Array) -> None:
        super().write(value, self.enter(out))

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        raise NotImplementedError(f"{self.name} arrays cannot be reshaped here; pass matrices of two axes.")

    def current_stream(self, device: Device) -> int:
        named = _named_stream.get()
        if named is not None:
            return named
        if self._exchange is None:
            raise ValueError(f"{self.name} names no current stream; pass stream=.")
        return self._exchange.current_stream(device)

    @contextmanager
    def on_stream(self, stream: int, device: Device) -> Iterator[None]:
        token = _named_stream.set(stream)
        try:
            with _gpu().on_stream(stream, device):
                yield
        finally:
            _named_stream.reset(token)

    def allocator(self, spec: ArraySpec) -> Callable[[Array], Array]:
        def empty(like: Array) -> Array:
            if self._exchange is None:
                raise TypeError(f"{self.name} cannot make results; pass out= (and aux_out=).")
            made = self._exchange.empty(spec)
            own, named = self._exchange.current_stream(spec.device), _named_stream.get()
            if named is not None and named != own:
                Event(own).hold_back(named)  # the allocation is in the order of the producer's stream
            return made

        return empty

    def scratch(self, size: int, like: Array) -> Array:
        device = self.device(like)
        with _gpu().on_stream(self.current_stream(device), device):  # CuPy reuses memory in the order of that stream
            return _gpu().scratch(size, like)

    def apply_in_place(self, activation: str, x: Array) -> None:
        self.enter(x)  # says why not
