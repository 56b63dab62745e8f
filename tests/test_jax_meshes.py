"""Products over Auto axes of a mesh: values and gradients of the plain expression, and nothing gathered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EPILOGS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import ACTIVATIONS, TRANSFORMS, assert_same, compiled, gradients, stacked
from mesh_cases import (
    ALL,
    COLUMNS,
    LAYOUTS,
    ODD,
    ROWS,
    UNEVEN,
    Layout,
    assert_adds,
    assert_both,
    assert_moves_no_more,
    both,
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

Array = Any

AUTO = mesh_of(AxisType.Auto)

CASES = [(layout, "gelu_tanh") for layout in LAYOUTS] + [(ALL, x) for x in ACTIVATIONS if x != "gelu_tanh"]


@pytest.mark.parametrize(("layout", "activation"), CASES, ids=str)
def test_values_and_gradients(layout: Layout, activation: str | None) -> None:
    p = layout.product
    assert_both(p.ours(activation), p.plain(activation), layout.placed(AUTO), p.arrays())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_is_gathered(layout: Layout) -> None:
    """A product adds its sharded sum alone, and its gradient what that of the plain expression does."""
    p, arrays = layout.product, layout.placed(AUTO)
    assert_adds(jax.jit(p.ours("gelu_tanh")).lower(*arrays).compile(), layout.reduced)
    assert_moves_no_more(gradients(p.ours("gelu_tanh")), gradients(p.plain("gelu_tanh")), arrays)


def test_a_gathered_operand_is_seen() -> None:
    replicated = jax.jit(lambda a: jax.lax.with_sharding_constraint(a, NamedSharding(AUTO, P())))
    assert collectives(replicated, ROWS.placed(AUTO)[0]) == {"all-gather": 1}


@pytest.mark.parametrize("layout", UNEVEN, ids=str)
def test_uneven_parts(layout: Layout) -> None:
    """What pads a part is cos(0) = 1 where the program computes the operands: it must not be summed."""

    def of(f: Any) -> Any:
        return layout.constrained(AUTO, lambda *xs: f(*map(jnp.cos, xs)))

    assert_both(of(ODD.ours("gelu_tanh")), of(ODD.plain("gelu_tanh")), ODD.arrays(), ODD.arrays())


@pytest.mark.parametrize("layout", UNEVEN[-2:], ids=str)
def test_uneven_parts_are_not_gathered(layout: Layout) -> None:
    """But for results, which jit returns whole."""
    ours, plain = (both(layout.constrained(AUTO, f)) for f in (ODD.ours("gelu_tanh"), ODD.plain("gelu_tanh")))
    assert_moves_no_more(ours, plain, ODD.arrays())


MOVED = ("jvp", "hvp", "hessian", "vmap of each", "vmap of grad", "checkpoint, nothing", "scan")


@pytest.mark.parametrize("name", MOVED)
def test_transforms(name: str) -> None:
    p = UNEVEN[-1].product if name == "hessian" else ALL.product
    layout = Layout("small", p, (P("x"), P(), P(), P("x"))) if name == "hessian" else ALL
    f, plain = (TRANSFORMS[name](g) for g in (p.ours("gelu_tanh"), p.plain("gelu_tanh")))
    assert_same(jax.jit(layout.constrained(AUTO, f))(*p.arrays()), compiled(plain, *p.arrays()))


def test_vmap_over_a_sharded_axis() -> None:
    """The mapped axis is held in parts as a batch axis of the caller's is."""
    layout = Layout("mapped", COLUMNS.product, (P("y"), P(None, "x"), P("x"), P(None, "x")))
    a, *rest = COLUMNS.product.arrays()
    arrays = layout.placed(AUTO, [stacked(a, 4), *rest])
    f, plain = (jax.vmap(g, (0, None, None, None)) for g in (layout.product.ours("relu"), layout.product.plain("relu")))
    assert_both(f, plain, arrays, [stacked(a, 4), *rest])
    assert_adds(jax.jit(f).lower(*arrays).compile(), 0)


# Epilogs -------------------------------------------------------------------------------------------------------------

HELD = {"m": ("x", None, None), "n": (None, "x", None), "k": (None, None, "x"), "all": ("x", "y", "z")}
"""The axis over which m, n and k are sharded."""

SUMS = {"DRELU_BGRAD": "mk", "DGELU_BGRAD": "mk", "BGRADA": "kk", "BGRADB": "kk"}
"""What is added over devices where it is sharded, a letter for each array; "k" where an epilog gives no sum."""


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("epilog", EPILOGS)
def test_epilogs(epilog: str, held: str) -> None:
    """Residuals are sharded as the result is, and nothing is gathered."""
    arrays, run = epilog_case(epilog)
    placed = placed_by(AUTO, arrays.values(), epilog_specs(arrays, *HELD[held]))
    program = jax.jit(run).lower(*placed).compile()
    assert_same(compared(epilog, 128, program(*placed)), compared(epilog, 128, run(*arrays.values())), rtol=1e-12)
    sharded = {letter for letter, axis in zip("mnk", HELD[held], strict=True) if axis}
    assert_adds(program, sum(letter in sharded for letter in SUMS.get(epilog, "k")))


@pytest.mark.parametrize("n", [40, 12], ids="n={}".format)
@pytest.mark.parametrize("epilog", [name for name in EPILOGS if "AUX" in name or name.startswith("D")])
def test_epilogs_whose_residual_is_padded(epilog: str, n: int) -> None:
    """Its padded axis is held in parts where each ends at a byte, whole where not; n is 12 in two parts of 6."""
    arrays, run = epilog_case(epilog, n)
    layout = Layout(epilog, ODD, epilog_specs(arrays, "x", "y", None))
    got = compiled(layout.constrained(AUTO, run), *map(jnp.asarray, arrays.values()))
    assert_same(compared(epilog, n, got), compared(epilog, n, run(*arrays.values())), rtol=1e-12)


@pytest.mark.parametrize("epilog", SUMS)
def test_sums_over_uneven_parts(epilog: str) -> None:
    arrays, run = epilog_case(epilog, 11, m=7, k=9)

    def of_cosines(a: Array, b: Array, *rest: Array) -> Any:
        return run(jnp.cos(a), jnp.cos(b), *rest)

    a, b, *rest = arrays.values()
    layout = Layout(epilog, ODD, epilog_specs(arrays, "x", "y", "z"))
    got = compiled(layout.constrained(AUTO, of_cosines), *map(jnp.asarray, arrays.values()))
    want = run(np.cos(a), np.cos(b), *rest)
    assert_same(compared(epilog, 11, got), compared(epilog, 11, want), rtol=1e-12)


# Two layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
def test_two_layers(activation: str) -> None:
    """By columns, then by rows: one sum, of the result."""
    arrays = mlp_arrays()
    placed = placed_by(AUTO, arrays, layer_specs("x"))
    assert_both(mlp(activation), plain_mlp(activation), placed, arrays)
    assert_adds(jax.jit(mlp(activation)).lower(*placed).compile(), 1)
    assert_moves_no_more(gradients(mlp(activation)), gradients(plain_mlp(activation)), placed)
