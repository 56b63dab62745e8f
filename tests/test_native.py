"""The native launcher over a stand-in for cuBLASLt: values, statuses, threads, lifetimes."""

from __future__ import annotations

import ctypes
import gc
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from native.stand_in import SOURCE, stand_in, stand_in_descriptor, stand_in_launcher, stand_in_program
from test_column_form import Call, Placed, calls, in_rows, simple

from fusedops import Epilog
from fusedops.arrays import ArraySpec
from fusedops.native import build
from fusedops.native.launcher import Launcher, LaunchError, launcher_object
from fusedops.problem import Problem, Settings, make_problem

Array = np.ndarray[Any, Any]

NATIVE = Path(build.__file__).parent

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="native code is compiled on Linux alone")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test after which a descriptor or layout still lives."""
    before = _live()
    yield
    stand_in().reset()
    if _live() != before:
        gc.collect()  # the frames of an exception
    assert _live() == before


def _live() -> tuple[int, int]:
    return stand_in().count("live_descriptors"), stand_in().count("live_layouts")


def at(x: Array | None) -> int:
    """Return the address of an array, 0 for none."""
    return 0 if x is None else x.ctypes.data


def biased(m: int = 4, n: int = 6, k: int = 5, dtype: str = "float32") -> tuple[Problem, Array, Array]:
    """Return a problem with a bias, and operands for it."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    specs = {"a": ArraySpec.dense((m, k), dtype), "b": ArraySpec.dense((k, n), dtype)}
    problem = make_problem(Settings(Epilog.BIAS), {**specs, "bias": ArraySpec.dense((n,), dtype)}, None, None)
    return problem, a, b


def launch(program: Any, a: Array, b: Array, out: Array, bias: Array, **rest: Any) -> None:
    """Queue a program that has a bias and no ``c``."""
    words = {"alpha": 1.0, "beta": 0.0, "workspace": 0, "stream": 0, **rest}
    stand_in_launcher().launch(
        program.address, at(a), at(b), at(out), at(out), at(bias), 0, words["workspace"],
        words["alpha"], words["beta"], words["stream"],
    )  # fmt: skip


# Values ---------------------------------------------------------------------------------------------------------------


def run(call: Call) -> None:
    """Launch a call natively, over its own memory."""

    def address(name: str) -> int:
        placed: Placed | None = call.arrays.get(name)
        return 0 if placed is None else placed.memory.data.ctypes.data + placed.memory.start * placed.array.itemsize

    gives = call.problem.epilog.gives
    sums = gives is not None and gives.format.startswith("sum")
    program = stand_in_program(call.problem)
    assert program is not None
    stand_in_launcher().launch(
        program.address,
        address("a"),
        address("b"),
        address("c") or address("out"),
        address("out"),
        address("aux_out") if sums else address("bias"),
        0 if sums and not call.problem.epilog.takes else address("aux_in") or address("aux_out"),
        0,
        call.alpha,
        call.beta if "c" in call.arrays else 0.0,
        0,
    )


