"""Products inside ``jax.shard_map``: the types of what varies, and gradients inside, outside and under vmap."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax_cases import ACTIVATIONS, Product, assert_same, compiled, gradients, loss, stacked
from mesh_cases import assert_adds, assert_both, collectives, layer_specs, mesh_of, mlp_arrays, placed_by, plain_mlp

import fusedops

Array = Any

MESHES = {kind.name: mesh_of(kind) for kind in (AxisType.Auto, AxisType.Explicit)}
P_BIAS = Product("bias", (8, 16), (16, 32), bias=(32,))
CHECKS = pytest.mark.parametrize("check", [True, False], ids=["check_vma", "no check"])
ON_MESHES = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


def summed(f: Any, axis: str) -> Any:
    """Return the sum over devices of their products, with bias and activation after it."""
    activation = ACTIVATIONS[f]
    return lambda a, b, bias: activation(jax.lax.psum(fusedops.matmul(a, b), axis) + bias)


WAYS: dict[str, tuple[tuple[P, ...], P, Any]] = {
    "m": ((P("x"), P(), P()), P("x"), P_BIAS.ours),
    "n": ((P(), P(None, "x"), P("x")), P(None, "x"), P_BIAS.ours),
    "m and n": ((P("x"), P(None, "y"), P("y")), P("x", "y"), P_BIAS.ours),
    "n, bias whole": ((P("y"), P(None, "x"), P()), P("y", "x"), lambda activation: _with_own_bias(activation)),
    "k": ((P(None, "x"), P("x"), P()), P(), partial(summed, axis="x")),
    "m and k": ((P("y", "x"), P("x"), P()), P("y"), partial(summed, axis="x")),
}


def _with_own_bias(activation: str | None) -> Any:
    """Return the product with a slice of a bias that every device has."""

    def run(a: Array, b: Array, bias: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(bias, jax.lax.axis_index("x") * b.shape[1], b.shape[1])
        return fusedops.matmul(a, b, bias=own, activation=activation)

    return run


@CHECKS
@ON_MESHES
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients(way: str, mesh: Any, check: bool) -> None:
    """Gradients outside: those of replicated weights are summed."""
    specs, out, f = WAYS[way]
    mapped = jax.shard_map(f("gelu_tanh"), mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)
    arrays = placed_by(mesh, P_BIAS.arrays(), specs)
    assert_both(mapped, P_BIAS.plain("gelu_tanh"), arrays, P_BIAS.arrays())
    assert_adds(jax.jit(mapped).lower(*arrays).compile(), int("k" in way))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation: str | None) -> None:
    specs, out, f = WAYS["m and n"]
    mapped = jax.shard_map(f(activation), mesh=MESHES["Auto"], in_specs=specs, out_specs=out)
    assert_both(mapped, P_BIAS.plain(activation), placed_by(MESHES["Auto"], P_BIAS.arrays(), specs), P_BIAS.arrays())


@ON_MESHES
@pytest.mark.parametrize("way", ["m", "n", "m and n"])
def test_gradients_inside(way: str, mesh: Any) -> None:
    """They type-check: of what is replicated they do not vary, so out_specs may say so."""
    specs, _, f = WAYS[way]

    def inside(*own: Array) -> Any:
        return jax.grad(lambda *own: jnp.sum(jnp.sin(f("gelu_tanh")(*own))), (0, 1, 2))(*own)

    mapped = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=specs)
    plain = jax.grad(lambda *xs: jnp.sum(jnp.sin(P_BIAS.plain("gelu_tanh")(*xs))), (0, 1, 2))
    assert_same(compiled(mapped, *placed_by(mesh, P_BIAS.arrays(), specs)), compiled(plain, *P_BIAS.arrays()))


def test_gradients_inside_without_the_check_are_one_devices() -> None:
    """As JAX's own: nothing says what is replicated, so the caller adds."""
    specs = WAYS["m"][0]

    def inside(f: Any) -> Any:
        def run(*own: Array) -> Any:
            da, db, dbias = jax.grad(loss(f), (0, 1, 2))(*own)
            return da, jax.lax.psum(db, "x"), jax.lax.psum(dbias, "x")

        return jax.shard_map(run, mesh=MESHES["Auto"], in_specs=specs, out_specs=specs, check_vma=False)

    arrays = placed_by(MESHES["Auto"], P_BIAS.arrays(), specs)
    assert_same(*(compiled(inside(f("gelu_tanh")), *arrays) for f in (P_BIAS.ours, P_BIAS.plain)))


