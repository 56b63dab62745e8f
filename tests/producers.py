"""DLPack producers that export exactly what a test tells them to, built on structures of their own.

Nothing here is taken from the package, whose structures are under test. Every export that is alive is in `exports`,
and leaves it when its deleter runs.

References
----------
DLPack 1.3, ``dlpack.h``.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLPackVersion(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("version", DLPackVersion),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    ]


Managed = DLManagedTensor | DLManagedTensorVersioned
exports: dict[int, tuple[Any, ...]] = {}
"""Every export that is alive, by its manager context, with all that it points to."""
_numbers = itertools.count(1)

_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@_Deleter
def _delete(address: int) -> None:
    """Forget an export of before DLPack 1.0."""
    exports.pop(DLManagedTensor.from_address(address).manager_ctx)


@_Deleter
def _delete_versioned(address: int) -> None:
    """Forget an export."""
    exports.pop(DLManagedTensorVersioned.from_address(address).manager_ctx)


def managed(tensor: DLTensor, versioned: bool, flags: int, *kept: Any) -> Managed:
    """Return a managed tensor that keeps what it points to until it is deleted."""
    record: Managed = DLManagedTensorVersioned() if versioned else DLManagedTensor()
    record.dl_tensor = tensor
    record.manager_ctx = next(_numbers)
    record.deleter = ctypes.cast(_delete_versioned if versioned else _delete, ctypes.c_void_p)
    if isinstance(record, DLManagedTensorVersioned):
        record.version, record.flags = DLPackVersion(1, 1), flags
    exports[record.manager_ctx] = (record, *kept)
    return record


def tensor_over(data: Array, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[DLTensor, list[Any]]:
    """Return a tensor over NumPy memory, ``strides`` None for NULL, and what it points to."""
    kept: list[Any] = [data, (ctypes.c_int64 * max(len(shape), 1))(*shape)]
    tensor = DLTensor(data.ctypes.data, DLDevice(1, 0), len(shape), DLDataType(2, data.itemsize * 8, 1))
    tensor.shape = ctypes.cast(kept[1], ctypes.POINTER(ctypes.c_int64))
    if strides is not None:
        kept.append((ctypes.c_int64 * max(len(shape), 1))(*strides))
        tensor.strides = ctypes.cast(kept[2], ctypes.POINTER(ctypes.c_int64))
    return tensor, kept


TABLE_NAME = b"dlpack_exchange_api"
"""A capsule keeps the address of its name, so the name must live as long."""

new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_capsule_of = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """Delete what an unconsumed capsule holds."""
    for name, delete in ((b"dltensor", _delete), (b"dltensor_versioned", _delete_versioned)):
        if _is_capsule_of(capsule, name):
            delete(_pointer_in(capsule, name))


class Producer:
    """An array known by DLPack alone, over a flat NumPy buffer.

    Parameters
    ----------
    data : ndarray
        The memory; NULL where it is None.
    shape, strides : tuple of int
        What is exported; strides in elements, None for NULL.
    byte_offset, code, bits, lanes, flags, device
        The fields of the structure.
    versioned : bool
        Whether it knows DLPack 1.0.
    """

    def __init__(
        self,
        data: Array | None,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        *,
        byte_offset: int = 0,
        code: int = 2,
        bits: int | None = None,
        lanes: int = 1,
        flags: int = 0,
        device: tuple[int, int] = (1, 0),
        versioned: bool = True,
    ) -> None:
        memory = np.zeros(1, "float32") if data is None else data
        self._tensor, self._kept = tensor_over(memory, shape, strides)
        self._tensor.byte_offset = byte_offset
        self._tensor.dtype = DLDataType(code, memory.itemsize * 8 if bits is None else bits, lanes)
        self._tensor.device = DLDevice(*device)
        if data is None:
            self._tensor.data = None
        self._flags, self._versioned = flags, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device.device_type, self._tensor.device.device_id

    def __dlpack__(self, **asked: Any) -> Any:
        if asked and not self._versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        record = managed(self._tensor, self._versioned, self._flags, *self._kept)
        name = b"dltensor_versioned" if self._versioned else b"dltensor"
        return new_capsule(ctypes.addressof(record), name, ctypes.cast(_destroy, ctypes.c_void_p))


# A producer with a C table of its own ---------------------------------------------------------------------------------

_SetError = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_Allocate = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(DLTensor), ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, _SetError
)
_ToObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class DLPackExchangeAPI(ctypes.Structure):
    _fields_ = [
        ("version", DLPackVersion),
        ("prev_api", ctypes.c_void_p),
        ("managed_tensor_allocator", _Allocate),
        ("managed_tensor_from_py_object_no_sync", ctypes.c_void_p),
        ("managed_tensor_to_py_object_no_sync", _ToObject),
        ("dltensor_from_py_object_no_sync", ctypes.c_void_p),
        ("current_work_stream", _CurrentStream),
    ]


MEMORY_LIMIT = 1 << 20
"""Bytes that the allocator gives at most, so that it can be seen to fail."""


@_Allocate
def _allocate(prototype: Any, made: Any, error_context: Any, set_error: Any) -> int:
    """Make dense memory for a prototype, within the limit."""
    wanted = prototype.contents
    shape = tuple(wanted.shape[: wanted.ndim])
    size = math.prod(shape) * wanted.dtype.bits // 8
    if size > MEMORY_LIMIT:
        set_error(error_context, b"MemoryError", b"the box is full")
        return -1
    tensor, kept = tensor_over(np.zeros(size + 1, "uint8"), shape, tuple(np.zeros(shape, "uint8").strides))
    tensor.dtype = wanted.dtype
    made[0] = ctypes.addressof(managed(tensor, True, 0, *kept))
    return 0


@_ToObject
def _to_object(record: int, made: Any) -> int:
    """Give a new reference to a box that owns a managed tensor."""
    box = Box(record)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(box))
    made[0] = id(box)
    return 0


@_CurrentStream
def _current_stream(device_type: int, device_id: int, made: Any) -> int:
    """Tell the device's number as its stream, 0 on the CPU."""
    made[0] = 0 if device_type == 1 else 1000 + device_id
    return 0


EXCHANGE_API = DLPackExchangeAPI(DLPackVersion(1, 3), None, _allocate, None, _to_object, None, _current_stream)


class Box:
    """An array of a library that has DLPack, its C table, and nothing else."""

    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(EXCHANGE_API), TABLE_NAME, None)

    def __init__(self, record: int) -> None:
        self._record = DLManagedTensorVersioned.from_address(record)

    @classmethod
    def holding(cls, values: Array) -> Box:
        """Return a box with a copy of an array."""
        data = np.ascontiguousarray(values)
        tensor, kept = tensor_over(data, data.shape, tuple(s // data.itemsize for s in data.strides))
        return cls(ctypes.addressof(managed(tensor, True, 0, *kept)))

    def __del__(self) -> None:
        _delete_versioned(ctypes.addressof(self._record))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        tensor = self._record.dl_tensor
        record = managed(tensor, True, 0, self)
        return new_capsule(ctypes.addressof(record), b"dltensor_versioned", ctypes.cast(_destroy, ctypes.c_void_p))
