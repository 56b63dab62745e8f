"""The doctor: findings from facts that no one machine has, and the command itself on this one, whole and broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusedops.doctor import checks, command, files, libraries, products, text
from fusedops.doctor.checks import findings_of
from fusedops.doctor.checks_software import LIMITS
from fusedops.doctor.facts import Facts as FoundFacts
from fusedops.doctor.findings import MEANINGS, Finding
from fusedops.doctor.probes import PROBES, Probe, probe_all
from fusedops.doctor.processes import run_processes
from fusedops.doctor.subjects import SUBJECTS
from fusedops.doctor.variables import variables_of
from fusedops.native import build

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"

Facts = dict[str, Any]

# Facts of machines ----------------------------------------------------------------------------------------------------

GONE = object()


def merged(base: Any, changes: Any) -> Any:
    """Return nested dicts with some values replaced, and those that are `GONE` left out."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    both = {**base, **{name: merged(base.get(name), value) for name, value in changes.items()}}
    return {name: value for name, value in both.items() if value is not GONE}


def probe(**stages: Any) -> Facts:
    return {"stages": {name.replace("__", " "): value for name, value in stages.items()}, "failure": None}


RIGHT = {"engine": "nvmath", "strategy": "fused", "launcher": "native", "custom_call": None, "first_call_seconds": 0.1}
LIBRARY = [{"name": "cublasLt", "path": "/site/libcublasLt.so.12", "version": "12.9.1"}]
OTHER = [{"name": "cublasLt", "path": "/site/libcublasLt.so.13", "version": "13.1.0"}]
CPU: Facts = {
    "system": probe(
        python={
            "version": "3.12.1",
            "implementation": "cpython",
            "system": "linux",
            "machine": "x86_64",
            "executable": "python",
            "conda": False,
        },
        packages={"numpy": "2.3.0", "torch": "2.11.0+cpu", "jax": "0.11.2", "jaxlib": "0.11.2"},
        modules={"numpy": True, "torch": True, "jax": True},
        environment={},
    ),
    "driver": probe(driver={"found": False, "why": "no libcuda.so.1", "nodes": [], "devices": []}, release=None),
    "files": probe(
        cache={
            "path": "/c/f",
            "used": True,
            "why": None,
            "mode": "0700",
            "yours": True,
            "writable": True,
            "objects": 2,
        },
        records={"path": None},
    ),
    "native": probe(
        compiler={"program": "/usr/bin/cc", "version": "cc 12"},
        launcher={"path": "/c/f/launcher-1.so", "kept": True, "seconds": 0.1},
    ),
    "numpy": probe(product__cpu__float32={**RIGHT, "engine": "reference", "launcher": None}),
    "torch": probe(**{"import": {"version": "2.11.0", "cuda": None, "devices": ["cpu"], "why": None}}),
    "jax": probe(**{"import": {"version": "0.11.2", "cuda": None, "devices": ["cpu:0"], "why": "no cuda"}}),
}
GPU = merged(
    CPU,
    {
        "system": probe(
            packages={
                "torch": "2.11.0",
                "jax-cuda12-plugin": "0.11.2",
                "cupy-cuda12x": "14.2.0",
                "nvmath-python": "1.0.0",
            },
            modules={"cupy": True, "nvmath": True},
        ),
        "driver": probe(
            driver={
                "found": True,
                "cuda": "13.0",
                "status": 0,
                "why": None,
                "devices": [
                    {"ordinal": 0, "name": "H200", "capability": "9.0", "memory_bytes": 1 << 37, "mode": "default"}
                ],
            },
            release="580.65.06",
        ),
        "torch": probe(
            **{"import": {"version": "2.11.0", "cuda": "12.9", "devices": ["cpu", "cuda:0"], "why": None}},
            libraries=LIBRARY,
            product__cuda__float16=RIGHT,
        ),
        "jax": probe(
            **{"import": {"version": "0.11.2", "cuda": None, "devices": ["cpu:0", "cuda:0"], "why": None}},
            libraries=LIBRARY,
            handler={"path": "/c/f/handler-1.so", "kept": True, "seconds": 0.2},
            registered={"why_not": None},
            product__cuda__float16={**RIGHT, "engine": "xla", "launcher": None, "custom_call": True},
        ),
        "cupy": probe(
            **{"import": {"version": "14.2.0", "cuda": "12.9", "devices": ["cuda:0"], "why": None}},
            libraries=LIBRARY,
        ),
        "nvmath": probe(engine={"path": "/site/libcublasLt.so.12", "version": "12.9.1"}, libraries=LIBRARY),
        "together": probe(engine={"path": "/site/libcublasLt.so.12", "version": "12.9.1"}, libraries=LIBRARY),
    },
)


