"""The benchmark's command, as far as a CPU allows, and the tables that were made with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusedops.bench.sampling import Table, host_samples

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "fusedops.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments", [("host", "--rounds", "0"), ("host", "--calls", "x"), ("table", "no-such-file"), (), ("gpu",)], ids=str
)
def test_a_wrong_argument_is_status_2_and_one_message(arguments: tuple[str, ...]) -> None:
    """No traceback, and the last line says what is wrong."""
    done = bench(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "fusedops.bench" in done.stderr.splitlines()[-1]


def test_the_cpu_table_has_every_framework_beside_its_own_operations() -> None:
    """Two rows or more for each library that is installed, in one table."""
    done = bench("cpu", "--rounds", "1", "--calls", "2")
    assert done.returncode == 0, done.stderr
    for framework in ("numpy", "torch", "jax"):
        assert f"fusedops.matmul, {framework}" in done.stdout
        assert any(line.startswith(framework) for line in done.stdout.splitlines())


def test_rows_are_interleaved_and_compared_with_the_baselines() -> None:
    """Every row has a sample a round, in the order of the rounds."""
    order: list[str] = []
    rows = {name: (lambda name=name: order.append(name)) for name in ("slow", "quick")}
    table = host_samples("t", "d", {"x": "1"}, rows, ("slow",), rounds=3, calls=1, drain=lambda: None)
    assert order == ["slow", "quick"] * 4
    assert {row: len(samples) for row, samples in table.samples.items()} == {"slow": 3, "quick": 3}
    assert Table.from_dict(json.loads(json.dumps(table.as_dict()))) == table
    assert "| slow |" in table.markdown()
    assert "1.00" in str(table)


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "performance").glob("*.json")), ids=lambda file: file.stem)
def test_the_documented_table_is_the_one_that_was_measured(file: Path) -> None:
    """The page shows what the command makes of the samples beside it."""
    done = bench("table", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (ROOT / "docs" / "performance.md").read_text()