@CHECKS
@ON_MESHES
def test_vmap_of_gradients_with_unbatched_weights(mesh: Any, check: bool) -> None:
    """A gradient for each item, of a loss over all devices."""
    specs, out, f = WAYS["m and n"]
    mapped = jax.shard_map(f("relu"), mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)
    a, *rest = P_BIAS.arrays()

    def each(g: Any) -> Any:
        return lambda a, b, bias: jax.vmap(jax.grad(loss(g), (0, 1, 2)), (0, None, None))(stacked(a), b, bias)

    got = compiled(each(mapped), *placed_by(mesh, [a, *rest], specs))
    assert_same(got, compiled(each(P_BIAS.plain("relu")), a, *rest))


def test_vmap_inside_with_unbatched_weights() -> None:
    """Of items that devices share out: the gradient of a replicated weight is added over devices, as JAX's own is."""

    def inside(f: Any) -> Any:
        def run(a: Array, b: Array, bias: Array) -> Any:
            return jax.vmap(jax.grad(loss(f), (0, 1, 2)), (0, None, None))(a, b, bias)

        out = (P("x"), P(), P())
        return jax.shard_map(run, mesh=MESHES["Auto"], in_specs=(P("x"), P(), P()), out_specs=out)

    a, *rest = P_BIAS.arrays()
    got, want = (compiled(inside(f("gelu_tanh")), stacked(a, 4), *rest) for f in (P_BIAS.ours, P_BIAS.plain))
    assert_same(got, want)


# Types ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [P_BIAS.ours("relu"), P_BIAS.plain("relu")], ids=["ours", "JAX's"])
@pytest.mark.parametrize("way", ["m", "n", "k"])
def test_a_varying_result_is_not_replicated(f: Any, way: str) -> None:
    mapped = jax.shard_map(f, mesh=MESHES["Auto"], in_specs=WAYS[way][0], out_specs=P())
    with pytest.raises(ValueError, match=r"inferred to be possibly varying over {x}"):
        jax.eval_shape(mapped, *P_BIAS.arrays())


@pytest.mark.parametrize("way", ["m", "n", "m and n", "k"])
def test_a_result_varies_as_that_of_jax(way: str) -> None:
    seen = []

    def inside(*own: Array) -> Array:
        seen.extend(str(jax.typeof(f(*own))) for f in (P_BIAS.ours("gelu_tanh"), P_BIAS.plain("gelu_tanh")))
        return own[0]

    specs = WAYS[way][0]
    jax.eval_shape(jax.shard_map(inside, mesh=MESHES["Auto"], in_specs=specs, out_specs=specs[0]), *P_BIAS.arrays())
    ours, of_jax = seen
    assert ours == of_jax
    assert "{V:" in ours


# Two layers ----------------------------------------------------------------------------------------------------------


@CHECKS
@ON_MESHES
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_two_layers(activation: str, mesh: Any, check: bool) -> None:
    """By columns, then by rows; the second bias is added once, after the sum."""

    def layers(x: Array, w1: Array, w2: Array, b1: Array, b2: Array) -> Array:
        return jax.lax.psum(fusedops.mlp(x, w1, w2, b1=b1, activation=activation), "x") + b2

    specs = layer_specs("x")
    mapped = jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=P("y"), check_vma=check)
    arrays = placed_by(mesh, mlp_arrays(), specs)
    assert_both(mapped, plain_mlp(activation), arrays, mlp_arrays())
    assert_adds(jax.jit(mapped).lower(*arrays).compile(), 1)
    assert set(collectives(gradients(mapped), *arrays)) == {"all-reduce"}
