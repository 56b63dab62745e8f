"""Programs by cuBLASLt's heuristic and a descriptor that nvmath planned, to be launched natively or by the binding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import cupy

from ...column_form import ColumnForm, bucketed, column_form
from ...native.launcher import Launcher, NativeProgram
from ...problem import Problem
from .algorithms import Found, all_sound, first_sound
from .descriptors import Descriptor, copied, family
from .launches import Way, fastest_way, program_of, spare
from .programs import Launch, Program

__all__ = ["native_program", "plan_program", "sound_programs"]

Made = TypeVar("Made")

_planning = threading.RLock()


def plan_program(problem: Problem, alignment: int, way: Way | None = None) -> Program:
    """Return the program of a problem for addresses that are multiples of ``alignment`` bytes.

    The algorithm is the heuristic's for the largest ``m`` of the bucket that the problem's is in, where it can run the
    problem: a new ``m`` then costs no heuristic, which takes 190 us, and the choice depends on nothing that ran before.

    Parameters
    ----------
    problem : Problem
        What to compute.
    alignment : int
        Bytes, a power of 2 of at most 16.
    way : callable, optional
        How to launch it; by default the fastest way that there is.

    Raises
    ------
    RuntimeError
        When the library offers no algorithm that is not known to be wrong.
    """
    form = column_form(problem)
    with _planning, cupy.cuda.Device(problem.device.ordinal):
        way = way or fastest_way()[0]
        descriptor = family(form, problem)

        def made(found: Found, check: bool) -> Program | None:
            launch = way(form, problem, descriptor, found, check)
            return None if launch is None else _program(form, found, launch)

        return _with_algorithm(form, descriptor, problem, alignment, made)


def native_program(problem: Problem, alignment: int, launcher: Launcher) -> NativeProgram:
    """Return a program of a launcher's for a problem, with a descriptor that no other program has.

    Parameters
    ----------
    problem : Problem
        What to compute.
    alignment : int
        Bytes, a power of 2 of at most 16.
    launcher : Launcher
        One over the functions of `library_functions`.

    Raises
    ------
    RuntimeError
        When the library offers no algorithm that is not known to be wrong.
    """
    form = column_form(problem)
    with _planning, cupy.cuda.Device(problem.device.ordinal):
        descriptor = family(form, problem)
        own = copied(descriptor, form, launcher)

        def made(found: Found, check: bool) -> NativeProgram | None:
            return program_of(launcher, form, problem, descriptor, own, found, check)

        return _with_algorithm(form, descriptor, problem, alignment, made)


def sound_programs(problem: Problem, alignment: int, way: Way | None = None) -> list[Program]:
    """Return a program for each algorithm of the heuristic that is not known to be wrong, best first."""
    form = column_form(problem)
    with _planning, cupy.cuda.Device(problem.device.ordinal):
        way = way or fastest_way()[0]
        descriptor = family(form, problem)
        found = all_sound(form, descriptor, problem, alignment)
        launches = [(each, way(form, problem, descriptor, each, False)) for each in found]
    return [_program(form, each, launch) for each, launch in launches if launch is not None]


def _with_algorithm(
    form: ColumnForm,
    descriptor: Descriptor,
    problem: Problem,
    alignment: int,
    made: Callable[[Found, bool], Made | None],
) -> Made:
    """Return what is made with the algorithm of a problem's bucket where it can run the problem, or with its own."""
    representative = bucketed(form)
    if representative is not None:
        found = first_sound(representative, descriptor, problem, alignment)
        result = None if found is None else made(found, True)
        if result is not None:
            return result
    found = first_sound(form, descriptor, problem, alignment)
    result = None if found is None else made(found, False)
    if result is None:
        raise RuntimeError(
            f"cuBLASLt has no algorithm for {problem.epilog.name} on m={problem.m} n={problem.n} k={problem.k} "
            f"{problem.a.dtype} at an alignment of {alignment} bytes. Please report it with this line."
        )
    return result


def _program(form: ColumnForm, found: Found, launch: Launch) -> Program:
    return Program(form, found.algorithm_id, found.split_k, found.workspace + spare(form, found), launch, found)
