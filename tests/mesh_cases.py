"""What the tests of meshes share: products beside who holds what of them, and the collectives of a compiled program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from cases import Case, build
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import ACTIVATIONS, Product, assert_same, compiled, gradients

import fusedops
from fusedops import Epilog

Array = Any
Function = Callable[..., Any]

AXES = ("x", "y", "z")


def mesh_of(*kinds: AxisType) -> Mesh:
    """Return a mesh of two by two by two devices; one kind stands for all axes."""
    return jax.make_mesh((2, 2, 2), AXES, axis_types=kinds * 3 if len(kinds) == 1 else kinds)


def placed_by(mesh: Mesh, arrays: Iterable[Array], specs: Iterable[P]) -> list[Array]:
    """Return arrays on a mesh."""
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


@dataclass(frozen=True)
class Layout:
    """A product, and how each of its arrays is sharded.

    ``reduced`` is how many arrays are added over devices in the forward pass.
    """

    name: str
    product: Product
    specs: tuple[P, ...]
    reduced: int = 0

    def __str__(self) -> str:
        return self.name

    def placed(self, mesh: Mesh, arrays: list[Array] | None = None) -> list[Array]:
        """Return the product's arrays on a mesh."""
        arrays = self.product.arrays() if arrays is None else arrays
        return placed_by(mesh, arrays, self.specs)

    def constrained(self, mesh: Mesh, f: Function) -> Function:
        """Return ``f`` of arrays that the program places, also where the devices do not divide an extent."""

        def run(*arrays: Array) -> Any:
            pairs = zip(arrays, self.specs, strict=True)
            return f(*(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) for x, spec in pairs))

        return run


DENSE = Product("dense", (8, 16), (16, 32), bias=(32,), c=(8, 32), alpha=0.5, beta=-2.0)
ODD = Product("odd", (7, 9), (9, 11), bias=(11,), c=(7, 11), alpha=0.5, beta=-2.0)
UNALIGNED = Product("unaligned", (6, 10), (10, 12), bias=(12,))
FLAGS = Product("flags", (16, 8), (32, 16), bias=(32,), transpose_a=True, transpose_b=True)
BATCH = Product("batch", (4, 8, 16), (16, 32), bias=(32,))
BOTH = Product("both", (4, 8, 16), (4, 16, 32), bias=(4, 1, 32), c=(8, 32))

COLUMNS = Layout("n", DENSE, (P(), P(None, "x"), P("x"), P(None, "x")))
ROWS = Layout("k", DENSE, (P(None, "x"), P("x"), P(), P()), reduced=1)
ALL = Layout("m and n and k", DENSE, (P("x", "y"), P("y", "z"), P("z"), P("x", "z")), reduced=1)
LAYOUTS = (
    Layout("m", DENSE, (P("x"), P(), P(), P("x"))),
    Layout("m over two axes", DENSE, (P(("x", "y")), P(), P(), P(("x", "y")))),
    COLUMNS,
    ROWS,
    Layout("k over two axes", DENSE, (P(None, ("x", "y")), P(("x", "y")), P(), P()), reduced=1),
    Layout("m and n", DENSE, (P("x"), P(None, "y"), P("y"), P("x", "y"))),
    Layout("m and k", DENSE, (P("x", "y"), P("y"), P(), P("x")), reduced=1),
    ALL,
    Layout("unaligned n", UNALIGNED, (P("x"), P(None, "y"), P("y"))),
    Layout("flags", FLAGS, (P("x", "y"), P("z", "x"), P("z")), reduced=1),
    Layout("batch", BATCH, (P("x"), P(), P())),
    Layout("batch and m and k", BATCH, (P("x", "y", "z"), P("z"), P()), reduced=1),
    Layout("batch of both", BOTH, (P("x", "y"), P("x", None, "z"), P("x", None, "z"), P("y", "z"))),
)
UNEVEN = tuple(Layout(f"odd {x}", ODD, x.specs, x.reduced) for x in LAYOUTS if x.product is DENSE)


