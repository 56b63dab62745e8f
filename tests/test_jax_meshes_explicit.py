"""Products over Explicit axes: the types that JAX's own operations give, and meshes with axes of several kinds."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import EPILOGS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import ACTIVATIONS, SHORT, TRANSFORMS, assert_same, compiled, gradients, stacked
from mesh_cases import (
    ALL,
    COLUMNS,
    DENSE,
    LAYOUTS,
    ROWS,
    UNALIGNED,
    Layout,
    assert_adds,
    assert_both,
    collectives,
    epilog_case,
    epilog_specs,
    layer_specs,
    mesh_of,
    mlp,
    mlp_arrays,
    placed_by,
    plain_mlp,
)
from test_jax_epilogs import compared

from fusedops import Epilog

Array = Any

EXPLICIT = mesh_of(AxisType.Explicit)

ADDEND = Layout("an addend alone", DENSE, (P(), P(), P(), P("x")))
BIAS = Layout("a bias alone", UNALIGNED, (P(), P(), P("x")))
ONE_OPERAND = Layout("k of a alone", DENSE, (P(None, "x"), P(), P(), P()), reduced=1)
ALL_LAYOUTS = (*LAYOUTS, ADDEND, BIAS, ONE_OPERAND)

CASES = [(layout, "gelu_tanh") for layout in ALL_LAYOUTS] + [(ALL, x) for x in ACTIVATIONS if x != "gelu_tanh"]


@pytest.mark.parametrize(("layout", "activation"), CASES, ids=str)
def test_values_gradients_and_sums(layout: Layout, activation: str | None) -> None:
    """A gradient has the type of its array; nothing but sums goes between devices, even where k is sharded alone."""
    p, arrays = layout.product, layout.placed(EXPLICIT)
    assert_both(p.ours(activation), p.plain(activation), arrays, p.arrays())
    for x, gradient in zip(arrays, jax.jit(gradients(p.ours(activation)))(*arrays), strict=True):
        assert gradient.sharding.spec == jax.typeof(x).sharding.spec
    assert_adds(jax.jit(p.ours(activation)).lower(*arrays).compile(), layout.reduced)


@pytest.mark.parametrize("name", SHORT)
def test_transforms(name: str) -> None:
    """With the mesh in the context, as ``jax.set_mesh`` puts it there, and without."""
    f, plain = (TRANSFORMS[name](g) for g in (ALL.product.ours("gelu_tanh"), ALL.product.plain("gelu_tanh")))
    want = compiled(plain, *ALL.product.arrays())
    assert_same(compiled(f, *ALL.placed(EXPLICIT)), want)
    with jax.set_mesh(EXPLICIT):
        assert_same(compiled(f, *ALL.placed(EXPLICIT)), want)


@pytest.mark.parametrize("name", ["value", "grad of all"])
def test_eager(name: str) -> None:
    f, plain = (TRANSFORMS[name](g) for g in (ALL.product.ours("relu"), ALL.product.plain("relu")))
    with jax.set_mesh(EXPLICIT):
        assert_same(f(*ALL.placed(EXPLICIT)), compiled(plain, *ALL.product.arrays()))


# Types ---------------------------------------------------------------------------------------------------------------

CLEAR = [layout for layout in ALL_LAYOUTS if not layout.reduced and layout.name != "batch of both"]


@pytest.mark.parametrize("layout", CLEAR, ids=str)
def test_types_are_those_of_jax(layout: Layout) -> None:
    types = [
        jax.eval_shape(f, *layout.placed(EXPLICIT)) for f in (layout.product.ours("relu"), layout.product.plain("relu"))
    ]
    assert types[0].sharding.spec == types[1].sharding.spec


AMBIGUOUS = {
    "k is added": (ROWS, P(None, None)),
    "m and n from k's sum": (ALL, P("x", "z")),
    "one axis for m and n": (Layout("", DENSE, (P("x"), P(None, "x"), P(), P())), P("x", None)),
}
"""Where JAX's own operation refuses to choose, and what ours chooses: an axis goes to the letter that has it first."""


