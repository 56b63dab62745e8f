"""The engines: ways to run a problem. An engine's ``prepare(problem, framework)`` returns a `Launch`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from ..frameworks import Framework
from ..problem import Problem
from .base import NO_NVMATH, Launch, Results

__all__ = ["Launch", "Results", "engine_name", "prepare"]

_FILES = {"nvmath": "gpu", "reference": "reference"}


def engine_name(problem: Problem) -> str:
    """Return which engine runs a problem, by where its arrays live."""
    return "nvmath" if problem.device.kind == "cuda" else "reference"


def prepare(problem: Problem, framework: Framework) -> Launch:
    """Return the launch of a problem on the engine that runs it."""
    name = engine_name(problem)
    if name == "nvmath" and not (find_spec("nvmath") and find_spec("cupy")):
        raise ImportError(NO_NVMATH)
    launch: Launch = import_module(f".{_FILES[name]}", __name__).prepare(problem, framework)
    return launch
