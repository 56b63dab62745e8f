"""The nvmath engine against float64: every case of the table, for PyTorch and CuPy on a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest
import torch
from cases import CASES, Case, build, laid_out
from devices import CUPY, FRAMEWORKS
from frameworks import TestFramework, np_dtype
from running import call, check, check_result
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops import Epilog, calls
from fusedops.engines import guard
from fusedops.engines.cells import SPLIT_CELLS, split_cell
from fusedops.engines.nvmath import descriptors, plan_program, programs, sound_programs
from fusedops.engines.nvmath.execute import execute
from fusedops.testing import assert_within, k_tail_operands, matmul_oracle, to_numpy

Array = Any

try:
    import tvm_ffi
except ImportError:
    tvm_ffi = None

RUNS = [pytest.param(f, c, id=f"{f.name}-{c.name}") for f in FRAMEWORKS for c in CASES]


@pytest.mark.parametrize(("framework", "case"), RUNS)
def test_case(framework: TestFramework, case: Case) -> None:
    """Result and auxiliary output are as near to float64 as their dtypes allow."""
    check(case, framework)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "bfloat16" and c.out_dtype is None], ids=str)
def test_out(framework: TestFramework, case: Case) -> None:
    """``out=`` with a leading dimension and ``aux_out=`` are written whole, and nothing around them is touched."""
    arrays = build(case)
    fresh, fresh_aux = call(case, framework, arrays)
    shape = tuple(fresh.shape)
    buffer = framework.make(np.full((*shape[:-1], shape[-1] + 8), 7, build(case)["a"].dtype))
    given = {"out": buffer[..., : shape[-1]]}
    if fresh_aux is not None:
        given["aux_out"] = {case.traits.gives.name: fresh_aux * 0}
    result, aux = call(case, framework, arrays, **given)
    assert result is given["out"]
    check_result(case, framework, arrays, result, aux)
    assert bool((buffer[..., shape[-1] :] == 7).all())


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("epilog", ["RELU_BIAS", "GELU_BIAS", "RELU_AUX_BIAS", "GELU_AUX_BIAS", "DRELU_BGRAD"])
def test_every_array_misaligned(framework: TestFramework, dtype: str, epilog: str) -> None:
    """Operands, bias and out one element into their buffers, in every combination, after the aligned call."""
    for offsets in np.ndindex(2, 2, 2, 2):
        a, b, bias, out = ("offset" if moved else "row" for moved in offsets)
        needs_bias = Epilog[epilog].bias
        case = Case(
            f"{epilog}-{dtype}-misaligned",
            16,
            64,
            32,
            epilog=epilog,
            dtype=dtype,
            a=a,
            b=b,
            bias={"row": "shared", "offset": "offset"}[bias] if needs_bias else None,
        )
        arrays = build(case)
        blank = laid_out(np.zeros((16, 64), arrays["a"].dtype), out)
        result, aux = call(case, framework, arrays, out=framework.make(blank))
        check_result(case, framework, arrays, result, aux)


@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_bias_for_each_item_lies_at_any_step(dtype: torch.dtype, activation: str | None) -> None:
    """The first item's bias is at a multiple of 16 bytes and the others are not."""
    a, b = (torch.randn(3, *shape, device="cuda").to(dtype) for shape in ((32, 16), (16, 64)))
    buffer = torch.randn(256, device="cuda").to(dtype)
    for step in (72, 65, 66, 68):
        bias = torch.as_strided(buffer, (3, 1, 64), (step, 64, 1))
        got = fusedops.matmul(a, b, bias=bias, activation=activation)
        want = matmul_oracle(a, b, bias=bias, activation=activation)
        assert_within(got, want.out, want.scale + 4, 16)


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_m_of_a_bucket(dtype: torch.dtype, order: str) -> None:
    """The algorithm chosen for a bucket's largest m runs the others, odd leading dimensions among them."""
    b, bias = torch.randn(64, 48, device="cuda").to(dtype), torch.randn(48, device="cuda").to(dtype)
    for m in (17, 33, 34, 35, 67, 131, 259, 1025, 4099):
        shape = (m, 64) if order == "rows" else (64, m)
        stored = torch.randn(*shape, device="cuda").to(dtype)
        a = stored if order == "rows" else stored.T
        want = matmul_oracle(a, b, bias=bias, activation="relu")
        assert_within(fusedops.matmul(a, b, bias=bias, activation="relu"), want.out, want.scale, 64)


