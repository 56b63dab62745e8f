"""Arrays as the package sees them: what planning reads of one (`ArraySpec`) and what a launch reads (`ArrayView`).

Plans are made from specs alone, so that nothing that changes from call to call (an address, a stream, the array itself)
can leak into a plan or its key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .dtypes import dtype_named

__all__ = ["ArraySpec", "ArrayView", "Device", "alignment_class", "row_major_strides", "untyped"]

_MAX_ALIGNMENT = 16
_OVERLAP_WORK = 100_000


class Device(NamedTuple):
    """Where an array lives: ``kind`` is "cpu", "cuda" or a framework's own word, ``ordinal`` counts within the kind."""

    kind: str
    ordinal: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("cpu", "xla") else f"{self.kind}:{self.ordinal}"


CPU = Device("cpu")


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense row-major array of this shape."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= 1 if extent == 0 else extent
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape, strides in elements, dtype name and device of an array: all that a plan may depend on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device = CPU

    @classmethod
    def dense(cls, shape: tuple[int, ...], dtype: str, device: Device = CPU) -> ArraySpec:
        """Return the spec of a dense row-major array."""
        return cls(shape, row_major_strides(shape), dtype, device)

    def normalised(self) -> ArraySpec:
        """Return the spec with dense strides where the array has no elements, whose strides say nothing."""
        return ArraySpec.dense(self.shape, self.dtype, self.device) if 0 in self.shape else self

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last, where no stride is negative."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return (last + 1) * dtype_named(self.dtype).itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def compact(self) -> bool:
        """Whether the elements fill one block of memory, in any order of the axes."""
        step = 1
        for stride, extent in sorted(zip(self.strides, self.shape, strict=True)):
            if extent > 1 and stride != step:
                return 0 in self.shape
            step *= extent
        return True

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} with strides {list(self.strides)} on {self.device}"


@dataclass(frozen=True, slots=True, eq=False)
class ArrayView:
    """A spec with the memory behind it, kept alive by ``owner``.

    Attributes
    ----------
    spec : ArraySpec
        What planning reads.
    ptr : int
        Address of the element at index 0, in bytes.
    readonly : bool
        Whether writing is forbidden.
    owner : object
        Whatever must stay alive while the address is used.
    """

    spec: ArraySpec
    ptr: int
    readonly: bool
    owner: Any = field(repr=False)  # whose own text may read a GPU

    def overlaps(self, other: ArrayView) -> bool:
        """Return whether any byte belongs to both, exactly: interleaved slices of one buffer do not overlap."""
        if self.spec.device != other.spec.device or 0 in self.spec.shape or 0 in other.spec.shape:
            return False
        if not (self.ptr and other.ptr):  # an array without memory, as on PyTorch's meta device
            return False
        first, second = _byte_interval(self), _byte_interval(other)
        if first[1] <= second[0] or second[1] <= first[0]:
            return False
        try:
            return bool(np.shares_memory(untyped(self), untyped(other), max_work=_OVERLAP_WORK))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


def _byte_interval(view: ArrayView) -> tuple[int, int]:
    """Return the first byte's address and the one after the last byte's."""
    itemsize = dtype_named(view.spec.dtype).itemsize
    steps = [(n - 1) * s * itemsize for n, s in zip(view.spec.shape, view.spec.strides, strict=True)]
    low = view.ptr + sum(s for s in steps if s < 0)
    return low, view.ptr + sum(s for s in steps if s > 0) + itemsize


class _Interface:
    """What NumPy asks of memory, for an `ArrayView`; it keeps the owner alive."""

    def __init__(self, view: ArrayView) -> None:
        itemsize = dtype_named(view.spec.dtype).itemsize
        self.owner = view.owner
        self.__array_interface__ = {
            "version": 3,
            "shape": view.spec.shape,
            "strides": tuple(step * itemsize for step in view.spec.strides),
            "typestr": f"|V{itemsize}",
            "data": (view.ptr, view.readonly),
        }


def untyped(view: ArrayView) -> np.ndarray[Any, Any]:
    """Return a NumPy array of raw elements over a view's addresses, which are not read: they may be a GPU's."""
    return np.asarray(_Interface(view))


def alignment_class(*addresses: int | None) -> int:
    """Return the largest power of two, at most 16, that divides every address; None and 0 divide by all."""
    joined = _MAX_ALIGNMENT
    for address in addresses:
        joined |= address or 0
    return joined & -joined
