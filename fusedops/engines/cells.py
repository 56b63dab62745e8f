"""The problems that an epilog refuses and that are computed split: a product of ours, then the framework's own
operations.

The list is data, printed by `fusedops.support`. Whatever the library refuses beyond it is an error, so that the list
cannot grow unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..epilogs import Epilog
from ..problem import Problem

__all__ = ["SPLIT_CELLS", "SplitCell", "split_cell"]

_BACKWARD = (Epilog.DRELU, Epilog.DGELU, Epilog.DRELU_BGRAD, Epilog.DGELU_BGRAD)
_MIN_ALIGNMENT_OF_AUX = 16


@dataclass(frozen=True, slots=True)
class SplitCell:
    """A set of problems that is computed split, why, and how a problem is told to be in it."""

    name: str
    why: str
    holds: Callable[[Problem, int], bool]


SPLIT_CELLS = (
    SplitCell(
        "an extent of 0",
        "there is nothing to multiply",
        lambda problem, aux_alignment: 0 in (problem.m, problem.n, problem.k, problem.batch_count),
    ),
    SplitCell(
        "GELU in float64, and in float32 without TF32",
        "the epilogs compute tanh to about 11 bits: 5e-6 off in float32, 20 times PyTorch's own error",
        lambda problem, aux_alignment: (
            problem.epilog.activation == "gelu_tanh"
            and (problem.a.dtype == "float64" or (problem.a.dtype == "float32" and problem.precision != "tf32"))
        ),
    ),
    SplitCell(
        "backward epilogs with k = 1",
        "nvmath refuses DRELU and DGELU with k = 1",
        lambda problem, aux_alignment: problem.epilog in _BACKWARD and problem.k == 1,
    ),
    SplitCell(
        "BGRADA with row-major a",
        "cuBLASLt sums an operand over k only where k is its contiguous axis in the other order",
        lambda problem, aux_alignment: problem.epilog is Epilog.BGRADA and problem.a.matrix.order == "row_major",
    ),
    SplitCell(
        "BGRADB with column-major b",
        "cuBLASLt sums an operand over k only where k is its contiguous axis in the other order",
        lambda problem, aux_alignment: problem.epilog is Epilog.BGRADB and problem.b.matrix.order == "col_major",
    ),
    SplitCell(
        "auxiliary arrays off 16 bytes",
        "cuBLASLt refuses a mask or pre-activation at an unaligned address",
        lambda problem, aux_alignment: (
            aux_alignment < _MIN_ALIGNMENT_OF_AUX
            and (
                problem.aux_in_spec is not None
                or (problem.epilog.gives is not None and problem.epilog.gives.format in ("relu_mask", "preact"))
            )
        ),
    ),
)


def split_cell(problem: Problem, aux_alignment: int = _MIN_ALIGNMENT_OF_AUX) -> SplitCell | None:
    """Return the cell that a problem is in, or None where an epilog takes it.

    ``aux_alignment`` is that of a mask or pre-activation which the caller passes, in bytes; one made here is aligned.
    """
    return next((cell for cell in SPLIT_CELLS if cell.holds(problem, aux_alignment)), None)
