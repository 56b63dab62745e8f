"""Foreign operands that must not join a call as they are, and how long the memory of those that do is safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from libraries import BIAS, A, B, aligned, made

import fusedops
from fusedops.testing import assert_within, matmul_oracle

Array = Any

# What must not join ---------------------------------------------------------------------------------------------------


def negated(x: torch.Tensor) -> torch.Tensor:
    """Return a view that negates when it is read, as the imaginary part of a conjugate is."""
    assert torch.complex(x, x).conj().imag.is_neg()
    return torch._neg_view(x)


def fake(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of shape and dtype alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(x.shape)


def dual(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a tangent."""
    return torch.autograd.forward_ad.make_dual(x, x)


NOT_THEIR_MEMORY = {
    "negated": (negated, "values are not in its memory"),
    "zero": (lambda x: torch._efficientzerotensor(x.shape), "values are not in its memory"),
    "fake": (fake, "FakeTensor has no memory of its own"),
    "dual": (dual, "forward-mode tangent"),
    "sparse": (lambda x: x.to_sparse(), "layout is torch.sparse_coo"),
    "requires grad": (lambda x: x.clone().requires_grad_(), "requires a gradient"),
}


@pytest.mark.parametrize("leader", ["jax", "array_api_strict", "tvm_ffi.Tensor"])
@pytest.mark.parametrize(("make", "message"), NOT_THEIR_MEMORY.values(), ids=NOT_THEIR_MEMORY.keys())
def test_tensors_whose_memory_is_not_their_values(
    leader: str, make: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """What exports address 0, the wrong sign, or loses a derivative is refused by name, and nothing is read."""
    out = np.zeros((8, 8), "float32") if leader == "tvm_ffi.Tensor" else None
    with torch.autograd.forward_ad.dual_level(), pytest.raises(TypeError, match=rf"matmul: b .*{message}"):
        fusedops.matmul(made(leader, A), make(torch.from_numpy(B)), out=out)


def test_what_the_message_says_to_do_works() -> None:
    """A clone of a negated view, and of a zero tensor, has its values in memory."""
    lead = jnp.asarray(A)
    want = matmul_oracle(A, -B)
    assert_within(fusedops.matmul(lead, negated(torch.from_numpy(B)).clone()), want.out, want.scale, 8)
    assert not np.any(fusedops.matmul(lead, torch._efficientzerotensor((8, 8)).clone()))


def test_torch_computes_with_its_own_such_tensors() -> None:
    """Where PyTorch leads, a negated view is what it says."""
    want = matmul_oracle(A, -B)
    assert_within(fusedops.matmul(torch.from_numpy(A), negated(torch.from_numpy(B))), want.out, want.scale, 8)


@pytest.mark.parametrize("name", ["a", "b", "bias"])
def test_float64_is_not_narrowed_by_jax(name: str) -> None:
    """With 64-bit types off JAX would take a float64 tensor as float32; that is an error which says so."""
    with jax.enable_x64(False):
        arrays: dict[str, Array] = {"a": jnp.asarray(A), "b": jnp.asarray(B), "bias": jnp.asarray(BIAS)}
        arrays[name] = torch.from_numpy(np.asarray(arrays[name], "float64"))
        # The first operand that is not NumPy's leads: here it is JAX's in every order.
        operands = (arrays["a"], arrays["b"]) if name != "a" else (arrays["b"], arrays["a"])
        with pytest.raises(TypeError, match="is float64, which JAX narrows to float32"):
            fusedops.matmul(*operands, bias=arrays["bias"])


ODD: dict[str, tuple[Callable[[], np.ndarray], type[Exception]]] = {
    "other byte order": (lambda: B.astype(">f4"), TypeError),
    "masked": (lambda: np.ma.masked_less(B, 0), TypeError),
    "matrix": (lambda: np.asmatrix(B), TypeError),
    "reversed": (lambda: B[::-1], ValueError),
}


@pytest.mark.parametrize("leader", ["numpy", "torch", "jax", "array_api_strict"])
@pytest.mark.parametrize(("odd", "kind"), ODD.values(), ids=ODD.keys())
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_odd_numpy_arrays_are_refused_by_name(
    leader: str, odd: Callable[[], np.ndarray], kind: type[Exception]
) -> None:
    """Whoever leads, the message says which argument it is."""
    with pytest.raises(kind, match=r"matmul: b "):
        fusedops.matmul(made(leader, A), odd())


def test_a_deleted_jax_array_is_refused_by_name() -> None:
    """Donated or deleted, its memory is gone."""
    gone = jnp.asarray(B) + 0
    gone.delete()
    for leader in ("torch", "array_api_strict", "jax"):
        with pytest.raises(ValueError, match=r"matmul: b .*deleted or donated"):
            fusedops.matmul(made(leader, A), gone)


def test_a_read_only_numpy_array_does_not_become_a_writable_tensor() -> None:
    """PyTorch has no read-only tensors, so it is refused; leads that only read take it."""
    frozen = aligned(B)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="b is a numpy array that torch cannot take over: it is a read-only"):
        fusedops.matmul(torch.from_numpy(A), frozen)
    want = matmul_oracle(A, B)
    for leader in ("numpy", "jax", "array_api_strict"):
        assert_within(fusedops.matmul(made(leader, A), frozen), want.out, want.scale, 8)


# Lifetime -------------------------------------------------------------------------------------------------------------

BIG = 1500


def big_call_then_overwrite() -> Array:
    """Call with a JAX lead and a torch operand of ones, overwrite the operand at once, and return the result."""
    lead = jnp.ones((BIG, BIG), "float32")
    source = torch.ones(BIG, BIG)
    result = fusedops.matmul(lead, source)
    source.fill_(7)
    return result


def test_overwriting_a_source_does_not_change_the_result() -> None:
    """The product of XLA's own thread has read a foreign operand when the call returns."""
    jax.block_until_ready(big_call_then_overwrite())
    for _ in range(3):
        result = np.asarray(big_call_then_overwrite())
        assert (result.min(), result.max()) == (BIG, BIG)


def test_without_waiting_the_result_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: where the call does not wait, some result is that of the overwritten operand."""
    from fusedops import calls

    monkeypatch.setattr(calls, "settle", lambda *_: None)
    jax.block_until_ready(big_call_then_overwrite())
    assert any(np.asarray(big_call_then_overwrite()).max() != BIG for _ in range(20))


def pending() -> jax.Array:
    """Return an array that XLA has not computed yet: all elements are ``BIG`` squared."""
    slow, ones = jax.jit(lambda x: x @ x @ x), jnp.ones((BIG, BIG), "float32")
    for _ in range(10):
        result = slow(ones)
        if not result.is_ready():
            return result
    raise AssertionError("XLA computes before the call returns")


@pytest.mark.parametrize("leader", ["torch", "array_api_strict", "tvm_ffi.Tensor"])
def test_a_source_that_xla_still_computes(leader: str) -> None:
    """An array of JAX that is not there yet is waited for before its memory is read."""
    lead = made(leader, np.ones((2, BIG), "float32"))
    out = np.zeros((2, BIG), "float32") if leader == "tvm_ffi.Tensor" else None
    result = torch.from_dlpack(fusedops.matmul(lead, pending(), out=out))
    assert torch.all(torch.isclose(result, torch.full_like(result, float(BIG) ** 3)))
