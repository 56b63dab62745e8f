"""The environment's variables that change what is computed, where, or with which library."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

__all__ = ["VARIABLES", "change_of", "variables_of"]

VARIABLES = {
    # what each changes, by a pattern; the first that fits counts
    "FUSEDOPS_CACHE_DIR": "where compiled code is kept",
    "FUSEDOPS_*": "a setting of fusedops",
    "NVIDIA_TF32_OVERRIDE": "0 forbids TF32 to cuBLAS in every library, whatever a program asks for",
    "CUPY_TF32": "1 lets CuPy, and so fusedops for CuPy arrays, multiply float32 in TF32",
    "TORCH_ALLOW_TF32*": "lets PyTorch, and so fusedops for its tensors, multiply float32 in TF32",
    "JAX_DEFAULT_MATMUL_PRECISION": "whether JAX, and so fusedops for its arrays, multiplies float32 in TF32",
    "CUBLAS_WORKSPACE_CONFIG": "the workspace of PyTorch's and CuPy's own products; fusedops passes its own",
    "CUBLASLT_*": "a setting of cuBLASLt",
    "CUDA_VISIBLE_DEVICES": "which GPUs there are, and their order",
    "CUDA_DEVICE_ORDER": "the order of GPUs",
    "CUDA_MODULE_LOADING": "when kernels are loaded",
    "CUDA_LAUNCH_BLOCKING": "1 makes every launch wait: slow, for debugging alone",
    "CUDA_HOME": "where libraries of CUDA are looked for",
    "CUDA_PATH": "where libraries of CUDA are looked for",
    "XLA_FLAGS": "how XLA compiles and computes",
    "XLA_PYTHON_CLIENT_*": "how much memory of a GPU JAX takes",
    "JAX_PLATFORMS": "which devices JAX uses",
    "JAX_ENABLE_X64": "whether JAX has 64-bit types",
    "JAX_COMPILATION_CACHE_DIR": "where JAX keeps compiled programs",
    "CUPY_*": "a setting of CuPy",
    "PYTORCH_*": "a setting of PyTorch",
    "LD_LIBRARY_PATH": "which libraries are found first, cuBLASLt among them",
    "LD_PRELOAD": "libraries that every process loads",
    "CC": "the C compiler",
    "XDG_CACHE_HOME": "where compiled code is kept",
}


def variables_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that change what is computed, where, or with which library."""
    return {name: value for name, value in sorted(environment.items()) if change_of(name) is not None}


def change_of(name: str) -> str | None:
    """Return what a variable changes, None where it changes nothing here."""
    return next((change for pattern, change in VARIABLES.items() if fnmatchcase(name, pattern)), None)
