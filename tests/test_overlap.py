"""Who shares memory with whom: exactly, byte by byte, and without reading any."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from libraries import ADDRESS, CPU

import fusedops
from fusedops.arrays import ArraySpec, ArrayView, Device
from fusedops.frameworks import kind_of


def spec_and_address(x: np.ndarray) -> ArrayView:
    """Return the view of a NumPy array."""
    return kind_of(x).framework.view(x)


@st.composite
def parts(draw: st.DrawFn, buffer: np.ndarray) -> np.ndarray:
    """Draw a view of a buffer of bytes: any start, steps, directions and dtypes."""
    itemsize = draw(st.sampled_from([1, 2, 4]))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    steps = [draw(st.integers(-12, 12)) * itemsize for _ in shape]
    reach = [(max(n, 1) - 1) * step for n, step in zip(shape, steps, strict=True)]
    low, high = -sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize
    start = draw(st.integers(low, max(low, buffer.size - high)))
    typed = np.ndarray(shape, f"u{itemsize}", buffer, start, steps) if start + high <= buffer.size else None
    return buffer[:0] if typed is None else typed


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_overlaps_is_exact(data: st.DataObject) -> None:
    """Two views overlap exactly where some byte belongs to both."""
    buffer = np.zeros(160, "uint8")
    first, second = data.draw(parts(buffer)), data.draw(parts(buffer))
    views = [spec_and_address(x) for x in (first, second)]
    shared = bool(bytes_of(first, buffer) & bytes_of(second, buffer))
    assert views[0].overlaps(views[1]) is shared
    assert views[1].overlaps(views[0]) is shared
    assert np.shares_memory(first, second) is shared


def bytes_of(view: np.ndarray, buffer: np.ndarray) -> set[int]:
    """Return the bytes of the buffer that belong to a view, by counting them all."""
    start = view.ctypes.data - buffer.ctypes.data
    found = set()
    for index in np.ndindex(view.shape):
        first = start + sum(i * step for i, step in zip(index, view.strides, strict=True))
        found |= set(range(first, first + view.itemsize))
    return found


def test_interleaved_slices_do_not_overlap() -> None:
    """Even and odd columns, left and right half: each has its own bytes."""
    x = np.zeros((6, 8))
    pairs = [(x[:, ::2], x[:, 1::2]), (x[:, :4], x[:, 4:]), (x[::2], x[1::2]), (x[:3], x[3:][::-1])]
    for first, second in pairs:
        assert not spec_and_address(first).overlaps(spec_and_address(second))
    for first, second in [(x[:, ::2], x[:, ::3]), (x, x.T), (x[:, :5], x[:, 4:]), (x[0], x[:, 0])]:
        assert spec_and_address(first).overlaps(spec_and_address(second))


def test_addresses_on_other_devices_do_not_meet() -> None:
    """Equal addresses on two devices are two places; the memory itself is never read."""
    specs = [ArraySpec.dense((4, 4), "float32", Device("cuda", i)) for i in (0, 1)]
    views = [ArrayView(spec, 0x7F00_0000_0000, False, None) for spec in (*specs, specs[0])]
    assert not views[0].overlaps(views[1])
    assert views[0].overlaps(views[2])


def test_what_would_take_too_long_counts_as_overlap() -> None:
    """Where the exact answer is out of reach, the safe one is given."""
    # The example of `numpy.shares_memory` for a problem that takes a minute.
    first = ArraySpec((1049, 1049, 1049), (36674, 61119, 85569), "uint8", CPU)
    second = ArraySpec((1049, 1049, 1), (12223, 12224, 1), "uint8", CPU)
    views = [ArrayView(first, ADDRESS, False, None), ArrayView(second, ADDRESS + 64023025, False, None)]
    assert views[0].overlaps(views[1])


def test_out_between_the_columns_of_an_operand() -> None:
    """An ``out`` that is interleaved with an operand is written, one that shares a column with it is refused."""
    buffer = np.zeros((4, 8), "float32")
    a, b = buffer[:, :4], np.eye(4, dtype="float32")
    a[...] = np.arange(16).reshape(4, 4)
    assert np.array_equal(fusedops.matmul(a, b, out=buffer[:, 4:]), a)
    with pytest.raises(ValueError, match="out shares memory with a"):
        fusedops.matmul(a, b, out=buffer[:, 3:7])


OWN_OVERLAPS = {
    "items": ((3, 4, 4), (4, 4, 1)),
    "rows": ((4, 4), (3, 1)),
    "one row": ((4, 4), (0, 1)),
    "one item": ((3, 4, 4), (0, 4, 1)),
}


@pytest.mark.parametrize(("shape", "strides"), OWN_OVERLAPS.values(), ids=OWN_OVERLAPS.keys())
def test_out_that_runs_into_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """An ``out`` whose elements share memory cannot hold a result."""
    out = np.lib.stride_tricks.as_strided(np.zeros(64, "float32"), shape, [4 * s for s in strides])
    a = np.ones(shape, "float32")
    with pytest.raises(ValueError, match=r"out has strides .* share memory"):
        fusedops.matmul(a, np.ones((4, 4), "float32"), out=out)


def test_out_whose_items_are_interleaved() -> None:
    """A batch along the middle axis of a buffer has no element twice, and is written where it lies."""
    a = np.random.default_rng(0).standard_normal((3, 4, 5))
    b = np.ones((5, 6))
    out = np.zeros((4, 3, 6)).transpose(1, 0, 2)
    assert fusedops.matmul(a, b, out=out) is out
    assert np.allclose(out, a @ b)
