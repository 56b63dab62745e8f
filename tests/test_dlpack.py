"""DLPack: whatever a producer exports is read right and freed once, and a producer's own table makes its arrays."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import array_api_strict
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import producers
import pytest
import torch
import tvm_ffi
from frameworks import np_dtype
from producers import Producer

import fusedops
from fusedops.arrays import ArraySpec, Device
from fusedops.dlpack import device_of, numpy_over, view_of
from fusedops.dtypes import DTYPES

Array = Any
Ints = tuple[int, ...]

CPU = Device("cpu", 0)
DATA = np.arange(24, dtype="float32")


@pytest.fixture(autouse=True)
def nothing_leaks() -> Any:
    """Every export of a test's own producers is deleted, once, by the end of the test."""
    yield
    if producers.exports:
        gc.collect()
    assert not producers.exports


# Reading --------------------------------------------------------------------------------------------------------------

REAL = {
    "numpy": (lambda x: x, lambda x: x.ctypes.data),
    "torch": (torch.from_numpy, lambda x: x.data_ptr()),
    "jax": (jnp.asarray, lambda x: x.unsafe_buffer_pointer()),
    "array_api_strict": (array_api_strict.asarray, lambda x: x._array.ctypes.data),
    "tvm_ffi": (tvm_ffi.from_dlpack, lambda x: np.from_dlpack(x).ctypes.data),
}


@pytest.mark.parametrize("library", REAL)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (4, 1, 2)], ids=str)
def test_real_producers(library: str, shape: Ints) -> None:
    """Shape, strides, dtype, device and address are the library's own."""
    make, address = REAL[library]
    x = make(np.ones(shape, "float32"))
    view = view_of(x)
    assert view.spec == ArraySpec.dense(shape, "float32", CPU)
    assert view.ptr == address(x)
    assert np.array_equal(numpy_over(view), np.ones(shape))


STRIDED: dict[str, Callable[[Array], Array]] = {
    "transposed": lambda x: x.T,
    "sliced": lambda x: x[1:3, 1:],
    "stepped": lambda x: x[::2, ::3],
    "broadcast": lambda x: np.broadcast_to(x[:1], (4, 6)) if isinstance(x, np.ndarray) else x[:1].expand(4, 6),
}


@pytest.mark.parametrize("how", STRIDED)
@pytest.mark.parametrize("make", [lambda x: x, torch.from_numpy], ids=["numpy", "torch"])
def test_strided_views(how: str, make: Callable[[np.ndarray], Array]) -> None:
    """Strides and the offset of the first element come through."""
    x = STRIDED[how](make(DATA.reshape(4, 6)))
    view = view_of(x)
    strides = x.stride() if isinstance(x, torch.Tensor) else tuple(s // 4 for s in x.strides)
    assert (view.spec.shape, view.spec.strides) == (tuple(x.shape), strides)
    assert np.array_equal(numpy_over(view), np.asarray(x))


def test_negative_strides() -> None:
    """The address is that of the element at index 0, wherever the memory begins."""
    x = DATA[::-2]
    view = view_of(x)
    assert (view.spec.strides, view.ptr) == ((-2,), x.ctypes.data)
    assert np.array_equal(numpy_over(view), x)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 3, 4), ()], ids=str)
def test_null_strides_are_dense_rows(shape: Ints, versioned: bool) -> None:
    """A producer may leave strides out for a dense array."""
    view = view_of(Producer(DATA, shape, None, versioned=versioned))
    assert view.spec == ArraySpec.dense(shape, "float32", CPU)
    assert np.array_equal(numpy_over(view), DATA[: max(1, int(np.prod(shape)))].reshape(shape))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("strides", [None, (6, 1), (1, 2)])
def test_byte_offset(strides: Ints | None, versioned: bool) -> None:
    """The first element lies ``byte_offset`` bytes after the address."""
    view = view_of(Producer(DATA, (2, 3), strides, byte_offset=20, versioned=versioned))
    assert view.ptr == DATA.ctypes.data + 20
    steps = [4 * s for s in strides or (3, 1)]
    assert np.array_equal(numpy_over(view), np.lib.stride_tricks.as_strided(DATA[5:], (2, 3), steps))


