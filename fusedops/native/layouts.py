"""Matrix layouts as numbers: what `Launcher.program` makes cuBLASLt's from, without cuBLASLt."""

from __future__ import annotations

from ..column_form import ColumnForm, ColumnMatrix
from ..epilogs import Epilog

__all__ = ["CUDA_TYPES", "layout_words", "matrix_words"]

CUDA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
"""``cudaDataType_t`` of each dtype."""

_COLUMN_ORDER, _ROW_ORDER = 0, 1

Words = tuple[int, int, int, int, int, int, int]


def matrix_words(matrix: ColumnMatrix, flipped: bool = False) -> Words:
    """Return the type, rows, columns, leading dimension, order, batch count and batch stride of a layout.

    A matrix that is read transposed is one in row order.
    """
    rows, cols = matrix.rows, matrix.cols
    row_order = matrix.transposed
    if matrix.transposed:
        rows, cols = cols, rows
    if flipped:
        rows, cols, row_order = cols, rows, not row_order
    order = _ROW_ORDER if row_order else _COLUMN_ORDER
    return (CUDA_TYPES[matrix.dtype], rows, cols, matrix.ld, order, matrix.batch.count, matrix.batch.stride)


def layout_words(form: ColumnForm) -> tuple[int, ...]:
    """Return the layouts of A, B, C and D one after another, C that of D where there is no ``c``."""
    flipped = form.epilog is Epilog.BGRADB  # nvmath's descriptor reads B transposed for this epilog
    made = (matrix_words(form.A), matrix_words(form.B, flipped), matrix_words(form.C or form.D), matrix_words(form.D))
    return tuple(word for words in made for word in words)
