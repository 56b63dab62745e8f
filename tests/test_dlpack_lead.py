"""A lead known by DLPack alone: its own table makes the results, or the caller says where they go."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import producers
import pytest
import torch
import tvm_ffi
from producers import Box, Producer

import fusedops
from fusedops.arrays import ArraySpec, Device
from fusedops.dlpack import ExchangeApi, numpy_over, view_of
from fusedops.frameworks import kind_of
from fusedops.testing import assert_within, matmul_oracle

Array = Any
Ints = tuple[int, ...]

CPU = Device("cpu", 0)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Every export of a test's own producers is deleted, once, by the end of the test."""
    yield
    if producers.exports:
        gc.collect()
    assert not producers.exports


# A producer's own table -----------------------------------------------------------------------------------------------


TORCH_TABLE = ExchangeApi(torch.Tensor.__dlpack_c_exchange_api__)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "uint8", "bool"])
def test_the_table_makes_torch_tensors(shape: Ints, dtype: str) -> None:
    """A new dense tensor of the shape, dtype and device asked for, with memory to write."""
    made = TORCH_TABLE.empty(ArraySpec.dense(shape, dtype))
    assert type(made) is torch.Tensor
    assert (tuple(made.shape), made.dtype) == (shape, getattr(torch, dtype))
    assert made.is_contiguous()
    assert made.device.type == "cpu"
    made.fill_(1)
    assert bool((made == 1).all())


def test_the_table_gives_one_reference() -> None:
    """The caller holds the only reference, so the tensor and its memory go with it: a thousand times over."""
    made, plain = TORCH_TABLE.empty(ArraySpec.dense((2, 3), "float32")), torch.empty(2, 3)
    assert sys.getrefcount(made) == sys.getrefcount(plain)
    spec = ArraySpec.dense((256, 1024), "float64")
    for _ in range(1000):  # 2 MiB each
        made = TORCH_TABLE.empty(spec)
        watched = weakref.ref(made)
        del made
        assert watched() is None


def test_current_stream_on_the_cpu() -> None:
    """There is none, which is 0."""
    assert TORCH_TABLE.current_stream(CPU) == 0
    assert ExchangeApi(Box.__dlpack_c_exchange_api__).current_stream(CPU) == 0


def test_current_stream_of_a_device() -> None:
    """The producer is asked with DLPack's code and the ordinal."""
    assert ExchangeApi(Box.__dlpack_c_exchange_api__).current_stream(Device("cuda", 3)) == 1003


def test_a_failed_allocation_says_why() -> None:
    """The producer's own words are in the error."""
    with pytest.raises(MemoryError, match=r"could not allocate float64\[1000, 1000\].*MemoryError: the box is full"):
        ExchangeApi(Box.__dlpack_c_exchange_api__).empty(ArraySpec.dense((1000, 1000), "float64"))


def test_another_version_of_the_table_is_refused() -> None:
    """Version 2 may look otherwise."""
    table = producers.DLPackExchangeAPI(producers.DLPackVersion(2, 0))
    capsule = producers.new_capsule(ctypes.addressof(table), producers.TABLE_NAME, None)
    with pytest.raises(TypeError, match="version 2"):
        ExchangeApi(capsule)


# As the lead of a call ------------------------------------------------------------------------------------------------

A, B = (np.random.default_rng(i).standard_normal(shape).astype("float32") for i, shape in enumerate([(4, 6), (6, 5)]))
BIAS = np.linspace(-1, 1, 5, dtype="float32")
WANT = matmul_oracle(A, B, bias=BIAS, activation="relu")
PREACT = matmul_oracle(A, B, bias=BIAS)


def over(x: Array) -> np.ndarray:
    """Return the values of any producer."""
    return numpy_over(view_of(x))


def test_a_table_makes_results_of_the_producers_own_type() -> None:
    """With a C table, a lead known by DLPack alone needs no ``out=``."""
    a, b, bias = (Box.holding(x) for x in (A, B, BIAS))
    out = fusedops.matmul(a, b, bias=bias, activation="relu")
    assert type(out) is Box
    assert_within(over(out), WANT.out, WANT.scale, 6)
    assert type(fusedops.matmul(a, B)) is Box
    assert type(fusedops.matmul(a, torch.from_numpy(B))) is Box


def test_a_table_makes_auxiliary_arrays_too() -> None:
    """The same for the auxiliary output, which goes into the backward call."""
    a, b, bias = (Box.holding(x) for x in (A, B, BIAS))
    out, aux = fusedops.epilog_matmul(a, b, epilog="RELU_AUX_BIAS", bias=bias)
    assert (type(out), type(aux["relu_aux"])) == (Box, Box)
    dz = fusedops.epilog_matmul(a, b, epilog="DRELU", relu_aux=aux["relu_aux"])
    assert np.array_equal(over(dz) != 0, PREACT.out >= 0)