def layer_specs(inner: str) -> tuple[P, ...]:
    """Return the specs of x, w1, w2, b1 and b2 with the hidden layer over an axis of the mesh, rows over y."""
    return P("y"), P(None, inner), P(inner), P(inner), P()


def mlp(activation: str) -> Function:
    return lambda x, w1, w2, b1, b2: fusedops.mlp(x, w1, w2, b1=b1, b2=b2, activation=activation)


def plain_mlp(activation: str) -> Function:
    return lambda x, w1, w2, b1, b2: ACTIVATIONS[activation](x @ w1 + b1) @ w2 + b2


def mlp_arrays(m: int = 8, k: int = 16, n: int = 32, p: int = 12) -> list[Array]:
    rng = np.random.default_rng(3)
    shapes = ((m, k), (k, n), (n, p), (n,), (p,))
    return [jax.numpy.asarray(rng.standard_normal(shape) * 0.5) for shape in shapes]


# Epilogs -------------------------------------------------------------------------------------------------------------

EPILOG_ARRAYS = ("a", "b", "bias", "c", "relu_aux", "gelu_aux")


def epilog_case(epilog: str, n: int = 128, m: int = 8, k: int = 16) -> tuple[dict[str, np.ndarray], Function]:
    """Return arrays by name, and ``epilog_matmul`` as a function of them; residuals without NaN in their padding."""
    bias = "shared" if Epilog[epilog].bias else None
    case = Case(f"{epilog}-mesh", m, n, k, epilog=epilog, dtype="float64", bias=bias, c="dense", alpha=0.5, beta=-2.0)
    arrays = build(case)
    if "gelu_aux" in arrays:
        arrays["gelu_aux"] = np.nan_to_num(arrays["gelu_aux"])
    names = [name for name in EPILOG_ARRAYS if name in arrays]

    def run(*xs: Array) -> Any:
        given = dict(zip(names, xs, strict=True))
        a, b = given.pop("a"), given.pop("b")
        return fusedops.epilog_matmul(a, b, epilog=epilog, alpha=0.5, beta=-2.0, **given)

    return {name: arrays[name] for name in names}, run


def epilog_specs(names: Any, m: str | None, n: str | None, k: str | None) -> tuple[P, ...]:
    """Return the specs of arrays by name, given the axis of each extent."""
    rows = P(m, n)
    specs = {"a": P(m, k), "b": P(k, n), "bias": P(n), "c": rows, "relu_aux": rows, "gelu_aux": rows}
    return tuple(specs[name] for name in names)


# Programs ------------------------------------------------------------------------------------------------------------

_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(([^)]*)\)")


def collectives(function: Function, *arrays: Array) -> Counter[str]:
    """Return how many arrays each kind of collective moves in a compiled program."""
    return collectives_in(jax.jit(function).lower(*arrays).compile())


def collectives_in(program: Any) -> Counter[str]:
    """Return the same of a compiled program; arrays and not operations, of which XLA joins some."""
    found: Counter[str] = Counter()
    for kind, operands in _COLLECTIVE.findall(program.as_text()):
        found[kind] += operands.count("%")
    return found


def assert_adds(program: Any, count: int) -> None:
    """Raise unless a compiled program adds ``count`` arrays over devices, and moves nothing else."""
    found = collectives_in(program)
    assert found == Counter({"all-reduce": count} if count else {}), found


def assert_moves_no_more(ours: Function, plain: Function, arrays: list[Array]) -> None:
    """Raise where a program moves more arrays of a kind than another."""
    got, want = collectives(ours, *arrays), collectives(plain, *arrays)
    assert got <= want, f"{got}, the plain expression {want}"


def both(f: Function) -> Function:
    """Return the value and the gradients of a function."""
    return lambda *xs: (f(*xs), gradients(f)(*xs))


def assert_both(got: Function, want: Function, placed: list[Array], arrays: list[Array]) -> None:
    """Raise unless values and gradients of ``got`` on a mesh are those of ``want`` on one device."""
    assert_same(compiled(both(got), *placed), compiled(both(want), *arrays))
