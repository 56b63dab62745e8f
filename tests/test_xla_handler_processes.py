"""The handler where one process is not enough: its end, several devices, programs of another, a sanitizer."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

pytest.importorskip("nvmath")

from fusedops.native.build import SOURCES, _compiler

TESTS = Path(__file__).parent
NATIVE = TESTS / "native"
SECONDS = 60

SERVED = "import jax, numpy as np; from native.handler_on_cpu import *; serve(); "


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that finds these tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), **more}


def printed_by(code: str, **more: str) -> list[str]:
    """Return the lines that a process prints which must succeed."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# The end of a process ------------------------------------------------------------------------------------------------


def test_a_process_ends_while_a_program_is_compiled() -> None:
    """In a thread that nobody waits for."""
    code = f"""{SERVED}
import threading
started = threading.Event()
plans().before = lambda: (started.set(), announce_and_sleep(1.0))
threading.Thread(target=run_example, daemon=True).start()
started.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=SECONDS)
    assert done.stdout == b"planning\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
def test_an_interrupt_while_a_program_is_compiled_ends_the_process() -> None:
    """Planning goes on until the signal is there, however late it is sent."""
    code = f"""{SERVED}
import os, signal
seen, tell = os.pipe()
os.set_blocking(tell, False)
signal.set_wakeup_fd(tell)
plans().before = lambda: (print("planning", flush=True), os.read(seen, 1))
run_example()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "planning\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT


def test_states_outlive_the_interpreter() -> None:
    """An executable that is freed at the very end."""
    code = f"""{SERVED}
arrays, _ = example()
jax.kept = jax.jit(call_of(problem_for("RELU_BIAS", **arrays))).lower(*arrays.values()).compile()
print("done")
"""
    assert printed_by(code) == ["done"]


# Several devices -----------------------------------------------------------------------------------------------------


def test_eight_devices_share_one_state_and_have_a_handle_each() -> None:
    code = f"""{SERVED}
from jax.sharding import PartitionSpec as P
from native.stand_in import stand_in
from fusedops.xla.handler import counters
arrays, expected = example(m=3)
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
call = call_of(problem_for("RELU_BIAS", **arrays))
specs = (P("x"), P(), P())
own = jax.shard_map(lambda *x: call(*x)[0], mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
many = np.concatenate([arrays["a"]] * 8)
for _ in range(2):
    out = jax.jit(own)(many, arrays["b"], arrays["bias"])
np.testing.assert_allclose(out, np.concatenate([expected] * 8), rtol=1e-5)
found = counters()
print(found["instantiations"], found["executions"], stand_in().count("handles"), len(plans().made))
"""
    (line,) = printed_by(code, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    instantiations, executions, handles, planned = map(int, line.split())
    assert (executions, handles, planned) == (16, 7, 1)
    assert instantiations == 1


# Programs of another process -----------------------------------------------------------------------------------------


def test_a_second_process_finds_the_program_in_the_cache(tmp_path: Path) -> None:
    code = f"""{SERVED}
from fusedops.xla.handler import counters
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
run_example()
print(len(hits), counters()["instantiations"])
"""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert [printed_by(code, **cache) for _ in range(2)] == [["0 1"], ["1 1"]]


def test_a_program_is_exported_to_another_process(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    from native.handler_on_cpu import TARGET, call_of, example, problem_for

    arrays, _ = example()
    exporting = jax.export.export(
        jax.jit(call_of(problem_for("RELU_BIAS", **arrays))),
        platforms=("cpu", "cuda"),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TARGET)],
    )
    file = tmp_path / "program"
    file.write_bytes(exporting(*arrays.values()).serialize())
    code = f"""{SERVED}
program = jax.export.deserialize(bytearray(open({str(file)!r}, "rb").read()))
arrays, expected = example(seed=5)
np.testing.assert_allclose(program.call(*arrays.values())[0], expected, rtol=1e-5, atol=1e-6)
print(len(plans().made))
"""
    assert printed_by(code) == ["1"]


# Without a compiler --------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_reason_says_what_to_install(tmp_path: Path) -> None:
    code = "from fusedops.xla.handler import ensure_registered; print(ensure_registered())"
    (line,) = printed_by(code, CC="no-such-compiler", FUSEDOPS_CACHE_DIR=str(tmp_path))
    assert line.startswith("$CC is 'no-such-compiler', which is not on the PATH. Install a C compiler")


# Threads -------------------------------------------------------------------------------------------------------------


def sanitized(folder: Path, launcher: str) -> Any:
    """Build the handler and a main that plays XLA with the thread sanitizer, and run it."""
    (folder / "launcher.c").write_text(launcher)
    parts = [folder / "launcher.c", SOURCES / "handler.c", NATIVE / "cublaslt_stand_in.c", NATIVE / "xla_in_threads.c"]
    flags = ["-g", "-O1", "-std=c11", "-pthread", "-Wall", "-Wextra", "-Werror", "-fsanitize=thread"]
    include = [f"-I{SOURCES}", f"-I{jax.ffi.include_dir()}"]
    program = str(folder / "threads")
    subprocess.run([*_compiler(), *flags, *include, *map(str, parts), "-lm", "-o", program], check=True)
    # Some kernels place memory where the sanitizer cannot follow unless they are told not to.
    setarch = shutil.which("setarch")
    command = [setarch, platform.machine(), "-R", program] if setarch else [program]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="native code is compiled on Linux alone")
def test_the_thread_sanitizer_has_nothing_to_report(tmp_path: Path) -> None:
    """Calls instantiated, executed and freed in eight threads; without the launcher's lock it does report."""
    source = (SOURCES / "launcher.c").read_text()
    done = sanitized(tmp_path, source)
    assert (done.stdout, done.stderr, done.returncode) == ("all is right\n", "", 0)
    unlocked = source.replace("pthread_mutex_lock(&descriptor->lock);", "").replace(
        "pthread_mutex_unlock(&descriptor->lock);", ""
    )
    assert "data race" in sanitized(tmp_path, unlocked).stderr
