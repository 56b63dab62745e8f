"""The layout algebra against NumPy: a layout addresses exactly the elements of the view, or there is none to find.

A view of ``arange`` holds, at every index, the offset of that element in the buffer: so a view is its own table of
addresses, and every claim about a layout can be compared with it.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fusedops.layout import (
    BatchLayout,
    MatrixLayout,
    batch_layout,
    broadcast_batch,
    matrix_layout,
    row_major_layout,
    span,
)

View = np.ndarray[Any, Any]
Ints = tuple[int, ...]

many = settings(max_examples=120, deadline=None)


def strides_of(view: View) -> Ints:
    """Return a view's strides in elements."""
    return tuple(step // view.itemsize for step in view.strides)


def offsets(view: View) -> View:
    """Return where each element lies, from the element at index 0 on."""
    return view - view[(0,) * view.ndim] if view.size else view


def addressed(layout: MatrixLayout) -> View:
    """Return where a layout says that each element lies."""
    row, col = (layout.ld, 1) if layout.order == "row_major" else (1, layout.ld)
    return np.arange(layout.rows)[:, None] * row + np.arange(layout.cols) * col


@st.composite
def slices(draw: st.DrawFn, extent: int) -> slice:
    """Draw a slice of an axis, of any step in either direction, that may be empty."""
    step = draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2]))
    start, stop = sorted(draw(st.lists(st.integers(0, extent), min_size=2, max_size=2)))
    return slice(start, stop, step) if step > 0 else slice(stop or None, start or None, step)


@st.composite
def views(draw: st.DrawFn, ndim: int) -> View:
    """Draw a view of a buffer as NumPy makes them: sliced, stepped, reversed, transposed, broadcast."""
    shape = draw(st.lists(st.integers(1, 5), min_size=ndim, max_size=ndim))
    view = np.arange(int(np.prod(shape))).reshape(shape)
    view = view.transpose(draw(st.permutations(range(ndim))))
    if draw(st.booleans()):
        view = view[tuple(draw(slices(extent)) for extent in view.shape)]
    wide = [draw(st.sampled_from([1, 2, 3])) if extent == 1 else extent for extent in view.shape]
    return np.broadcast_to(view, wide) if draw(st.booleans()) else view


def restrided(view: View, steps: list[int]) -> View:
    """Return the view with another stride, never taken, on each axis of extent 1."""
    strides = [s if n > 1 else step * 8 for n, s, step in zip(view.shape, view.strides, steps, strict=False)]
    return np.lib.stride_tricks.as_strided(view, view.shape, strides)


def describable(view: View) -> bool:
    """Return by trying every order and leading dimension whether a matrix has a description."""
    rows, cols = view.shape
    wanted = offsets(view)
    for order, length in (("row_major", cols), ("col_major", rows)):
        for ld in range(max(length, 1), 200):
            if np.array_equal(addressed(MatrixLayout(rows, cols, order, ld)), wanted):  # type: ignore[arg-type]
                return True
    return False


# Matrices -------------------------------------------------------------------------------------------------------------


@many
@given(views(2), st.lists(st.integers(-9, 9), min_size=2, max_size=2))
def test_matrix_layout_is_right_or_there_is_none(view: View, steps: list[int]) -> None:
    """The layout addresses the view's elements; an error means that no order and leading dimension would."""
    view = restrided(view, steps)
    try:
        layout = matrix_layout("a", view.shape, strides_of(view))
    except ValueError:
        assert not describable(view)
        return
    assert (layout.rows, layout.cols) == view.shape
    assert layout.ld >= max(1, layout.cols if layout.order == "row_major" else layout.rows)
    assert np.array_equal(addressed(layout), offsets(view))


@many
@given(views(2), st.lists(st.integers(-9, 9), min_size=2, max_size=2))
def test_strides_of_extents_of_one_say_nothing(view: View, steps: list[int]) -> None:
    """Whatever stride an axis of extent 1 has, the answer is the same."""
    answers = []
    for version in (view, restrided(view, steps)):
        try:
            answers.append(matrix_layout("a", version.shape, strides_of(version)))
        except ValueError:
            answers.append(None)
    assert answers[0] == answers[1]


@many
@given(views(2))
def test_row_major_layout(view: View) -> None:
    """Only rows are accepted where the result must be row-major, and the layout is the one of `matrix_layout`."""
    try:
        layout = row_major_layout("out", view.shape, strides_of(view))
    except ValueError:
        by_rows = (MatrixLayout(*view.shape, "row_major", ld) for ld in range(max(view.shape[1], 1), 200))
        assert not any(np.array_equal(addressed(layout), offsets(view)) for layout in by_rows)
        return
    assert layout == matrix_layout("out", view.shape, strides_of(view))
    assert layout.order == "row_major"


