"""GPU tests: not collected without a device, an error without one under ``--require-gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _missing() -> str | None:
    """Return what a GPU test lacks here, or None."""
    try:
        import cupy
        import jax  # noqa: F401
        import nvmath  # noqa: F401
        import torch

        if not cupy.cuda.is_available():
            return "a CUDA device"
        return None if torch.cuda.is_available() else "a PyTorch with CUDA"
    except ImportError as error:
        return str(error.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out test files that need a GPU or a library which is not there; with ``--require-gpu``, stop."""
    if collection_path.name.startswith("test_") and _missing() is not None:
        if config.getoption("--require-gpu"):
            raise pytest.UsageError(f"--require-gpu, and this machine lacks {_missing()}")
        return True
    return None
