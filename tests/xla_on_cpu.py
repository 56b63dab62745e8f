"""Runs JAX's tests through the custom call: ``python -m pytest -p xla_on_cpu tests/test_jax.py``, from ``tests``.

The handler is registered for the CPU over the stand-in for cuBLASLt, and products are lowered there as they are for
CUDA.
"""

from __future__ import annotations

import pytest
from native.handler_on_cpu import serve
from virtual_devices import ask_for_virtual_devices

from fusedops.xla import counters
from fusedops.xla.product import lower_to_the_call

ask_for_virtual_devices()
serve()
lower_to_the_call("cpu")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"custom calls executed: {counters()['executions']}")
