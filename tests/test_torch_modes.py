"""Modes of PyTorch's: autocast, tensors without memory, dispatch modes, subclasses, inference, determinism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import array, layer_arrays, mlp

import fusedops
from fusedops.frameworks import kind_of
from fusedops.problem import Settings

Array = Any

X, W, B = array(4, 5, dtype=torch.float32), array(5, 3, dtype=torch.float32), array(3, dtype=torch.float32)


def ours(x: Array, w: Array, b: Array) -> Array:
    return fusedops.matmul(x, w, bias=b, activation="relu")


def own(x: Array, w: Array, b: Array) -> Array:
    return torch.relu(F.linear(x, w.T, b))


# Autocast ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moving", [False, True])
def test_autocast_casts_as_a_linear_layer_is_cast(moving: bool) -> None:
    arrays = [x.clone().requires_grad_(moving) for x in (X, W, B)]
    with torch.autocast("cpu", torch.bfloat16):
        got, want = ours(*arrays), own(*arrays)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want)
    if moving:
        gradients = [torch.autograd.grad(out.sum(), arrays) for out in (got, want)]
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
        assert {x.dtype for x in gradients[0]} == {torch.float32}


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(X.double(), W.double(), B.double()).dtype is torch.float64


def test_autocast_with_a_wide_result() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = fusedops.matmul(X, W, bias=B, out_dtype="float32")
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, X.bfloat16().float() @ W.bfloat16().float() + B)


def test_autocast_of_an_mlp() -> None:
    """In one operation or written to the caller's array."""
    arrays = layer_arrays(torch.float32)
    x, w1, w2, b1, b2 = arrays
    wanted = mlp("gelu_tanh")(*(t.bfloat16() for t in arrays))
    out = torch.zeros_like(wanted)
    with torch.autocast("cpu", torch.bfloat16):
        got = mlp("gelu_tanh")(*arrays)
        assert fusedops.mlp(x, w1, w2, b1=b1, b2=b2, activation="gelu_tanh", out=out) is out
    torch.testing.assert_close((got, out), (wanted, wanted))


# Tensors without memory ----------------------------------------------------------------------------------------------


def test_fake_tensors() -> None:
    """Only shapes and dtypes are computed, also of what is learnt from them."""
    with FakeTensorMode():
        x, w = torch.empty(4, 5, requires_grad=True), torch.empty(5, 3)
        out = fusedops.matmul(x, w, activation="gelu_tanh")
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert (tuple(out.shape), tuple(gradient.shape)) == ((4, 3), (4, 5))


@pytest.mark.parametrize("moving", [False, True])
def test_meta_tensors(moving: bool) -> None:
    x, w = torch.empty(4, 5, device="meta", requires_grad=moving), torch.empty(5, 3, device="meta")
    out = fusedops.matmul(x, w, activation="relu")
    assert (tuple(out.shape), out.device.type) == ((4, 3), "meta")
    if moving:
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def test_a_plan_refuses_a_tensor_without_memory() -> None:
    planned = fusedops.plan(X, W)
    with FakeTensorMode() as mode, pytest.raises(TypeError, match="subclass"):
        planned(mode.from_tensor(X), mode.from_tensor(W))


# Modes and subclasses ------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts the operators of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if operator.namespace == "fusedops":
            self.seen.append(operator.__name__)
        return operator(*arguments, **(keywords or {}))


def test_a_mode_sees_the_operator() -> None:
    with Counting() as mode:
        out = ours(X, W, B)
    assert mode.seen == ["product.default"]
    torch.testing.assert_close(out, own(X, W, B))


class Named(torch.Tensor):
    """A tensor that says no more than that it is one."""


BLOCKS: dict[str, tuple[AbstractContextManager[Any], type]] = {
    "function mode": (torch.device("cpu"), torch.Tensor),
    "inference": (torch.inference_mode(), torch.Tensor),
    "subclass": (nullcontext(), Named),
    "parameter": (torch.no_grad(), torch.nn.Parameter),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_result_has_the_type_of_a_linear_layers(name: str) -> None:
    block, kind = BLOCKS[name]
    w = torch.nn.Parameter(W) if kind is torch.nn.Parameter else W.as_subclass(kind)
    with block:
        got, want = ours(X, w, B), own(X, w, B)
    assert type(got) is type(want)
    torch.testing.assert_close(got, want)


def test_an_inference_tensor_is_written() -> None:
    with torch.inference_mode():
        out = torch.empty(4, 3)
        assert fusedops.matmul(X, W, out=out) is out
        torch.testing.assert_close(out, X @ W)


def test_vmap_with_out_is_refused_rather_than_half_written() -> None:
    out = torch.zeros(2, 4, 3)
    with pytest.raises(Exception, match=r"vmap|batching|in-place|inplace|out"):
        torch.vmap(lambda x, o: fusedops.matmul(x, W, out=o))(torch.stack([X, X]), out)
    assert not out.any()


# Determinism ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def settled(asked: bool | None) -> bool | None:
    """Return what becomes of the argument for an array on a GPU."""
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float16)
    answer: bool | None = kind_of(X).framework.settled(Settings(deterministic=asked), on_gpu).deterministic
    return answer


@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_asks_for_the_same_bits_unless_the_caller_does_not() -> None:
    assert [settled(None), settled(False), settled(True)] == [True, False, True]


def test_without_the_mode_nobody_asks() -> None:
    assert settled(None) is None
