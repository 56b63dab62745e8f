"""Arrays of several libraries in one call: who leads, and whose memory is read."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from libraries import ADDRESS, BIAS, LIBRARIES, WANT, A, B, aligned, made

import fusedops
from fusedops.arrays import ArraySpec, Device
from fusedops.dtypes import name_of
from fusedops.frameworks import kind_of
from fusedops.lead import join_lead
from fusedops.testing import assert_within, matmul_oracle, to_numpy

Array = Any

# Who leads ------------------------------------------------------------------------------------------------------------


ORDERS = [
    # libraries of a, b and bias; who leads
    (("numpy", "numpy", "numpy"), "numpy"),
    (("numpy", "torch", "numpy"), "torch"),
    (("numpy", "numpy", "jax"), "jax"),
    (("torch", "jax", "numpy"), "torch"),
    (("jax", "torch", "numpy"), "jax"),
    (("numpy", "jax", "torch"), "jax"),
    (("tvm_ffi.Tensor", "torch", "jax"), "tvm_ffi.Tensor"),
    (("torch", "tvm_ffi.Tensor", "jax"), "torch"),
    (("numpy", "array_api_strict", "torch"), "array_api_strict"),
    (("jax", "jax", "array_api_strict"), "jax"),
]


@pytest.mark.parametrize(("libraries", "leader"), ORDERS, ids=str)
def test_the_lead_rule(libraries: tuple[str, ...], leader: str) -> None:
    """The first operand that is not NumPy's leads, else NumPy; the result is of its type, and right."""
    a, b, bias = (made(name, x) for name, x in zip(libraries, (A, B, BIAS), strict=True))
    lead = join_lead((a, b, bias, None, None, None))[0]
    assert (lead.framework.name, lead.traced) == (leader, False)
    out = np.zeros((8, 8), "float32") if leader == "tvm_ffi.Tensor" else None
    result = fusedops.matmul(a, b, bias=bias, out=out)
    assert result is out or type(result) is type(made(leader, A))
    assert_within(result, WANT.out, WANT.scale, 8)


@pytest.mark.parametrize("place", range(3))
def test_a_tracer_leads_wherever_it_stands(place: int) -> None:
    """A tracer leads before any concrete array, of JAX's too; NumPy arrays join it as constants."""
    seen = []

    def traced(x: Array) -> Array:
        operands: list[Array] = [A, jnp.asarray(B), BIAS]
        operands[place] = x
        lead = join_lead((*operands, None, None, None))[0]
        seen.append((lead.framework.name, lead.traced))
        return fusedops.matmul(operands[0], operands[1], bias=operands[2])

    result = jax.jit(traced)([A, B, BIAS][place])
    assert seen == [("jax", True)]
    assert_within(result, WANT.out, WANT.scale, 8)


def test_a_concrete_foreign_array_does_not_join_a_trace() -> None:
    """A trace would keep today's values of it for ever, so it is refused by name."""
    with pytest.raises(TypeError, match="a is a torch array, and JAX is tracing"):
        jax.jit(lambda x: fusedops.matmul(torch.from_numpy(A), x))(B)


# Whose memory is read -------------------------------------------------------------------------------------------------

PAIRS = [pair for pair in itertools.permutations(LIBRARIES, 2) if pair[0] != "numpy"]


@pytest.mark.parametrize(("leader", "source"), PAIRS, ids=lambda pair: pair)
def test_an_operand_joins_over_its_own_memory(leader: str, source: str) -> None:
    """What the lead reads is at the address where the source has its values: nothing was copied."""
    lead, x = made(leader, A), made(source, B)
    kind, joined, _ = join_lead((lead, x, None, None, None, None))
    assert joined[0] is lead
    if (leader, source) == ("jax", "numpy"):
        assert joined[1] is x  # JAX takes NumPy arrays by rules of its own
        return
    assert kind.framework.view(joined[1]).ptr == LIBRARIES[source].address(x)


@pytest.mark.parametrize(("leader", "source"), PAIRS, ids=lambda pair: pair)
def test_a_result_does_not_hold_or_alter_its_operands(leader: str, source: str) -> None:
    """The result is right, in memory of its own, and the operands are as they were."""
    lead, x = made(leader, A), made(source, B)
    out = np.zeros((8, 8), "float32") if leader == "tvm_ffi.Tensor" else None
    result = fusedops.matmul(lead, x, out=out)
    want = matmul_oracle(A, B)
    assert_within(result, want.out, want.scale, 8)
    assert np.array_equal(to_numpy(torch.from_dlpack(lead)), A)
    assert np.array_equal(to_numpy(x if source == "numpy" else torch.from_dlpack(x)), B)


