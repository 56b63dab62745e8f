"""The handler of the custom call: compiled, registered with XLA, and told who plans.

XLA instantiates the calls of a program when it is compiled or loaded, on a thread of its own that knows nothing of the
caller's: the planner then holds no lock but its own, imports nothing (an import whose module is waiting for that very
program would never end) and calls nothing of JAX. What a call needs afterwards is C's (``native/handler.c``).

One executable may run on several devices: its calls are planned on the first of the process, and run by handles of
their own on the others, which are taken to be of the same kind.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

import jax

from ..arrays import Device, alignment_class
from ..column_form import unasked_steps
from ..engines.base import NO_NVMATH
from ..native.build import shared_object
from ..native.launcher import Launcher, NativeProgram
from ..problem import Problem
from .problem_text import TARGET, buffers_of, problem_of

__all__ = ["TARGET", "Planner", "counters", "ensure_registered", "handler_object", "reason_or_warn", "register_for"]

Plan = Callable[[Problem, int], NativeProgram]
"""What makes the program of a problem for an alignment in bytes."""

STATES_KEPT = 4096
"""Calls kept at most by their text; the oldest half goes when there are more, and executables keep their own."""

_A, _B, _BIAS, _C, _AUX, _OUT, _WORKSPACE = range(7)
_SLOTS = {
    # The places of `native/handler.c`; a sum is written where a bias would be read.
    "a": _A,
    "b": _B,
    "bias": _BIAS,
    "c": _C,
    "out": _OUT,
    "workspace": _WORKSPACE,
    **dict.fromkeys(("relu_aux", "gelu_aux"), _AUX),
    **dict.fromkeys(("drelu_bgrad", "dgelu_bgrad", "bgrada", "bgradb"), _BIAS),
}
_CANCELLED, _INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _INTERNAL = 1, 3, 8, 13  # XLA_FFI_Error_Code
_COUNTERS = ("instantiations", "executions", "live_states", "holders", "in_flight")

_address, _long = ctypes.c_void_p, ctypes.c_int64
_Provider = ctypes.CFUNCTYPE(ctypes.c_int, _address, _long, ctypes.POINTER(_address), _address, _long)


# Planning ------------------------------------------------------------------------------------------------------------


class Planner:
    """Makes the states of one platform's calls, and keeps them by text.

    Parameters
    ----------
    shared : ctypes.CDLL
        The handler.
    device : Device
        Where programs are planned.
    plan : callable
        ``plan(problem, alignment)``; its program belongs to a launcher over ``shared``.
    """

    def __init__(self, shared: ctypes.CDLL, device: Device, plan: Plan) -> None:
        self._shared = shared
        self._device = device
        self._plan = plan
        self._states: dict[str, int] = {}
        self._lock = threading.Lock()
        self.callback = _Provider(self._provide)

    def forget(self) -> None:
        """Release the states that no executable has."""
        with self._lock:
            self._drop(len(self._states))

    def _provide(self, text: int, length: int, state: Any, message: int, capacity: int) -> int:
        """Answer C: 0 and a state with a reference for it, or an error's code and message."""
        try:
            state[0] = self._retained(ctypes.string_at(text, length).decode())
            return 0
        except BaseException as error:  # nothing may be raised through C
            said = f"{type(error).__name__}: {error}".encode(errors="replace")[: capacity - 1]
            said = said.decode(errors="ignore").encode() + b"\0"
            ctypes.memmove(message, said, len(said))
            return _code(error)

    def _retained(self, text: str) -> int:
        """Return the state of a call, planned where it is the first with its text, with a reference for the caller."""
        with self._lock:
            state = self._states.get(text)
            if state is not None:
                self._shared.state_retain(state)
                return state
        made = self._made(text)  # without the lock: another thread may be planning the same, and one of them is kept
        with self._lock:
            state = self._states.setdefault(text, made)
            self._shared.state_retain(state)
            if state is not made:
                self._shared.state_release(made)
            if len(self._states) > STATES_KEPT:
                self._drop(STATES_KEPT // 2)
        return state

    def _made(self, text: str) -> int:
        problem, alpha, beta = problem_of(text, self._device)
        program = self._plan(problem, alignment_class(unasked_steps(problem)))
        operands, results = buffers_of(problem)
        buffers = (*operands, *results)
        state: int | None = self._shared.state_new(
            program.address,
            alpha,
            beta,
            self._device.ordinal,
            text.encode(),
            len(operands),
            len(results),
            (ctypes.c_int * len(buffers))(*(_SLOTS[name] for name, _ in buffers)),
            (ctypes.c_int64 * len(buffers))(*(size for _, size in buffers)),
        )
        if not state:
            raise MemoryError(f"no state for a program that needs {program.workspace} bytes of workspace: {text}")
        return state

    def _drop(self, count: int) -> None:
        """Release the oldest states; the caller holds the lock."""
        for old in list(self._states)[:count]:
            self._shared.state_release(self._states.pop(old))


def _code(error: BaseException) -> int:
    if isinstance(error, (TypeError, ValueError, NotImplementedError)):
        return _INVALID_ARGUMENT
    if isinstance(error, MemoryError):
        return _RESOURCE_EXHAUSTED
    return _INTERNAL if isinstance(error, Exception) else _CANCELLED


# Registering ---------------------------------------------------------------------------------------------------------

_registering = threading.Lock()
_planners: dict[str, list[Planner]] = {}
"""Every planner that a platform had, the last one in use: C may be in the callback of an earlier one."""

_outcome: list[str | None] = []
_unwarned = [True]


def ensure_registered() -> str | None:
    """Let the handler serve the CUDA programs of this process, from the first call on.

    Returns
    -------
    str or None
        Why it cannot, with what to do; None where it does.

    Notes
    -----
    The first call may run the C compiler, and imports nvmath and CuPy. It touches no GPU, so that a machine without
    one may compile programs for another.
    """
    if not _outcome:
        with _registering:
            if not _outcome:
                _outcome.append(_register_cuda())
    return _outcome[0]


def reason_or_warn() -> str | None:
    """Return what `ensure_registered` does; a reason is a warning too, once a process."""
    reason = ensure_registered()
    if reason is not None:
        with _registering:
            first = bool(_unwarned) and _unwarned.pop()
        if first:
            warnings.warn(f"fusedops: JAX programs compute unfused on CUDA: {reason}", RuntimeWarning, stacklevel=2)
    return reason


def register_for(platform: str, device: Device, plan: Plan, create: int = 0) -> Planner:
    """Register the handler for a platform, or set another planner for it.

    Parameters
    ----------
    platform : {"CUDA", "cpu"}
        The name that XLA knows it by.
    device : Device
        Where programs are planned; its ordinal is XLA's of that device.
    plan : callable
        ``plan(problem, alignment)`` returns a program of a launcher over `handler_object`.
    create : int
        Address of ``cublasLtCreate``.
    """
    shared = handler_object()
    planner = Planner(shared, device, plan)
    known = _planners.setdefault(platform, [])
    known.append(planner)
    shared.handler_serve(platform == "CUDA", planner.callback, create)
    if len(known) == 1:
        kind = "cuda" if platform == "CUDA" else "host"
        stages = {stage: jax.ffi.pycapsule(getattr(shared, f"{kind}_{stage}")) for stage in ("instantiate", "execute")}
        jax.ffi.register_ffi_target(TARGET, stages, platform=platform)
    return planner


def counters() -> dict[str, int]:
    """Return the handler's counts: of instantiated and executed calls, of states, of those that executables hold."""
    shared = handler_object()
    return {name: getattr(shared, f"handler_{name}")() for name in _COUNTERS}


@cache
def handler_object() -> ctypes.CDLL:
    """Return the handler and the launcher as one object, compiled against the headers of this process's XLA.

    Raises
    ------
    NoNativeCode
        Where there is no C compiler.
    """
    sources = ("handler.c", "launcher.c")
    shared = shared_object("handler", sources, (jax.ffi.include_dir(),), metadata.version("jaxlib"))
    integer, number = ctypes.c_int, ctypes.c_double
    declared: dict[str, tuple[Any, list[Any]]] = {
        "state_new": (
            _address,
            [_address, number, number, integer, ctypes.c_char_p, integer, integer, _address, _address],
        ),
        "state_retain": (None, [_address]),
        "state_release": (None, [_address]),
        "handler_serve": (None, [integer, _Provider, _address]),
        **{f"handler_{name}": (ctypes.c_long, []) for name in _COUNTERS},
    }
    for name, (result, arguments) in declared.items():
        function = getattr(shared, name)
        function.restype, function.argtypes = result, arguments
    atexit.register(_stop, shared)
    return shared


def _stop(shared: ctypes.CDLL) -> None:
    """Let no call to Python begin, and wait for those under way, which need the interpreter."""
    for is_cuda in (True, False):
        shared.handler_serve(is_cuda, _Provider(), None)
    while shared.handler_in_flight():
        time.sleep(0.001)


def _register_cuda() -> str | None:
    """Register the handler with nvmath as its planner, or return why not."""
    try:
        shared = handler_object()
        from ..engines.nvmath import library_functions, native_program

        functions = library_functions()
        launcher = Launcher(shared, functions)
    except ImportError as error:
        return f"{NO_NVMATH} ({error})"
    except (AttributeError, OSError, RuntimeError) as error:  # no compiler, no cuBLASLt, or one of other names
        return str(error)

    def plan(problem: Problem, alignment: int) -> NativeProgram:
        return native_program(problem, alignment, launcher)

    register_for("CUDA", Device("cuda", _first_ordinal()), plan, functions["cublasLtCreate"])
    return None


def _first_ordinal() -> int:
    """Return the ordinal of the first CUDA device that JAX may use."""
    first = str(jax.config.values.get("jax_cuda_visible_devices")).partition(",")[0]
    return int(first) if first.isdecimal() else 0
