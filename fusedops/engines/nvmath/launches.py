"""The ways to launch a program: the native launcher, nvmath's binding, and ``Matmul.execute``.

Each is ``way(form, problem, descriptor, found, check)``, and gives None where ``check`` is asked for and the algorithm
cannot run the form. All give the same bits. Which one a process uses is settled with its first program: the native one
wherever it can be had. It makes layouts, sets pointers and converts factors in C, and a new shape costs it one call
where the binding takes twenty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from nvmath.bindings import cublasLt
from nvmath.bindings.cublasLt import cuBLASLtError
from nvmath.linalg.advanced import Algorithm

from ...column_form import WORKSPACE_SPARE, ColumnForm
from ...epilogs import Epilog
from ...native.build import NoNativeCode
from ...native.launcher import FUNCTIONS, Launcher, NativeDescriptor, NativeProgram, launcher_object
from ...native.layouts import layout_words
from ...problem import Problem
from .algorithms import Found, Layouts
from .descriptors import Descriptor, copied
from .execute import ExecuteLaunch
from .programs import Launch

__all__ = [
    "Way",
    "binding_way",
    "execute_way",
    "fastest_way",
    "library_functions",
    "native_launcher",
    "native_way",
    "program_of",
    "spare",
]

Way = Callable[[ColumnForm, Problem, Descriptor, Found, bool], "Launch | None"]

_BIAS_POINTER = int(cublasLt.MatmulDescAttribute.BIAS_POINTER)
_AUX_POINTER = int(cublasLt.MatmulDescAttribute.EPILOGUE_AUX_POINTER)
_matmul = cublasLt.matmul
_set_descriptor = cublasLt.matmul_desc_set_attribute


def fastest_way() -> tuple[Way, str]:
    """Return the way of this process and its name, with the reason where it is not the native one."""
    why = native_launcher()
    return (native_way, "native") if isinstance(why, Launcher) else (binding_way, f"binding: {why}")


def spare(form: ColumnForm, found: Found) -> int:
    """Return the bytes that nvmath adds to a workspace with an epilog, against a fault of the library."""
    return WORKSPACE_SPARE if found.workspace and form.epilog is not Epilog.DEFAULT else 0


# Native --------------------------------------------------------------------------------------------------------------


def library_functions() -> dict[str, int]:
    """Return the addresses of cuBLASLt's functions, those that the binding itself calls.

    Another library of the same name may be loaded too, and an algorithm of one is nothing to the other.

    Raises
    ------
    NoNativeCode
        When this nvmath does not tell them.
    """
    try:
        from nvmath.bindings._internal.cublasLt import _inspect_function_pointer

        return {name: int(_inspect_function_pointer(f"__{name}")) for name in (*FUNCTIONS, "cublasLtCreate")}
    except (AttributeError, ImportError, KeyError) as error:
        raise NoNativeCode(f"this nvmath does not tell the addresses of cuBLASLt's functions ({error!r}).") from error


@cache
def native_launcher() -> Launcher | str:
    """Return the launcher of this process, or why there is none."""
    try:
        return Launcher(launcher_object(), library_functions(), cuBLASLtError)
    except NoNativeCode as error:
        return str(error)


def program_of(
    launcher: Launcher,
    form: ColumnForm,
    problem: Problem,
    descriptor: Descriptor,
    native: NativeDescriptor,
    found: Found,
    check: bool,
) -> NativeProgram | None:
    """Return a native program with a descriptor of the launcher's: layouts and check are one call of C."""
    is_double = problem.compute_dtype == "float64"
    return launcher.program(
        descriptor.handle,
        native,
        layout_words(form),
        found.address,
        found.workspace,
        is_double,
        check,
        spare(form, found),
    )


def native_way(form: ColumnForm, problem: Problem, descriptor: Descriptor, found: Found, check: bool) -> Launch | None:
    """Return the builtin of a native program; the family's programs share the launcher's copy of its descriptor."""
    launcher = native_launcher()
    assert isinstance(launcher, Launcher)
    if descriptor.native is None:
        descriptor.native = copied(descriptor, form, launcher)
    program = program_of(launcher, form, problem, descriptor, descriptor.native, found, check)
    return None if program is None else launcher.bound(program)


# The binding ---------------------------------------------------------------------------------------------------------


def binding_way(form: ColumnForm, problem: Problem, descriptor: Descriptor, found: Found, check: bool) -> Launch | None:
    """Return the call of ``nvmath.bindings.cublasLt.matmul``."""
    layouts = Layouts(form)
    if check and not found.runs(descriptor, layouts):
        return None
    return BindingLaunch(form, problem, descriptor, layouts, found)


class BindingLaunch:
    """The binding's call with everything but the addresses."""

    def __init__(
        self, form: ColumnForm, problem: Problem, descriptor: Descriptor, layouts: Layouts, found: Found
    ) -> None:
        self._descriptor = descriptor
        self._layouts = layouts
        self._found = found
        self._algorithm = found.address
        self._workspace = found.workspace + spare(form, found)
        self._a, self._b, self._c, self._d = layouts.pointers
        self._scale = np.float64 if problem.compute_dtype == "float64" else np.float32
        self._zero, self._one = _constants(self._scale)

    def __call__(
        self,
        a: int,
        b: int,
        c: int,
        out: int,
        bias: int,
        aux: int,
        workspace: int,
        alpha: float,
        beta: float,
        stream: int,
        /,
    ) -> None:
        descriptor = self._descriptor
        alpha_address, beta_address = self._one, self._zero
        if alpha != 1.0 or beta != 0.0:
            factors = np.array((alpha, beta), self._scale)  # read before the binding returns
            alpha_address = factors.ctypes.data
            beta_address = alpha_address + factors.itemsize
        with descriptor.lock:
            if bias:
                descriptor.buffer[0] = bias
                _set_descriptor(descriptor.pointer, _BIAS_POINTER, descriptor.address, 8)
            if aux:
                descriptor.buffer[0] = aux
                _set_descriptor(descriptor.pointer, _AUX_POINTER, descriptor.address, 8)
            _matmul(
                descriptor.handle,
                descriptor.pointer,
                alpha_address,
                b,
                self._a,
                a,
                self._b,
                beta_address,
                c,
                self._d if c == out else self._c,  # one matrix cannot have two layouts
                out,
                self._d,
                self._algorithm,
                workspace,
                self._workspace,
                stream,
            )


@cache
def _constants(scale: type) -> tuple[int, int]:
    """Return the addresses of 0 and 1 in a scale type, which are never freed."""
    _kept.append(np.array((0, 1), scale))
    address: int = _kept[-1].ctypes.data
    return address, address + _kept[-1].itemsize


_kept: list[Any] = []


# Matmul.execute ------------------------------------------------------------------------------------------------------


def execute_way(form: ColumnForm, problem: Problem, descriptor: Descriptor, found: Found, check: bool) -> Launch | None:
    """Return ``Matmul.execute`` with the algorithm found: the check of the others."""
    if check and not found.runs(descriptor, Layouts(form)):
        return None
    algorithm = Algorithm(cublasLt.MatmulHeuristicResult.from_ptr(found.address))
    return ExecuteLaunch(form, problem, algorithm, kept=found)
