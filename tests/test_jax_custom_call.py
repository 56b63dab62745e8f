"""JAX's tests once more, with every product the custom call that CUDA runs, over the stand-in for cuBLASLt."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvmath")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="native code is compiled on Linux alone")

TESTS = Path(__file__).parent
SECONDS = 600  # a third of it on an idle machine

FILES = ("test_jax.py", "test_jax_epilogs.py", "test_jax_dtypes.py", "test_jax_programs.py", "test_jax_meshes*.py")

LEFT_OUT = {
    "test_eager": "compiled programs have the same transforms of the same products, and this is a quarter of the time",
    "another_process": "such a test starts processes of either lowering by itself",
}
"""Tests by a part of their names, and why they are not run."""


def test_they_pass_and_run_custom_calls() -> None:
    """In one process of its own: how a primitive lowers is settled once a process."""
    files = [path.name for pattern in FILES for path in sorted(TESTS.glob(pattern))]
    chosen = " and ".join(f"not {name}" for name in LEFT_OUT)
    command = [sys.executable, "-m", "pytest", "-p", "xla_on_cpu", "-p", "no:cacheprovider", "-k", chosen, *files]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    (executed,) = re.findall(r"custom calls executed: (\d+)", done.stdout)
    assert int(executed) >= int(passed) >= 200