@pytest.mark.parametrize("data", [None, DATA], ids=["null", "some"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_no_elements(shape: Ints, data: np.ndarray | None) -> None:
    """An array without elements may have no memory, and no strides."""
    view = view_of(Producer(data, shape))
    assert (view.spec.shape, numpy_over(view).shape) == (shape, shape)
    assert numpy_over(view).dtype == np.float32


def test_no_memory_for_elements_is_refused() -> None:
    """Address 0 is an error, not a fault when the first element is read."""
    with pytest.raises(TypeError, match="no memory"):
        view_of(Producer(None, (2, 3)))


@pytest.mark.parametrize(("flags", "readonly"), [(0, False), (1, True), (2, False), (3, True)])
def test_the_read_only_flag(flags: int, readonly: bool) -> None:
    """Its bit, and no other, forbids writing, in NumPy's view too."""
    view = view_of(Producer(DATA.copy(), (4, 6), flags=flags))
    assert view.readonly is readonly
    assert numpy_over(view).flags.writeable is not readonly


def test_read_only_numpy_arrays() -> None:
    """NumPy's own flag comes through DLPack."""
    x = np.ones(3)
    assert not view_of(x).readonly
    x.flags.writeable = False
    assert view_of(x).readonly


def test_bfloat16() -> None:
    """Type code 4 with 16 bits is bfloat16, for NumPy that of ml_dtypes."""
    values = torch.tensor([1.5, -2.0, 3e38]).to(torch.bfloat16)
    for x in (values, tvm_ffi.from_dlpack(values)):
        view = view_of(x)
        assert view.spec.dtype == "bfloat16"
        assert numpy_over(view).dtype == ml_dtypes.bfloat16
        assert numpy_over(view).astype("float64").tolist() == values.double().tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_the_table(name: str) -> None:
    """Code and bits of the table name the dtype, and NumPy's view has it, also without elements."""
    dtype = DTYPES[name]
    data = np.zeros(3, np_dtype(name))
    view = view_of(Producer(data, (3,), code=dtype.dlpack_code))
    assert view.spec.dtype == name
    assert numpy_over(view).dtype == data.dtype
    assert numpy_over(view_of(Producer(data, (0,), code=dtype.dlpack_code))).dtype == data.dtype


@pytest.mark.parametrize(
    ("code", "bits", "lanes"), [(2, 32, 4), (2, 8, 1), (7, 8, 1), (4, 32, 1), (0, 4, 2), (3, 64, 1), (17, 4, 1)]
)
def test_other_types_are_named_and_refused(code: int, bits: int, lanes: int) -> None:
    """Vectors, float8, opaque handles: no dtype of the package, and an error that says what it is."""
    x = Producer(DATA, (2, 3), code=code, bits=bits, lanes=lanes)
    text = f"dlpack type (code {code}, {bits} bits, {lanes} lanes)"
    assert view_of(x).spec.dtype == text
    with pytest.raises(TypeError, match=rf"a is dlpack type \(code {code}, {bits} bits, {lanes} lanes\), expected one"):
        fusedops.matmul(x, np.ones((3, 2), "float32"), out=np.empty((2, 2), "float32"))


@pytest.mark.parametrize(
    ("code", "device"), [((1, 0), CPU), ((2, 3), Device("cuda", 3)), ((13, 1), Device("cuda_managed", 1))]
)
def test_devices(code: Ints, device: Device) -> None:
    """Device codes are DLPack's; an unknown one keeps its number."""
    assert device_of(Producer(DATA, (2, 3), device=code)) == device  # type: ignore[arg-type]
    assert view_of(Producer(DATA, (2, 3), device=code)).spec.device == device  # type: ignore[arg-type]
    assert device_of(Producer(DATA, (2, 3), device=(77, 2))) == Device("dlpack77", 2)


def test_a_consumed_capsule_is_refused() -> None:
    """A capsule that somebody took over has nothing to read any more."""

    class Once:
        def __init__(self) -> None:
            self.capsule = torch.ones(2, 3).__dlpack__()
            torch.from_dlpack(self.capsule)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: Any) -> Any:
            return self.capsule

    with pytest.raises(TypeError, match="used_dltensor"):
        view_of(Once())


def test_other_users_of_pythonapi_do_not_meet_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others declare on the shared `ctypes.pythonapi` functions changes nothing here."""
    for name in ("PyCapsule_GetPointer", "PyCapsule_GetName"):
        monkeypatch.setattr(getattr(ctypes.pythonapi, name), "argtypes", [ctypes.c_double])
    assert view_of(DATA).ptr == DATA.ctypes.data


# Memory ---------------------------------------------------------------------------------------------------------------


def test_the_owner_keeps_the_memory() -> None:
    """A view, and NumPy's array over it, outlive the producer; then the export is deleted, once."""
    array = numpy_over(view_of(Producer(DATA.copy(), (4, 6))))
    gc.collect()
    assert len(producers.exports) == 1
    assert np.array_equal(array, DATA.reshape(4, 6))
    part = array[1:, ::2]
    del array
    assert len(producers.exports) == 1
    del part
    assert not producers.exports


@pytest.mark.parametrize("make", [np.ones, torch.ones, lambda n: jnp.ones(n)], ids=["numpy", "torch", "jax"])
def test_a_view_keeps_and_releases_a_real_array(make: Callable[[int], Array]) -> None:
    """The values are there as long as a view is, and the array is free when the view is gone."""
    x = make(1000)
    watched = weakref.ref(x)
    view = view_of(x)
    del x
    assert numpy_over(view).sum() == 1000
    del view
    gc.collect()
    assert watched() is None


def test_ten_thousand_views_leave_nothing() -> None:
    """No export and no reference is left behind, from producers old and new."""
    arrays = [
        Producer(DATA, (4, 6)),
        Producer(DATA, (4, 6), versioned=False),
        DATA,
        torch.ones(4),
        tvm_ffi.from_dlpack(DATA),
    ]

    def references() -> list[int]:
        return [sys.getrefcount(x) for x in arrays]

    def look(x: Array) -> None:
        for _ in range(2000):
            numpy_over(view_of(x))

    before = references()
    for i in range(len(arrays)):
        look(arrays[i])
    assert references() == before
    assert not producers.exports


def test_numpy_over_copies_nothing() -> None:
    """NumPy's view has the same address and strides, and writes where the producer reads."""
    tensor = torch.zeros(5, 4)[1:, ::2]
    array = numpy_over(view_of(tensor))
    assert (array.ctypes.data, array.strides) == (tensor.data_ptr(), (16, 8))
    array[...] = 7
    assert tensor.sum() == 7 * 8
