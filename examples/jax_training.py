"""Train a network on handwritten digits with JAX and optax, first in plain ``jnp``, then with three lines changed.

The three lines are those of ``fused`` below. Needs optax and scikit-learn:
``pip install -e '.[examples-jax]' && python examples/jax_training.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fusedops

Array = Any
Params = dict[str, Array]

EPOCHS, BATCH, HIDDEN, TARGET = 20, 64, 128, 0.95


def plain(params: Params, x: Array) -> Array:
    h = jax.nn.relu(x @ params["w1"] + params["b1"])
    h = jax.nn.gelu(h @ params["w2"] + params["b2"], approximate=True)
    return h @ params["w3"] + params["b3"]


def fused(params: Params, x: Array) -> Array:
    h = fusedops.matmul(x, params["w1"], bias=params["b1"], activation="relu")
    h = fusedops.matmul(h, params["w2"], bias=params["b2"], activation="gelu_tanh")
    return fusedops.matmul(h, params["w3"], bias=params["b3"])


def initial(extents: tuple[int, ...]) -> Params:
    params: Params = {}
    for i, (k, n) in enumerate(pairwise(extents), start=1):
        params[f"w{i}"] = jax.random.normal(jax.random.key(i), (k, n)) * (2 / k) ** 0.5
        params[f"b{i}"] = jnp.zeros(n)
    return params


def train(network: Callable[[Params, Array], Array], x: Array, y: Array) -> Params:
    """Return the parameters after all epochs; one step is one compiled program."""
    optimizer = optax.adam(2e-3)

    def loss(params: Params, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(network(params, x), y).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, x: Array, y: Array) -> tuple[Params, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state)
        return optax.apply_updates(params, updates), state

    params = initial((64, HIDDEN, HIDDEN, 10))
    state = optimizer.init(params)
    for _ in range(EPOCHS):
        for start in range(0, len(x) - BATCH + 1, BATCH):
            params, state = step(params, state, x[start : start + BATCH], y[start : start + BATCH])
    return params


def main() -> int:
    digits = load_digits()
    split = train_test_split(digits.data / 16, digits.target, test_size=0.25, random_state=0)
    x, x_test, y, y_test = (jnp.asarray(part, "float32" if part.ndim > 1 else "int32") for part in split)
    accuracies = []
    for network in (plain, fused):
        start = time.perf_counter()
        params = train(network, x, y)
        accuracies.append(float((network(params, x_test).argmax(1) == y_test).mean()))
        print(f"{network.__name__:6} accuracy {accuracies[-1]:.3f} in {time.perf_counter() - start:.1f} s")
    return 0 if min(accuracies) > TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
