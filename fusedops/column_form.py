"""The transposed problem: what cuBLASLt, which thinks in columns, is asked for to get a row-major result.

``out = a @ b`` in row-major memory is ``out^T = b^T @ a^T`` in column-major memory: the same bytes, read the other
way. So the operands change places (``A`` is ``b^T``, ``B`` is ``a^T``), the bias along ``n`` becomes the bias along
the rows that cuBLASLt knows, and BGRADA and BGRADB change places. Leading batch axes over which ``a`` and ``out``
simply go on, while ``b`` is shared, become part of ``m``: one product instead of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .dtypes import dtype_named
from .epilogs import Epilog
from .layout import BatchLayout, MatrixLayout
from .operands import Operand
from .problem import Problem

__all__ = [
    "WORKSPACE_LIMIT",
    "WORKSPACE_SPARE",
    "ColumnForm",
    "ColumnMatrix",
    "bucketed",
    "column_form",
    "unasked_steps",
]

WORKSPACE_LIMIT = 32 << 20
"""Bytes of workspace that an algorithm may ask for: a rule, because what happens to be free would change results."""

WORKSPACE_SPARE = 16
"""Bytes that a launch may pass beyond what its algorithm asks for."""

_SWAPPED = {Epilog.BGRADA: Epilog.BGRADB, Epilog.BGRADB: Epilog.BGRADA}
LAST_BUCKET_OF_ONE = 16
"""The largest extent that is a bucket of its own, as every smaller one is."""

_PER_ITEM = ("sum_over_m", "sum_b_over_k")
"""Auxiliary outputs that a batch has one of for each item, which one folded product would sum into one."""


@dataclass(frozen=True, slots=True)
class ColumnMatrix:
    """A matrix of the column form: ``rows x cols`` in column order with ``ld``, read transposed where ``transposed``.

    ``rows`` and ``cols`` are those of the memory, before the transpose, as cuBLASLt's layouts want them.
    """

    rows: int
    cols: int
    ld: int
    transposed: bool
    dtype: str
    batch: BatchLayout


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """``D[m, n] = epilog(A[m, k] @ B[k, n] + C)`` in column order, where ``m`` is the caller's ``n`` and the reverse.

    Attributes
    ----------
    m, n, k : int
        Extents of the transposed problem.
    batch_count : int
        Items of the batch after folding.
    A, B, C, D : ColumnMatrix
        ``A`` over the caller's ``b``, ``B`` over ``a``, ``C`` over ``c`` (None without it), ``D`` over ``out``.
    bias : BatchLayout or None
        The bias along the rows of ``D``.
    epilog : Epilog
        The epilog as cuBLASLt must be asked for it.
    folded : bool
        Whether the caller's batch became part of ``n``.
    """

    m: int
    n: int
    k: int
    batch_count: int
    A: ColumnMatrix
    B: ColumnMatrix
    C: ColumnMatrix | None
    D: ColumnMatrix
    bias: BatchLayout | None
    epilog: Epilog
    folded: bool


def column_form(problem: Problem) -> ColumnForm:
    """Return the column form of a problem."""
    folds = _folds(problem)
    rows = problem.m * problem.batch_count if folds else problem.m
    batch_count = 1 if folds else problem.batch_count
    one = BatchLayout(1, 0)

    def transposed(operand: Operand, tall: bool) -> ColumnMatrix:
        matrix = operand.matrix
        if folds and tall:
            ld = matrix.ld if problem.m > 1 else max(operand.batch.stride, matrix.ld)
            matrix = MatrixLayout(rows, matrix.cols, "row_major", ld)
        return _read_in_columns(matrix, operand.dtype, one if folds else operand.batch)

    return ColumnForm(
        m=problem.n,
        n=rows,
        k=problem.k,
        batch_count=batch_count,
        A=transposed(problem.b, tall=False),
        B=transposed(problem.a, tall=True),
        C=None if problem.c is None else transposed(problem.c, tall=True),
        D=transposed(problem.out, tall=True),
        bias=one if folds and problem.bias else problem.bias,
        epilog=_SWAPPED.get(problem.epilog, problem.epilog),
        folded=folds,
    )


def bucketed(form: ColumnForm) -> ColumnForm | None:
    """Return the form with the largest ``n`` (the caller's ``m``) of its bucket, or None where it stands for itself.

    A bucket holds the extents that agree in their four leading bits, rounded up.
    """
    if form.batch_count > 1 or form.n <= LAST_BUCKET_OF_ONE:
        return None
    step = 1 << max((form.n - 1).bit_length() - 4, 0)
    largest = -(-form.n // step) * step
    if largest == form.n:
        return None

    def stretched(matrix: ColumnMatrix) -> ColumnMatrix:
        if matrix.transposed:
            return replace(matrix, rows=largest, ld=max(matrix.ld, largest))
        return replace(matrix, cols=largest)

    c = None if form.C is None else stretched(form.C)
    return replace(form, n=largest, B=stretched(form.B), C=c, D=stretched(form.D))


def _read_in_columns(matrix: MatrixLayout, dtype: str, batch: BatchLayout) -> ColumnMatrix:
    """Return the transpose of a caller's matrix: row-major memory is that transpose in column order."""
    if matrix.order == "row_major":
        return ColumnMatrix(matrix.cols, matrix.rows, matrix.ld, False, dtype, batch)
    return ColumnMatrix(matrix.rows, matrix.cols, matrix.ld, True, dtype, batch)


def _folds(problem: Problem) -> bool:
    """Return whether the batch may become part of m: one matrix goes on into the next, and the rest is shared."""
    if problem.batch_count <= 1 or problem.b.batch.stride or (problem.bias and problem.bias.stride):
        return False
    if problem.epilog.gives and problem.epilog.gives.format in _PER_ITEM:
        return False
    tall = [operand for operand in (problem.a, problem.c, problem.out) if operand is not None]
    return all(_goes_on(operand, problem.m) for operand in tall)


def _goes_on(operand: Operand, m: int) -> bool:
    """Return whether the rows of all items are equally spaced."""
    matrix, stride = operand.matrix, operand.batch.stride
    if matrix.order == "col_major":
        return False
    return stride >= matrix.cols if m == 1 else stride == m * matrix.ld


def unasked_steps(problem: Problem) -> int:
    """Return the bytes from item to item of a bias or a sum: the heuristic asks the alignment of matrices alone."""
    if problem.batch_count <= 1:
        return 0
    itemsize = dtype_named(problem.out.dtype).itemsize
    if problem.bias is not None:
        return problem.bias.stride * itemsize
    gives = problem.epilog.gives
    if gives is None or not gives.format.startswith("sum"):
        return 0
    return (problem.m if gives.format == "sum_a_over_k" else problem.n) * itemsize