def test_a_transposed_tensor_is_the_contiguous_one_to_jax() -> None:
    """Strides come through DLPack: the same values, with the same bits in the result."""
    tensor = torch.from_numpy(aligned(B)).T
    lead = jnp.asarray(A)
    joined = join_lead((lead, tensor, None, None, None, None))[1][1]
    assert np.array_equal(np.asarray(joined), B.T)
    assert np.array_equal(fusedops.matmul(lead, tensor), fusedops.matmul(lead, tensor.contiguous()))


BFLOAT16 = ("numpy", "torch", "jax", "tvm_ffi.Tensor")


@pytest.mark.parametrize(("leader", "source"), list(itertools.product(BFLOAT16, BFLOAT16)))
def test_bfloat16_meets_bfloat16(leader: str, source: str) -> None:
    """NumPy's by ml_dtypes, PyTorch's and JAX's are one dtype; the result is the lead's."""
    a, b = (x.astype(ml_dtypes.bfloat16) for x in (A, B))
    operands = made(leader, a), made(source, b)
    kind, joined, _ = join_lead((*operands, None, None, None, None))
    assert {kind.framework.spec(x).dtype for x in joined[:2]} == {"bfloat16"}
    out = torch.zeros(8, 8, dtype=torch.bfloat16) if kind.framework.name == "tvm_ffi.Tensor" else None
    result = fusedops.matmul(*operands, out=out)
    assert name_of(result.dtype) == "bfloat16"
    want = matmul_oracle(a, b)
    assert_within(result, want.out, want.scale, 8)


# CuPy, as far as a CPU goes -------------------------------------------------------------------------------------------


def on_gpu(shape: tuple[int, ...], dtype: Any, order: str = "C") -> Array:
    """Return a CuPy array at an invented address, whose memory nobody reads."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(ADDRESS, 1 << 20, None, 0)
    return cupy.ndarray(shape, dtype=dtype, memptr=cupy.cuda.MemoryPointer(memory, 32), order=order)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
@pytest.mark.parametrize(("order", "strides"), [("C", (4, 1)), ("F", (1, 3))])
def test_cupy_arrays_are_read(dtype: Any, order: str, strides: tuple[int, int]) -> None:
    """Recognised without a driver: strides in elements, dtype, device and pointer."""
    x = on_gpu((3, 4), dtype, order)
    kind = kind_of(x)
    assert (kind.framework.name, kind.traced) == ("cupy", False)
    spec = ArraySpec((3, 4), strides, name_of(np.dtype(dtype)), Device("cuda", 0))
    assert kind.framework.spec(x) == spec
    assert kind.framework.device(x) == Device("cuda", 0)
    view = kind.framework.view(x)
    assert (view.spec, view.ptr, view.readonly, view.owner is x) == (spec, ADDRESS + 32, False, True)


def test_cupy_signatures_tell_layouts_and_dtypes_apart() -> None:
    """Equal for arrays of one kind, different where planning would see a difference."""
    x = on_gpu((4, 4), "float32")
    signature = kind_of(x).framework.signature
    assert signature(x) == signature(on_gpu((4, 4), "float32"))
    others = [on_gpu((4, 4), "float32", "F"), on_gpu((4, 4), "float16"), on_gpu((2, 8), "float32"), on_gpu((16,), "f4")]
    assert len({signature(y) for y in (x, *others)}) == 5
    assert hash(signature(x)) == hash(signature(on_gpu((4, 4), "float32")))


@pytest.mark.parametrize("leader", ["torch", "jax", "array_api_strict", "tvm_ffi.Tensor"])
def test_arrays_on_two_devices_do_not_meet(leader: str) -> None:
    """A CuPy array and one on the CPU: an error with both devices, before anything touches the address."""
    with pytest.raises(ValueError, match=r"b is a cupy array on cuda:0, and the lead is a .* array on cpu"):
        fusedops.matmul(made(leader, A), on_gpu((8, 8), "float32"))
