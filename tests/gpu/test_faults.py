"""The table of bad arguments on the nvmath engine: the same errors, in the same words, as on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bad_input_cases import FAULTS, VALID, Fault
from devices import CUPY, TORCH
from frameworks import NUMPY, TestFramework
from frameworks import TORCH as TORCH_ON_CPU
from test_bad_input import check

ELSEWHERE = ("byte order", "framework", "stream", "device", "gradient", "read-only")
"""What a GPU answers otherwise, or has not: `test_engine.py` and `test_streams.py` have its own."""


def there(fault: Fault, framework: TestFramework, twin: TestFramework) -> Fault:
    """Return a row for a framework on the GPU, with the answer of its twin on the CPU."""
    return replace(fault, on=(framework,), instead={framework: fault.answer(twin)})


RUNS = [
    pytest.param(there(fault, framework, twin), framework, id=f"{fault.label}-{fault.ops}-{framework.name}")
    for framework, twin in ((TORCH, TORCH_ON_CPU), (CUPY, TORCH_ON_CPU))
    for fault in FAULTS
    if twin in fault.on and NUMPY in fault.on and not any(word in fault.label for word in ELSEWHERE)
]


@pytest.mark.parametrize(("fault", "framework"), RUNS)
def test_fault(fault: Fault, framework: TestFramework) -> None:
    """Every function of a row answers as the row says, and changes no argument."""
    for op in fault.ops.split():
        check(op, fault, framework)


@pytest.mark.parametrize("op", [op for op in VALID if not op.startswith("options")])
@pytest.mark.parametrize("framework", [TORCH, CUPY], ids=str)
def test_the_valid_call_is_valid(op: str, framework: TestFramework) -> None:
    """Otherwise its rows would see the fault of another argument."""
    check(op, replace(FAULTS[0], ops=op, given={}, planned={}, instead={framework: None}), framework)
