"""`epilog_matmul` under JAX's transforms: against NumPy's own result, item by item, and against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import EPILOGS, Case, build
from jax_cases import assert_same, weights

import fusedops
from fusedops import Epilog

Array = Any
Arrays = dict[str, np.ndarray]
Flags = dict[str, bool]

FLAGS: dict[str, Flags] = {"": {}, "-ta": {"transpose_a": True}, "-tb": {"transpose_b": True}}
ORDER = ("a", "b", "bias", "c", "relu_aux", "gelu_aux")
COUNT = 3


def case_of(epilog: str, **more: Any) -> Case:
    bias = "shared" if Epilog[epilog].bias else None
    return Case(f"{epilog}-jax", 4, 9, 5, epilog=epilog, dtype="float64", bias=bias, **more)


def arrays_of(case: Case, seed: int = 0) -> Arrays:
    """Return the arrays by name in the order of the rules, another draw for another seed, residuals unpadded of NaN."""
    arrays = build(Case(**{**vars(case), "name": f"{case.name}-{seed}"}))
    if "gelu_aux" in arrays:
        arrays["gelu_aux"] = np.nan_to_num(arrays["gelu_aux"])
    return {name: arrays[name] for name in ORDER if name in arrays}


def compared(epilog: str, n: int, results: Any) -> list[Array]:
    """Return ``out`` and what an auxiliary output says, without the padding."""
    if Epilog[epilog].gives is None:
        return [results]
    out, aux = results
    (x,) = aux.values()
    form = Epilog[epilog].value.gives.format
    if form == "relu_mask":
        x = np.unpackbits(np.asarray(x), axis=-1, count=n, bitorder="little")
    return [out, x[..., :n] if form == "preact" else x]


def call(epilog: str, names: tuple[str, ...], **options: Any) -> Callable[..., Any]:
    """Return the op as a function of its arrays by position."""

    def run(*arrays: Array) -> Any:
        given = dict(zip(names, arrays, strict=True))
        return fusedops.epilog_matmul(given.pop("a"), given.pop("b"), epilog=epilog, **given, **options)

    return run


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("epilog", EPILOGS)
def test_compiled(epilog: str, flags: Flags, batch: tuple[int, ...], dtype: str) -> None:
    case = case_of(epilog, c="dense", alpha=0.5, beta=-2.0, batch_a=batch)
    arrays = {name: x if x.dtype == np.uint8 else x.astype(dtype) for name, x in arrays_of(case).items()}
    for name, flag in (("a", "transpose_a"), ("b", "transpose_b")):
        if flag in flags:
            arrays[name] = np.ascontiguousarray(np.swapaxes(arrays[name], -1, -2))
    run = call(epilog, tuple(arrays), alpha=0.5, beta=-2.0, **flags)
    got = jax.jit(run)(*map(jnp.asarray, arrays.values()))
    want = run(*arrays.values())
    rtol = 1e-12 if dtype == "float64" else 2e-5
    assert_same(compared(epilog, case.n, got), compared(epilog, case.n, want), rtol=rtol)


def axes_for(names: tuple[str, ...]) -> list[tuple[int | None, ...]]:
    """Return all batched, each alone, and all but each."""
    alone = [tuple(0 if name == one else None for name in names) for one in names]
    others = [tuple(None if axis == 0 else 0 for axis in axes) for axes in alone]
    return [tuple(0 for _ in names), *alone, *others]


@pytest.mark.parametrize("epilog", EPILOGS)
def test_vmap(epilog: str) -> None:
    """Any operand unbatched, the weights and the residual among them."""
    case = case_of(epilog)
    items = [arrays_of(case, seed) for seed in range(COUNT)]
    names = tuple(items[0])
    run = call(epilog, names)
    together = [jnp.stack([item[name] for item in items]) for name in names]
    first = [x[0] for x in together]
    every = axes_for(names)

    @jax.jit
    def mapped(together: list[Array], first: list[Array]) -> list[Any]:
        chosen = [
            [y if axis is None else x for x, y, axis in zip(together, first, axes, strict=True)] for axes in every
        ]
        return [jax.vmap(run, axes)(*xs) for axes, xs in zip(every, chosen, strict=True)]

    for axes, got in zip(every, mapped(together, first), strict=True):
        for i, item in enumerate(items):
            own = [items[0][name] if axis is None else item[name] for name, axis in zip(names, axes, strict=True)]
            part = jax.tree.map(lambda x, i=i: x[i], got)
            want = compared(epilog, case.n, run(*own))
            assert_same(compared(epilog, case.n, part), want, rtol=1e-12, what=f"{axes}, item {i}")


@pytest.mark.parametrize("epilog", EPILOGS)
def test_vmap_of_a_batch(epilog: str) -> None:
    """A batch axis of the caller's beside the one that vmap adds, with a bias for each item."""
    case = case_of(epilog, batch_a=(2,), batch_b=(2,))
    items = [arrays_of(case, seed) for seed in range(COUNT)]
    names = tuple(items[0])
    got = jax.vmap(call(epilog, names))(*(jnp.stack([item[name] for item in items]) for name in names))
    for i, item in enumerate(items):
        part = jax.tree.map(lambda x, i=i: x[i], got)
        want = compared(epilog, case.n, call(epilog, names)(*item.values()))
        assert_same(compared(epilog, case.n, part), want, rtol=1e-12)


