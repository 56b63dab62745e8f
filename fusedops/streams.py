"""``stream=``: a block in which the caller's stream is the lead's current one, for imports, memory and launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .arrays import Device
from .cuda import on_device
from .errors import OURS, named
from .frameworks import Framework
from .lead import lead_of, spec_of_argument
from .lifetime import keep_until_read
from .problem import OPERANDS

__all__ = ["launch_stream"]

Array = Any


@contextmanager
def launch_stream(
    op: str, stream: object, operands: tuple[Array, ...], names: tuple[str, ...] = OPERANDS, required: int = 2
) -> Iterator[None]:
    """Make ``stream`` the current stream of the framework that leads ``operands``, for a block; None changes nothing.

    The memory of the lead's own operands is kept from reuse until the stream has read it. What was queued on other
    streams before, the caller has to order, as with any stream of one's own.

    Raises
    ------
    TypeError, ValueError
        For what is no stream's address, in JAX, and for arrays on a CPU.
    """
    if stream is None:
        yield
        return
    try:
        name, lead = lead_of(operands, names, required)
        framework = lead.framework
        spec_of_argument(name, operands[names.index(name)], framework)
        device = framework.device(operands[names.index(name)])
        address = _checked(stream, framework, device)
    except OURS as error:
        raise named(op, error) from error.__cause__
    before = framework.current_stream(device) if framework.makes_own_streams else None
    with on_device(device.ordinal), framework.on_stream(address, device):  # CuPy's is that of the current device
        yield
    if before != address:
        keep_until_read(address, device, [(framework, x) for x in operands if x is not None])


def _checked(stream: object, framework: Framework, device: Device) -> int:
    if not isinstance(stream, int) or isinstance(stream, bool):
        raise TypeError(f"stream is {stream!r}, expected the address of a CUDA stream as an int.")
    if framework.name == "jax":
        raise ValueError("stream is given, and JAX runs on XLA's own stream. Leave stream out.")
    if device.kind != "cuda":
        raise ValueError("stream is given, and these arrays live on a CPU. Leave stream out.")
    return stream
