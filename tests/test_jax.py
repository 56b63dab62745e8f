"""`matmul` under JAX's transforms, against the plain expression in float64; and what its jaxprs are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import (
    ACTIVATIONS,
    BIAS,
    FACTORS,
    MIXED_AXES,
    OTHERS,
    PLAIN,
    PRODUCT,
    SHORT,
    TRANSFORMS,
    Product,
    assert_same,
    compiled,
    gradients,
    loss,
    names_in,
    over,
    stacked,
)

import fusedops

Array = Any

ALL = tuple(TRANSFORMS)
COMPILED = {(BIAS, activation): ALL for activation in ACTIVATIONS}
COMPILED |= {(p, activation): SHORT for p in OTHERS for activation in ("relu", "gelu_tanh")}
EAGER = [(BIAS, activation, name) for activation in ACTIVATIONS for name in (ALL if activation == "relu" else SHORT)]
EAGER += [(p, ("relu", "gelu_tanh")[i % 2], "grad of all") for i, p in enumerate(OTHERS)]


def program(f: Any, names: tuple[str, ...], p: Product) -> dict[str, Any]:
    """Return what the transforms of a function give, compiled as one program."""
    return compiled(lambda *xs: {name: TRANSFORMS[name](f)(*xs) for name in names}, *p.arrays())


@cache
def wanted(p: Product, activation: str | None) -> dict[str, Any]:
    """Return what the transforms of the plain expression give."""
    return program(p.plain(activation), COMPILED[p, activation], p)


@pytest.mark.parametrize(("p", "activation", "name"), EAGER, ids=str)
def test_eager(p: Product, activation: str | None, name: str) -> None:
    assert_same(TRANSFORMS[name](p.ours(activation))(*p.arrays()), wanted(p, activation)[name])


@pytest.mark.parametrize(("p", "activation"), COMPILED, ids=str)
def test_compiled(p: Product, activation: str | None) -> None:
    """All transforms of a product in one program."""
    got = program(p.ours(activation), COMPILED[p, activation], p)
    for name, value in wanted(p, activation).items():
        assert_same(got[name], value, what=name)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_vmap_over_any_axes(activation: str) -> None:
    """Each operand unbatched or batched over one of its axes, the result's new axis anywhere."""

    def all_of(f: Callable[..., Array]) -> Any:
        return compiled(lambda *xs: [over(axes, i % 3)(f)(*xs) for i, axes in enumerate(MIXED_AXES)], *BIAS.arrays())

    assert_same(all_of(BIAS.ours(activation)), all_of(BIAS.plain(activation)))


def test_vmap_of_factors_and_addend() -> None:
    """``c`` is batched alone, with the bias, and with everything."""
    for axes in ((None, None, None, 0), (None, None, 0, 1), (0, 1, 0, 2), (None, 0, None, None)):
        got, want = (over(axes, 1)(f)(*FACTORS.arrays()) for f in (FACTORS.ours("relu"), FACTORS.plain("relu")))
        assert_same(got, want, what=str(axes))


# How it runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_without_compilation(activation: str) -> None:
    """``jax.disable_jit`` leaves values and gradients as they are."""
    xs = BIAS.arrays()
    with jax.disable_jit():
        value, gradient = BIAS.ours(activation)(*xs), gradients(BIAS.ours(activation))(*xs)
        batched = over((0, None, None), 0)(BIAS.ours(activation))(*xs)
    assert_same(value, BIAS.plain(activation)(*xs))
    assert_same(gradient, gradients(BIAS.plain(activation))(*xs))
    assert_same(batched, over((0, None, None), 0)(BIAS.plain(activation))(*xs))


def test_a_donated_addend_is_used() -> None:
    xs = FACTORS.arrays()
    want = np.asarray(FACTORS.plain("relu")(*xs))
    got = jax.jit(FACTORS.ours("relu"), donate_argnums=3)(*xs)
    assert xs[3].is_deleted()
    assert_same(got, want)
    with pytest.raises(ValueError, match="matmul: c cannot be used: it was deleted or donated"):
        FACTORS.ours("relu")(*xs)


TRACED = "/jax/core/compile/jaxpr_trace_duration"
COMPILED_ONE = "/jax/core/compile/backend_compile_duration"