def stages(name: str, **changes: Any) -> Facts:
    """Return changes of the stages of one probe."""
    return {name: {"stages": {stage.replace("__", " "): value for stage, value in changes.items()}}}


def packages(**versions: Any) -> Facts:
    return stages("system", packages={name.replace("_", "-"): version for name, version in versions.items()})


def driver(**changes: Any) -> Facts:
    return stages("driver", driver=changes)


def environment(**variables: str) -> Facts:
    return stages("system", environment=variables)


WITHOUT_GPU = driver(devices=[])
DEVICE = GPU["driver"]["stages"]["driver"]["devices"][0]
NO_CUPY = stages("system", packages={"cupy-cuda12x": GONE}, modules={"cupy": False})
NO_NVMATH = stages("system", packages={"nvmath-python": GONE}, modules={"nvmath": False})
NO_CC = {"program": None, "why": "cc, gcc or clang is not on the PATH."}
SQLITE = {"path": "/c/f/r.db", "exists": True, "writable": True, "rows": 3, "why": None}
INSTALL = "pip install 'fusedops[jax-cuda12]'"

ROWS: tuple[tuple[Facts, Any, str, str, str | None], ...] = (
    # machine, changes, finding, level, a part of the remedy
    (CPU, {}, "no-device", "note", None),
    (CPU, {}, "native-ready", "ok", None),
    (CPU, {}, "product-right", "ok", None),
    (GPU, {}, "handler-ready", "ok", None),
    (GPU, driver(devices=[], status=100), "no-device", "note", None),
    (
        GPU,
        merged(driver(devices=[], status=100), environment(CUDA_VISIBLE_DEVICES="")),
        "devices-hidden",
        "note",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (CPU, driver(nodes=["/dev/nvidia0"]), "driver-missing", "problem", "docker run --gpus all"),
    (GPU, driver(devices=[], status=999, why="CUDA_ERROR_UNKNOWN"), "driver-broken", "problem", "nvidia-smi"),
    (GPU, driver(devices=[{**DEVICE, "mode": "prohibited"}]), "device-prohibited", "problem", "nvidia-smi -i 0 -c 0"),
    (
        GPU,
        merged(driver(cuda="12.8"), packages(cupy_cuda13x="14.0.0", cupy_cuda12x=GONE)),
        "driver-too-old",
        "problem",
        "pip uninstall -y cupy-cuda13x && pip install 'fusedops[cuda12]'",
    ),
    (GPU, driver(cuda="11.8"), "driver-too-old", "problem", "ubuntu-drivers install"),
    (
        GPU,
        merged(driver(cuda="12.8"), stages("torch", **{"import": {"cuda": "13.0"}})),
        "driver-too-old",
        "problem",
        "whl/cu126",
    ),
    (GPU, NO_NVMATH, "nvmath-missing", "problem", INSTALL),
    (GPU, NO_CUPY, "cupy-missing", "problem", INSTALL),
    (GPU, packages(cupy="14.1.0"), "cupy-duplicate", "problem", "pip uninstall -y cupy cupy-cuda12x"),
    (
        CPU,
        stages("torch", **{"import": {"error": "ImportError: undefined symbol"}}),
        "import-failed",
        "problem",
        "pip install --force-reinstall torch",
    ),
    (CPU, packages(torch="2.8.1"), "version-untested", "note", "pip install 'torch>=2.9,<2.14'"),
    (CPU, packages(torch="2.14.0a0+git1"), "version-untested", "note", "pip install 'torch>=2.9,<2.14'"),
    (GPU, stages("torch", **{"import": {"cuda": None, "devices": ["cpu"]}}), "torch-cpu-build", "note", "whl/cu126"),
    (
        GPU,
        merged(packages(jax_cuda12_plugin=GONE), stages("jax", **{"import": {"devices": ["cpu:0"]}})),
        "jax-no-plugin",
        "note",
        INSTALL,
    ),
    (GPU, packages(jaxlib="0.11.1"), "jax-plugin-mismatch", "problem", "pip install --upgrade 'jax[cuda12]'"),
    (
        GPU,
        stages("jax", **{"import": {"devices": ["cpu:0"], "why": "cuInit failed"}}),
        "framework-no-gpu",
        "problem",
        "pip install --upgrade 'fusedops[jax-cuda12]'",
    ),
    (
        GPU,
        merged(stages("jax", **{"import": {"devices": ["cpu:0"]}}), environment(JAX_PLATFORMS="cpu")),
        "framework-no-gpu",
        "note",
        "unset JAX_PLATFORMS",
    ),
    (GPU, stages("torch", **{"import": {"devices": ["cpu"]}}), "framework-no-gpu", "problem", "whl/cu126"),
    (GPU, stages("torch", **{"import": {"cuda": "13.0"}}), "cuda-majors-differ", "note", "pip uninstall -y jax-cuda12"),
    (GPU, stages("nvmath", libraries=OTHER), "cublaslt-versions", "note", None),
    (
        GPU,
        merged(stages("together", libraries=LIBRARY + OTHER), environment(LD_LIBRARY_PATH="/usr/local/cuda/lib64")),
        "cublaslt-versions",
        "note",
        "unset LD_LIBRARY_PATH",
    ),
    (GPU, stages("nvmath", engine={"error": "RuntimeError: no libcublasLt"}), "cublaslt-failed", "problem", INSTALL),
    (CPU, stages("native", compiler=NO_CC), "no-compiler", "note", "apt-get install gcc"),
    (GPU, stages("native", compiler=NO_CC), "no-compiler", "problem", "apt-get install gcc"),
    (
        GPU,
        merged(stages("native", compiler=NO_CC), stages("system", python={"conda": True})),
        "no-compiler",
        "problem",
        "conda install -c conda-forge gxx",
    ),
    (CPU, merged(stages("native", compiler=NO_CC), environment(CC="tcc")), "no-compiler", "note", "unset CC"),
    (CPU, stages("system", python={"system": "darwin"}), "no-compiler", "note", None),
    (
        CPU,
        stages("native", launcher={"error": "NoNativeCode: cc failed"}),
        "native-failed",
        "note",
        "apt-get install gcc libc6-dev",
    ),
    (
        GPU,
        stages("torch", product__cuda__float16={**RIGHT, "launcher": "Matmul.execute: x"}),
        "launcher-slow",
        "note",
        INSTALL,
    ),
    (GPU, stages("jax", registered={"why_not": "no cublasLtCreate"}), "handler-failed", "problem", INSTALL),
    (GPU, stages("jax", handler={"error": "OSError: x"}), "handler-failed", "problem", "apt-get install gcc"),
    (GPU, stages("jax", product__cuda__float16={**RIGHT, "custom_call": False}), "handler-unused", "problem", None),
    (
        CPU,
        stages("files", cache={"mode": GONE, "writable": False, "used": False, "why": "Not a directory"}),
        "cache-unusable",
        "note",
        "export FUSEDOPS_CACHE_DIR=",
    ),
    (CPU, stages("files", cache={"yours": False, "used": False}), "cache-unusable", "note", "FUSEDOPS_CACHE_DIR"),
    (CPU, stages("files", cache={"writable": False, "why": "Read-only"}), "cache-read-only", "note", "CACHE_DIR"),
    (CPU, stages("files", cache={"mode": "0777", "used": False}), "cache-not-private", "note", "chmod go-w /c/f"),
    (CPU, stages("native", launcher={"kept": False}), "cache-not-executable", "note", "FUSEDOPS_CACHE_DIR"),
    (
        CPU,
        stages("files", records={**SQLITE, "rows": None, "why": "file is not a database"}),
        "records-unreadable",
        "problem",
        "mv /c/f/r.db /c/f/r.db.broken",
    ),
    (CPU, stages("files", records={**SQLITE, "writable": False}), "records-read-only", "note", "chmod u+w /c/f/r.db"),
    (CPU, environment(NVIDIA_TF32_OVERRIDE="0"), "tf32-override", "note", "unset NVIDIA_TF32_OVERRIDE"),
    (CPU, environment(CUBLAS_WORKSPACE_CONFIG=":4096:8"), "environment", "note", "unset CUBLAS_WORKSPACE_CONFIG"),
    (
        GPU,
        stages("torch", product__cuda__float16={"error": "AssertionError: result is off"}),
        "product-wrong",
        "problem",
        "doctor --json",
    ),
    (GPU, stages("cupy", k__tail__cuda={"right": False, "own_right": False}), "product-wrong", "problem", None),
    (GPU, stages("cupy", k__tail__cuda={"right": True, "own_right": False}), "own-product-wrong", "note", None),
    (GPU, stages("jax", product__cuda__float16={"error": "RuntimeError: x"}), "product-failed", "problem", None),
    (GPU, stages("torch", own__cuda={"error": "RuntimeError: x"}), "own-product-failed", "problem", "import torch"),
    (GPU, stages("torch", own__cuda={"right": False}), "own-product-failed", "problem", "import torch"),
    (CPU, stages("system", packages={"error": "OSError: x"}), "probe-failed", "problem", None),
    (
        CPU,
        {"torch": {"failure": {"kind": "died", "stage": "import", "text": "it was ended by SIGSEGV"}}},
        "probe-died",
        "problem",
        "python -X faulthandler -c 'import torch'",
    ),
    (CPU, {"jax": {"failure": {"kind": "slow", "stage": None, "text": "120 s"}}}, "probe-slow", "problem", "jax"),
)


def with_id(found: list[Finding], name: str) -> list[Finding]:
    return [finding for finding in found if finding.id == name]


@pytest.mark.parametrize(("machine", "changes", "name", "level", "remedy"), ROWS, ids=[row[2] for row in ROWS])
def test_finding(machine: Facts, changes: Any, name: str, level: str, remedy: str | None) -> None:
    found = findings_of(merged(machine, changes))
    assert [finding.level for finding in with_id(found, name)][:1] == [level], found
    remedies = [finding.remedy or "" for finding in with_id(found, name)]
    assert remedy is None or any(remedy in given for given in remedies), remedies
    if level != "ok" and changes:
        assert with_id(findings_of(machine), name) == []


def test_a_problem_has_no_other_cause_than_its_own() -> None:
    """Each change gives the findings of its row and at most those that follow from it; nothing crashes."""
    for machine, changes, name, *_ in ROWS:
        found = findings_of(merged(machine, changes))
        assert name == "probe-failed" or with_id(found, "probe-failed") == []


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_machine_that_is_well_has_no_problem(machine: Facts) -> None:
    assert [finding for finding in findings_of(machine) if finding.level == "problem"] == []


def test_every_finding_has_a_row() -> None:
    assert {row[2] for row in ROWS} == set(MEANINGS)


def test_a_finding_without_a_meaning_cannot_be_made() -> None:
    with pytest.raises(KeyError, match="sunspots"):
        Finding("sunspots", "note", "many")


def test_nothing_known_is_no_crash() -> None:
    """All probes died at once, or gave something else than they should."""
    assert findings_of({}) == []
    nonsense = {name: {"stages": dict.fromkeys(found["stages"], 7)} for name, found in GPU.items()}
    findings_of(nonsense)
    for name, found in GPU.items():
        for stage in found["stages"]:
            changed = merged(GPU, {name: {"stages": {stage: GONE}}})
            assert text.report("1", changed, findings_of(changed))


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError("of course")

    monkeypatch.setattr(checks, "CHECKS", (broken, *checks.CHECKS))
    (found,) = with_id(findings_of(CPU), "probe-failed")
    assert "ZeroDivisionError: of course" in found.what
    assert with_id(findings_of(CPU), "no-device")


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_report_shows_everything(machine: Facts) -> None:
    shown = text.report("1.2.3", machine, findings_of(machine))
    assert "cannot be shown" not in shown
    assert all(f" {finding.id}: " in shown for finding in findings_of(machine))
    assert "fusedops 1.2.3" in shown
    if machine is GPU:
        assert "H200, compute capability 9.0, 128.0 GiB" in shown
        assert "580.65.06, up to CUDA 13.0" in shown
        assert "fusedops calls cublasLt 12.9.1 /site/libcublasLt.so.12" in shown


def test_limits_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.split(r"[\[<>=]", line)[0]: line for line in project["dependencies"]}
    for lines in project["optional-dependencies"].values():
        asked = {re.split(r"[\[<>=]", line)[0]: line for line in lines} | asked
    for package, (first, limit) in LIMITS.items():
        assert f">={'.'.join(map(str, first))}" in asked[package]
        assert ("<" in asked[package]) == (limit is not None)
        assert limit is None or f"<{'.'.join(map(str, limit))}" in asked[package]


