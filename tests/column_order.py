"""What cuBLASLt computes, in NumPy: column-order matrices over flat memory, its epilogs along columns.

Written from cuBLAS's documentation ("cublasLtMatmul()", "cublasLtEpilogue_t") and not from the package, so that a
column form can be run without a GPU and its memory compared with the caller's answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusedops import Epilog
from fusedops.column_form import ColumnForm, ColumnMatrix

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Memory:
    """A flat buffer, and the index in it that a pointer points to."""

    data: Array
    start: int = 0


def _gelu(z: float) -> float:
    """Return the tanh form of gelu of one number."""
    return 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _gelu_slope(z: float) -> float:
    """Return its derivative."""
    t = math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)


def each(function: Any, x: Array) -> Array:
    """Apply a function of one number: the same bits in whatever order the numbers come."""
    return np.asarray(np.frompyfunc(function, 1, 1)(x), np.float64).reshape(x.shape)


def relu(z: Array) -> Array:
    """Return ``max(z, 0)``."""
    return np.maximum(z, 0)


def gelu(z: Array) -> Array:
    """Return gelu, the tanh form."""
    return each(_gelu, z)


def gelu_slope(z: Array) -> Array:
    """Return gelu's derivative."""
    return each(_gelu_slope, z)


def columns(memory: Memory, rows: int, cols: int, ld: int, item: int) -> Array:
    """Return a view of ``rows x cols`` in column order, ``item`` elements after the start; never beyond the buffer."""
    assert ld >= max(rows, 1)
    if 0 in (rows, cols):
        return np.empty((rows, cols), memory.data.dtype)
    start = memory.start + item
    assert start >= 0
    assert start + (cols - 1) * ld + rows <= memory.data.size
    step = memory.data.itemsize
    return np.lib.stride_tricks.as_strided(memory.data[start:], (rows, cols), (step, ld * step))


def read(memory: Memory, matrix: ColumnMatrix, item: int) -> Array:
    """Return op(X) of one item of a batch."""
    view = columns(memory, matrix.rows, matrix.cols, matrix.ld, item * matrix.batch.stride)
    return view.T if matrix.transposed else view


class Aux:
    """The auxiliary memory of one item: along the columns of D for residuals, one vector for sums."""

    def __init__(self, memory: Memory, form: ColumnForm, item: int) -> None:
        self.memory, self.form, self.item = memory, form, item

    def _mask(self) -> Array:
        """Return the bit mask as bytes by column, its leading dimension a multiple of 128 bits."""
        ld = -(-self.form.m // 128) * 16
        return columns(self.memory, ld, self.form.n, max(ld, 1), self.item * ld * self.form.n)

    def preact(self) -> Array:
        """Return the pre-activations, their leading dimension a multiple of 8."""
        ld = -(-self.form.m // 8) * 8
        return columns(self.memory, self.form.m, self.form.n, max(ld, 1), self.item * ld * self.form.n)

    def write_mask(self, bits: Array) -> None:
        """Store a bit an element, and ones in the padding."""
        packed = np.packbits(bits, axis=0, bitorder="little")
        mask = self._mask()
        mask[: packed.shape[0]] = packed
        mask[packed.shape[0] :] = 255

    def read_mask(self) -> Array:
        """Return the bits as ``m x n``."""
        return np.unpackbits(np.ascontiguousarray(self._mask()), axis=0, count=self.form.m, bitorder="little")

    def write_sum(self, values: Array) -> None:
        """Store one item's sums."""
        start = self.memory.start + self.item * values.size
        self.memory.data[start : start + values.size] = values


def launch(form: ColumnForm, memory: dict[str, Memory], alpha: float, beta: float) -> None:
    """Run a column form as ``cublasLtMatmul`` would.

    ``memory`` holds A, B, D, and where the form has them C, bias, the residual "aux_in" and "aux_out".
    """
    assert not form.D.transposed
    assert (form.C is None) == ("C" not in memory)
    for item in range(form.batch_count):
        a, b = read(memory["A"], form.A, item), read(memory["B"], form.B, item)
        assert (a.shape, b.shape) == ((form.m, form.k), (form.k, form.n))
        z = alpha * (a @ b)
        if form.C is not None:
            assert not form.C.transposed
            z = z + beta * read(memory["C"], form.C, item)
        if form.bias is not None:
            first = memory["bias"].start + item * form.bias.stride
            z = z + memory["bias"].data[first : first + form.m, None]
        aux = {name: Aux(memory[name], form, item) for name in ("aux_in", "aux_out") if name in memory}
        d = read(memory["D"], form.D, item)
        assert d.shape == z.shape
        d[...] = epilogue(form.epilog, z, a, b, aux)


def epilogue(epilog: Epilog, z: Array, a: Array, b: Array, aux: dict[str, Aux]) -> Array:
    """Return what is stored in D, having written the auxiliary output."""
    match epilog.name:
        case "RELU_AUX" | "RELU_AUX_BIAS":
            aux["aux_out"].write_mask(z >= 0)
        case "GELU_AUX" | "GELU_AUX_BIAS":
            aux["aux_out"].preact()[...] = z
        case "BGRADA":
            aux["aux_out"].write_sum(a.sum(axis=1))
        case "BGRADB":
            aux["aux_out"].write_sum(b.sum(axis=0))
        case "DRELU" | "DRELU_BGRAD":
            z = z * aux["aux_in"].read_mask()
        case "DGELU" | "DGELU_BGRAD":
            z = z * gelu_slope(aux["aux_in"].preact())
    if epilog.name.endswith("_BGRAD"):
        aux["aux_out"].write_sum(z.sum(axis=1))
    if epilog.name.startswith("RELU"):
        return relu(z)
    return gelu(z) if epilog.name.startswith("GELU") else z
