"""Programs: layouts, an algorithm and a descriptor, ready to be launched with addresses of one alignment class."""

from __future__ import annotations

import threading
import weakref
from functools import cache
from itertools import product
from typing import Any

import cupy
import numpy as np
from nvmath.bindings import cublasLt
from nvmath.bindings.cublasLt import cuBLASLtError

from ...column_form import ColumnForm, ColumnMatrix, bucketed, column_form
from ...epilogs import Epilog
from ...problem import Problem
from ..guard import Traits, refusal
from .descriptors import INVENTED, WORKSPACE_LIMIT, Descriptor, family

__all__ = ["WORKSPACE_LIMIT", "Program", "cuBLASLtError", "plan_program", "sound_programs"]

BUCKETS_KEPT = 4096
"""Algorithms kept at most; the oldest half goes when there are more."""

_CANDIDATES = 16
_BIAS_POINTER = int(cublasLt.MatmulDescAttribute.BIAS_POINTER)
_AUX_POINTER = int(cublasLt.MatmulDescAttribute.EPILOGUE_AUX_POINTER)
_LAYOUT_ORDER = int(cublasLt.MatrixLayoutAttribute.ORDER)
_LAYOUT_COUNT = int(cublasLt.MatrixLayoutAttribute.BATCH_COUNT)
_LAYOUT_STRIDE = int(cublasLt.MatrixLayoutAttribute.STRIDED_BATCH_OFFSET)
_ALGORITHM_ID = int(cublasLt.MatmulAlgoConfigAttribute.ID)
_ALGORITHM_SPLIT_K = int(cublasLt.MatmulAlgoConfigAttribute.SPLITK_NUM)
_ROW_ORDER = int(cublasLt.Order.ROW)
_SPLIT_K_ALLOWED, _SPLIT_K_FORBIDDEN = int(cublasLt.ReductionScheme.MASK), int(cublasLt.ReductionScheme.NONE)
_FOUND = np.dtype(cublasLt.matmul_heuristic_result_dtype)
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
"""``cudaDataType_t`` of each dtype."""

_planning = threading.RLock()
_matmul = cublasLt.matmul
_set_descriptor = cublasLt.matmul_desc_set_attribute


class Program:
    """A planned product for one alignment class.

    Attributes
    ----------
    form : ColumnForm
        What cuBLASLt was asked for.
    algorithm : int
        Address of the algorithm's bytes, which the program owns.
    algorithm_id, split_k : int
        What it is.
    workspace : int
        Bytes that a launch needs.
    """

    def __init__(
        self, form: ColumnForm, problem: Problem, descriptor: Descriptor, layouts: _Layouts, found: _Found
    ) -> None:
        self.form = form
        self.algorithm_id, self.split_k = found.algorithm_id, found.split_k
        # nvmath adds 16 bytes where there is an epilog, against a fault of the library.
        extra = 16 if found.workspace and form.epilog is not Epilog.DEFAULT else 0
        self.workspace = found.workspace + extra
        self._descriptor = descriptor
        self._layouts = layouts
        self._found = found
        self.algorithm = found.address
        self._a, self._b, self._c, self._d = layouts.pointers
        self._scale = np.float64 if problem.compute_dtype == "float64" else np.float32
        self._zero, self._one = _constants(self._scale)

    def launch(
        self,
        a: int,
        b: int,
        c: int,
        out: int,
        bias: int,
        aux: int,
        workspace: int,
        alpha: float,
        beta: float,
        stream: int,
    ) -> None:
        """Queue the product on ``stream``.

        All are addresses in the caller's terms, 0 where there is no such array. ``bias`` is also where an epilog writes
        a sum, ``aux`` where it reads or writes a mask or pre-activation. ``c`` is ``out`` where there is no ``c``.
        """
        descriptor = self._descriptor
        alpha_address, beta_address = self._one, self._zero
        if alpha != 1.0 or beta != 0.0:
            factors = np.array((alpha, beta), self._scale)  # read before the binding returns
            alpha_address = factors.ctypes.data
            beta_address = alpha_address + factors.itemsize
        with descriptor.lock:
            if bias:
                descriptor.buffer[0] = bias
                _set_descriptor(descriptor.pointer, _BIAS_POINTER, descriptor.address, 8)
            if aux:
                descriptor.buffer[0] = aux
                _set_descriptor(descriptor.pointer, _AUX_POINTER, descriptor.address, 8)
            _matmul(
                descriptor.handle,
                descriptor.pointer,
                alpha_address,
                b,
                self._a,
                a,
                self._b,
                beta_address,
                c,
                self._d if c == out else self._c,  # one matrix cannot have two layouts
                out,
                self._d,
                self.algorithm,
                workspace,
                self.workspace,
                stream,
            )