# Single parts ---------------------------------------------------------------------------------------------------------

MAPS = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 11 /usr/bin/python3
7f0000000000-7f0000100000 r-xp 00001000 08:01 12 /site with space/nvidia/cublas/lib/libcublasLt.so.12
7f0000100000-7f0000200000 r--p 00101000 08:01 12 /site with space/nvidia/cublas/lib/libcublasLt.so.12
7f0000300000-7f0000400000 r-xp 00000000 08:01 13 /torch/lib/libcudart-218eec4c.so.12
7f0000500000-7f0000600000 rw-p 00000000 00:00 0
7f0000700000-7f0000800000 r-xp 00000000 08:01 14 /lib/libcudnn.so.9
"""


def test_libraries_of_a_process() -> None:
    assert libraries.libraries_in(libraries.mapped_files(MAPS)) == [
        ("cublasLt", "/site with space/nvidia/cublas/lib/libcublasLt.so.12"),
        ("cudart", "/torch/lib/libcudart-218eec4c.so.12"),
    ]
    assert libraries.file_at(0x7F0000000010, MAPS) == "/site with space/nvidia/cublas/lib/libcublasLt.so.12"
    assert libraries.file_at(0x7F0000500010, MAPS) is None
    assert libraries.version_text(130100, (10000, 100)) == "13.1.0"
    assert libraries.version_text(12090, (1000, 10)) == "12.9"


def test_a_framework_is_installed_by_package_or_by_module() -> None:
    found = stages("system", packages={"torch": "2.11"}, modules={"jax": True, "torch": False})
    assert FoundFacts(found).installed == ["torch", "jax"]


def test_variables() -> None:
    given = {"FUSEDOPS_X": "1", "HOME": "/h", "NVIDIA_TF32_OVERRIDE": "0", "XLA_FLAGS": "-a", "MY_CC": "x"}
    assert list(variables_of(given)) == ["FUSEDOPS_X", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS"]


@pytest.mark.parametrize("variables", [{"FUSEDOPS_CACHE_DIR": "given"}, {"XDG_CACHE_HOME": "xdg"}, {}], ids=str)
def test_cache_path_is_that_of_the_builder(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FUSEDOPS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert files.cache_path(os.environ, tmp_path) == build._cache_folder()


def test_records_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    assert files.read_records(path) == {"path": str(path), "exists": False}
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE plans (key TEXT)")
        file.executemany("INSERT INTO plans VALUES (?)", [("a",), ("b",)])
    file.close()
    assert files.read_records(path)["rows"] == 2
    path.write_text("no database, but long enough to be taken for a broken one" * 9)
    assert "not a database" in files.read_records(path)["why"]


def test_a_wrong_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS["numpy"]()
    assert products._product(subject, "cpu", "float32", "ieee")["engine"] == "reference"
    monkeypatch.setattr(products, "matmul", lambda *_, **__: np.zeros((24, 40), "float32"))
    with pytest.raises(AssertionError, match="elements are off"):
        products._product(subject, "cpu", "float32", "ieee")


STUB = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { *v = 12090; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, device ? "Second" : "First"); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)150 << 30; return 0; }
int cuDeviceGetAttribute(int *v, int which, int device) { *v = which == 75 ? 9 : which == 20 ? 3 : 0; return 0; }
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="needs a C compiler")
def test_driver_is_asked(tmp_path: Path) -> None:
    (tmp_path / "stub.c").write_text(STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "stub.c"], check=True)
    target = {"driver": "fusedops.doctor.driver:examine"}
    found = run_processes(target, {}, 30, 1, {"LD_LIBRARY_PATH": str(tmp_path)})["driver"]["stages"]["driver"]
    assert found["cuda"] == "12.9"
    assert found["devices"][1] == {
        "ordinal": 1,
        "name": "Second",
        "capability": "9.0",
        "memory_bytes": 150 << 30,
        "mode": "exclusive process",
    }


# Probes that break ----------------------------------------------------------------------------------------------------

BROKEN = """
import os, signal, subprocess, sys, time