def test_c_is_not_read_where_beta_is_0() -> None:
    """Whatever its leading dimension and its contents."""
    a, b = torch.randn(32, 16, device="cuda").half(), torch.randn(16, 64, device="cuda").half()
    c = torch.full((32, 72), float("nan"), device="cuda").half()[:, :64]
    want = matmul_oracle(a, b)
    assert_within(fusedops.matmul(a, b, c=c, beta=0.0), want.out, want.scale, 16)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
def test_one_column_with_bias_gradient(framework: TestFramework) -> None:
    """A tall product with a single column and a sum over its rows."""
    for epilog in ("BGRADB", "DRELU_BGRAD", "RELU_AUX_BIAS"):
        case = Case(f"one-column-{epilog}", 13824, 1, 400, epilog=epilog, dtype="float16")
        check(replace(case, bias="shared") if Epilog[epilog].bias else case, framework)


def _tail_problems() -> list[tuple[int, int, int, str]]:
    sizes = ((1, 8), (8, 1), (8, 8), (16, 128), (128, 128))
    return [(m, n, k, dtype) for (m, n), k, dtype in product(sizes, (11528, 57608), ("float16", "bfloat16"))]


def _tail_results(m: int, n: int, k: int, dtype: str, transposed: bool) -> list[float]:
    """Return the first element that each algorithm of a plan gives for operands whose last 8 terms alone count."""
    a, b = (cupy.asarray(x).astype(np_dtype(dtype)) for x in k_tail_operands(m, n, k))
    if transposed:
        b = cupy.ascontiguousarray(b.T).T
    problem = fusedops.plan(a, b).problem
    out = cupy.zeros((m, n), a.dtype)
    results = []
    for program in sound_programs(problem, 16):
        workspace = cupy.empty(max(program.workspace, 1), cupy.uint8)
        addresses = (a.data.ptr, b.data.ptr, out.data.ptr, out.data.ptr, 0, 0, workspace.data.ptr)
        program.launch(*addresses, 1.0, 0.0, cupy.cuda.get_current_stream().ptr)
        results.append(float(abs(out.astype("float32") - 8).max()))
    return results


@pytest.mark.parametrize("transposed", [False, True])
def test_no_algorithm_drops_the_tail_of_k(transposed: bool) -> None:
    """Every algorithm that a plan may take sums the last terms of k."""
    for problem in _tail_problems():
        assert max(_tail_results(*problem, transposed)) == 0, problem


def test_without_the_guard_the_tail_of_k_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is what keeps the wrong algorithm out: without it, this library gives one."""
    monkeypatch.setattr(guard, "KNOWN_BAD", ())
    errors = [max(_tail_results(*problem, False)) for problem in _tail_problems()]
    assert max(errors) == 8


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
@pytest.mark.parametrize("epilog", ["DEFAULT", "RELU_BIAS", "GELU_BIAS", "RELU_AUX_BIAS", "GELU_AUX"])
def test_tail_of_k_through_the_public_call(framework: TestFramework, epilog: str) -> None:
    """The last terms of k count in every epilog."""
    for m, n, k, dtype in _tail_problems():
        case = Case("tail", m, n, k, epilog=epilog, dtype=dtype, data="k_tail")
        check(replace(case, bias="shared") if Epilog[epilog].bias else case, framework)


def test_float8_is_refused() -> None:
    """A dtype without support is an error that names it, not a wrong scale."""
    a = torch.zeros((16, 16), device="cuda").to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        fusedops.matmul(a, a)


def test_a_gradient_is_refused_rather_than_lost() -> None:
    """CUDA tensors that require a gradient are an error until there is a backward pass."""
    a = torch.zeros((16, 16), device="cuda", requires_grad=True)
    with pytest.raises(NotImplementedError, match="gradient"):
        fusedops.matmul(a, a)
    with torch.no_grad():
        assert fusedops.matmul(a, a).shape == (16, 16)


def test_vectors_and_second_steps() -> None:
    """Vectors, and the activations that no epilog has, with and without ``out=``."""
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal(64), rng.standard_normal((64, 32)), rng.standard_normal(32)
    for framework, activation in product(FRAMEWORKS, ("silu", "gelu_erf", "gelu_tanh", "relu")):
        arrays = [framework.make(v.astype("float32")) for v in (x, w, b)]
        want = matmul_oracle(x[None], w, bias=b, activation=activation).out[0]
        got = fusedops.matmul(arrays[0], arrays[1], bias=arrays[2], activation=activation)
        assert_within(got, want, np.full(want.shape, 30.0), 64)
        out = fusedops.matmul(arrays[0], arrays[1], bias=arrays[2], activation=activation, out=got * 0)
        assert_within(out, want, np.full(want.shape, 30.0), 64)


def test_mlp_and_its_gradient() -> None:
    """`mlp_grad` on a GPU gives what the CPU's reference gives."""
    rng = np.random.default_rng(1)
    shapes = {"x": (48, 64), "w1": (64, 96), "w2": (96, 32), "b1": (96,), "b2": (32,)}
    arrays = {name: (rng.standard_normal(shape) * 0.3).astype("float32") for name, shape in shapes.items()}
    dout = rng.standard_normal((48, 32)).astype("float32")
    for framework, activation in product(FRAMEWORKS, (None, "relu", "gelu_tanh", "gelu_erf", "silu")):
        grads = {}
        for name, make in (("cpu", lambda x: x), ("gpu", framework.make)):
            there = {key: make(value) for key, value in arrays.items()}
            weights = {key: there.pop(key) for key in ("b1", "b2")}
            out, saved = fusedops.mlp(*there.values(), **weights, activation=activation, save=True)
            grads[name] = [
                out,
                *fusedops.mlp_grad(make(dout), *there.values(), **weights, activation=activation, saved=saved),
            ]
        for on_cpu, on_gpu in zip(grads["cpu"], grads["gpu"], strict=True):
            np.testing.assert_allclose(to_numpy(on_gpu), on_cpu, rtol=2e-4, atol=2e-4)


