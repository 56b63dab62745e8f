"""Every example runs as a user would run it; the quickstart learns, on each framework that is here."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
QUICKSTART = EXAMPLES[0].with_name("quickstart.py")


@cache
def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    done = run(path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_quickstart_learns_on_every_framework() -> None:
    reached = dict(re.findall(r"^(\w+) .*accuracy ([\d.]+)", run(QUICKSTART).stdout, re.MULTILINE))
    assert {"numpy", *(name for name in ("jax", "torch") if find_spec(name))} <= reached.keys()
    assert all(float(accuracy) > 0.95 for accuracy in reached.values())


def test_quickstart_fails_without_training() -> None:
    done = run(QUICKSTART, "--epochs", "0")
    assert done.returncode == 1
    assert "accuracy" in done.stdout
