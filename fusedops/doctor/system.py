"""What can be told without loading anything: the interpreter, installed packages, and variables that change results."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from .stages import Stages
from .variables import variables_of

__all__ = ["PACKAGES", "examine"]

PACKAGES = (
    *("numpy", "array-api-compat", "ml_dtypes", "scipy"),
    *("torch", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("cupy", "cupy-cuda12x", "cupy-cuda13x", "nvmath-python"),
    *("cuda-core", "cuda-bindings", "cuda-python", "cuda-pathfinder"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    # other producers of DLPack
    *("apache-tvm-ffi", "array-api-strict", "dpnp", "mlx", "paddlepaddle", "tensorflow"),
)


def examine(stages: Stages, _: Mapping[str, Any]) -> None:
    """Find the interpreter, the packages and the environment."""
    stages.run("python", _python)
    stages.run("packages", lambda: {name: _version(name) for name in PACKAGES})
    stages.run("modules", lambda: {name: _is_found(name) for name in ("numpy", "torch", "jax", "cupy", "nvmath")})
    stages.run("environment", lambda: variables_of(os.environ))


def _python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": sys.implementation.name,
        "executable": sys.executable,
        "system": sys.platform,
        "machine": platform.machine(),
        "conda": bool(os.environ.get("CONDA_PREFIX")),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _is_found(name: str) -> bool:
    """Return whether a module can be found; one whose search fails is there, and its own probe says what is wrong."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    except (ImportError, ValueError):
        return True
