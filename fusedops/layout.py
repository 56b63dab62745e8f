"""The layout algebra: which arrays a matrix product can read or write in place, and how they look to it.

A matrix is described by its memory order and its leading dimension, a batch of them by one stride. What has no such
description would need a copy, and the package makes none: it raises. The rules are the same on every engine, so that a
program that runs on a laptop runs on a GPU. Strides of extents of 1 say nothing and are never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BatchLayout", "MatrixLayout", "batch_layout", "broadcast_batch", "matrix_layout"]

Order = Literal["row_major", "col_major"]
Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A matrix in memory: ``rows`` by ``cols`` elements, ``ld`` elements from one row (or column) to the next."""

    rows: int
    cols: int
    order: Order
    ld: int

    @property
    def transposed(self) -> MatrixLayout:
        """The same memory read as the transposed matrix."""
        order: Order = "col_major" if self.order == "row_major" else "row_major"
        return MatrixLayout(self.cols, self.rows, order, self.ld)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A batch in memory: ``count`` items, ``stride`` elements from one to the next, 0 where all share one."""

    count: int
    stride: int


_NO_BATCH = BatchLayout(1, 0)


def matrix_layout(name: str, shape: Ints, strides: Ints) -> MatrixLayout:
    """Return the layout of a matrix from its two extents and strides in elements; row-major where both fit.

    Raises
    ------
    ValueError
        When neither its rows nor its columns are contiguous, or when they overlap.
    """
    (rows, cols), (row_step, col_step) = shape, strides
    if rows == 0 or cols == 0:
        return MatrixLayout(rows, cols, "row_major", max(cols, 1))
    if cols == 1 or col_step == 1:
        ld = max(cols, 1) if rows == 1 else row_step
        if ld >= cols:
            return MatrixLayout(rows, cols, "row_major", ld)
    if rows == 1 or row_step == 1:
        ld = rows if cols == 1 else col_step
        if ld >= rows:
            return MatrixLayout(rows, cols, "col_major", ld)
    raise ValueError(
        f"{name} has shape {(rows, cols)} and strides {(row_step, col_step)} in its last two axes; rows or columns "
        f"must be contiguous and must not overlap. Nothing is copied silently; pass a contiguous copy of {name}."
    )


def row_major_layout(name: str, shape: Ints, strides: Ints) -> MatrixLayout:
    """Return the layout of a matrix whose rows must be contiguous (``c``, ``out``)."""
    layout = matrix_layout(name, shape, strides)
    if layout.order == "col_major":
        raise ValueError(
            f"{name} has shape {shape} and strides {strides} in its last two axes; its rows must be contiguous "
            f"(stride 1 along n). Pass a row-major {name}."
        )
    return layout


def broadcast_batch(a_batch: Ints, b_batch: Ints) -> Ints:
    """Return the joint batch shape of two operands, by NumPy's broadcasting rule."""
    ndim = max(len(a_batch), len(b_batch))
    joined = []
    for x, y in zip(_pad(a_batch, ndim), _pad(b_batch, ndim), strict=True):
        if x != y and 1 not in (x, y):
            raise ValueError(f"batch axes do not broadcast: a has {a_batch}, b has {b_batch}.")
        joined.append(y if x == 1 else x)
    return tuple(joined)


def batch_layout(name: str, shape: Ints, strides: Ints, batch_shape: Ints) -> BatchLayout:
    """Return the one stride that walks ``name`` over the whole batch.

    Parameters
    ----------
    name : str
        The argument, for messages.
    shape, strides : tuple of int
        The operand's own batch axes, in elements; they may be fewer than the batch has.
    batch_shape : tuple of int
        The joint batch shape.

    Raises
    ------
    ValueError
        When the axes do not broadcast to ``batch_shape``, or no single stride exists.
    """
    if not batch_shape and not shape:
        return _NO_BATCH
    own = _pad(shape, len(batch_shape))
    steps = (0,) * (len(batch_shape) - len(strides)) + strides
    if len(own) != len(batch_shape) or any(x not in (1, y) for x, y in zip(own, batch_shape, strict=True)):
        raise ValueError(f"{name} has batch axes {shape}, which do not broadcast to {batch_shape}.")
    count = 1
    for extent in batch_shape:
        count *= extent
    if count in (0, 1):
        return BatchLayout(count, 0)
    stride, expected, innermost = 0, 0, True
    for x, y, step in reversed(list(zip(own, batch_shape, steps, strict=True))):
        if y == 1:
            continue
        step = 0 if x == 1 else step
        if innermost:
            stride, innermost = step, False
        elif step != expected:
            raise ValueError(
                f"{name} has batch axes {shape} with strides {strides}, broadcast to {batch_shape}; one stride must "
                f"walk over all of them. Pass a contiguous copy of {name}, expanded to {batch_shape}."
            )
        expected = step * y
    if stride < 0:
        raise ValueError(f"{name} has a negative stride over its batch axes. Pass a contiguous copy of {name}.")
    return BatchLayout(count, stride)


def span(layout: MatrixLayout) -> int:
    """Return the number of elements from a matrix's first to its last, both included."""
    if 0 in (layout.rows, layout.cols):
        return 0
    runs, length = (layout.rows, layout.cols) if layout.order == "row_major" else (layout.cols, layout.rows)
    return (runs - 1) * layout.ld + length


def _pad(shape: Ints, ndim: int) -> Ints:
    return (1,) * (ndim - len(shape)) + shape