def test_results_of_a_table_are_freed() -> None:
    """No result and no operand stays alive after a hundred calls."""
    a, b = Box.holding(A), Box.holding(B)
    for _ in range(100):
        fusedops.matmul(a, b)
    gc.collect()
    assert len(producers.exports) == 2


def tvm(values: np.ndarray) -> Array:
    """Return an array known by DLPack alone, without a table."""
    x = tvm_ffi.from_dlpack(np.array(values))
    assert not hasattr(type(x), "__dlpack_c_exchange_api__")
    assert not hasattr(x, "__array_namespace__")
    return x


@pytest.mark.parametrize("make_out", [tvm, np.array, torch.tensor], ids=["tvm_ffi", "numpy", "torch"])
def test_a_lead_without_a_table_writes_into_out(make_out: Callable[[np.ndarray], Array]) -> None:
    """``out=`` of its own or of any mutable kind is written and returned."""
    out = make_out(np.zeros((4, 5), "float32"))
    assert fusedops.matmul(tvm(A), tvm(B), bias=tvm(BIAS), activation="relu", out=out) is out
    assert_within(over(out), WANT.out, WANT.scale, 6)


def test_a_lead_without_a_table_writes_into_aux_out() -> None:
    """The same for ``aux_out=``."""
    out, aux = tvm(np.zeros((4, 5), "float32")), tvm(np.zeros((4, 8), "float32"))
    result, given = fusedops.epilog_matmul(
        tvm(A), tvm(B), epilog="GELU_AUX_BIAS", bias=tvm(BIAS), out=out, aux_out={"gelu_aux": aux}
    )
    assert result is out
    assert given["gelu_aux"] is aux
    assert_within(over(aux)[:, :5], PREACT.out, PREACT.scale, 6)


@pytest.mark.parametrize(
    ("given", "missing"), [((), "out= and aux_out="), (("out",), "aux_out="), (("aux_out",), "out=")]
)
def test_a_lead_without_a_table_needs_out(given: tuple[str, ...], missing: str) -> None:
    """Without a place for the result it is an error, which says what to pass."""
    outputs = {"out": np.zeros((4, 5), "float32"), "aux_out": {"gelu_aux": np.zeros((4, 8), "float32")}}
    chosen: dict[str, Any] = {name: outputs[name] for name in given}
    with pytest.raises(TypeError, match=rf"tvm_ffi.Tensor arrays come with no way to make a new one; pass {missing}\."):
        fusedops.epilog_matmul(tvm(A), tvm(B), epilog="GELU_AUX", **chosen)


def test_a_plain_matmul_without_a_table_needs_out() -> None:
    """The same at the other door."""
    with pytest.raises(TypeError, match=r"matmul: tvm_ffi.Tensor arrays .* pass out=\."):
        fusedops.matmul(tvm(A), tvm(B))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("offset", [0, 4, 12])
def test_null_strides_and_offsets_give_right_values(offset: int, versioned: bool) -> None:
    """A lead with NULL strides and a byte offset, and one that has no elements, multiply as any other."""
    a = Producer(np.arange(16, dtype="float32"), (2, 6), byte_offset=offset, versioned=versioned)
    out = np.empty((2, 5), "float32")
    fusedops.matmul(a, B, out=out)
    want = matmul_oracle((np.arange(12, dtype="float32") + offset // 4).reshape(2, 6), B)
    assert_within(out, want.out, want.scale, 6)
    empty = Producer(None, (2, 0), versioned=versioned)
    assert np.array_equal(fusedops.matmul(empty, np.ones((0, 5), "float32"), bias=BIAS, out=out), [BIAS, BIAS])


def test_a_read_only_out_is_refused() -> None:
    """The flag of a producer protects its memory."""
    out = Producer(np.zeros(20, "float32"), (4, 5), flags=1)
    with pytest.raises(ValueError, match="out is read-only"):
        fusedops.matmul(tvm(A), B, out=out)


def test_bfloat16_through_a_lead_without_a_table() -> None:
    """Operands and result in bfloat16, from ml_dtypes, PyTorch and TVM FFI."""
    a, b = (x.astype(ml_dtypes.bfloat16) for x in (A, B))
    theirs = tvm_ffi.from_dlpack(torch.from_numpy(a.view("uint16")).view(torch.bfloat16))
    out = torch.zeros(4, 5, dtype=torch.bfloat16)
    fusedops.matmul(theirs, b, out=out)
    want = matmul_oracle(a, b)
    assert_within(out, want.out, want.scale, 6)


def test_each_class_is_a_framework_of_its_own() -> None:
    """A class with a table and one without are told apart, and known again."""
    kinds = [kind_of(x).framework for x in (Box.holding(A), tvm(A), Producer(A, (4, 6)), Box.holding(B))]
    assert [framework.makes_results for framework in kinds] == [True, False, False, True]
    assert kinds[0] is kinds[3]
    assert [framework.name for framework in kinds[:3]] == ["producers.Box", "tvm_ffi.Tensor", "producers.Producer"]
