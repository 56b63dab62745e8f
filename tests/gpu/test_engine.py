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
from devices import CUPY, FRAMEWORKS, placed
from frameworks import TestFramework, np_dtype
from running import call, check, check_result
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fusedops
from fusedops import Epilog, planned
from fusedops.column_form import unasked_steps
from fusedops.engines import guard
from fusedops.engines.cells import SPLIT_CELLS, split_cell
from fusedops.engines.nvmath import algorithms, choice, descriptors, planning, sound_programs
from fusedops.engines.nvmath.launches import binding_way, execute_way, native_way
from fusedops.engines.split import Split
from fusedops.residuals import aux_dtype, aux_shape
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


@pytest.fixture
def split_calls(monkeypatch: pytest.MonkeyPatch) -> list[Split]:
    """The launches that were computed split, as they come."""
    seen: list[Split] = []
    launch = Split.__call__
    monkeypatch.setattr(Split, "__call__", lambda self, *args: (seen.append(self), launch(self, *args))[1])
    return seen


AUX_CASES = [
    Case(f"{epilog.name}-{dtype}-aux_off", epilog=epilog.name, dtype=dtype, bias="shared" if epilog.bias else None)
    for epilog, dtype in product(Epilog, ("float16", "bfloat16", "float32"))
    if not (epilog.activation == "gelu_tanh" and dtype == "float32")  # split wherever its arrays lie
]
TAKING = [case for case in AUX_CASES if case.traits.takes]
GIVING = [replace(case, a="col" if case.epilog == "BGRADA" else "row") for case in AUX_CASES if case.traits.gives]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
@pytest.mark.parametrize("case", TAKING, ids=str)
def test_a_residual_off_16_bytes(framework: TestFramework, case: Case, split_calls: list[Split]) -> None:
    """A mask or pre-activation is read right wherever it lies: fused, one element and 8 bytes off split, then fused."""
    arrays = build(case)
    name = case.traits.takes.name
    rest = {key: x for key, x in arrays.items() if key != name}
    for offset in (0, 1, 8 // arrays[name].itemsize, 0):
        given, _ = placed(framework, arrays[name], offset)
        split_calls.clear()
        check_result(case, framework, arrays, *call(case, framework, rest, **{name: given}))
        assert len(split_calls) == (1 if offset else 0)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
@pytest.mark.parametrize("case", GIVING, ids=str)
def test_aux_out_off_16_bytes(framework: TestFramework, case: Case, split_calls: list[Split]) -> None:
    """``aux_out=`` is written whole wherever it lies, and nothing around it; off 16 bytes all but sums are split."""
    arrays, gives = build(case), case.traits.gives
    blank = np.zeros(aux_shape(gives, (), case.m, case.n), np_dtype(aux_dtype(gives, case.dtype)))
    for offset in (0, 1, 8 // blank.itemsize, 0):
        given, buffer = placed(framework, blank, offset)
        split_calls.clear()
        out, aux = call(case, framework, arrays, aux_out={gives.name: given})
        assert aux is given
        check_result(case, framework, arrays, out, aux)
        assert (np.delete(to_numpy(buffer), slice(offset, offset + blank.size)) == 3).all()
        if not gives.format.startswith("sum"):
            assert len(split_calls) == (1 if offset else 0)


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
    before = torch.cuda.memory_reserved(), _resident(), len(descriptors._families), len(algorithms._bucket_algorithms)
    run(100_000)
    after = torch.cuda.memory_reserved(), _resident(), len(descriptors._families), len(algorithms._bucket_algorithms)
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


WAYS = {"native": native_way, "binding": binding_way, "execute": execute_way}


def written(case: Case, out: Array, aux: Array | None) -> list[np.ndarray]:
    """Return the bytes of a result and of an auxiliary output, without the padding, which may hold anything."""
    parts = [cupy.asnumpy(out)]
    gives = case.traits.gives
    if gives is not None:
        host = cupy.asnumpy(aux)
        bits = gives.format == "relu_mask"
        padded = gives.format == "preact"
        parts.append(np.unpackbits(host, axis=-1, count=case.n, bitorder="little") if bits else host)
        parts[1] = parts[1][..., : case.n] if padded else parts[1]
    return [np.ascontiguousarray(part).view("u1") if part.size else part for part in parts]


@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_every_way_to_launch_gives_the_bits_of_matmul_execute(case: Case) -> None:
    """The native launcher, the binding and nvmath's own ``Matmul.execute`` compute one thing, and so does the call."""
    arrays = {name: CUPY.make(x) for name, x in build(case).items()}
    settings = {name: x for name, x in case.settings.items() if name not in ("alpha", "beta")}
    a, b = arrays["a"], arrays["b"]
    rest = {name: x for name, x in arrays.items() if name not in ("a", "b")}
    problem = fusedops.plan(a, b, **rest, **settings).problem
    if split_cell(problem) is not None:
        assert fusedops.explain(a, b, **rest, **settings).strategy == "split"
        return
    want = written(case, *call(case, CUPY, build(case)))
    beta = case.beta if "c" in arrays else 0.0
    for name, way in WAYS.items():
        out, aux = cupy.zeros(problem.out_spec.shape, np_dtype(problem.out.dtype)), None
        if problem.aux_spec is not None:
            aux = cupy.zeros(problem.aux_spec.shape, np_dtype(problem.aux_spec.dtype))
        sums = aux is not None and case.traits.gives.format.startswith("sum")
        bias = aux if sums else arrays.get("bias")
        residual = arrays.get("relu_aux", arrays.get("gelu_aux", None if sums else aux))
        at = [
            0 if x is None else x.data.ptr for x in (a, b, arrays.get("c", out) if beta else out, out, bias, residual)
        ]
        joined = int(np.bitwise_or.reduce([*at, unasked_steps(problem), 16]))
        program = planning.plan_program(problem, joined & -joined, way)
        workspace = cupy.empty(max(program.workspace, 1), cupy.uint8)
        stream = cupy.cuda.get_current_stream().ptr
        program.launch(*at, workspace.data.ptr, case.alpha, beta, stream)
        for got, expected in zip(written(case, out, aux), want, strict=True):
            assert np.array_equal(got, expected), name


def test_the_native_launcher_is_the_one_in_use() -> None:
    """There is a C compiler on a machine that runs these tests, and this nvmath has all that the launcher reads."""
    a = torch.randn(16, 16, device="cuda").half()
    fusedops.matmul(a, a, activation="relu")
    assert fusedops.support().launcher == "native"


@pytest.mark.parametrize("case", SAME_BITS[::8], ids=str)
def test_public_names_of_nvmath_alone_are_enough(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of an nvmath without descriptors and bindings: planned and launched by ``Matmul`` alone, and right."""
    monkeypatch.setattr(choice, "_fast", False)
    monkeypatch.setattr(planned, "_plans", type(planned._plans)())
    check(case, CUPY)


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
    monkeypatch.setattr(algorithms, "_bucket_algorithms", {})
    planned._plans.clear()
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


def test_memory_that_is_not_the_values_is_refused() -> None:
    """A lazily negated view never reaches a launch, though a plan for its like exists; a fake tensor is traced."""
    a = torch.randn(16, 16, device="cuda", dtype=torch.float32)
    lazily = torch._neg_view(a)
    fusedops.matmul(a, a)
    with pytest.raises(TypeError, match="negated"):
        fusedops.matmul(lazily, a)
    with pytest.raises(TypeError, match="negated"):
        fusedops.matmul(a, a, out=torch._neg_view(torch.empty_like(a)))
    with FakeTensorMode() as mode:
        traced = fusedops.matmul(mode.from_tensor(a), mode.from_tensor(a))
    assert isinstance(traced, FakeTensor)
    assert traced.shape == a.shape
    assert traced.device == a.device