@pytest.mark.parametrize(("layout", "spec"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_types_where_jax_refuses(layout: Layout, spec: P) -> None:
    arrays = layout.placed(EXPLICIT)
    with pytest.raises(Exception, match=r"ambiguous how the output should be sharded|illegally sharded"):
        jax.eval_shape(layout.product.plain("relu"), *arrays)
    assert jax.eval_shape(layout.product.ours("relu"), *arrays).sharding.spec == spec
    assert_same(compiled(layout.product.ours("relu"), *arrays), layout.product.plain("relu")(*layout.product.arrays()))


def test_a_mapped_axis_that_is_sharded() -> None:
    """Its gradient is one of a ``shard_map`` in another, which JAX refuses to lower."""
    a, *rest = COLUMNS.product.arrays()
    stack = [stacked(a, 4), *rest]
    arrays = placed_by(EXPLICIT, stack, (P("y"), *COLUMNS.specs[1:]))
    f, plain = (jax.vmap(g, (0, *[None] * 3)) for g in (COLUMNS.product.ours("relu"), COLUMNS.product.plain("relu")))
    assert_same(compiled(f, *arrays), compiled(plain, *stack))
    assert jax.eval_shape(f, *arrays).sharding.spec == P("y", None, "x")
    with pytest.raises(ValueError, match="already bound by a parent"):
        compiled(gradients(f), *arrays)


# Epilogs and two layers ----------------------------------------------------------------------------------------------

HELD = {"m": ("x", None, None), "n": (None, "x", None), "k": (None, None, "x"), "all": ("x", "y", "z")}


PADDED = [name for name in EPILOGS if "AUX" in name or name.startswith("D")]
EPILOG_CASES = [(epilog, "all", 128) for epilog in EPILOGS] + [(epilog, "all", 12) for epilog in PADDED]
EPILOG_CASES += [(epilog, held, 96) for epilog in EPILOGS if Epilog[epilog].gives for held in ("m", "n", "k")]


@pytest.mark.parametrize(("epilog", "held", "n"), EPILOG_CASES, ids=str)
def test_epilogs(epilog: str, held: str, n: int) -> None:
    """A residual is sharded where its parts need no padding; n of 12 is in two parts of 6."""
    arrays, run = epilog_case(epilog, n)
    placed = placed_by(EXPLICIT, arrays.values(), epilog_specs(arrays, *HELD[held]))
    assert_same(compared(epilog, n, compiled(run, *placed)), compared(epilog, n, run(*arrays.values())), rtol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
def test_two_layers(activation: str) -> None:
    """By columns, then by rows: one sum, of the result."""
    arrays = mlp_arrays()
    placed = placed_by(EXPLICIT, arrays, layer_specs("x"))
    assert_both(mlp(activation), plain_mlp(activation), placed, arrays)
    assert_adds(jax.jit(mlp(activation)).lower(*placed).compile(), 1)
    assert set(collectives(gradients(mlp(activation)), *placed)) == {"all-reduce"}


# Axes of several kinds -----------------------------------------------------------------------------------------------

MIXED = ((AxisType.Auto, AxisType.Explicit, AxisType.Auto), (AxisType.Explicit, AxisType.Auto, AxisType.Explicit))


@pytest.mark.parametrize("kinds", MIXED, ids=lambda kinds: "-".join(kind.name for kind in kinds))
def test_auto_and_explicit_axes(kinds: tuple[AxisType, ...]) -> None:
    """What is held in parts along an Auto axis stays so among JAX's own operations; the call has it gathered."""
    mesh, p = mesh_of(*kinds), ALL.product
    with jax.set_mesh(mesh):
        arrays = ALL.placed(mesh)
        assert_both(p.ours("gelu_tanh"), p.plain("gelu_tanh"), arrays, p.arrays())
        moved = collectives(p.ours("gelu_tanh"), *arrays)
    assert moved["all-gather"] == 0 or "xla_on_cpu" in sys.modules
    assert moved["all-reduce"] == 1 or kinds[1] is AxisType.Auto


def over_x(f: Any) -> Any:
    """Return ``f`` of each device's rows along x, the other axes left as they are."""
    return jax.shard_map(f, in_specs=(P("x"), P(), P(), P("x")), out_specs=P("x"), axis_names={"x"})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("layout", [ALL, Layout("m", DENSE, (P("x"), P(), P(), P("x")))], ids=str)
def test_manual_beside_other_axes(kind: AxisType, layout: Layout) -> None:
    """XLA ends the process at an operation that is partitioned there, so a product is not."""
    mesh, p = mesh_of(kind), layout.product
    with jax.set_mesh(mesh):
        arrays = layout.placed(mesh)
        assert_same(compiled(over_x(p.ours("gelu_tanh")), *arrays), p.plain("gelu_tanh")(*p.arrays()))
        if kind is AxisType.Explicit and layout is ALL:
            with pytest.raises(ValueError, match="already bound by a parent"):
                compiled(gradients(over_x(p.ours("gelu_tanh"))), *arrays)
        else:
            got = compiled(gradients(over_x(p.ours("gelu_tanh"))), *arrays)
            assert_same(got, compiled(gradients(p.plain("gelu_tanh")), *p.arrays()))


def test_jax_cannot_lower_the_gradient_of_a_shard_map_in_another_either() -> None:
    """When this fails, the error above has gone from JAX."""

    def inner(x: Array) -> Array:
        return jax.shard_map(jnp.sin, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"})(x)

    outer = jax.shard_map(inner, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(jnp.ones((4, 4)), NamedSharding(EXPLICIT, P("x", "y")))
        assert_same(jax.jit(outer)(x), jnp.sin(jnp.ones((4, 4))))
        with pytest.raises(ValueError, match="already bound by a parent"):
            jax.jit(jax.grad(lambda x: outer(x).sum()))(x)
