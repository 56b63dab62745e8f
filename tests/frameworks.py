"""The frameworks under test: how each makes an array with the memory layout that a case asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import array_api_strict
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

Array = Any

jax.config.update("jax_enable_x64", True)


def np_dtype(name: str) -> np.dtype:
    """Return NumPy's dtype object, for bfloat16 that of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _torch(x: np.ndarray) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _jax(x: np.ndarray) -> jax.Array:
    """Return the array on the CPU, also where JAX has a GPU: there XLA multiplies float32 in TF32."""
    return jax.device_put(jnp.asarray(x), jax.devices("cpu")[0])


@dataclass(frozen=True)
class TestFramework:
    """A framework under test.

    ``make`` turns a NumPy array into one of the framework's; where ``strided``, over the same memory with the same
    strides.
    """

    __test__ = False

    name: str
    type: type
    make: Callable[[np.ndarray], Array]
    dtypes: tuple[str, ...]
    strided: bool
    has_erf: bool = True
    unfused: Callable[[Array, Array, Array], Array] | None = None

    def __repr__(self) -> str:
        return self.name


_ALL = ("float16", "bfloat16", "float32", "float64")

NUMPY = TestFramework(
    "numpy",
    np.ndarray,
    lambda x: x,
    _ALL,
    True,
    unfused=lambda a, b, bias: np.maximum((a @ b).astype(a.dtype) + bias, 0),
)
TORCH = TestFramework("torch", torch.Tensor, _torch, _ALL, True, unfused=lambda a, b, bias: torch.relu(a @ b + bias))
JAX = TestFramework("jax", jax.Array, _jax, _ALL, False, unfused=lambda a, b, bias: jax.nn.relu(a @ b + bias))
STRICT = TestFramework(
    "array_api_strict",
    array_api_strict._array_object.Array,
    array_api_strict.asarray,
    ("float32", "float64"),
    True,
    False,
)

FRAMEWORKS = (NUMPY, TORCH, JAX, STRICT)