@pytest.mark.parametrize("epilog", EPILOGS)
def test_derivatives(epilog: str) -> None:
    """Forward mode in the direction of each float operand against differences, backward mode against forward."""
    case = case_of(epilog, c="dense", alpha=0.5, beta=-2.0)
    arrays = arrays_of(case)
    run = call(epilog, tuple(arrays), alpha=0.5, beta=-2.0)
    moving = [i for i, x in enumerate(arrays.values()) if x.dtype != np.uint8]

    def of_moving(*values: Array) -> tuple[Array, ...]:
        chosen = list(arrays.values())
        for i, x in zip(moving, values, strict=True):
            chosen[i] = x
        traced = isinstance(values[0], jax.core.Tracer)
        results = run(*map(jnp.asarray, chosen)) if traced else run(*chosen)
        out, aux = results if isinstance(results, tuple) else (results, {})
        return out, *[x[..., : case.n] for x in aux.values() if x.dtype != np.uint8]

    values = [list(arrays.values())[i] for i in moving]
    tangents = [weights(x.shape) for x in values]
    zeros = [np.zeros_like(x) for x in values]

    @jax.jit
    def derivatives(*values: Array) -> Any:
        forward = [jax.jvp(of_moving, values, _only(i, tangents, zeros))[1] for i in range(len(values))]
        out, back = jax.vjp(of_moving, *values)
        return forward, back(tuple(jnp.asarray(weights(x.shape)) for x in out))

    forward, backward = derivatives(*map(jnp.asarray, values))
    for i, got in enumerate(forward):
        want = differences(of_moving, values, _only(i, tangents, zeros))
        assert_same(list(got), list(want), rtol=1e-6, what=f"jvp by operand {moving[i]}")
        inner = sum(np.vdot(weights(x.shape), x) for x in want)
        assert_same(np.vdot(backward[i], tangents[i]), inner, rtol=1e-6, what=f"vjp by operand {moving[i]}")


def _only(i: int, tangents: list[np.ndarray], zeros: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    return tuple(t if i == j else z for j, (t, z) in enumerate(zip(tangents, zeros, strict=True)))


def differences(
    f: Callable[..., tuple[Array, ...]], values: list[np.ndarray], tangents: tuple[np.ndarray, ...], step: float = 1e-6
) -> list[np.ndarray]:
    """Return the derivative of ``f`` in a direction by central differences."""
    above, below = (f(*(x + sign * step * t for x, t in zip(values, tangents, strict=True))) for sign in (1, -1))
    return [(x - y) / (2 * step) for x, y in zip(above, below, strict=True)]
