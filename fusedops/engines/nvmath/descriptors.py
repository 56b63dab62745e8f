"""Operation descriptors: one ``nvmath.linalg.advanced.Matmul`` for each family of problems, made without memory."""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any

import cupy
import numpy as np
from nvmath.bindings import cublasLt

from ...column_form import ColumnForm
from ...native.launcher import Launcher, NativeDescriptor
from ...problem import Problem
from .carriers import INVENTED, planned_matmul

__all__ = ["FAMILIES_KEPT", "Descriptor", "NoFastWay", "copied", "family"]

FAMILIES_KEPT = 1024
"""Descriptors kept at most; the oldest half goes when there are more."""

_Attribute = cublasLt.MatmulDescAttribute
_BIAS_POINTER, _AUX_POINTER = int(_Attribute.BIAS_POINTER), int(_Attribute.EPILOGUE_AUX_POINTER)
_BIAS_STRIDE = int(_Attribute.BIAS_BATCH_STRIDE)
_COPIED = tuple(
    _Attribute[name]
    for name in (
        "POINTER_MODE",
        "TRANSA",
        "TRANSB",
        "TRANSC",
        "FILL_MODE",
        "EPILOGUE",
        "BIAS_BATCH_STRIDE",
        "BIAS_DATA_TYPE",
        "EPILOGUE_AUX_LD",
        "EPILOGUE_AUX_BATCH_STRIDE",
        "EPILOGUE_AUX_DATA_TYPE",
        "SM_COUNT_TARGET",
        "FAST_ACCUM",
    )
)
"""All that a ``Matmul`` of ours can set, but for types and pointers."""

_create = cublasLt.matmul_desc_create
_destroy = cublasLt.matmul_desc_destroy
_get = cublasLt.matmul_desc_get_attribute
_set = cublasLt.matmul_desc_set_attribute
_size_of = cublasLt.get_matmul_desc_attribute_dtype


class NoFastWay(RuntimeError):
    """The ``Matmul`` of the installed nvmath does not show its descriptor."""


class Descriptor:
    """An operation descriptor, the ``Matmul`` that owns it, and the lock of the pointers in it.

    ``native`` is the launcher's own copy of it, made with the family's first native program.
    """

    __slots__ = ("__weakref__", "address", "buffer", "handle", "lock", "matmul", "native", "pointer")

    def __init__(self, matmul: Any, handle: int) -> None:
        try:
            self.pointer: int = matmul.mm_desc
        except AttributeError as error:
            raise NoFastWay(str(error)) from error
        self.matmul = matmul
        self.handle = handle
        self.native: NativeDescriptor | None = None
        self.lock = threading.Lock()
        self.buffer = np.zeros(1, np.uint64)
        self.address: int = self.buffer.ctypes.data
        weakref.finalize(self, matmul.free).atexit = False

    def set(self, attribute: int, value: int) -> None:
        """Set a pointer or stride of 8 bytes; the caller holds the lock."""
        self.buffer[0] = value
        _set(self.pointer, attribute, self.address, 8)

    def invent_pointers(self, form: ColumnForm) -> None:
        """Set the pointers of the arrays that an epilog has, which a heuristic and a check want to see."""
        for pointer in _pointers(form):
            self.set(pointer, INVENTED)


_families: dict[Any, Descriptor] = {}


@cache
def _handle(ordinal: int) -> int:
    """Return the process's cuBLASLt handle of a device, which is never destroyed."""
    with cupy.cuda.Device(ordinal):
        return int(cublasLt.create())


def family(form: ColumnForm, problem: Problem) -> Descriptor:
    """Return the descriptor of a problem's family, made by a ``Matmul`` where it is the first."""
    bias_stride = form.bias.stride if form.bias else 0
    per_batch = (form.batch_count, form.n) if form.batch_count > 1 else ()
    key = (
        form.epilog,
        form.m,
        problem.a.dtype,
        problem.out.dtype,
        problem.precision,
        bias_stride,
        per_batch,
        problem.device.ordinal,
    )
    descriptor = _families.get(key)
    if descriptor is None:
        if len(_families) >= FAMILIES_KEPT:
            for old in list(_families)[: FAMILIES_KEPT // 2]:
                del _families[old]
        handle = _handle(problem.device.ordinal)
        try:
            planned = planned_matmul(form, problem, handle)
        except (AssertionError, RuntimeError, TypeError, ValueError, cublasLt.cuBLASLtError) as error:
            # In nvmath's words, which are those of the transposed problem.
            raise RuntimeError(f"nvmath cannot plan {problem}: {error}") from error
        descriptor = _families[key] = Descriptor(planned, handle)
        if bias_stride:
            descriptor.set(_BIAS_STRIDE, bias_stride)
    return descriptor


def copied(descriptor: Descriptor, form: ColumnForm, launcher: Launcher) -> NativeDescriptor:
    """Return a copy that the launcher owns, because C and an object of nvmath must not share pointers."""
    with descriptor.lock:
        types = [_read(descriptor.pointer, kind) for kind in (_Attribute.COMPUTE_TYPE, _Attribute.SCALE_TYPE)]
        pointer = int(_create(*types))
        try:
            for attribute in _COPIED:
                _copy(descriptor.pointer, pointer, attribute)
            for at in _pointers(form):
                descriptor.buffer[0] = INVENTED
                _set(pointer, at, descriptor.address, 8)
            return launcher.descriptor(pointer)
        except BaseException:
            _destroy(pointer)
            raise


def _pointers(form: ColumnForm) -> list[int]:
    """Return the pointers that a form's epilog reads: a sum goes where a bias would be read."""
    gives = form.epilog.gives
    sums = gives is not None and gives.format.startswith("sum")
    aux = form.epilog.takes or (gives and not sums)
    return [_BIAS_POINTER] * bool(form.epilog.bias or sums) + [_AUX_POINTER] * bool(aux)


def _read(pointer: int, attribute: Any) -> int:
    value: Any = np.zeros(1, _size_of(attribute))
    written = np.zeros(1, np.uint64)
    _get(pointer, int(attribute), value.ctypes.data, value.nbytes, written.ctypes.data)
    return int(value[0])


def _copy(source: int, target: int, attribute: Any) -> None:
    """Copy an attribute that differs; a default, such as the -1 of a type, is not always one that may be set."""
    try:
        wanted = _read(source, attribute)
        differs = wanted != _read(target, attribute)
    except cublasLt.cuBLASLtError:  # unknown to this cuBLASLt, so nobody has set it
        return
    if differs:
        value: Any = np.array([wanted], _size_of(attribute))
        _set(target, int(attribute), value.ctypes.data, value.nbytes)