def well(stages, argument):
    print("noise of a library")
    os.write(1, b"more noise")
    stages.run("one", lambda: {"two": argument["two"]})
    os.write(1, b'\\n["end", "one", "what a library prints is not what a probe found"]\\n')

def raises(stages, argument):
    stages.run("one", lambda: 1)
    stages.run("exits", lambda: sys.exit("done"))
    raise ValueError("a probe of no use")

def segfaults(stages, argument):
    stages.run("one", lambda: 1)
    stages.run("crash", lambda: os.kill(os.getpid(), signal.SIGSEGV))

def hangs(stages, argument):
    stages.run("one", lambda: 1)
    subprocess.Popen(["sleep", "600"])
    stages.run("wait", lambda: time.sleep(600))

def ends(stages, argument):
    stages.run("one", lambda: 1)
    os._exit(3)
"""


def test_probes_that_break_take_nothing_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_probes.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("hangs", "well", "raises", "segfaults", "ends", "missing")
    start = time.monotonic()
    found = run_processes({name: f"broken_probes:{name}" for name in names}, {"two": 2}, 4, 2)
    assert time.monotonic() - start < 12
    assert found["well"]["stages"]["one"] == {"two": 2}
    assert found["well"]["failure"] is None
    assert found["raises"]["stages"]["exits"] == {"error": "SystemExit: done"}
    assert found["raises"]["stages"]["all"] == {"error": "ValueError: a probe of no use"}
    assert found["segfaults"]["stages"] == {"probe": {}, "one": 1}
    assert found["segfaults"]["failure"]["stage"] == "crash"
    assert "SIGSEGV" in found["segfaults"]["failure"]["text"]
    assert "Fatal Python error: Segmentation fault" in found["segfaults"]["failure"]["text"]
    assert found["hangs"]["failure"] == {"kind": "slow", "stage": "wait", "text": "it had not ended after 4 s"}
    assert found["hangs"]["stages"]["one"] == 1
    assert found["ends"]["failure"]["stage"] is None
    assert "status 3" in found["ends"]["failure"]["text"]
    assert "AttributeError" in found["missing"]["stages"]["probe"]["error"]
    ids = {finding.id for finding in findings_of(found)}
    assert ids == {"probe-failed", "probe-died", "probe-slow"}


def test_an_interpreter_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    found = probe_all((*PROBES[:3], Probe("native", "fusedops.doctor.files:native")), 5)
    assert {value["failure"]["kind"] for value in found.values()} == {"died"}
    assert {finding.id for finding in findings_of(found)} == {"probe-died"}


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_target_of_a_probe_is_there(probe: Probe) -> None:
    module, _, function = probe.target.partition(":")
    assert callable(getattr(import_module(module), function))


# The command ----------------------------------------------------------------------------------------------------------


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command, without what the environment of the tests may say."""
    kept = {name: value for name, value in os.environ.items() if name not in variables_of(os.environ)}
    paths = os.pathsep.join(filter(None, (variables.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**kept, **variables, "PYTHONPATH": paths}
    started = [sys.executable, "-m", "fusedops.doctor", *arguments]
    return subprocess.run(started, capture_output=True, text=True, timeout=300, env=environment, check=False)


@cache
def whole() -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = doctor("--json")
    return done, json.loads(done.stdout)


def ids_of(found: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in found["findings"]]


def test_json() -> None:
    done, found = whole()
    problems = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert found["schema"] == command.SCHEMA
    assert found["status"] == ("problem" if problems else "ok")
    assert done.returncode == bool(problems)
    assert list(found["probes"]) == [probe.name for probe in PROBES]
    assert found["probes"]["system"]["stages"]["packages"]["numpy"] == np.__version__
    assert found["probes"]["torch"]["stages"]["product cpu float16"]["engine"] == "reference"
    assert found["probes"]["jax"]["stages"]["product cpu:0 float32"]["engine"] == "xla"
    assert {"id", "level", "what", "means", "remedy"} == set(found["findings"][0])
    if not found["probes"]["driver"]["stages"]["driver"]["devices"]:
        assert "no-device" in ids_of(found)
        assert problems == []


def test_modules_that_are_not_there_and_a_cache_that_cannot_be(tmp_path: Path) -> None:
    """Plain text; no framework but NumPy, by package or by module; the folder of compiled code is a file."""
    hide(tmp_path, hide_packages=True)
    (tmp_path / "file").write_text("")
    variables = {"FUSEDOPS_CACHE_DIR": str(tmp_path / "file" / "x"), "NVIDIA_TF32_OVERRIDE": "0"}
    done = doctor(PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("torch", "jax", "cupy"):
        assert f"{name}: left out: not installed" in done.stdout
    assert "numpy cpu float32: right; reference engine" in done.stdout
    assert "NOTE     cache-unusable: " in done.stdout
    assert "$ unset NVIDIA_TF32_OVERRIDE" in done.stdout
    assert "0 problems" in done.stdout
    assert done.stderr == ""


def hide(folder: Path, hide_packages: bool) -> None:
    """Let every interpreter with a folder on its path fail to import the frameworks."""
    code = """
        import importlib.metadata as metadata, sys

        HIDDEN = {"torch", "jax", "jaxlib", "cupy", "nvmath", "nvmath-python", "cupy-cuda12x", "cupy-cuda13x"}

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in HIDDEN:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Blocker())
        version = metadata.version

        def some(name):
            if name in HIDDEN:
                raise metadata.PackageNotFoundError(name)
            return version(name)
    """
    lines = textwrap.dedent(code) + ("metadata.version = some\n" if hide_packages else "")
    (folder / "sitecustomize.py").write_text(lines)


def test_packages_whose_modules_are_gone(tmp_path: Path) -> None:
    hide(tmp_path, hide_packages=False)
    done = doctor("--json", PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    failed = [finding for finding in found["findings"] if finding["id"] == "import-failed"]
    assert {finding["remedy"] for finding in failed} >= {
        "pip install --force-reinstall torch",
        "pip install --force-reinstall jax",
    }
    assert "No module named 'torch'" in failed[0]["what"]


def test_frameworks_that_crash_and_hang(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "jax.py").write_text("import time\ntime.sleep(600)\n")
    done = doctor("--json", "--timeout", "5", PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    found = json.loads(done.stdout)
    what = {finding["id"]: finding["what"] for finding in found["findings"] if finding["level"] == "problem"}
    assert done.returncode == 1
    assert set(what) == {"probe-died", "probe-slow"}
    assert what["probe-died"].startswith("torch in its stage 'import': it was ended by SIGSEGV")
    assert what["probe-slow"] == "jax in its stage 'import': it had not ended after 5 s"
    assert "product-right" in ids_of(found)


@pytest.mark.parametrize("arguments", [["--jsn"], ["--timeout", "0"], ["--timeout", "soon"], ["now"]], ids=str)
def test_a_wrong_argument_is_status_2_and_a_short_message(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "python -m fusedops doctor: error: " in said.err
    assert len(said.err.splitlines()) <= 3


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert "exit status: 0" in capsys.readouterr().out


# The page -------------------------------------------------------------------------------------------------------------


def table_of_page() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*?) \|(?: (.*?))? \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (means, remedy) for name, means, remedy in rows if name in MEANINGS}


def test_page_has_every_finding_and_what_it_means() -> None:
    assert [(name, means) for name, (means, _) in table_of_page().items()] == list(MEANINGS.items())


@pytest.mark.parametrize(("machine", "changes", "name"), [row[:3] for row in ROWS], ids=[row[2] for row in ROWS])
def test_page_has_the_remedy(machine: Facts, changes: Any, name: str) -> None:
    """The command that is printed, by its first word: the rest is the machine's."""
    _, shown = table_of_page()[name]
    commands = {code.partition(" ")[0] for code in re.findall(r"`([^`]+)`", shown)}
    for finding in with_id(findings_of(merged(machine, changes)), name):
        assert not finding.remedy or finding.remedy.partition(" ")[0] in commands


# The commands' one door -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["doctor", "--no-such"], 2, "python -m fusedops doctor"),
        (["bench", "no-such"], 2, "invalid choice"),
        (["docter"], 2, "there is no command 'docter'"),
        ([], 2, "usage: python -m fusedops COMMAND"),
        (["--help"], 0, "doctor"),
    ],
)
def test_commands_are_found_by_name(arguments: list[str], status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "fusedops", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert said in (done.stderr if status else done.stdout)
    assert "Traceback" not in done.stderr
