"""CUDA by address: events, stream order and capture state, through the runtime that CuPy loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["Event", "device_getter", "is_capturing", "on_device"]


@cache
def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


class Event:
    """An event recorded on a stream."""

    def __init__(self, stream: int) -> None:
        runtime = _runtime()
        self._runtime = runtime
        self._event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        runtime.eventRecord(self._event, stream)

    def done(self) -> bool:
        """Return whether everything before it has finished."""
        return bool(self._runtime.eventQuery(self._event) == 0)

    def hold_back(self, stream: int) -> None:
        """Make later work on ``stream`` wait for it."""
        self._runtime.streamWaitEvent(stream, self._event)

    def __del__(self) -> None:
        if self._runtime is not None:
            self._runtime.eventDestroy(self._event)


def is_capturing(stream: int) -> bool:
    """Return whether work on ``stream`` is being captured into a graph, or may not be queued beside another capture."""
    runtime = _runtime()
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError:  # the legacy stream, while another stream captures
        return True


def device_getter() -> Callable[[], int]:
    """Return the function that gives the ordinal of the current device."""
    getter: Callable[[], int] = _runtime().getDevice
    return getter


@contextmanager
def on_device(ordinal: int) -> Iterator[None]:
    """Make a device current for a block."""
    runtime = _runtime()
    before = runtime.getDevice()
    runtime.setDevice(ordinal)
    try:
        yield
    finally:
        runtime.setDevice(before)
