"""`Framework`: what the package must know of an array library, and the array-API way of computing with one.

A framework is recognised without importing it, and loaded when one of its arrays arrives. Its class answers four kinds
of questions: what an array looks like (`signature`, `spec`, `view`), how a foreign array becomes one of its own
(`from_foreign`), where a launch on a GPU finds and gets memory and streams (`pointer`, `allocator`, `current_stream`),
and how to compute the unfused reference with it (everything below "arithmetic"). The arithmetic here is written against
the array-API standard, so a library that follows the standard needs none of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from .. import activations
from ..arrays import ArraySpec, ArrayView, Device
from ..cuda import Event
from ..dtypes import name_of

__all__ = ["Framework"]

Array = Any
_BIT_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


class Framework:
    """One array library.

    Attributes
    ----------
    name : str
        The library, for messages and records.
    xp : module
        Its array-API namespace.
    mutable : bool
        Whether its arrays may be written, so that ``out=`` makes sense.
    makes_results : bool
        Whether it can allocate a result, so that ``out=`` may be left out.
    makes_own_streams : bool
        Whether its owner may go on working with an array on a current stream that others can make wait.
    keeps_graph_memory : bool
        Whether memory that is allocated and freed inside a stream capture stays the graph's.
    joins_layers : bool
        Whether its engine takes two layers as one operation, whose derivative it then knows as a whole.
    has_rules : bool
        Whether a call may have to go through the framework's own rules of derivatives and transforms (`needs_rules`)
        before it can be launched.
    """

    name: str
    xp: Any
    mutable = True
    makes_results = True
    makes_own_streams = False
    keeps_graph_memory = False
    joins_layers = False
    has_rules = False

    # What an array looks like ---------------------------------------------------------------------

    def signature(self, x: Array) -> Hashable:
        """Return, as cheaply as can be, all that planning may read of ``x``: equal signatures, equal specs."""
        raise NotImplementedError

    def signatures(self, operands: tuple[Array, ...]) -> Hashable:
        """Return the signatures of all operands of a call, None where there is none."""
        return tuple([None if x is None else self.signature(x) for x in operands])

    def spec(self, x: Array) -> ArraySpec:
        """Return the spec of ``x``; TypeError where the package cannot compute with such an array."""
        raise NotImplementedError

    def view(self, x: Array) -> ArrayView:
        """Return ``x`` with its address."""
        raise NotImplementedError

    def device(self, x: Array) -> Device:
        """Return where ``x`` lives."""
        return self.spec(x).device

    def is_plain(self, x: Array) -> bool:
        """Return whether the type of ``x`` is the library's own."""
        return True

    def is_traced(self, x: Array) -> bool:
        """Return whether ``x`` stands for a value that is not there yet."""
        return False

    def requires_grad(self, x: Array) -> bool:
        """Return whether a gradient is recorded through ``x`` outside of a transform."""
        return False

    def any_requires_grad(self, arrays: tuple[Array | None, ...]) -> bool:
        """Return whether a gradient is recorded through any of them."""
        return False

    def records(self, arrays: tuple[Array | None, ...]) -> bool:
        """Return whether a derivative of any kind is to be recorded through one of them."""
        return False

    def needs_rules(self, arrays: tuple[Array | None, ...]) -> bool:
        """Return whether the framework wants to see the call, for derivatives or a mode of its own, before a launch."""
        return False

    def check_launch(self, operands: tuple[Array, ...], out: Array | None = None, aux_out: Array | None = None) -> None:
        """Raise where an array's memory is not its values."""

    def check_export(self, x: Array) -> None:
        """Raise a TypeError where what ``x`` exports by DLPack is not its values."""

    # How arrays come in and go out ---------------------------------------------------------------

    def from_foreign(self, x: Array, foreign: Framework) -> Array:
        """Return ``x``, an array of another framework, as one of this, over the same memory."""
        return self.xp.from_dlpack(x)

    def enter(self, x: Array) -> Array:
        """Return ``x`` as an array that the arithmetic below works on."""
        return x

    def leave(self, value: Array) -> Array:
        """Return a computed value as an array of the caller's type."""
        return value

    def write(self, value: Array, out: Array) -> None:
        """Copy ``value`` into ``out``."""
        out[...] = value

    def mark_written(self, *written: Array | None) -> None:
        """Let the framework know of arrays whose memory a launch writes behind its back."""

    def wait(self, result: Array) -> None:
        """Return when ``result`` has been computed."""

    # Memory and streams of a GPU -------------------------------------------------------------------

    def current_stream(self, device: Device) -> int:
        """Return the address of the stream on which the framework would launch on ``device``."""
        raise NotImplementedError

    def stream_getter(self, device: Device) -> Callable[[], int]:
        """Return the function that gives the address of the current stream on ``device``."""
        return partial(self.current_stream, device)

    def on_stream(self, stream: int, device: Device) -> AbstractContextManager[Any]:
        """Return a block in which ``stream`` is the framework's current one, for launches and allocations."""
        raise NotImplementedError

    def pointer(self, x: Array) -> int:
        """Return the address of an array's first element."""
        return self.view(x).ptr

    def is_apart(self, written: Array, size: int, others: list[tuple[Array, int]]) -> bool:
        """Return whether the ``size`` bytes of an array surely lie outside of those of others, each with its own."""
        pointer = self.pointer
        low = pointer(written)
        high = low + size
        for x, extent in others:
            at = pointer(x)
            if low < at + extent and at < high:
                return False
        return True

    def is_readonly(self, x: Array) -> bool:
        """Return whether writing to ``x`` is forbidden."""
        return self.view(x).readonly

    def allocator(self, spec: ArraySpec) -> Callable[[Array], Array]:
        """Return a function that makes a dense array of this spec, given any array on its device."""
        raise NotImplementedError

    def scratch(self, size: int, like: Array) -> Array:
        """Return ``size`` bytes of memory on the device of ``like``, to be dropped when the launch is queued."""
        raise NotImplementedError

    def wait_for(self, event: Event, device: Device, stream: int) -> None:
        """Make the framework's current stream wait for an event recorded on ``stream``, unless it is that one."""
        current = self.current_stream(device)
        if current != stream:
            event.hold_back(current)

    def placeholder(self, shape: tuple[int, ...], like: Array) -> Any:
        """Return what stands for an array of this shape in planning, without values."""
        raise NotImplementedError

    def settled(self, settings: Any, a: Array) -> Any:
        """Return the settings with what the framework decides where the caller does not say.

        That is ``precision`` and ``deterministic``; what is no operand of a launch on a GPU has neither.
        """
        return settings

    def apply_in_place(self, activation: str, x: Array) -> None:
        """Replace a result by its activation, computed in at least float32."""
        wide = self.astype(x, "float64" if x.dtype == self.dtype("float64") else "float32")
        self.write(self.astype(getattr(self, activation)(wide), name_of(x.dtype)), x)

    # Arithmetic of the unfused reference ---------------------------------------------------------

    def matmul(self, a: Array, b: Array, compute_dtype: str, precision: str | None) -> Array:
        """Return ``a @ b`` in ``compute_dtype``; widened before, because the standard knows no accumulation dtype."""
        return self.xp.matmul(self.astype(a, compute_dtype), self.astype(b, compute_dtype))

    def matrix_transpose(self, x: Array) -> Array:
        return x.mT

    def dtype(self, name: str) -> Any:
        """Return the library's own dtype object."""
        return getattr(self.xp, name)

    def astype(self, x: Array, dtype: str) -> Array:
        """Return ``x`` in ``dtype``: itself where it has it."""
        wanted = self.dtype(dtype)
        return x if x.dtype == wanted else self.xp.astype(x, wanted)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        return self.xp.zeros(shape, dtype=self.dtype(dtype), device=like.device)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self.xp.reshape(x, shape)

    def sum(self, x: Array, axis: int, keepdims: bool) -> Array:
        return self.xp.sum(x, axis=axis, keepdims=keepdims)

    def erf(self, x: Array) -> Array:
        """Return the error function; the standard has none."""
        raise NotImplementedError(
            f'activation "gelu_erf" needs an error function, and {self.name} has none that is known here. '
            'Use "gelu_tanh", or pass arrays of NumPy, PyTorch, JAX or CuPy.'
        )

    def relu(self, z: Array) -> Array:
        return activations.relu(z, self.xp)

    def gelu_tanh(self, z: Array) -> Array:
        return activations.gelu_tanh(z, self.xp)

    def gelu_erf(self, z: Array) -> Array:
        return activations.gelu_erf(z, self.erf)

    def silu(self, z: Array) -> Array:
        return activations.silu(z, self.xp)

    def activation_derivative(self, name: str, z: Array) -> Array:
        """Return the derivative of an activation other than relu at the pre-activation ``z``."""
        if name == "gelu_tanh":
            return activations.gelu_tanh_derivative(z, self.xp)
        if name == "silu":
            return activations.silu_derivative(z, self.xp)
        return activations.gelu_erf_derivative(z, self.xp, self.erf)

    def where_positive(self, values: Array, z: Array) -> Array:
        """Return ``values`` where ``z > 0`` and 0 elsewhere: relu's derivative, applied."""
        return self.xp.where(z > 0, values, self.xp.zeros_like(values))

    def pad_last(self, x: Array, length: int) -> Array:
        """Return ``x`` with zeros appended to its last axis, to ``length``."""
        missing = length - x.shape[-1]
        if missing == 0:
            return x
        tail = self.xp.zeros((*x.shape[:-1], missing), dtype=x.dtype, device=x.device)
        return self.xp.concat([x, tail], axis=-1)

    def pack_bits(self, bits: Array, length: int) -> Array:
        """Return boolean ``(..., n)`` as uint8 ``(..., length)``, eight to a byte, least significant bit first."""
        padded = self.pad_last(self.astype(bits, "uint8"), length * 8)
        groups = self.xp.reshape(padded, (*bits.shape[:-1], length, 8))
        return self.xp.sum(groups * self._bit_weights(bits), axis=-1, dtype=self.dtype("uint8"))

    def unpack_bits(self, mask: Array, n: int) -> Array:
        """Return uint8 ``(..., length)`` as boolean ``(..., n)``: the inverse of `pack_bits`."""
        bits = (self.xp.expand_dims(mask, axis=-1) & self._bit_weights(mask)) != 0
        length = math.prod(bits.shape[-2:])
        return self.xp.reshape(bits, (*mask.shape[:-1], length))[..., :n]

    def _bit_weights(self, like: Array) -> Array:
        return self.xp.asarray(_BIT_WEIGHTS, dtype=self.dtype("uint8"), device=like.device)
