"""Train a network of two layers on handwritten digits, its backward pass written by hand in fused products.

The same training loop runs on NumPy and then on each of JAX, PyTorch and CuPy that is here; only loading differs.
Needs NumPy and scikit-learn: ``pip install -e '.[examples]' && python examples/quickstart.py``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fusedops

Array = Any

BATCH, HIDDEN, RATE, MOMENTUM, TARGET = 64, 128, 0.1, 0.9, 0.95


class Params(NamedTuple):
    w1: Array  # (64, hidden)
    b1: Array  # (hidden,)
    w2: Array  # (hidden, 10)
    b2: Array  # (10,)


def frameworks() -> Iterator[tuple[str, Callable[[np.ndarray], Array]]]:
    """Yield the name of each framework that is here, and what turns a NumPy array into one of its arrays."""
    yield "numpy", np.asarray
    if find_spec("jax"):
        import jax.numpy as jnp

        yield "jax", jnp.asarray
    if find_spec("torch"):
        import torch

        where = "cuda" if torch.cuda.is_available() else "cpu"
        yield "torch", lambda x: torch.asarray(x, device=where)
    if find_spec("cupy"):
        import cupy

        if cupy.is_available():
            yield "cupy", cupy.asarray


def initial_params(features: int, classes: int) -> Params:
    rng = np.random.default_rng(0)
    w1 = rng.normal(0, (2 / features) ** 0.5, (features, HIDDEN)).astype(np.float32)
    w2 = rng.normal(0, (2 / HIDDEN) ** 0.5, (HIDDEN, classes)).astype(np.float32)
    return Params(w1, np.zeros(HIDDEN, np.float32), w2, np.zeros(classes, np.float32))


def forward(params: Params, x: Array) -> tuple[Array, Array, Array]:
    """Return the hidden layer, the bits where relu let it pass, and the logits."""
    hidden, saved = fusedops.epilog_matmul(x, params.w1, epilog="RELU_AUX_BIAS", bias=params.b1)
    logits = fusedops.epilog_matmul(hidden, params.w2, epilog="BIAS", bias=params.b2)
    return hidden, saved["relu_aux"], logits


def gradients(params: Params, x: Array, onehot: Array) -> Params:
    """Return the gradients of the mean cross-entropy between ``softmax(logits)`` and the labels."""
    xp = array_namespace(x)
    hidden, relu_aux, logits = forward(params, x)
    odds = xp.exp(logits - xp.max(logits, axis=1, keepdims=True))
    dlogits = (odds / xp.sum(odds, axis=1, keepdims=True) - onehot) / x.shape[0]
    # dw2 = hidden^T @ dlogits, and dlogits summed over the rows; then the way back through w2 and relu, likewise
    dw2, sums2 = fusedops.epilog_matmul(hidden, dlogits, transpose_a=True, epilog="BGRADB")
    dpreact, sums1 = fusedops.epilog_matmul(
        dlogits, params.w2, transpose_b=True, epilog="DRELU_BGRAD", relu_aux=relu_aux
    )
    dw1 = fusedops.epilog_matmul(x, dpreact, transpose_a=True, epilog="DEFAULT")
    return Params(dw1, sums1["drelu_bgrad"], dw2, sums2["bgradb"])


def train(params: Params, x: Array, onehot: Array, epochs: int) -> Params:
    """Return the parameters after gradient descent with momentum; nothing is written in place, as JAX asks."""
    steps = [0.0] * len(params)
    for _ in range(epochs):
        for start in range(0, x.shape[0] - BATCH + 1, BATCH):
            grads = gradients(params, x[start : start + BATCH, :], onehot[start : start + BATCH, :])
            steps = [MOMENTUM * step - RATE * grad for step, grad in zip(steps, grads, strict=True)]
            params = Params(*(param + step for param, step in zip(params, steps, strict=True)))
    return params


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs

    digits = load_digits()
    pixels, onehot = (digits.data / 16).astype(np.float32), np.eye(10, dtype=np.float32)[digits.target]
    data = train_test_split(pixels, onehot, test_size=0.25, random_state=0)
    accuracies = []
    for name, asarray in frameworks():
        x, x_test, y, y_test = map(asarray, data)
        params = Params(*map(asarray, initial_params(pixels.shape[1], onehot.shape[1])))
        engine = fusedops.explain(x, params.w1, epilog="RELU_AUX_BIAS", bias=params.b1).engine
        start = time.perf_counter()
        params = train(params, x, y, epochs)
        xp, logits = array_namespace(x), forward(params, x_test)[2]
        hits = int(xp.sum(xp.argmax(logits, axis=1) == xp.argmax(y_test, axis=1)))
        seconds = time.perf_counter() - start
        accuracies.append(hits / x_test.shape[0])
        print(f"{name:6} engine {engine}, {device(x)!s:12} accuracy {accuracies[-1]:.3f} in {seconds:.1f} s")
    return 0 if min(accuracies) > TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
