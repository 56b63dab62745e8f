"""Algorithms: what cuBLASLt's heuristic proposes for a form, less what is known to be wrong."""

from __future__ import annotations

import weakref
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from nvmath.bindings import cublasLt
from nvmath.bindings.cublasLt import cuBLASLtError

from ...column_form import WORKSPACE_LIMIT, ColumnForm
from ...native.layouts import layout_words
from ...problem import Problem
from ..guard import Traits, refusal
from .descriptors import Descriptor

__all__ = ["BUCKETS_KEPT", "Found", "Layouts", "all_sound", "first_sound"]

BUCKETS_KEPT = 4096
"""Algorithms kept at most; the oldest half goes when there are more."""

_CANDIDATES = 16
_LAYOUT_ORDER = int(cublasLt.MatrixLayoutAttribute.ORDER)
_LAYOUT_COUNT = int(cublasLt.MatrixLayoutAttribute.BATCH_COUNT)
_LAYOUT_STRIDE = int(cublasLt.MatrixLayoutAttribute.STRIDED_BATCH_OFFSET)
_ALGORITHM_ID = int(cublasLt.MatmulAlgoConfigAttribute.ID)
_ALGORITHM_SPLIT_K = int(cublasLt.MatmulAlgoConfigAttribute.SPLITK_NUM)
_SPLIT_K_ALLOWED, _SPLIT_K_FORBIDDEN = int(cublasLt.ReductionScheme.MASK), int(cublasLt.ReductionScheme.NONE)
_FOUND = np.dtype(cublasLt.matmul_heuristic_result_dtype)


class Layouts:
    """The four matrix layouts of a form, made through the binding and freed with this object."""

    def __init__(self, form: ColumnForm) -> None:
        words = layout_words(form)
        self.pointers = tuple(_layout(*words[i : i + 7]) for i in range(0, len(words), 7))
        weakref.finalize(self, _destroy_layouts, self.pointers).atexit = False


def _destroy_layouts(pointers: tuple[int, ...]) -> None:
    for pointer in pointers:
        cublasLt.matrix_layout_destroy(pointer)


def _layout(kind: int, rows: int, cols: int, ld: int, order: int, count: int, stride: int) -> int:
    layout = int(cublasLt.matrix_layout_create(kind, rows, cols, ld))
    setter = cublasLt.matrix_layout_set_attribute
    if order:
        _set(setter, layout, _LAYOUT_ORDER, order, np.int32)
    if count > 1:
        _set(setter, layout, _LAYOUT_COUNT, count, np.int32)
        _set(setter, layout, _LAYOUT_STRIDE, stride, np.int64)
    return layout


def _set(setter: Any, target: int, attribute: int, value: int, kind: type) -> None:
    """Set an attribute of a layout or preference."""
    buffer: Any = np.array(value, kind)
    setter(target, attribute, buffer.ctypes.data, buffer.nbytes)


class Found:
    """An algorithm that the heuristic proposes: where its bytes lie, which a launch reads, and what it is."""

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

    def runs(self, descriptor: Descriptor, layouts: Layouts) -> bool:
        """Return whether the algorithm can run other layouts within the workspace that it was found with."""
        result = np.zeros(1, _FOUND)
        try:
            cublasLt.matmul_algo_check(
                descriptor.handle, descriptor.pointer, *layouts.pointers, self.address, result.ctypes.data
            )
        except cuBLASLtError:
            return False
        return int(result["workspace_size"][0]) <= self.workspace


_bucket_algorithms: dict[Any, Found | None] = {}


def first_sound(form: ColumnForm, descriptor: Descriptor, problem: Problem, alignment: int) -> Found | None:
    """Return the first algorithm for a form that is not known to be wrong, without split-K where need be."""
    key = (form, problem.precision, problem.deterministic, problem.device.ordinal, alignment)
    if key in _bucket_algorithms:
        return _bucket_algorithms[key]
    if len(_bucket_algorithms) >= BUCKETS_KEPT:
        for old in list(_bucket_algorithms)[: BUCKETS_KEPT // 2]:
            del _bucket_algorithms[old]
    layouts = Layouts(form)
    first = None
    for scheme, candidates in product(_schemes(problem), (1, _CANDIDATES)):
        proposed = _proposed(form, descriptor, layouts, _preference(alignment, scheme), candidates)
        first = next((found for found in proposed if _is_sound(found, form)), None)
        if first is not None:
            break
    _bucket_algorithms[key] = first
    return first


def all_sound(form: ColumnForm, descriptor: Descriptor, problem: Problem, alignment: int) -> list[Found]:
    """Return every algorithm for a form that is not known to be wrong, best first."""
    layouts = Layouts(form)
    preferences = [_preference(alignment, scheme) for scheme in _schemes(problem)]
    proposed = [_proposed(form, descriptor, layouts, preference, _CANDIDATES) for preference in preferences]
    return [found for each in proposed for found in each if _is_sound(found, form)]


def _schemes(problem: Problem) -> tuple[int, ...]:
    return (_SPLIT_K_FORBIDDEN,) if problem.deterministic else (_SPLIT_K_ALLOWED, _SPLIT_K_FORBIDDEN)


def _is_sound(found: Found, form: ColumnForm) -> bool:
    return refusal(Traits(found.algorithm_id, found.split_k, form.k)) is None


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
    form: ColumnForm, descriptor: Descriptor, layouts: Layouts, preference: int, candidates: int
) -> list[Found]:
    """Return what the heuristic proposes, best first; nothing where it knows no way."""
    found = np.zeros(candidates, _FOUND)
    count = np.zeros(1, np.int32)
    with descriptor.lock:
        descriptor.invent_pointers(form)
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
    return [Found(found, i) for i in range(int(count[0]))]
