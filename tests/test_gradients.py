"""Derivatives: `matmul` and `mlp` under JAX and PyTorch, and `mlp_grad`, against differences in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import Case, build
from frameworks import JAX, NUMPY, TORCH, TestFramework

import fusedops
from fusedops.activations import ACTIVATIONS
from fusedops.testing import matmul_oracle, to_numpy

Array = Any
Arrays = dict[str, np.ndarray]

ALL = (None, *ACTIVATIONS)
LAYERS = (None, "relu", "gelu_tanh", "gelu_erf", "silu")


def differences(f: Callable[[Arrays], np.ndarray], arrays: Arrays, dout: np.ndarray, step: float = 1e-6) -> Arrays:
    """Return the gradient of ``sum(f * dout)`` by central differences, in float64."""
    grads = {}
    for name, x in arrays.items():
        grads[name] = np.zeros(x.shape)
        for at in np.ndindex(*x.shape):
            moved = {key: value.astype(np.float64) for key, value in arrays.items()}
            moved[name][at] += step
            above = np.sum(f(moved) * dout)
            moved[name][at] -= 2 * step
            grads[name][at] = (above - np.sum(f(moved) * dout)) / (2 * step)
    return grads


def jax_gradients(f: Callable[..., Array], arrays: Arrays, dout: np.ndarray) -> Arrays:
    """Return the gradients of ``sum(f * dout)`` by ``jax.grad``."""
    theirs = {name: jnp.asarray(x) for name, x in arrays.items()}
    return jax.grad(lambda values: jnp.sum(f(**values) * jnp.asarray(dout)))(theirs)


def torch_gradients(f: Callable[..., Array], arrays: Arrays, dout: np.ndarray) -> Arrays:
    """Return the gradients of ``sum(f * dout)`` by ``backward``."""
    theirs = {name: torch.from_numpy(x.copy()).requires_grad_() for name, x in arrays.items()}
    (f(**theirs) * torch.from_numpy(dout)).sum().backward()
    return {name: x.grad for name, x in theirs.items()}


GRADIENTS = {"jax": jax_gradients, "torch": torch_gradients}

CASES = [
    Case("plain", 3, 4, 5, bias="shared", dtype="float64"),
    Case("factors", 3, 4, 5, bias="shared", c="dense", alpha=0.5, beta=-2.0, dtype="float64"),
    Case("flags", 3, 4, 5, a="flag", b="flag", bias="shared", dtype="float64"),
    Case("batch", 2, 3, 4, batch_a=(2,), bias="per_item", dtype="float64"),
    Case("one-token", 1, 4, 5, bias="shared", dtype="float64"),
    Case("one-column", 6, 1, 3, bias="shared", dtype="float64"),
]


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matmul(name: str, activation: str | None, case: Case) -> None:
    """Gradients of every array argument, bias and ``c`` counted once."""
    arrays = build(case)
    settings = {**case.settings, "activation": activation}

    def f(**values: Array) -> Array:
        return fusedops.matmul(values["a"], values["b"], bias=values["bias"], c=values.get("c"), **settings)

    def oracle(values: Arrays) -> np.ndarray:
        return matmul_oracle(values["a"], values["b"], bias=values["bias"], c=values.get("c"), **settings).out

    dout = np.random.default_rng(1).standard_normal((*case.batch_shape, case.m, case.n))
    want = differences(oracle, arrays, dout)
    got = GRADIENTS[name](f, arrays, dout)
    for key, value in want.items():
        np.testing.assert_allclose(to_numpy(got[key]), value, rtol=1e-6, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_relu_gradient_at_zero_is_zero(name: str, zero: float) -> None:
    """Rows of zeros with a zero bias: the derivative is 0, as PyTorch's and JAX's own is."""
    a = np.full((3, 4), zero)
    arrays = {"a": a, "b": np.ones((4, 5)), "bias": np.zeros(5)}
    got = GRADIENTS[name](
        lambda a, b, bias: fusedops.matmul(a, b, bias=bias, activation="relu"), arrays, np.ones((3, 5))
    )
    for value in got.values():
        assert not np.any(to_numpy(value))
    saved = fusedops.mlp_grad(np.ones((3, 5)), a, np.ones((4, 5)), np.eye(5), b1=np.zeros(5), activation="relu")
    assert not np.any(saved.dx)
    assert not np.any(saved.db1)


def layers(rng: np.random.Generator, dtype: str = "float64", leading: tuple[int, ...] = ()) -> Arrays:
    """Return the arguments of a small mlp."""
    shapes = {"x": (*leading, 3, 4), "w1": (4, 6), "w2": (6, 5), "b1": (6,), "b2": (5,)}
    return {name: (rng.standard_normal(shape) * 0.7).astype(dtype) for name, shape in shapes.items()}


def mlp_oracle(values: Arrays, activation: str | None) -> np.ndarray:
    """Return the mlp in float64."""
    hidden = matmul_oracle(values["x"], values["w1"], bias=values.get("b1"), activation=activation).out
    return matmul_oracle(hidden, values["w2"], bias=values.get("b2")).out


def call_mlp(op: Callable[..., Any], first: tuple[Array, ...], values: dict[str, Array], **more: Any) -> Any:
    """Call `mlp` or `mlp_grad` with arrays by name."""
    return op(*first, values["x"], values["w1"], values["w2"], b1=values.get("b1"), b2=values.get("b2"), **more)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("activation", LAYERS)
def test_mlp(name: str, activation: str | None) -> None:
    """`mlp` is differentiable as it stands."""
    arrays = layers(np.random.default_rng(2))
    dout = np.random.default_rng(3).standard_normal((3, 5))
    want = differences(lambda values: mlp_oracle(values, activation), arrays, dout)
    got = GRADIENTS[name](lambda **v: call_mlp(fusedops.mlp, (), v, activation=activation), arrays, dout)
    for key, value in want.items():
        np.testing.assert_allclose(to_numpy(got[key]), value, rtol=1e-6, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("framework", [NUMPY, TORCH, JAX], ids=lambda framework: framework.name)
@pytest.mark.parametrize("activation", LAYERS)
@pytest.mark.parametrize("biases", [(), ("b1",), ("b2",), ("b1", "b2")], ids=str)
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)], ids=str)
def test_mlp_grad(
    framework: TestFramework, activation: str | None, biases: tuple[str, ...], flags: tuple[bool, bool]
) -> None:
    """`mlp_grad` gives the gradients of the given arguments, from saved values and without them."""
    arrays = layers(np.random.default_rng(4), leading=(2,))
    arrays = {name: x for name, x in arrays.items() if not name.startswith("b") or name in biases}
    dout = np.random.default_rng(5).standard_normal((2, 3, 5))
    want = differences(lambda values: mlp_oracle(values, activation), arrays, dout)
    stored = {
        name: x.T.copy() if (name, True) in zip(("w1", "w2"), flags, strict=True) else x for name, x in arrays.items()
    }
    theirs = {name: framework.make(x) for name, x in stored.items()}
    more = {"activation": activation, "transpose_w1": flags[0], "transpose_w2": flags[1]}
    out, saved = call_mlp(fusedops.mlp, (), theirs, save=True, **more)
    np.testing.assert_allclose(to_numpy(out), mlp_oracle(arrays, activation), rtol=1e-12)
    for given in (saved, None):
        grads = call_mlp(fusedops.mlp_grad, (framework.make(dout),), theirs, saved=given, **more)
        for key in ("x", "w1", "w2", "b1", "b2"):
            got = getattr(grads, f"d{key}")
            if key not in arrays:
                assert got is None
                continue
            assert isinstance(got, framework.type)
            assert tuple(got.shape) == stored[key].shape
            value = want[key].T if stored[key].shape != want[key].shape or stored[key] is not arrays[key] else want[key]
            np.testing.assert_allclose(to_numpy(got), value, rtol=1e-6, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("activation", ALL)
def test_jax_transforms(activation: str | None) -> None:
    """``jit``, ``vmap``, ``jvp``, ``hessian`` and ``vmap(grad)`` go through the reference."""
    rng = np.random.default_rng(6)
    x, w, b = (jnp.asarray(rng.standard_normal(shape)) for shape in ((4, 3, 5), (5, 6), (6,)))

    def f(x: Array, w: Array, b: Array) -> Array:
        return fusedops.matmul(x, w, bias=b, activation=activation)

    def own(x: Array, w: Array, b: Array) -> Array:
        z = x @ w + b
        gelu = {"gelu_tanh": True, "gelu_erf": False}
        if activation in gelu:
            return jax.nn.gelu(z, approximate=gelu[activation])
        return {None: lambda z: z, "relu": jax.nn.relu, "silu": jax.nn.silu}[activation](z)

    def total(op: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *args: jnp.sum(op(*args) ** 2)

    transforms: tuple[Callable[..., Any], ...] = (
        lambda op: jax.jit(op)(x, w, b),
        lambda op: jax.vmap(op, (0, None, None))(x, w, b),
        lambda op: jax.jvp(op, (x, w, b), (x, w, b)),
        lambda op: jax.vmap(jax.grad(total(op), (0, 1, 2)), (0, None, None))(x, w, b),
        lambda op: jax.jit(jax.grad(total(op), (0, 1, 2)))(x, w, b),
        lambda op: jax.hessian(total(op), 2)(x[0], w, b),
        lambda op: jax.checkpoint(total(op))(x, w, b),
    )
    for transform in transforms:
        got, want = transform(f), transform(own)
        jax.tree.map(lambda g, t: np.testing.assert_allclose(g, t, rtol=1e-9, atol=1e-9), got, want)


@pytest.mark.parametrize("activation", ALL)
def test_torch_gradcheck(activation: str | None) -> None:
    """First and second derivatives by PyTorch's own check."""
    rng = torch.Generator().manual_seed(7)
    args = [torch.randn(shape, dtype=torch.float64, generator=rng).requires_grad_() for shape in ((3, 4), (4, 5), (5,))]

    def f(a: Array, b: Array, bias: Array) -> Array:
        return fusedops.matmul(a, b, bias=bias, activation=activation)

    assert torch.autograd.gradcheck(f, args)
    assert torch.autograd.gradgradcheck(f, args)
    assert torch.autograd.gradcheck(f, args, check_forward_ad=True)


def test_hand_written_backward_agrees_with_autograd() -> None:
    """RELU_AUX_BIAS, DRELU_BGRAD and BGRADB compose to the gradient that autograd finds away from 0."""
    arrays = layers(np.random.default_rng(8), "float32")
    x, w1, w2, b1 = (arrays[name] for name in ("x", "w1", "w2", "b1"))
    dout = np.ones((3, 5), "float32")
    hidden, aux = fusedops.epilog_matmul(x, w1, epilog="RELU_AUX_BIAS", bias=b1)
    dpreact, sums = fusedops.epilog_matmul(dout, w2, epilog="DRELU_BGRAD", relu_aux=aux["relu_aux"], transpose_b=True)
    dw2, db2 = fusedops.epilog_matmul(hidden, dout, epilog="BGRADB", transpose_a=True)
    got = {"w1": x.T @ dpreact, "w2": dw2, "b1": sums["drelu_bgrad"], "b2": db2["bgradb"], "x": dpreact @ w1.T}
    want = torch_gradients(lambda **v: call_mlp(fusedops.mlp, (), v, activation="relu"), arrays, dout)
    for key, value in got.items():
        np.testing.assert_allclose(value, to_numpy(want[key]), rtol=1e-4, atol=1e-5, err_msg=key)