def plan_program(problem: Problem, alignment: int) -> Program:
    """Return the program of a problem for addresses that are multiples of ``alignment`` bytes.

    The algorithm is the heuristic's for the largest ``m`` of the bucket that the problem's is in, where it can run the
    problem: a new ``m`` then costs no heuristic, which takes 190 us, and the choice depends on nothing that ran before.

    Raises
    ------
    RuntimeError
        When the library offers no algorithm that is not known to be wrong.
    """
    form = column_form(problem)
    with _planning, cupy.cuda.Device(problem.device.ordinal):
        descriptor = family(form, problem)
        layouts = _Layouts(form)
        representative = bucketed(form)
        if representative is not None:
            found = _first_sound(representative, descriptor, problem, alignment)
            if found is not None and found.runs(descriptor, layouts):
                return Program(form, problem, descriptor, layouts, found)
        found = _first_sound(form, descriptor, problem, alignment)
    if found is None:
        raise RuntimeError(
            f"cuBLASLt has no algorithm for {problem.epilog.name} on m={problem.m} n={problem.n} k={problem.k} "
            f"{problem.a.dtype} at an alignment of {alignment} bytes. Please report it with this line."
        )
    return Program(form, problem, descriptor, layouts, found)


def sound_programs(problem: Problem, alignment: int) -> list[Program]:
    """Return a program for each algorithm of the heuristic that is not known to be wrong, best first."""
    form = column_form(problem)
    with _planning, cupy.cuda.Device(problem.device.ordinal):
        descriptor = family(form, problem)
        layouts = _Layouts(form)
        preferences = [_preference(alignment, scheme) for scheme in _schemes(problem)]
        proposed = [_proposed(form, descriptor, layouts, preference, _CANDIDATES) for preference in preferences]
        sound = [found for each in proposed for found in each if _is_sound(found, form)]
    return [Program(form, problem, descriptor, layouts, found) for found in sound]


_bucket_algorithms: dict[Any, _Found | None] = {}