def check(call: Call) -> None:
    """Raise unless the launch leaves in memory what the caller's formulas say, and touches nothing else."""
    expected = {name: placed.memory.data.copy() for name, placed in call.arrays.items()}
    want, want_aux = in_rows(call)
    out = call.arrays["out"]
    out.over(expected["out"])[...] = want.reshape(out.array.shape)
    run(call)
    for name in set(expected) - {"aux_out"}:
        np.testing.assert_allclose(call.arrays[name].memory.data, expected[name], rtol=1e-13, atol=1e-13)
    if want_aux is not None:
        got = call.arrays["aux_out"].array
        if call.problem.epilog.gives.format == "relu_mask":
            got = np.unpackbits(got, axis=-1, count=call.problem.n, bitorder="little")
        elif call.problem.epilog.gives.format == "preact":
            got = got[..., : call.problem.n]
        np.testing.assert_allclose(got, want_aux, rtol=1e-13, atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(calls())
def test_memory_is_what_the_caller_asked_for(call: Call) -> None:
    """Any epilog over any layouts: every word of a layout and every address arrives where it must."""
    problem = call.problem
    assume(problem.batch_count * problem.m * problem.n * problem.k)  # an extent of 0 is never launched
    check(call)


@pytest.mark.parametrize("epilog", Epilog, ids=lambda epilog: epilog.name)
def test_every_epilog(epilog: Epilog) -> None:
    """A plain call of each, square so that no axis can stand for another by its extent."""
    check(simple(epilog, (), 17, 17, 17))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_factors_are_of_the_scale_type(dtype: str) -> None:
    """Alpha and beta reach cuBLASLt in the type in which it reads them, and ``c`` with a layout of its own."""
    _, a, b = biased(dtype=dtype)
    wide = np.arange(4 * 9, dtype=dtype).reshape(4, 9)
    c = wide[:, :6]
    specs = {name: ArraySpec.dense(x.shape, dtype) for name, x in (("a", a), ("b", b))}
    specs["c"] = ArraySpec((4, 6), (9, 1), dtype)
    program = stand_in_program(make_problem(Settings(Epilog.DEFAULT), specs, None, None))
    out = np.zeros((4, 6), dtype)
    stand_in_launcher().launch(program.address, at(a), at(b), at(c), at(out), 0, 0, 0, 0.5, -3.0, 0)
    np.testing.assert_allclose(out, 0.5 * (a @ b) - 3 * c, rtol=1e-5)


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_status_is_an_error() -> None:
    """A refused launch raises the launcher's error with the status, and the next one is as before."""
    problem, a, b = biased()
    program, out, bias = stand_in_program(problem), np.zeros((4, 6), "float32"), np.ones(6, "float32")
    stand_in().set("fail", 13)
    with pytest.raises(LaunchError, match="13") as raised:
        launch(program, a, b, out, bias)
    assert raised.value.status == 13
    stand_in().reset()
    launch(program, a, b, out, bias)
    np.testing.assert_allclose(out, a @ b + 1, rtol=1e-5)


def test_the_error_is_the_one_of_the_launcher() -> None:
    """Whatever class it is given, made of the status; failures hold no references."""

    class RefusedError(Exception):
        pass

    launcher = Launcher(launcher_object(), stand_in().functions, RefusedError)
    program = stand_in_program(biased()[0], launcher)
    stand_in().set("fail", 14)
    held = sys.getrefcount(RefusedError)
    for _ in range(100):
        with pytest.raises(RefusedError, match=r"^14$"):
            launcher.launch(program.address, *[0] * 7, 1.0, 0.0, 0)
    assert sys.getrefcount(RefusedError) < held + 10


WRONG = {
    "too few": ((1,) * 10, TypeError, "launch takes"),
    "none": ((), TypeError, "launch takes"),
    "too many": ((1,) * 12, TypeError, "launch takes"),
    "program 0": ((0,) * 11, TypeError, "program is 0"),
    "None": ((None,) * 11, TypeError, "integer"),
    "a float address": ((1, 1.5, *(0,) * 9), TypeError, "integer"),
    "a text": ((1, "1", *(0,) * 9), TypeError, "integer"),
    "a negative": ((1, -1, *(0,) * 9), OverflowError, "negative"),
    "beyond an address": ((1, 2**64, *(0,) * 9), OverflowError, "too (big|large)"),
    "alpha a text": ((1, *(0,) * 7, "2", 0.0, 0), TypeError, "real number"),
    "beta None": ((1, *(0,) * 7, 1.0, None, 0), TypeError, "real number"),
    "stream None": ((1, *(0,) * 7, 1.0, 0.0, None), TypeError, "integer"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise(wrong: tuple[tuple[Any, ...], type[Exception], str]) -> None:
    """Before anything is called with them."""
    arguments, kind, message = wrong
    before = stand_in().count("calls")
    with pytest.raises(kind, match=message):
        stand_in_launcher().launch(*arguments)
    with pytest.raises(TypeError):
        stand_in_launcher().launch(*(0,) * 11, stream=0)
    assert stand_in().count("calls") == before


@pytest.mark.parametrize("layout", range(4))
def test_a_layout_that_cannot_be_made_is_an_error(layout: int) -> None:
    """And those made before it are destroyed."""
    stand_in().set("fail_layout", layout)
    with pytest.raises(LaunchError, match="3"):
        stand_in_program(biased()[0])


def test_the_check_refuses() -> None:
    """An algorithm that cannot run a problem, or not within its workspace, makes no program; unasked, it does."""
    problem = biased()[0]
    checks = stand_in().count("checks")
    assert stand_in_program(problem, workspace=64, limit=63) is None
    assert stand_in_program(problem, workspace=64, limit=64) is not None
    stand_in().set("fail_check", 15)
    assert stand_in_program(problem) is None
    assert stand_in().count("checks") == checks + 3
    assert stand_in_program(problem, check=False) is not None
    assert stand_in().count("checks") == checks + 3


def test_workspace_handle_and_stream_reach_the_library() -> None:
    """A launch passes the workspace that its program says it needs, the program's handle and the stream."""
    problem, a, b = biased()
    program, out, bias = stand_in_program(problem, workspace=256), np.zeros((4, 6), "float32"), np.zeros(6, "float32")
    assert program.workspace == 256
    with pytest.raises(LaunchError, match="7"):
        launch(program, a, b, out, bias)
    launch(program, a, b, out, bias, workspace=0x7000, stream=0xFFFF_FFFF_FFFF_FFF0)
    said = {name: stand_in().count(f"last_{name}") % 2**64 for name in ("workspace", "stream", "handle")}
    assert said == {"workspace": 0x7000, "stream": 0xFFFF_FFFF_FFFF_FFF0, "handle": 0x1000}


# Lifetimes ------------------------------------------------------------------------------------------------------------


def test_a_program_keeps_its_descriptor_and_c_may_keep_the_program() -> None:
    """Whoever holds a reference may launch, and the last one frees."""
    problem, a, b = biased()
    out, bias = np.zeros((4, 6), "float32"), np.zeros(6, "float32")
    descriptor = stand_in_descriptor(problem)
    program, other = (stand_in_program(problem, descriptor=descriptor) for _ in range(2))
    del descriptor, other
    gc.collect()
    launch(program, a, b, out, bias)
    shared, address = launcher_object(), program.address
    shared.program_retain(ctypes.c_void_p(address))
    bound = stand_in_launcher().bound(program)
    del program
    gc.collect()
    bound(at(a), at(b), at(out), at(out), at(bias), 0, 0, 2.0, 0.0, 0)
    del bound
    gc.collect()
    stand_in_launcher().launch(address, at(a), at(b), at(out), at(out), at(bias), 0, 0, 3.0, 0.0, 0)
    np.testing.assert_allclose(out, 3 * (a @ b), rtol=1e-5)
    alive = _live()
    shared.program_release(address)
    assert _live() == (alive[0] - 1, alive[1] - 4)


# Threads --------------------------------------------------------------------------------------------------------------


def test_eight_threads_each_get_their_own_bias() -> None:
    """Two programs share a descriptor, and no launch sees the pointer of another."""
    problem, a, b = biased(16, 16, 16)
    descriptor = stand_in_descriptor(problem)
    programs = [stand_in_program(problem, descriptor=descriptor) for _ in range(2)]
    plain = a @ b
    wrong: list[int] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        out, bias = np.zeros((16, 16), "float32"), np.full(16, 100.0 * i, "float32")
        start.wait()
        for round_ in range(100):
            launch(programs[round_ % 2], a, b, out, bias)
            if not np.allclose(out, plain + 100.0 * i, atol=1e-3):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_launch_that_waits_holds_up_no_other_thread() -> None:
    """The interpreter goes on while the queue is full, and while the lock of a descriptor is taken."""
    problem, a, b = biased()
    program, bias = stand_in_program(problem), np.zeros(6, "float32")
    outs = [np.zeros((4, 6), "float32") for _ in range(2)]
    stand_in().set("sleep", 300_000)
    before = stand_in().count("calls")
    threads = [threading.Thread(target=launch, args=(program, a, b, out, bias)) for out in outs]
    for thread in threads:
        thread.start()
    while stand_in().count("calls") == before:
        time.sleep(0.001)
    assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    assert all(np.allclose(out, a @ b, rtol=1e-5) for out in outs)


def sanitized(folder: Path, launcher: str) -> subprocess.CompletedProcess[str]:
    """Build the launcher, the stand-in and a main of eight threads with the thread sanitizer, and run it."""
    (folder / "launcher.c").write_text(launcher)
    parts = [folder / "launcher.c", SOURCE, SOURCE.with_name("launch_in_threads.c")]
    flags = ["-g", "-O1", "-std=c11", "-pthread", "-Wall", "-fsanitize=thread", f"-I{NATIVE}"]
    program = folder / "threads"
    subprocess.run([*build._compiler(), *flags, *map(str, parts), "-lm", "-o", str(program)], check=True)
    # Some kernels place memory where the sanitizer cannot follow unless they are told not to.
    setarch = shutil.which("setarch")
    command = [setarch, platform.machine(), "-R", str(program)] if setarch else [str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_thread_sanitizer_has_nothing_to_report(tmp_path: Path) -> None:
    """Launches, new programs and freed ones in eight threads; without the lock it does report."""
    source = (NATIVE / "launcher.c").read_text()
    done = sanitized(tmp_path, source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 failures\n", "")
    unlocked = source.replace("pthread_mutex_lock(&descriptor->lock);", "").replace(
        "pthread_mutex_unlock(&descriptor->lock);", ""
    )
    assert unlocked != source
    assert "data race" in sanitized(tmp_path, unlocked).stderr


# The object -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("nm"), reason="nm is not installed")
def test_the_object_needs_the_c_library_alone() -> None:
    """No symbol of CUDA, Python or XLA is left to the loader."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", launcher_object()._name], capture_output=True, text=True)
    names = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if " U " in line}
    assert names
    assert {name for name in names if not name.startswith("pthread_")} <= {"calloc", "malloc", "free", "memcpy"}


def test_missing_functions_are_named() -> None:
    """A library without one of them has no launcher."""
    functions = {**stand_in().functions, "cublasLtMatmulAlgoCheck": 0}
    with pytest.raises(build.NoNativeCode, match="cublasLtMatmulAlgoCheck"):
        Launcher(launcher_object(), functions)
