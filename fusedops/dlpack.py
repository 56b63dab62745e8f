"""DLPack as memory: reading what any producer exports, and making arrays through a producer's own C table.

A capsule is read and kept as the owner, never consumed, so that its own destructor frees it. NULL strides, byte offsets
and sizes of 0 are resolved here, and nowhere else.

References
----------
DLPack 1.3, ``dlpack.h``: ``DLManagedTensorVersioned`` and ``DLPackExchangeAPI``; the Python array API standard,
"Data interchange mechanisms".
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import ArraySpec, ArrayView, Device, row_major_strides, untyped
from .dtypes import DTYPES

__all__ = ["ExchangeApi", "device_of", "numpy_dtype", "numpy_over", "view_of"]

_READ_ONLY = 1
_DEVICE_KINDS = {1: "cpu", 2: "cuda", 3: "cuda_host", 10: "rocm", 13: "cuda_managed"}
_DEVICE_CODES = {kind: code for code, kind in _DEVICE_KINDS.items()}
_DTYPE_NAMES = {(dtype.dlpack_code, dtype.itemsize * 8): name for name, dtype in DTYPES.items()}
_MAX_VERSION = (1, 3)


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = (
        ("version", _Version),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


# Prototypes of our own: the attributes of `ctypes.pythonapi` are shared by everybody in the process, who may set them.
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_release = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_DecRef", ctypes.pythonapi))


def device_of(x: Any) -> Device:
    """Return where a producer says that its array lives, without an export."""
    code, ordinal = x.__dlpack_device__()
    return Device(_DEVICE_KINDS.get(int(code), f"dlpack{int(code)}"), int(ordinal))


def view_of(x: Any) -> ArrayView:
    """Return the view that ``x`` exports; the capsule owns the memory from then on.

    On a GPU it orders no streams: the launch is on the stream of the array's own work, or on one that the caller named.
    """
    unordered = {"stream": -1} if device_of(x).kind == "cuda" else {}
    try:
        capsule = x.__dlpack__(max_version=_MAX_VERSION, **unordered)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = x.__dlpack__(**unordered)
    name = _capsule_name(capsule)
    if name not in (b"dltensor", b"dltensor_versioned"):
        raise TypeError(f"its __dlpack__ gave a capsule named {name!r}, which was consumed or is none of DLPack's.")
    address = _capsule_pointer(capsule, name)
    if name == b"dltensor_versioned":
        managed = Versioned.from_address(address)
        return _view(managed.tensor, bool(managed.flags & _READ_ONLY), capsule)
    return _view(Tensor.from_address(address), False, capsule)


def _view(tensor: Tensor, readonly: bool, owner: Any) -> ArrayView:
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else row_major_strides(shape)
    dtype = tensor.dtype
    name = _DTYPE_NAMES.get((dtype.code, dtype.bits)) if dtype.lanes == 1 else None
    kind = _DEVICE_KINDS.get(tensor.device.kind, f"dlpack{tensor.device.kind}")
    spec = ArraySpec(
        shape,
        strides,
        name or f"dlpack type (code {dtype.code}, {dtype.bits} bits, {dtype.lanes} lanes)",
        Device(kind, tensor.device.ordinal),
    )
    if not tensor.data and 0 not in shape:
        raise TypeError("its DLPack export has no memory (address 0); pass an array that holds its values.")
    return ArrayView(spec, (tensor.data or 0) + tensor.byte_offset, readonly, owner)


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype object, for bfloat16 that of ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise ImportError("bfloat16 in NumPy arrays needs ml_dtypes: pip install ml_dtypes.") from error
    return np.dtype(bfloat16)  # type: ignore[no-any-return]


def numpy_over(view: ArrayView) -> np.ndarray[Any, Any]:
    """Return a NumPy array over the memory of a view on the CPU; bfloat16 needs ml_dtypes."""
    dtype = numpy_dtype(view.spec.dtype)
    return np.empty(view.spec.shape, dtype) if 0 in view.spec.shape else untyped(view).view(dtype)


_SetError = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_Allocate = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Tensor), ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, _SetError
)
_ToObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _Table(ctypes.Structure):
    """``DLPackExchangeAPI``."""

    _fields_ = (
        ("version", _Version),
        ("previous", ctypes.c_void_p),
        ("allocate", _Allocate),
        ("from_object", ctypes.c_void_p),
        ("to_object", _ToObject),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", _CurrentStream),
    )


class _Allocation(NamedTuple):
    """A prototype and the extents that it points to."""

    tensor: Tensor
    shape: Any


class ExchangeApi:
    """A producer's C table: its allocator and its current stream.

    Parameters
    ----------
    capsule : PyCapsule
        ``type(x).__dlpack_c_exchange_api__``.
    """

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule
        self._table = _Table.from_address(_capsule_pointer(capsule, b"dlpack_exchange_api"))
        if self._table.version.major != 1:
            raise TypeError(f"its DLPack exchange table has version {self._table.version.major}; 1 is known here.")

    def empty(self, spec: ArraySpec) -> Any:
        """Return a new dense array of the producer's own type."""
        prototype = _prototype(spec)
        messages: list[str] = []
        report = _SetError(lambda _, kind, text: messages.append(f"{kind.decode()}: {text.decode()}"))
        managed = ctypes.c_void_p()
        if self._table.allocate(ctypes.byref(prototype.tensor), ctypes.byref(managed), None, report):
            raise MemoryError(f"the producer of the lead operand could not allocate {spec}: {'; '.join(messages)}.")
        result = ctypes.c_void_p()
        if self._table.to_object(managed, ctypes.byref(result)):
            raise TypeError("the producer of the lead operand could not make an array of its own allocation.")
        made = ctypes.cast(result, ctypes.py_object).value
        _release(made)  # the call gave a reference, and the cast took another
        return made

    def current_stream(self, device: Device) -> int:
        """Return the address of the producer's current stream; 0 on the CPU."""
        stream = ctypes.c_void_p()
        if self._table.current_stream(_DEVICE_CODES[device.kind], device.ordinal, ctypes.byref(stream)):
            raise RuntimeError(f"the producer of the lead operand gave no current stream for {device}.")
        return stream.value or 0


def _prototype(spec: ArraySpec) -> _Allocation:
    dtype = DTYPES[spec.dtype]
    shape = (ctypes.c_int64 * max(spec.ndim, 1))(*spec.shape)
    tensor = Tensor(
        None,
        _Device(_DEVICE_CODES[spec.device.kind], spec.device.ordinal),
        spec.ndim,
        _DType(dtype.dlpack_code, dtype.itemsize * 8, 1),
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        None,
        0,
    )
    return _Allocation(tensor, shape)