def _first_sound(form: ColumnForm, descriptor: Descriptor, problem: Problem, alignment: int) -> _Found | None:
    """Return the first algorithm for a form that is not known to be wrong, without split-K where need be."""
    key = (form, problem.precision, problem.deterministic, problem.device.ordinal, alignment)
    if key in _bucket_algorithms:
        return _bucket_algorithms[key]
    if len(_bucket_algorithms) >= BUCKETS_KEPT:
        for old in list(_bucket_algorithms)[: BUCKETS_KEPT // 2]:
            del _bucket_algorithms[old]
    layouts = _Layouts(form)
    first = None
    for scheme, candidates in product(_schemes(problem), (1, _CANDIDATES)):
        proposed = _proposed(form, descriptor, layouts, _preference(alignment, scheme), candidates)
        first = next((found for found in proposed if _is_sound(found, form)), None)
        if first is not None:
            break
    _bucket_algorithms[key] = first
    return first


def _schemes(problem: Problem) -> tuple[int, ...]:
    return (_SPLIT_K_FORBIDDEN,) if problem.deterministic else (_SPLIT_K_ALLOWED, _SPLIT_K_FORBIDDEN)


def _is_sound(found: _Found, form: ColumnForm) -> bool:
    return refusal(Traits(found.algorithm_id, found.split_k, form.k)) is None


@cache
def _constants(scale: type) -> tuple[int, int]:
    """Return the addresses of 0 and 1 in a scale type, which are never freed."""
    _kept.append(np.array((0, 1), scale))
    address: int = _kept[-1].ctypes.data
    return address, address + _kept[-1].itemsize


_kept: list[Any] = []


# Layouts -------------------------------------------------------------------------------------------------------------


class _Layouts:
    """The four matrix layouts of a program, freed with it."""

    def __init__(self, form: ColumnForm) -> None:
        flipped = form.epilog is Epilog.BGRADB  # nvmath's descriptor reads B transposed for this epilog
        c = form.C or form.D
        made = [_layout(form.A), _layout(form.B, flipped), _layout(c), _layout(form.D)]
        self.pointers = tuple(made)
        weakref.finalize(self, _destroy_layouts, self.pointers).atexit = False


def _destroy_layouts(pointers: tuple[int, ...]) -> None:
    for pointer in pointers:
        cublasLt.matrix_layout_destroy(pointer)


def _layout(matrix: ColumnMatrix, flipped: bool = False) -> int:
    """Return a new layout; a matrix that is read transposed is one in row order."""
    rows, cols = matrix.rows, matrix.cols
    row_order = matrix.transposed
    if matrix.transposed:
        rows, cols = cols, rows
    if flipped:
        rows, cols, row_order = cols, rows, not row_order
    layout = int(cublasLt.matrix_layout_create(_TYPES[matrix.dtype], rows, cols, matrix.ld))
    setter = cublasLt.matrix_layout_set_attribute
    if row_order:
        _set(setter, layout, _LAYOUT_ORDER, _ROW_ORDER, np.int32)
    if matrix.batch.count > 1:
        _set(setter, layout, _LAYOUT_COUNT, matrix.batch.count, np.int32)
        _set(setter, layout, _LAYOUT_STRIDE, matrix.batch.stride, np.int64)
    return layout


def _set(setter: Any, target: int, attribute: int, value: int, kind: type) -> None:
    """Set an attribute of a layout or preference."""
    buffer: Any = np.array(value, kind)
    setter(target, attribute, buffer.ctypes.data, buffer.nbytes)


# Algorithms ----------------------------------------------------------------------------------------------------------


class _Found:
    """An algorithm that the heuristic proposes: where its bytes lie, which the binding reads, and what it is."""

    __slots__ = ("_buffer", "address", "algorithm_id", "split_k", "workspace")

    def __init__(self, buffer: Any, i: int) -> None:
        self._buffer = buffer
        self.address: int = buffer.ctypes.data + i * _FOUND.itemsize
        self.workspace = int(buffer["workspace_size"][i])
        values = np.zeros(3, np.int64)
        at = values.ctypes.data
        cublasLt.matmul_algo_config_get_attribute(self.address, _ALGORITHM_ID, at, 4, at + 16)
        cublasLt.matmul_algo_config_get_attribute(self.address, _ALGORITHM_SPLIT_K, at + 8, 4, at + 16)
        self.algorithm_id, self.split_k = int(values[0]), int(values[1])

    def runs(self, descriptor: Descriptor, layouts: _Layouts) -> bool:
        """Return whether the algorithm can run other layouts within the workspace that it was found with."""
        result = np.zeros(1, _FOUND)
        try:
            cublasLt.matmul_algo_check(
                descriptor.handle, descriptor.pointer, *layouts.pointers, self.address, result.ctypes.data
            )
        except cuBLASLtError:
            return False
        return int(result["workspace_size"][0]) <= self.workspace


@cache
def _preference(alignment: int, scheme: int) -> int:
    """Return the preference for an alignment of all matrices, in bytes, and a set of ways to split k; never freed."""
    preference = int(cublasLt.matmul_preference_create())
    names = cublasLt.MatmulPreferenceAttribute
    setter = cublasLt.matmul_preference_set_attribute
    _set(setter, preference, int(names.MAX_WORKSPACE_BYTES), WORKSPACE_LIMIT, np.uint64)
    _set(setter, preference, int(names.REDUCTION_SCHEME_MASK), scheme, np.uint32)
    for name in ("A", "B", "C", "D"):
        _set(setter, preference, int(names[f"MIN_ALIGNMENT_{name}_BYTES"]), alignment, np.uint32)
    return preference


def _proposed(
    form: ColumnForm, descriptor: Descriptor, layouts: _Layouts, preference: int, candidates: int
) -> list[_Found]:
    """Return what the heuristic proposes, best first; nothing where it knows no way."""
    found = np.zeros(candidates, _FOUND)
    count = np.zeros(1, np.int32)
    with descriptor.lock:
        if form.epilog.takes or (form.epilog.gives and not form.epilog.gives.format.startswith("sum")):
            descriptor.set(_AUX_POINTER, INVENTED)
        if form.epilog.bias or (form.epilog.gives and form.epilog.gives.format.startswith("sum")):
            descriptor.set(_BIAS_POINTER, INVENTED)
        try:
            cublasLt.matmul_algo_get_heuristic(
                descriptor.handle,
                descriptor.pointer,
                *layouts.pointers,
                preference,
                candidates,
                found.ctypes.data,
                count.ctypes.data,
            )
        except cuBLASLtError:
            return []
    return [_Found(found, i) for i in range(int(count[0]))]
