"""The split strategy: a guarded product of ours, then the steps of the epilog as the framework's own operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..arrays import ArraySpec
from ..cuda import is_capturing, on_device
from ..epilogs import Epilog
from ..frameworks import Framework
from ..layout import BatchLayout, MatrixLayout
from ..operands import Operand
from ..problem import Problem
from .base import Results
from .cells import SplitCell
from .fused import Fused
from .reference import Reference

__all__ = ["Split"]

Array = Any

NO_STEPS_WHILE_CAPTURING = (
    "this problem is computed in steps, and a stream capture is running; the memory between the steps would go to "
    "others while the graph still writes to it. Capture it with PyTorch, whose memory pools know of graphs."
)


class Split(Reference):
    """A problem in a cell of ``cells.py``: the reference, but for the product, which is fused's."""

    strategy = "split"

    def __init__(self, problem: Problem, framework: Framework, cell: SplitCell) -> None:
        super().__init__(problem, framework)
        self._cell = cell
        plain = _plain_product(problem)
        empty = 0 in plain.out_spec.shape or problem.k == 0
        self._fused = None if empty else Fused(plain, framework)
        self._shape = plain.out_spec.shape

    @property
    def why(self) -> str:
        return f"{self._cell.name}: {self._cell.why}"

    def facts(self) -> dict[str, Any]:
        """Return the algorithm and workspace of the product."""
        return {} if self._fused is None else self._fused.facts()

    def __call__(
        self, operands: tuple[Array, ...], alpha: float, beta: float, out: Array | None, aux_out: Array | None
    ) -> Results:
        self.framework.check_launch(operands, out, aux_out)
        with on_device(self.problem.device.ordinal):  # where CuPy computes, wherever its operands are
            if not self.framework.keeps_graph_memory and is_capturing(
                self.framework.current_stream(self.problem.device)
            ):
                raise RuntimeError(NO_STEPS_WHILE_CAPTURING)
            return super().__call__(operands, alpha, beta, out, aux_out)

    def _product(self, a: Array, b: Array) -> Array:
        if self._fused is None:
            return self.framework.zeros(self._shape, self.problem.compute_dtype, like=a)
        return self._fused((a, b, None, None, None, None), 1.0, 1.0, None, None)[0]


def _plain_product(problem: Problem) -> Problem:
    """Return the problem of ``a @ b`` alone, with a dense result in the compute dtype."""
    shape = (*problem.batch_shape, problem.m, problem.n)
    dtype = problem.compute_dtype
    item = problem.m * problem.n
    batch = BatchLayout(problem.batch_count, item if problem.batch_count > 1 else 0)
    matrix = MatrixLayout(problem.m, problem.n, "row_major", max(problem.n, 1))
    return replace(
        problem,
        epilog=Epilog.DEFAULT,
        activation=None,
        c=None,
        bias=None,
        out=Operand(matrix, batch, dtype),
        out_spec=ArraySpec.dense(shape, dtype, problem.device),
        aux_spec=None,
        aux_in_spec=None,
        vector_a=False,
        vector_b=False,
    )
