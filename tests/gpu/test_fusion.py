"""Proof of fusion and of zero copy: the kernels of a call, the addresses that it reads, the memory that it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cupy
import pytest
import torch
from cases import CASES, Case, build
from devices import CUPY, TORCH, address
from frameworks import TestFramework
from running import split

import fusedops
from fusedops import Epilog, planned
from fusedops.engines import fused
from fusedops.engines.cells import SPLIT_CELLS
from fusedops.engines.nvmath import Program, plan_program
from fusedops.explanation import Explanation
from fusedops.problem import Problem

Array = Any


def arrays_of(case: Case, framework: TestFramework) -> dict[str, Array]:
    """Return the arrays of a case on the GPU."""
    return {name: framework.make(x) for name, x in build(case).items()}


def explanation_of(case: Case, framework: TestFramework) -> Explanation:
    """Return what a case's call would do."""
    arrays = arrays_of(case, framework)
    settings = {name: x for name, x in case.settings.items() if name not in ("alpha", "beta")}
    return fusedops.explain(arrays.pop("a"), arrays.pop("b"), **arrays, **settings)


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
    return kernels, explanation_of(case, TORCH).strategy


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


def small(epilog: str, **changes: Any) -> Case:
    """Return a case of a few aligned rows and columns in float32, but for what is changed."""
    case = Case(f"{epilog}-{changes}", 16, 64, 32, epilog=epilog)
    return replace(case, **changes)


DERIVATIVES = ("DRELU", "DGELU", "DRELU_BGRAD", "DGELU_BGRAD")
IEEE, TF32 = ({"options": {"precision": precision}} for precision in ("ieee", "tf32"))

CELLS: dict[str, tuple[list[Case], list[Case]]] = {
    "an extent of 0": (
        [small("RELU", m=0), small("RELU", n=0), small("RELU", k=0), small("RELU", batch_a=(0,))],
        [small("RELU", m=1), small("RELU", n=1), small("RELU", k=1), small("RELU", batch_a=(1,))],
    ),
    "GELU in float64, and in float32 without TF32": (
        [small("GELU", dtype="float64"), small("GELU", **IEEE), small("DGELU", dtype="float64")],
        [small("RELU", dtype="float64"), small("GELU", **TF32), small("DGELU", dtype="float16")],
    ),
    "backward epilogs with k = 1": (
        [small(epilog, dtype="float16", k=1) for epilog in DERIVATIVES],
        [small(epilog, dtype="float16", k=2) for epilog in DERIVATIVES],
    ),
    "BGRADA with row-major a": ([small("BGRADA")], [small("BGRADA", a="col")]),
    "BGRADB with column-major b": ([small("BGRADB", b="col")], [small("BGRADB")]),
    "auxiliary arrays off 16 bytes": ([], [small("RELU_AUX"), small("DRELU"), small("DRELU_BGRAD")]),
}
"""By the name of its cell, what is computed split, and what is fused though it all but lies in the cell. The last one
is told by addresses, which no explanation knows: `test_engine.py` has its inside."""


def test_there_are_no_other_cells() -> None:
    """One that is added or renamed needs its problems in the table above."""
    assert [cell.name for cell in SPLIT_CELLS] == [*CELLS]


@pytest.mark.parametrize("framework", [TORCH, CUPY], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_split_and_what_is_next_to_it_is_fused(framework: TestFramework, name: str) -> None:
    """The strategy changes where the cell ends, and an explanation names the cell."""
    inside, beside = CELLS[name]
    for case in inside:
        explanation = explanation_of(case, framework)
        assert (explanation.strategy, explanation.why.partition(":")[0]) == ("split", name), case.name
    for case in beside:
        assert explanation_of(case, framework).strategy == "fused", case.name


def test_an_explanation_says_where_addresses_decide() -> None:
    """Of a mask or pre-activation, not of a sum."""
    for epilog, decide in (("RELU_AUX", True), ("DRELU_BGRAD", True), ("RELU", False), ("BGRADB", False)):
        assert ("off 16 bytes" in explanation_of(small(epilog), CUPY).why) == decide, epilog


@pytest.mark.parametrize("framework", [TORCH, CUPY], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "bfloat16" and c.op == "epilog_matmul"][:32], ids=str)
def test_operands_are_read_where_they_are(
    framework: TestFramework, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch gets the operands' own addresses."""
    arrays = arrays_of(case, framework)
    a, b = arrays.pop("a"), arrays.pop("b")
    seen: list[tuple[int, ...]] = []

    def watched(problem: Problem, alignment: int) -> Program:
        program = plan_program(problem, alignment)
        return replace(program, launch=lambda *args: (seen.append(args[:6]), program.launch(*args))[1])

    planned._plans.clear()  # a plan keeps its programs
    monkeypatch.setattr(fused, "plan_program", watched)
    fusedops.epilog_matmul(a, b, **arrays, **case.settings)
    assert len(seen) == 1
    assert seen[0][:2] == (address(a), address(b))
    for x in arrays.values():
        assert address(x) in seen[0]


class Requests(cupy.cuda.MemoryHook):
    """The bytes that this thread asks of CuPy's pool in a block, before they are rounded up."""

    def __init__(self) -> None:
        self.total = 0

    def malloc_preprocess(self, **request: int) -> None:
        self.total += request["size"]


def measured(run: Callable[[], Any]) -> tuple[Any, dict[TestFramework, int]]:
    """Return what a call gives, and by how many bytes, not rounded, its peak exceeds what was there before."""
    torch.cuda.init()
    gc.collect()  # nothing older is given back during the call
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    with Requests() as requests:
        given = run()
    rise = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return given, {TORCH: rise, CUPY: requests.total}


@pytest.mark.parametrize(("framework", "other"), [(TORCH, CUPY), (CUPY, TORCH)], ids=str)
@pytest.mark.parametrize("epilog", ["DEFAULT", "RELU_BIAS", "RELU_AUX_BIAS", "GELU_AUX_BIAS", *DERIVATIVES, "BGRADB"])
def test_memory_rises_by_the_results_alone(framework: TestFramework, other: TestFramework, epilog: str) -> None:
    """To the byte by results and workspace, in the lead's memory: a copy of the smallest operand would be seen."""
    bias = "shared" if Epilog[epilog].bias else None
    case = Case(f"memory-{epilog}", 2048, 1024, 512, epilog=epilog, dtype="bfloat16", bias=bias)
    workspace = explanation_of(case, framework).facts["workspace"]
    assert workspace <= (32 << 20) + 16
    arrays = arrays_of(case, framework)
    run = partial(fusedops.epilog_matmul, arrays.pop("a"), arrays.pop("b"), **arrays, **case.settings)
    run()  # planned and loaded
    given, rise = measured(run)
    out, aux = split(case, given)
    results = out.nbytes + (0 if aux is None else aux.nbytes)
    assert rise == {framework: results + workspace, other: 0}
