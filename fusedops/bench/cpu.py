"""What a call adds on a CPU to the framework's own operations, on arrays so small that their time hides nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import fusedops

from .sampling import Table, host_samples

__all__ = ["cpu_table"]

Rows = dict[str, Callable[[], object]]
OWN = "numpy maximum(a @ b + bias, 0)"


def cpu_table(rounds: int, calls: int) -> Table:
    """Measure ``relu(a @ b + bias)`` on 5 x 7 x 9 float32 beside each framework's own operations.

    Parameters
    ----------
    rounds, calls : int
        Samples of each row, and calls in a sample.

    Returns
    -------
    Table
        In microseconds a call; PyTorch's and JAX's rows where they are installed.
    """
    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(shape).astype("float32") for shape in ((5, 7), (7, 9), (9,)))
    out = np.empty((5, 9), "float32")
    rows: Rows = {
        OWN: lambda: np.maximum(a @ b + bias, 0),
        "fusedops.matmul, numpy": lambda: fusedops.matmul(a, b, bias=bias, activation="relu"),
        "fusedops.matmul, numpy, out=": lambda: fusedops.matmul(a, b, bias=bias, activation="relu", out=out),
    }
    if find_spec("torch"):
        rows |= _torch_rows(a, b, bias)
    if find_spec("jax"):
        rows |= _jax_rows(a, b, bias)
    title = "host time of relu(a @ b + bias), 5 x 7 x 9 float32, microseconds a call"
    return host_samples(title, "CPU", {}, rows, (OWN,), rounds, calls, lambda: None)


def _torch_rows(*arrays: Any) -> Rows:
    import torch

    a, b, bias = map(torch.from_numpy, arrays)
    return {
        "torch relu(a @ b + bias)": lambda: torch.relu(a @ b + bias),
        "fusedops.matmul, torch": lambda: fusedops.matmul(a, b, bias=bias, activation="relu"),
    }


def _jax_rows(*arrays: Any) -> Rows:
    import jax

    a, b, bias = (jax.device_put(x, jax.devices("cpu")[0]) for x in arrays)
    return {
        "jax relu(a @ b + bias)": lambda: jax.nn.relu(a @ b + bias),
        "fusedops.matmul, jax": lambda: fusedops.matmul(a, b, bias=bias, activation="relu"),
    }
