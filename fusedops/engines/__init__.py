"""The engines: ways to run a problem. An engine's ``prepare(problem, framework)`` returns a `Launch`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..frameworks import Framework
from ..problem import Problem
from .base import NO_NVMATH, Launch, Results

__all__ = ["Launch", "Results", "engine_name", "prepare", "two_layers"]

_FILES = {"nvmath": "gpu", "xla": "xla", "reference": "reference"}
_ENGINES = {"cuda": "nvmath", "xla": "xla"}


def engine_name(problem: Problem) -> str:
    """Return which engine runs a problem, by where its arrays live."""
    return _ENGINES.get(problem.device.kind, "reference")


def two_layers(first: Launch | None, second: Launch | None, *arrays: Any) -> Any:
    """Return two layers as one operation, for launches of an engine that knows it (`Framework.joins_layers`)."""
    return import_module(".xla", __name__).two_layers(first, second, *arrays)


def prepare(problem: Problem, framework: Framework) -> Launch:
    """Return the launch of a problem on the engine that runs it."""
    name = engine_name(problem)
    if name == "nvmath" and not (find_spec("nvmath") and find_spec("cupy")):
        raise ImportError(NO_NVMATH)
    launch: Launch = import_module(f".{_FILES[name]}", __name__).prepare(problem, framework)
    return launch