def _resident() -> int:
    """Return the bytes of host memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_many_shapes_and_streams_keep_memory_flat() -> None:
    """100,000 calls over 2,000 shapes and 64 streams leave memory and the number of descriptors where they were."""
    weight, bias = torch.randn(64, 48, device="cuda").half(), torch.randn(48, device="cuda").half()
    inputs = torch.randn(2000, 64, device="cuda").half()
    streams = [torch.cuda.Stream() for _ in range(64)]

    def run(calls: int) -> None:
        for i in range(calls):
            with torch.cuda.stream(streams[i % 64]):
                fusedops.matmul(inputs[: 1 + i % 2000], weight, bias=bias, activation="relu")
        torch.cuda.synchronize()

    run(20_000)
    before = torch.cuda.memory_reserved(), _resident(), len(descriptors._families), len(programs._bucket_algorithms)
    run(100_000)
    after = torch.cuda.memory_reserved(), _resident(), len(descriptors._families), len(programs._bucket_algorithms)
    assert after[0] <= before[0] + (64 << 20)
    assert after[1] <= before[1] + (16 << 20)
    assert after[2:] == before[2:]


def test_eight_threads_on_one_problem() -> None:
    """Threads with biases of their own never see each other's."""
    rng = np.random.default_rng(2)
    a, b = (cupy.asarray(rng.standard_normal(shape), "float32") for shape in ((64, 32), (32, 64)))
    fusedops.matmul(a, b, bias=cupy.zeros(64, "float32"), activation="relu")
    product_ = cupy.asnumpy(a) @ cupy.asnumpy(b)
    wrong: list[str] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        bias = cupy.full(64, i * 100.0, "float32")
        start.wait()
        for _ in range(300):
            got = cupy.asnumpy(fusedops.matmul(a, b, bias=bias, activation="relu"))
            if not np.allclose(got, np.maximum(product_ + i * 100.0, 0), atol=1e-2):
                wrong.append(f"thread {i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert fusedops.matmul(a, b, bias=cupy.zeros(64, "float32")).shape == (64, 64)


def test_explain_and_support_say_what_runs() -> None:
    """`explain` names engine, strategy and algorithm; `support` prints the cells that are computed split."""
    a = torch.randn(64, 64, device="cuda").half()
    fused = fusedops.explain(a, a, activation="relu")
    assert (fused.engine, fused.strategy) == ("nvmath", "fused")
    assert fused.facts["algorithm"] >= 0
    split = fusedops.explain(a.double(), a.double(), activation="gelu_tanh")
    assert split.strategy == "split"
    assert "tanh" in split.why
    assert all(cell.name in str(fusedops.support()) for cell in SPLIT_CELLS)


SAME_BITS = [c for c in CASES if c.op == "epilog_matmul" and c.dtype in ("float16", "float32") and c.data == "random"]


@pytest.mark.parametrize("case", SAME_BITS[::2], ids=str)
def test_the_launch_gives_the_bits_of_matmul_execute(case: Case) -> None:
    """The short way through the binding computes what nvmath's own ``Matmul.execute`` computes."""
    arrays = {name: CUPY.make(x) for name, x in build(case).items()}
    a, b = arrays["a"], arrays["b"]
    settings = {name: x for name, x in case.settings.items() if name not in ("alpha", "beta")}
    rest = {name: x for name, x in arrays.items() if name not in ("a", "b")}
    problem = fusedops.plan(a, b, **rest, **settings).problem
    if split_cell(problem) is not None:
        assert fusedops.explain(a, b, **rest, **settings).strategy == "split"
        return
    fast, fast_aux = call(case, CUPY, build(case))
    out = cupy.zeros(fast.shape, fast.dtype)
    beta = case.beta if "c" in arrays else 0.0
    if "c" in arrays:
        out[...] = arrays["c"]
    residual = arrays.get("relu_aux", arrays.get("gelu_aux"))

    def address(x: Array | None) -> int:
        return 0 if x is None else x.data.ptr

    joined = address(a) | address(b) | address(out) | address(arrays.get("bias")) | address(residual) | 16
    program = plan_program(problem, joined & -joined)
    aux = execute(
        problem, program, address(a), address(b), address(out), address(arrays.get("bias")), address(residual),
        case.alpha, beta,
    )  # fmt: skip
    assert bool((out.view("u1") == fast.view("u1")).all()) if out.size else out.shape == fast.shape
    if fast_aux is not None and case.traits.gives.format.startswith("sum"):
        assert np.array_equal(cupy.asnumpy(aux).ravel(), cupy.asnumpy(fast_aux).ravel())


@pytest.mark.parametrize("epilog", [epilog.name for epilog in Epilog])
def test_verify_passes_sound_plans(epilog: str) -> None:
    """``options(verify=True)`` runs each new plan and lets the right ones through."""
    for dtype, k in product(("float16", "float32"), (24, 2)):  # gelu(2) is not 2
        case = Case(f"verify-{epilog}-{dtype}-{k}", 40, 56, k, epilog=epilog, dtype=dtype, a="slice", batch_a=(3,))
        case = replace(case, bias="shared") if Epilog[epilog].bias else case
        with fusedops.options(verify=True):
            check(case, CUPY)


def test_verify_catches_a_wrong_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the guard off, `verify` is what keeps the algorithm out that drops the tail of k."""
    monkeypatch.setattr(guard, "KNOWN_BAD", ())
    monkeypatch.setattr(programs, "_bucket_algorithms", {})
    calls._plans.clear()
    caught = 0
    with fusedops.options(verify=True):
        for m, n, k, dtype in _tail_problems():
            a, b = (cupy.asarray(x).astype(np_dtype(dtype)) for x in k_tail_operands(m, n, k))
            if max(_tail_results(m, n, k, dtype, False)[:1]) == 0:
                continue
            with pytest.raises(RuntimeError, match="wrong results"):
                fusedops.matmul(a, b)
            caught += 1
    assert caught


@pytest.mark.skipif(not tvm_ffi, reason="tvm_ffi is not installed")
def test_a_dlpack_producer_on_a_gpu() -> None:
    """Arrays known by DLPack alone are read in place, written through ``out=``, on the stream that is named."""
    a, b, bias = (torch.randn(*shape, device="cuda").half() for shape in ((64, 48), (48, 32), (32,)))
    out = torch.zeros(64, 32, device="cuda").half()
    theirs = [tvm_ffi.from_dlpack(x) for x in (a, b, bias, out)]
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    result = fusedops.matmul(*theirs[:2], bias=theirs[2], activation="relu", out=theirs[3], stream=stream)
    assert result is theirs[3]
    assert torch.allclose(out.double(), torch.relu(a.double() @ b.double() + bias.double()), atol=0.05)
    with pytest.raises((TypeError, ValueError), match="stream="):
        fusedops.matmul(*theirs[:2], out=theirs[3])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_memory_that_is_not_the_values_is_refused() -> None:
    """A lazily negated view and a fake tensor never reach a launch, though a plan for their like exists."""
    a = torch.randn(16, 16, device="cuda", dtype=torch.float32)
    lazily = torch._neg_view(a)
    fusedops.matmul(a, a)
    with pytest.raises(TypeError, match="negated"):
        fusedops.matmul(lazily, a)
    with pytest.raises(TypeError, match="negated"):
        fusedops.matmul(a, a, out=torch._neg_view(torch.empty_like(a)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises((TypeError, RuntimeError)):
        fusedops.matmul(mode.from_tensor(a), mode.from_tensor(a))
