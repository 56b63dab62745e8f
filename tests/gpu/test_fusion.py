"""Proof of fusion and of zero copy: the kernels of a call, the addresses that it reads, the memory that it takes."""

from __future__ import annotations

from typing import Any

import cupy
import pytest
import torch
from cases import CASES, Case, build
from devices import CUPY, TORCH
from frameworks import TestFramework

import fusedops
from fusedops.engines import nvmath as engine
from fusedops.engines.cells import split_cell

Array = Any


def arrays_of(case: Case, framework: TestFramework) -> dict[str, Array]:
    """Return the arrays of a case on the GPU."""
    return {name: framework.make(x) for name, x in build(case).items()}


def kernels_of(case: Case) -> tuple[list[str], str]:
    """Return the names of the kernels of one call, and its strategy."""
    arrays = arrays_of(case, TORCH)
    a, b = arrays.pop("a"), arrays.pop("b")
    op = getattr(fusedops, case.op)
    op(a, b, **arrays, **case.settings)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        op(a, b, **arrays, **case.settings)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    settings = {name: x for name, x in case.settings.items() if name not in ("alpha", "beta")}
    return kernels, fusedops.explain(a, b, **arrays, **settings).strategy


FUSED = [
    case
    for case in CASES
    if case.dtype in ("bfloat16", "float32")
    and case.activation in (None, "relu", "gelu_tanh")
    and case.data == "random"
]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("case", FUSED[::3], ids=str)
def test_a_fused_call_is_the_products_kernels_alone(case: Case) -> None:
    """One kernel, two or three where the library reduces or sums in steps of its own: none of them the framework's."""
    kernels, strategy = kernels_of(case)
    if strategy == "fused":
        assert 1 <= len(kernels) <= 3, kernels
        assert not any("at::" in name for name in kernels), kernels
    else:
        assert strategy == "split"


def test_the_strategy_is_the_tables() -> None:
    """A problem is split where the table says so, and nowhere else."""
    for case in CASES[::7]:
        arrays = arrays_of(case, CUPY)
        a, b = arrays.pop("a"), arrays.pop("b")
        settings = {name: x for name, x in case.settings.items() if name not in ("alpha", "beta")}
        plan = fusedops.plan(a, b, **arrays, **settings)
        expected = "fused" if split_cell(plan.problem) is None else "split"
        assert plan.explain().strategy == expected, case.name


@pytest.mark.parametrize("framework", [TORCH, CUPY], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "bfloat16" and c.op == "epilog_matmul"][:32], ids=str)
def test_operands_are_read_where_they_are(
    framework: TestFramework, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The binding gets the operands' own addresses."""
    arrays = arrays_of(case, framework)
    a, b = arrays.pop("a"), arrays.pop("b")
    seen: list[tuple[int, ...]] = []
    launch = engine.Program.launch
    monkeypatch.setattr(engine.Program, "launch", lambda self, *args: (seen.append(args[:6]), launch(self, *args))[1])
    fusedops.epilog_matmul(a, b, **arrays, **case.settings)
    address = (lambda x: x.data_ptr()) if framework is TORCH else (lambda x: x.data.ptr)
    assert len(seen) == 1
    assert seen[0][:2] == (address(a), address(b))
    for x in arrays.values():
        assert address(x) in seen[0]


def test_memory_rises_by_the_result_alone() -> None:
    """Peak memory of a call is that of its result and its workspace."""
    a, b = (torch.randn(1024, 1024, device="cuda").bfloat16() for _ in range(2))
    bias = torch.randn(1024, device="cuda").bfloat16()
    workspace = fusedops.explain(a, b, bias=bias, activation="relu").facts["workspace"]
    fusedops.matmul(a, b, bias=bias, activation="relu")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = fusedops.matmul(a, b, bias=bias, activation="relu")
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + workspace + 1024
    assert cupy.get_default_memory_pool().used_bytes() < 1 << 30
