"""The launcher as Python sees it: descriptors and programs as objects, and the builtin that launches."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from typing import Any

from .build import NoNativeCode, shared_object

__all__ = [
    "FUNCTIONS",
    "LaunchError",
    "Launcher",
    "NativeDescriptor",
    "NativeProgram",
    "NoNativeCode",
    "launcher_object",
]

FUNCTIONS = (
    "cublasLtMatmul",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutSetAttribute",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatmulAlgoCheck",
)
"""The functions of cuBLASLt that the launcher calls, in the order in which C takes them."""

_PYTHON = (
    "PyLong_AsUnsignedLongLong",
    "PyFloat_AsDouble",
    "PyErr_Occurred",
    "PyLong_FromLong",
    "Py_DecRef",
    "Py_IncRef",
    "PyErr_SetObject",
    "PyErr_SetString",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)
_REFUSED = -1
_address = ctypes.c_void_p


class LaunchError(RuntimeError):
    """A ``cublasStatus_t`` other than success."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cuBLASLt answered with status {status}.")
        self.status = status


class NativeDescriptor:
    """An operation descriptor of the launcher's, with its lock; it lives as long as a program of it does."""

    def __init__(self, shared: ctypes.CDLL, address: int) -> None:
        self.address = address
        weakref.finalize(self, shared.descriptor_release, address).atexit = False


class NativeProgram:
    """A planned product.

    Attributes
    ----------
    address : int
        Where C has it; valid as long as this object, or a reference that C retained, lives.
    workspace : int
        Bytes that a launch needs.
    """

    def __init__(self, shared: ctypes.CDLL, address: int) -> None:
        self.address = address
        self.workspace: int = shared.program_workspace(address)
        weakref.finalize(self, shared.program_release, address).atexit = False


class Launcher:
    """The launcher over one cuBLASLt.

    Parameters
    ----------
    shared : ctypes.CDLL
        An object that ``launcher.c`` is part of.
    functions : mapping of str to int
        The address of each of `FUNCTIONS`; others are ignored.
    error : type
        What `launch` raises, made of the status.
    """

    def __init__(self, shared: ctypes.CDLL, functions: Mapping[str, int], error: type[Exception] = LaunchError) -> None:
        missing = [name for name in FUNCTIONS if not functions.get(name)]
        if missing:
            raise NoNativeCode(f"this cuBLASLt has no {', '.join(missing)}.")
        _declare(shared)
        self._shared = shared
        self._error = error
        self._library = shared.library_new(*(functions[name] for name in FUNCTIONS))

    def descriptor(self, pointer: int) -> NativeDescriptor:
        """Return a descriptor that owns a ``cublasLtMatmulDesc_t`` from now on: nobody else may set its pointers."""
        address = self._shared.descriptor_new(self._library, pointer)
        if not address:
            raise MemoryError("no memory for a descriptor")
        return NativeDescriptor(self._shared, address)

    def program(
        self,
        handle: int,
        descriptor: NativeDescriptor,
        layouts: tuple[int, ...],
        algorithm: int,
        workspace: int,
        scale_is_double: bool,
        check: bool,
        spare: int = 0,
    ) -> NativeProgram | None:
        """Return a program; None where ``check`` is asked for and the algorithm cannot run these layouts.

        Parameters
        ----------
        handle : int
            The cuBLASLt handle of launches that name none.
        descriptor : NativeDescriptor
            Shared with any number of programs.
        layouts : tuple of 28 int
            As `fusedops.native.layouts.layout_words` gives them.
        algorithm : int
            Address of the 64 bytes of an algorithm, which are copied.
        workspace : int
            Bytes that the algorithm was found with; a check refuses it if it needs more.
        scale_is_double : bool
            Whether the factors are float64, or float32.
        check : bool
            Whether to ask cuBLASLt whether the algorithm runs these layouts.
        spare : int
            Bytes that a launch passes beyond ``workspace``.

        Raises
        ------
        Exception
            The launcher's ``error``, where a layout cannot be made.
        """
        status = ctypes.c_int()
        address = self._shared.program_new(
            self._library,
            handle,
            descriptor.address,
            _Layouts(*layouts),
            algorithm,
            workspace,
            spare,
            scale_is_double,
            check,
            ctypes.byref(status),
        )
        if address:
            return NativeProgram(self._shared, address)
        if status.value == _REFUSED:
            return None
        raise self._error(status.value)

    @cached_property
    def launch(self) -> Callable[..., None]:
        """``launch(program, a, b, c, out, bias, aux, workspace, alpha, beta, stream)``, a builtin.

        All are int addresses, 0 where there is no such array, but for the float factors ``alpha`` and ``beta``; their
        types are checked, and that the addresses are right is the caller's. ``c`` is ``out`` where there is no ``c``.
        It holds the interpreter's lock while it reads the arguments alone, and raises ``error(status)`` on a failure.
        """
        if sys.implementation.name != "cpython":
            raise NoNativeCode(f"the launcher speaks to CPython alone, and this is {sys.implementation.name}.")
        kind = ctypes.PYFUNCTYPE(ctypes.py_object, _address, ctypes.py_object, _address)
        make = kind(("PyCFunction_NewEx", ctypes.pythonapi))
        launch: Callable[..., None] = make(self._shared.python_setup(_python_addresses()), self._error, None)
        return launch

    def bound(self, program: NativeProgram) -> Callable[..., None]:
        """Return `launch` with its first argument given, which keeps the program alive."""
        launch = partial(self.launch, program.address)
        launch.program = program  # type: ignore[attr-defined]
        return launch


@cache
def launcher_object() -> ctypes.CDLL:
    """Return the object that is ``launcher.c`` alone."""
    return shared_object("launcher", ("launcher.c",))


_Layouts: Any = ctypes.c_int64 * 28


def _python_addresses() -> Any:
    """Return the addresses that ``python_setup`` takes, in its order."""
    api = ctypes.pythonapi
    functions = [ctypes.cast(getattr(api, name), _address).value for name in _PYTHON]
    type_error = _address.in_dll(api, "PyExc_TypeError").value
    return (_address * (len(functions) + 2))(*functions, type_error, id(None))


def _declare(shared: ctypes.CDLL) -> None:
    """Tell ctypes the types of the launcher's functions."""
    integer, size = ctypes.c_int, ctypes.c_size_t
    declared: dict[str, tuple[Any, list[Any]]] = {
        "library_new": (_address, [_address] * len(FUNCTIONS)),
        "descriptor_new": (_address, [_address] * 2),
        "descriptor_release": (None, [_address]),
        "program_new": (_address, [*[_address] * 5, size, size, integer, integer, _address]),
        "program_workspace": (size, [_address]),
        "program_release": (None, [_address]),
        "python_setup": (_address, [_address]),
    }
    for name, (result, arguments) in declared.items():
        function = getattr(shared, name)
        function.restype, function.argtypes = result, arguments