CALLS: dict[str, Callable[..., Any]] = {
    "eager": BIAS.ours("relu"),
    "eager, a separate activation": BIAS.ours("silu"),
    "eager grad": gradients(BIAS.ours("gelu_tanh")),
    "eager vmap": lambda x, *rest: jax.vmap(BIAS.ours("relu"), (0, None, None))(stacked(x), *rest),
    "compiled": jax.jit(gradients(BIAS.ours("relu"))),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_traced_or_compiled_again(call: Callable[..., Any], events: Counter[str]) -> None:
    first, second = BIAS.arrays(seed=1), BIAS.arrays(seed=2)
    jax.block_until_ready(call(*first))
    events.clear()
    jax.block_until_ready(call(*second))
    assert not {TRACED, COMPILED_ONE} & set(events), events


def test_the_first_call_is_seen_to_compile(events: Counter[str]) -> None:
    fusedops.matmul(jnp.ones((3, 11)), jnp.ones((11, 2)))
    assert events[TRACED] >= 1
    assert events[COMPILED_ONE] >= 1


def test_a_compiled_function_is_traced_once() -> None:
    traces = []

    @jax.jit
    def step(*xs: Array) -> Array:
        traces.append(len(xs))
        return gradients(BIAS.ours("relu"))(*xs)

    for seed in range(3):
        step(*BIAS.arrays(seed=seed))
    assert traces == [3]


# What it is made of ---------------------------------------------------------------------------------------------------

DEEP = ("grad of all", "hessian", "hessian, reverse", "hvp", "vmap of each", "vmap of grad", "vmap of hvp", "linearize")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("name", DEEP)
def test_every_product_is_ours(activation: str | None, name: str) -> None:
    for p in (BIAS, FACTORS):
        found = names_in(TRANSFORMS[name](p.ours(activation)), *p.arrays())
        assert found[PRODUCT] >= 1
        assert not {"dot_general", "conv_general_dilated", "ragged_dot"} & set(found), found


def test_a_product_of_jax_would_be_seen() -> None:
    assert names_in(jax.hessian(loss(BIAS.plain("relu"))), *BIAS.arrays())["dot_general"] >= 1


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_a_gradient_is_one_product_forward_and_one_call_backward(activation: str) -> None:
    found = names_in(gradients(BIAS.ours(activation)), *BIAS.arrays())
    assert found["fusedops_backward"] == 1
    assert found[PRODUCT] == 3  # the forward one, and two in the call
    assert names_in(jax.grad(loss(BIAS.ours(activation)), 1), *BIAS.arrays())[PRODUCT] == 2
    assert names_in(jax.grad(loss(BIAS.ours(activation)), 2), *BIAS.arrays())[PRODUCT] == 1


def test_a_batch_adds_an_axis_and_moves_nothing() -> None:
    """A product under vmap, and its gradients, are products of more letters: nothing is transposed."""
    f = over((0, None, None), 0)(BIAS.ours("relu"))
    found = names_in(jax.grad(loss(f), (0, 1, 2)), *BIAS.arrays())
    assert found[PRODUCT] == 3
    assert not {"transpose", "dot_general"} & set(found), found


# Values at the edges --------------------------------------------------------------------------------------------------


EDGES = [(x, value) for x in ACTIVATIONS for value in (0.0, -0.0, np.nan, np.inf, -np.inf, 1e30)]
LIMITS = {("gelu_tanh", np.inf): 1.0, ("gelu_tanh", -np.inf): 0.0}
"""Where JAX's own derivative is NaN and ours the limit."""


@pytest.mark.parametrize(("activation", "value"), [edge for edge in EDGES if edge not in LIMITS], ids=str)
def test_gradients_at_the_edges_are_those_of_jax(activation: str | None, value: float) -> None:
    """relu'(0) is 0; what is not a number stays so where JAX's own operation keeps it."""
    xs = (jnp.array([[value]]), jnp.ones((1, 1)))

    def of(f: Callable[..., Array]) -> Any:
        return f(*xs), jax.grad(lambda *xs: jnp.sum(f(*xs)), (0, 1))(*xs), jax.jvp(f, xs, tuple(map(jnp.ones_like, xs)))

    assert_same(of(PLAIN.ours(activation)), of(PLAIN.plain(activation)))


@pytest.mark.parametrize(("activation", "value"), LIMITS, ids=str)
def test_derivatives_at_infinity_are_the_limit(activation: str, value: float) -> None:
    one = jnp.ones((1, 1))
    assert jax.grad(lambda a: jnp.sum(PLAIN.ours(activation)(a, one)))(one * value) == LIMITS[activation, value]


def test_the_derivative_of_relu_at_zero_is_zero_in_every_mode() -> None:
    xs = (jnp.zeros((2, 3)), jnp.ones((3, 4)), jnp.zeros(4))
    f = BIAS.ours("relu")
    zeros = jax.tree.map(jnp.zeros_like, xs)
    assert_same(jax.grad(lambda *xs: jnp.sum(f(*xs)), (0, 1, 2))(*xs), zeros)
    assert_same(jax.jvp(f, xs, tuple(map(jnp.ones_like, xs)))[1], jnp.zeros((2, 4)))
