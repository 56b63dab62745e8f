"""GPU tests: skipped without a device, a failure without one under ``--require-gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _missing() -> str | None:
    """Return what a GPU test lacks here, or None."""
    try:
        import cupy
        import nvmath  # noqa: F401

        return None if cupy.cuda.is_available() else "no CUDA device"
    except ImportError as error:
        return f"{error.name} is not installed"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them or let them fail where there is no GPU."""
    ours = [item for item in items if HERE in Path(item.fspath).parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
    missing = _missing()
    if missing is None or not ours:
        return
    for item in ours:
        if config.getoption("--require-gpu"):
            item.add_marker(pytest.mark.xfail(reason=f"--require-gpu, and {missing}", run=False, strict=True))
        else:
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import test files that need a GPU library which is not there."""
    if collection_path.name.startswith("test_") and _missing() is not None:
        if config.getoption("--require-gpu"):
            raise pytest.UsageError(f"--require-gpu, and {_missing()}")
        return True
    return None
