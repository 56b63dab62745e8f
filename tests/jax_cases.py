"""What the JAX tests share: products beside their plain expressions, transforms of either, and a look into jaxprs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fusedops

Array = Any
Function = Callable[..., Any]
Shape = tuple[int, ...]

ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
    None: lambda z: z,
    "relu": jax.nn.relu,
    "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
    "gelu_erf": lambda z: jax.nn.gelu(z, approximate=False),
    "silu": jax.nn.silu,
}


@dataclass(frozen=True)
class Product:
    """A call of `fusedops.matmul`: the shapes of its arrays as they are stored, and its options.

    Its functions take the arrays in the order a, b, bias, c, those that there are.
    """

    name: str
    a: Shape
    b: Shape
    bias: Shape | None = None
    c: Shape | None = None
    alpha: float = 1.0
    beta: float = 1.0
    transpose_a: bool = False
    transpose_b: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def shapes(self) -> dict[str, Shape]:
        given = {"a": self.a, "b": self.b, "bias": self.bias, "c": self.c}
        return {name: shape for name, shape in given.items() if shape is not None}

    def arrays(self, dtype: str = "float64", seed: int = 0) -> list[Array]:
        rng = np.random.default_rng(seed)
        return [jnp.asarray(rng.standard_normal(shape) * 0.8, dtype) for shape in self.shapes.values()]

    def ours(self, activation: str | None, **more: Any) -> Function:
        """Return the call as a function of its arrays."""
        options = {"alpha": self.alpha, "beta": self.beta, "activation": activation}
        options |= {"transpose_a": self.transpose_a, "transpose_b": self.transpose_b, **more}

        def matmul(*arrays: Array) -> Array:
            given = dict(zip(self.shapes, arrays, strict=True))
            return fusedops.matmul(given.pop("a"), given.pop("b"), **given, **options)

        return matmul

    def plain(self, activation: str | None, out_dtype: str | None = None) -> Function:
        """Return the same by operations of JAX."""

        def matmul(*arrays: Array) -> Array:
            given = dict(zip(self.shapes, arrays, strict=True))
            a = jnp.swapaxes(given["a"], -1, -2) if self.transpose_a else given["a"]
            b = jnp.swapaxes(given["b"], -1, -2) if self.transpose_b else given["b"]
            z = jnp.matmul(a, b, preferred_element_type=out_dtype)
            z = z if self.alpha == 1.0 else z * self.alpha
            z = z + self.beta * given["c"] if "c" in given else z
            return ACTIVATIONS[activation](z + given["bias"] if "bias" in given else z)

        return matmul


PLAIN = Product("plain", (3, 4), (4, 5))
BIAS = Product("bias", (3, 4), (4, 5), bias=(5,))
FACTORS = Product("factors", (3, 4), (4, 5), bias=(5,), c=(3, 5), alpha=0.5, beta=-2.0)
FLAGS = Product("flags", (4, 3), (5, 4), bias=(5,), transpose_a=True, transpose_b=True)
BATCHES = (
    Product("batch-a", (2, 3, 4), (4, 5), bias=(5,)),
    Product("batch-b", (3, 4), (2, 4, 5), bias=(5,)),
    Product("batch-both", (2, 3, 4), (2, 4, 5), bias=(2, 1, 5), c=(3, 5), alpha=-1.5),
    Product("batch-broadcast", (2, 1, 3, 4), (2, 1, 5, 4), bias=(5,), transpose_b=True),
    Product("batch-flag-a", (2, 4, 3), (4, 5), bias=(5,), transpose_a=True),
)
VECTORS = (
    Product("vector-a", (4,), (4, 5), bias=(5,)),
    Product("vector-b", (2, 3, 4), (4,), c=(2, 3), beta=0.5),
)
ONES = Product("ones", (1, 1), (1, 1), bias=(1,))
OTHERS = (PLAIN, FACTORS, FLAGS, *BATCHES, *VECTORS, ONES)

# Transforms: each takes a function of arrays and gives another --------------------------------------------------------


def weights(shape: Shape) -> np.ndarray:
    """Return values that differ from element to element."""
    return np.cos(1.0 + np.arange(np.prod(shape, dtype=int))).reshape(shape)


def loss(f: Function) -> Function:
    """Return a scalar that depends on every element of ``f`` in a way of its own."""

    def total(*xs: Array) -> Array:
        out = f(*xs)
        return jnp.sum(jnp.sin(out) * weights(out.shape).astype(out.dtype))

    return total


def every(xs: Any) -> tuple[int, ...]:
    return tuple(range(len(xs)))


def moved(xs: Any) -> tuple[Array, ...]:
    """Return tangents of arrays."""
    return tuple(jnp.asarray(weights(x.shape), x.dtype) for x in xs)


def stacked(x: Array, count: int = 3) -> Array:
    return x * (1 - 0.4 * np.arange(count)).astype(x.dtype).reshape(-1, *[1] * x.ndim)


def _each_batched(f: Function) -> Function:
    """Return ``f`` over a batch of each operand alone."""

    def run(*xs: Array) -> list[Array]:
        flags = [tuple(0 if i == j else None for j in every(xs)) for i in every(xs)]
        return [jax.vmap(f, axes)(*_stacked_where(axes, xs)) for axes in flags]

    return run


def _stacked_where(axes: tuple[int | None, ...], xs: Any) -> list[Array]:
    return [x if axis is None else jnp.moveaxis(stacked(x), 0, axis) for x, axis in zip(xs, axes, strict=True)]


def _of_first(transform: Callable[[Function], Function], f: Function) -> Function:
    """Return a transform of ``f`` over a batch of its first operand, the others unbatched."""
    return lambda x, *rest: jax.vmap(transform(f), (0, *[None] * len(rest)))(stacked(x), *rest)


def gradients(f: Function) -> Function:
    return lambda *xs: jax.grad(loss(f), every(xs))(*xs)


def _hvp(f: Function) -> Function:
    return lambda *xs: jax.jvp(gradients(f), xs, moved(xs))[1]


def _nested(f: Function) -> Function:
    def run(x, y, *rest):
        inner = jax.vmap(f, (None, 0, *[None] * len(rest)), out_axes=1)
        return jax.vmap(inner, (0, *[None] * (1 + len(rest))))(stacked(x), stacked(y, 2), *rest)

    return run


def _linearize(f: Function) -> Function:
    def run(*xs: Array) -> tuple[Array, Array]:
        out, linear = jax.linearize(f, *xs)
        return out, linear(*moved(xs))

    return run


def _checkpoint(policy: Any) -> Callable[[Function], Function]:
    return lambda f: gradients(jax.checkpoint(lambda *xs: jnp.sin(f(*xs)), policy=policy))


def _scan(f: Function) -> Function:
    def total(x, *rest):
        def step(carry, each):
            out = f(each * carry, *rest)
            return carry + jnp.sum(jnp.sin(out)) / 9, out

        return lax.scan(step, jnp.ones((), x.dtype), stacked(x))

    return lambda *xs: (total(*xs), jax.grad(lambda *xs: total(*xs)[0], every(xs))(*xs))


def _while(f: Function) -> Function:
    def run(*xs: Array) -> Array:
        def step(state):
            i, total = state
            return i + 1, total + jnp.sum(jnp.sin(f(*[x * total for x in xs]))) / 9

        return lax.while_loop(lambda state: state[0] < 3, step, (0, jnp.ones((), xs[0].dtype)))[1]

    return lambda *xs: jax.jvp(run, xs, moved(xs))


def _cond(f: Function) -> Function:
    def chosen(*xs: Array) -> Array:
        return lax.cond(jnp.sum(xs[0]) > 100, lambda *xs: -f(*xs), f, *xs)

    return gradients(chosen)


def _grad_of_vmap(f: Function) -> Function:
    return lambda x, *rest: jax.grad(
        loss(lambda *xs: jax.vmap(f, (0, *[None] * len(rest)))(stacked(xs[0]), *xs[1:])), every((x, *rest))
    )(x, *rest)


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "value": lambda f: f,
    "grad of each": lambda f: lambda *xs: [jax.grad(loss(f), i)(*xs) for i in every(xs)],
    "grad of all": gradients,
    "value_and_grad": lambda f: lambda *xs: jax.value_and_grad(loss(f), every(xs))(*xs),
    "jvp": lambda f: lambda *xs: jax.jvp(f, xs, moved(xs)),
    "jvp of each": lambda f: (
        lambda *xs: [
            jax.jvp(lambda x, i=i: f(*xs[:i], x, *xs[i + 1 :]), (xs[i],), moved(xs)[i : i + 1])[1] for i in every(xs)
        ]
    ),
    "vjp": lambda f: lambda *xs: jax.vjp(f, *xs)[1](jnp.cos(f(*xs))),
    "jacfwd": lambda f: lambda *xs: jax.jacfwd(f, every(xs))(*xs),
    "jacrev": lambda f: lambda *xs: jax.jacrev(f, every(xs))(*xs),
    "hessian": lambda f: lambda *xs: jax.hessian(loss(f), every(xs))(*xs),
    "hessian, reverse": lambda f: lambda *xs: jax.jacrev(jax.jacrev(loss(f), every(xs)), every(xs))(*xs),
    "hvp": _hvp,
    "hvp, reverse": lambda f: (
        lambda *xs: jax.grad(
            lambda *xs: sum(jnp.vdot(g, t) for g, t in zip(gradients(f)(*xs), moved(xs), strict=True)), every(xs)
        )(*xs)
    ),
    "linearize": _linearize,
    "vmap of each": _each_batched,
    "vmap, nested": _nested,
    "vmap of grad": lambda f: _of_first(gradients, f),
    "vmap of jvp": lambda f: _of_first(TRANSFORMS["jvp"], f),
    "vmap of hvp": lambda f: _of_first(_hvp, f),
    "grad of vmap": _grad_of_vmap,
    "grad of grad of vmap": lambda f: _hvp(lambda x, *rest: _of_first(lambda f: f, f)(x, *rest)),
    "checkpoint, nothing": _checkpoint(jax.checkpoint_policies.nothing_saveable),
    "checkpoint, dots": _checkpoint(jax.checkpoint_policies.dots_saveable),
    "scan": _scan,
    "while_loop": _while,
    "cond": _cond,
}

SHORT = ("value", "grad of all", "jvp", "hvp", "vmap of each", "vmap of grad")
"""The transforms that reach every rule."""

MIXED_AXES = tuple(
    axes for axes in product((None, 0, 1), (None, 0, 2), (None, 0, 1)) if any(x is not None for x in axes)
)
"""Of a, b and bias, one at least batched."""


def over(axes: tuple[int | None, ...], out_axis: int) -> Callable[[Function], Function]:
    """Return the transform that maps ``f`` over these axes of its operands."""
    return lambda f: lambda *xs: jax.vmap(f, axes, out_axis)(*_stacked_where(axes, xs))


def assert_same(got: Any, want: Any, rtol: float = 1e-9, what: str = "") -> None:
    """Raise unless two trees of arrays agree, relative to the largest element of each array."""
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    assert got_tree == want_tree, f"{what}: {got_tree} is not {want_tree}"
    for i, (x, y) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype, f"{what}, leaf {i}: {x.dtype} is not {y.dtype}"
        scale = np.max(np.abs(y), initial=0.0, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * max(scale, 1.0), err_msg=f"{what}, leaf {i}")


QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Options that compile four times as fast, where XLA knows them."""


def compiled(function: Function, *arrays: Array) -> Any:
    """Return what a function gives under ``jax.jit``, compiled once and quickly."""
    lowered = jax.jit(function).lower(*arrays)
    try:
        return lowered.compile(QUICK)(*arrays)
    except jax.errors.JaxRuntimeError:
        return lowered.compile()(*arrays)


# Jaxprs ---------------------------------------------------------------------------------------------------------------

PRODUCT = "fusedops_product"


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations of a jaxpr and of those in it, but for what a product is made of."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        if equation.primitive.name == PRODUCT:
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)


def names_in(function: Function, *arrays: Array) -> Counter[str]:
    """Return how often each primitive occurs in a function; a call of ``jax.jit`` counts under its own name."""
    found: Counter[str] = Counter()
    for equation in equations(jax.make_jaxpr(function)(*arrays)):
        name = equation.primitive.name
        found[equation.params["name"] if name in ("jit", "pjit") else name] += 1
    return found
