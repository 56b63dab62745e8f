"""A tensor-parallel MLP under ``jax.shard_map``: columns of the first weight, rows of the second, one sum at the end.

Each device computes its slice of the hidden layer, with its slice of the bias, and its part of the result; the parts
are added and the last bias comes once. Runs on all devices of the machine, on eight virtual ones without a GPU.
Needs JAX: ``pip install -e '.[jax]' && python examples/jax_tensor_parallel.py``.
"""

from __future__ import annotations

import os
from typing import Any

if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fusedops

Array = Any

ROWS, FEATURES, HIDDEN = 32, 64, 256
SPECS = (P(), P(None, "tensor"), P("tensor"), P("tensor", None), P())
"""Of x, w1, b1, w2 and b2."""


def layer(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """Compute one device's part, and add all parts: ``x`` and ``b2`` whole, the others a slice."""
    hidden = fusedops.matmul(x, w1, bias=b1, activation="gelu_tanh")
    return jax.lax.psum(fusedops.matmul(hidden, w2), "tensor") + b2


def main() -> int:
    mesh = jax.make_mesh((len(jax.devices()),), ("tensor",))
    parallel = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=SPECS, out_specs=P()))

    rng = np.random.default_rng(0)
    shapes = ((ROWS, FEATURES), (FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, FEATURES), (FEATURES,))
    arrays = [rng.normal(0, 0.3, shape).astype("float32") for shape in shapes]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, SPECS, strict=True)]

    got = parallel(*placed)
    x, w1, b1, w2, b2 = (x.astype("float64") for x in arrays)
    z = x @ w1 + b1
    want = 0.5 * z * (1 + np.tanh((2 / np.pi) ** 0.5 * (z + 0.044715 * z**3))) @ w2 + b2
    error = float(np.abs(np.asarray(got) - want).max())
    grads = jax.jit(jax.grad(lambda *arrays: jnp.sum(parallel(*arrays)), (1, 3)))(*placed)
    print(f"{len(jax.devices())} devices, error {error:.1e}, gradients sharded as {[g.sharding.spec for g in grads]}")
    return 0 if error < 0.05 else 1  # TF32 on a GPU


if __name__ == "__main__":
    raise SystemExit(main())
