"""Keeps foreign memory safe until the work that reads it is done.

The lead launches on its own stream and is done with a call when it has queued it; the owner of a foreign operand knows
nothing of that. Freed or written right after the call, the memory would change under a kernel that still reads it.

==============================  ========================================================================================
who reads, who owns             what is done
==============================  ========================================================================================
a GPU stream, anybody           the array is kept beside an event, and dropped by a later call once the event is done
a GPU stream, PyTorch or CuPy   its current stream, where the owner may write to the array, waits for the launch too
XLA, anybody on a GPU           the array is kept beside the result, and dropped by a later call once that is ready
XLA, anybody on the CPU         the call returns when the result is ready: nothing orders a write on the CPU after it
==============================  ========================================================================================

PyTorch's ``record_stream`` was rejected: when the tensor is freed it records an event on the reader's stream, and where
that stream is another library's and gone by then, the process dies (seen with CuPy 14.2 and PyTorch 2.11).

NumPy arrays need none of it: JAX takes them under its own rules, and no other lead computes after the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .arrays import Device
from .cuda import Event, is_capturing, on_device
from .frameworks import Framework

__all__ = ["held_count", "keep_until_read", "settle"]

Array = Any

_held: list[tuple[Callable[[], bool], Any]] = []
"""What is kept, each with the question whether its reader is done."""

_lock = threading.Lock()


def settle(lead: Framework, device: Device, results: tuple[Array, ...], sources: list[tuple[Framework, Array]]) -> None:
    """See to it that the memory of ``sources`` outlives the work that was queued on it.

    Parameters
    ----------
    lead : Framework
        Who launched.
    device : Device
        Where the sources live.
    results : tuple
        What the launch gives, None where it gives nothing.
    sources : list of (Framework, array)
        The foreign operands with their frameworks.
    """
    if lead.name == "jax":
        _settle_in_xla(lead, results, sources)
    elif device.kind == "cuda":
        keep_until_read(lead.current_stream(device), device, sources)


def keep_until_read(stream: int, device: Device, sources: list[tuple[Framework, Array]]) -> None:
    """Keep arrays from being freed or written until what is queued on ``stream`` is done.

    Not inside a capture: a graph reads its operands at every replay, and who replays it must keep them.
    """
    with on_device(device.ordinal):  # an event belongs to the device that is current when it is made
        if is_capturing(stream):
            return  # before any event is asked, which would spoil the capture
        event = Event(stream)
        for framework in {framework for framework, _ in sources}:
            if framework.makes_own_streams:
                framework.wait_for(event, device, stream)
    _hold(event.done, sources)


def held_count() -> int:
    """Return how many calls' foreign operands are being kept."""
    _drop_what_is_done()
    return len(_held)


def _settle_in_xla(lead: Framework, results: tuple[Array, ...], sources: list[tuple[Framework, Array]]) -> None:
    given = [result for result in results if result is not None]
    owner, source = sources[0]
    if owner.device(source).kind == "cpu":  # a problem that JAX leads says "xla", wherever that is
        for result in given:
            lead.wait(result)
    elif given and hasattr(given[0], "is_ready"):
        _hold(lambda: all(_is_ready(result) for result in given), sources)


def _is_ready(result: Array) -> bool:
    """Return whether a JAX result has been computed; one that was donated or deleted may no longer be asked."""
    return bool(result.is_deleted() or result.is_ready())


def _hold(done: Callable[[], bool], what: Any) -> None:
    _drop_what_is_done()
    with _lock:
        _held.append((done, what))


def _drop_what_is_done() -> None:
    if _held:
        with _lock:
            _held[:] = [(done, what) for done, what in _held if not done()]