@many
@given(views(2))
def test_transposed_and_span(view: View) -> None:
    """The transpose of a layout addresses the transpose, and the span ends at the last element."""
    try:
        layout = matrix_layout("a", view.shape, strides_of(view))
    except ValueError:
        return
    assert np.array_equal(addressed(layout.transposed), addressed(layout).T)
    assert layout.transposed.transposed == layout
    assert span(layout) == (addressed(layout).max() + 1 if view.size else 0)


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [
        ((3, 4), (4, 1), ("row_major", 4)),
        ((3, 4), (9, 1), ("row_major", 9)),
        ((3, 4), (1, 3), ("col_major", 3)),
        ((3, 4), (1, 8), ("col_major", 8)),
        ((1, 4), (0, 1), ("row_major", 4)),
        ((1, 4), (-7, 3), ("col_major", 3)),
        ((4, 1), (3, -7), ("row_major", 3)),
        ((1, 1), (0, 0), ("row_major", 1)),
        ((0, 4), (5, 2), ("row_major", 4)),
        ((4, 0), (-5, 2), ("row_major", 1)),
    ],
)
def test_known_layouts(shape: Ints, strides: Ints, layout: tuple[str, int]) -> None:
    """Row-major wins where both fit."""
    made = matrix_layout("a", shape, strides)
    assert (made.order, made.ld) == layout


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 4), (8, 2)), ((3, 4), (-4, 1)), ((3, 4), (4, -1)), ((3, 4), (0, 1)), ((3, 4), (3, 1)), ((2, 2), (1, 1))],
)
def test_refused_layouts(shape: Ints, strides: Ints) -> None:
    """Steps, negative strides, repeats and overlaps need a copy, which is the caller's to make."""
    with pytest.raises(ValueError, match=r"b has shape .* pass a contiguous copy of b"):
        matrix_layout("b", shape, strides)


# Batches --------------------------------------------------------------------------------------------------------------


def has_one_stride(view: View) -> bool:
    """Return by trying every stride whether one walks over all items of a batch."""
    items = offsets(view).ravel()
    return any(np.array_equal(np.arange(items.size) * stride, items) for stride in range(200))


@st.composite
def batches(draw: st.DrawFn) -> tuple[View, Ints]:
    """Draw the first elements of a batch's items, with an axis or more to broadcast, and the joint batch shape."""
    view = draw(views(draw(st.integers(1, 3))))
    joint = [draw(st.integers(0, 3)) if extent == 1 and draw(st.booleans()) else extent for extent in view.shape]
    more = draw(st.lists(st.integers(0, 3), max_size=1))
    return view, (*more, *joint)


@many
@given(batches(), st.lists(st.integers(-9, 9), min_size=3, max_size=3))
def test_batch_layout_is_right_or_there_is_none(batch: tuple[View, Ints], steps: list[int]) -> None:
    """The one stride walks over the items in the joint batch's order; an error means that none would."""
    view, joint = restrided(batch[0], steps), batch[1]
    whole = np.broadcast_to(batch[0], joint)
    try:
        layout = batch_layout("a", view.shape, strides_of(view), joint)
    except ValueError:
        assert not has_one_stride(whole)
        return
    assert layout.count == whole.size
    assert np.array_equal(np.arange(layout.count) * layout.stride, offsets(whole).ravel())


@many
@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3))
def test_broadcast_batch(first: list[int], second: list[int]) -> None:
    """Batch shapes broadcast by NumPy's rule, or not at all."""
    a, b = tuple(first), tuple(second)
    try:
        want = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(ValueError, match="do not broadcast"):
            broadcast_batch(a, b)
        return
    assert broadcast_batch(a, b) == want


@pytest.mark.parametrize(
    ("shape", "strides", "joint", "layout"),
    [
        ((), (), (), (1, 0)),
        ((), (), (2, 3), (6, 0)),
        ((2, 3), (36, 12), (2, 3), (6, 12)),
        ((1, 3), (99, 12), (1, 3), (3, 12)),
        ((2, 1), (36, 99), (2, 1), (2, 36)),
        ((1, 1), (99, 99), (2, 3), (6, 0)),
        ((2, 3), (0, 0), (2, 3), (6, 0)),
        ((0,), (-5,), (0,), (0, 0)),
    ],
)
def test_known_batches(shape: Ints, strides: Ints, joint: Ints, layout: tuple[int, int]) -> None:
    """Shared items have stride 0, and axes of 1 do not count."""
    assert batch_layout("a", shape, strides, joint) == BatchLayout(*layout)


@pytest.mark.parametrize(
    ("shape", "strides", "joint", "message"),
    [
        ((3,), (12,), (2, 3), "one stride must walk over all"),
        ((2, 1), (12, 12), (2, 3), "one stride must walk over all"),
        ((2, 3), (12, 24), (2, 3), "one stride must walk over all"),
        ((3,), (-12,), (3,), "negative stride"),
        ((2,), (12,), (3,), r"batch axes \(2,\), which do not broadcast to \(3,\)"),
        ((2, 3), (36, 12), (3,), "do not broadcast"),
    ],
)
def test_refused_batches(shape: Ints, strides: Ints, joint: Ints, message: str) -> None:
    """What no single stride can walk is refused in terms of the argument."""
    with pytest.raises(ValueError, match=f"bias has .*{message}"):
        batch_layout("bias", shape, strides, joint)
