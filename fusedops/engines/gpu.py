"""Problems on a GPU: fused where an epilog takes them, split where it does not."""

from __future__ import annotations

from typing import Any

from ..arrays import alignment_class
from ..frameworks import Framework
from ..problem import Problem
from .base import Results
from .cells import SplitCell, split_cell
from .fused import Fused
from .split import Split

__all__ = ["prepare"]

Array = Any


def prepare(problem: Problem, framework: Framework) -> Fused | Split | ByAlignment:
    """Return the launch of a problem."""
    cell = split_cell(problem)
    if cell is not None:
        return Split(problem, framework, cell)
    unaligned = split_cell(problem, aux_alignment=1)
    if unaligned is not None:
        return ByAlignment(problem, framework, unaligned)
    return Fused(problem, framework)


class ByAlignment:
    """A problem whose epilog takes aligned auxiliary arrays only: fused or split, by the addresses of the call."""

    strategy = "fused"
    why = "an epilog takes it; split where an auxiliary array that is passed is off 16 bytes"

    def __init__(self, problem: Problem, framework: Framework, cell: SplitCell) -> None:
        self._fused = Fused(problem, framework)
        self._split = Split(problem, framework, cell)
        self._problem = problem
        self._framework = framework

    def facts(self) -> dict[str, Any]:
        """Return the algorithm and workspace for aligned arrays."""
        return self._fused.facts()

    def __call__(
        self, operands: tuple[Array, ...], alpha: float, beta: float, out: Array | None, aux_out: Array | None
    ) -> Results:
        given = (operands[4], operands[5], aux_out)
        alignment = alignment_class(*[self._framework.pointer(x) for x in given if x is not None])
        launch = self._fused if split_cell(self._problem, alignment) is None else self._split
        return launch(operands, alpha, beta, out, aux_out)
