"""The engines: ways to run a problem. An engine's ``prepare(problem, framework)`` returns a `Launch`."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from ..frameworks import Framework
from ..problem import Problem

__all__ = ["Launch", "engine_name", "prepare"]

Array = Any
Results = tuple[Array, Array | None]

NO_NVMATH = "CUDA arrays need nvmath-python: pip install 'fusedops[cuda12]' (on CUDA 13: 'fusedops[cuda13]')."


class Launch(Protocol):
    """A problem that an engine has made ready: operands in, result and auxiliary array out."""

    def __call__(
        self, operands: tuple[Array, ...], alpha: float, beta: float, out: Array | None, aux_out: Array | None
    ) -> Results: ...


def engine_name(problem: Problem) -> str:
    """Return which engine runs a problem, by where its arrays live."""
    return "nvmath" if problem.device.kind == "cuda" else "reference"


def prepare(problem: Problem, framework: Framework) -> Launch:
    """Return the launch of a problem on the engine that runs it."""
    launch: Launch = import_module(f".{engine_name(problem)}", __name__).prepare(problem, framework)
    return launch
