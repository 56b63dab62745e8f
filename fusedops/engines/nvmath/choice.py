"""Which way programs are planned and launched here: the fast ways, or nvmath's public interface where those are not."""

from __future__ import annotations

from nvmath.bindings.cublasLt import cuBLASLtError

from ...native.build import NoNativeCode
from ...native.launcher import Launcher, NativeProgram
from ...problem import Problem
from ..base import LAUNCHER
from . import execute
from .programs import Program

try:
    from . import launches, planning
    from .descriptors import NoFastWay
except (AttributeError, ImportError, KeyError) as _error:  # an nvmath of other names
    _fast = False
    LAUNCHER["nvmath"] = f"Matmul.execute: this nvmath lacks what the launcher reads ({_error})"
else:
    _fast = True

__all__ = ["cuBLASLtError", "library_functions", "native_program", "plan_program", "sound_programs"]


def plan_program(problem: Problem, alignment: int) -> Program:
    """Return the program of a problem for addresses that are multiples of ``alignment`` bytes.

    Raises
    ------
    RuntimeError
        When the library offers no algorithm that is not known to be wrong.
    """
    global _fast
    if _fast:
        try:
            program = planning.plan_program(problem, alignment)
        except NoFastWay as error:
            _fast = False
            LAUNCHER["nvmath"] = f"Matmul.execute: {error}"
        else:
            LAUNCHER["nvmath"] = launches.fastest_way()[1]
            return program
    return execute.plan_program(problem, alignment)


def sound_programs(problem: Problem, alignment: int) -> list[Program]:
    """Return a program for each algorithm that is not known to be wrong, best first."""
    return planning.sound_programs(problem, alignment) if _fast else execute.sound_programs(problem, alignment)


def native_program(problem: Problem, alignment: int, launcher: Launcher) -> NativeProgram:
    """Return a program of a launcher over `library_functions`, with a descriptor that no other program has.

    Raises
    ------
    NoNativeCode
        When this nvmath lacks what it takes.
    RuntimeError
        When the library offers no algorithm that is not known to be wrong.
    """
    if not _fast:
        raise NoNativeCode(LAUNCHER["nvmath"])
    try:
        return planning.native_program(problem, alignment, launcher)
    except NoFastWay as error:
        raise NoNativeCode(str(error)) from error


def library_functions() -> dict[str, int]:
    """Return the addresses of cuBLASLt's functions by name, those that nvmath itself calls.

    Raises
    ------
    NoNativeCode
        When this nvmath does not tell them.
    """
    if not _fast:
        raise NoNativeCode(LAUNCHER["nvmath"])
    return launches.library_functions()
