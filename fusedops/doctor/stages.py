"""The stages of a probe, reported one by one, each guarded by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Stages"]

T = TypeVar("T")


class Stages:
    """Runs and reports the stages of a probe.

    Parameters
    ----------
    descriptor : int
        The file that lines are written to.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def run(self, name: str, function: Callable[[], T], show: Callable[[T], Any] = lambda value: value) -> T | None:
        """Return what a function gives, or None where it raises; either is reported.

        Parameters
        ----------
        name : str
            Of the stage.
        function : callable
            What the stage does.
        show : callable, optional
            What is reported of its value; as it is by default.
        """
        self._say("begin", name, None)
        try:
            value = function()
            said = show(value)
        except BaseException as error:  # a library may raise anything, SystemExit too
            self._say("end", name, {"error": f"{type(error).__name__}: {error}"[:2000]})
            return None
        self._say("end", name, said)
        return value

    def _say(self, kind: str, name: str, value: Any) -> None:
        os.write(self._descriptor, (json.dumps([kind, name, value], default=str) + "\n").encode())
