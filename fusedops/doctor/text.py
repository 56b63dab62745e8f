"""Facts and findings as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .facts import Facts
from .findings import MEANINGS, Finding
from .variables import change_of

__all__ = ["report"]

_WIDTH = 12


def report(version: str, found: Mapping[str, Mapping[str, Any]], findings: list[Finding]) -> str:
    """Return what was found, line by line, and what it means.

    Parameters
    ----------
    version : str
        Of fusedops.
    found : mapping
        As `fusedops.doctor.probes.probe_all` returns it.
    findings : list of Finding
        What `fusedops.doctor.checks.findings_of` made of it.
    """
    facts, lines = Facts(found), [f"fusedops {version}", ""]
    for section in (_system, _gpus, _libraries, _native, _files, _products):
        try:
            lines += section(facts)
        except Exception as error:  # what is shown matters less than what was found
            lines.append(_line(section.__name__[1:], f"cannot be shown: {type(error).__name__}: {error}"))
    lines += ["", *(line for finding in findings for line in _finding(finding))]
    count = {level: sum(finding.level == level for finding in findings) for level in ("problem", "note", "ok")}
    problems = f"{count['problem']} problem{'s' * (count['problem'] != 1)}"
    return "\n".join([*lines, "", f"{problems}, {count['note']} to note, {count['ok']} ok"])


def _line(name: str, text: str) -> str:
    return f"{name:{_WIDTH}} {' '.join(text.split())}"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{finding.level.upper():8} {finding.id}: {' '.join(finding.what.split())}"
    if finding.level != "ok":
        yield f"{'':8} {MEANINGS[finding.id]}"
    if finding.remedy:
        yield f"{'':8} $ {finding.remedy}"


def _system(facts: Facts) -> Iterator[str]:
    python = facts.stage("system", "python")
    if python:
        where = f"{python['implementation']} on {python['system']}, {python['machine']}"
        yield _line("python", f"{python['version']} ({where}) {python['executable']}")
    for name, version in facts.stage("system", "packages").items():
        if version:
            yield _line("package", f"{name} {version}")
    for name, value in facts.stage("system", "environment").items():
        yield _line("environment", f"{name}={value} ({change_of(name)})")


def _gpus(facts: Facts) -> Iterator[str]:
    driver, release = facts.stage("driver", "driver"), facts.stages("driver").get("release")
    if not facts.has_gpu:
        yield _line("gpu", f"none: {driver.get('why') or 'no CUDA device'}")
        return
    shown = release if isinstance(release, str) else "of unknown version"
    yield _line("driver", f"{shown}, up to CUDA {driver['cuda']}")
    for device in facts.devices:
        memory = f"{device['memory_bytes'] / 2**30:.1f} GiB"
        what = f"{device['name']}, compute capability {device['capability']}, {memory}, mode {device['mode']}"
        yield _line("gpu", f"{device['ordinal']}: {what}")


def _libraries(facts: Facts) -> Iterator[str]:
    for probe in ("torch", "jax", "cupy", "nvmath", "together"):
        for library in (*facts.libraries(probe), *facts.libraries(probe, "cudart")):
            yield _line("library", f"{probe}: {library['name']} {library['version'] or '?'} {library['path']}")
    engine = facts.stage("together", "engine") or facts.stage("nvmath", "engine")
    if engine:
        yield _line("library", f"fusedops calls cublasLt {engine['version'] or '?'} {engine['path']}")


def _native(facts: Facts) -> Iterator[str]:
    compiler = facts.stage("native", "compiler")
    if compiler:
        shown = f"{compiler['program']}: {compiler['version']}" if compiler["program"] else "none"
        yield _line("compiler", shown)
    for name, probe in (("launcher", "native"), ("handler", "jax")):
        made = facts.stage(probe, name)
        if made:
            kept = "" if made["kept"] else " (for one process alone)"
            yield _line(name, f"{made['path']}{kept}, loaded in {made['seconds']} s")
    registered = facts.stage("jax", "registered")
    if registered:
        yield _line("handler", registered["why_not"] or "registered with XLA for CUDA")


def _files(facts: Facts) -> Iterator[str]:
    cache, records = facts.stage("files", "cache"), facts.stage("files", "records")
    if cache:
        state = "used" if cache["used"] else "not used"
        access = "writable" if cache["writable"] else "not writable"
        inside = f"{cache.get('objects', 0)} compiled objects, mode {cache.get('mode', '?')}"
        yield _line("cache", f"{cache['path']}: {state}, {access}, {inside}")
    path = records.get("path")
    if not path:
        yield _line("records", "none")
    elif not records["exists"]:
        yield _line("records", f"none yet: {path}")
    else:
        access = "writable" if records["writable"] else "not writable"
        rows = "cannot be read" if records["rows"] is None else f"{records['rows']} rows"
        yield _line("records", f"{path}: {rows}, {access}")


def _products(facts: Facts) -> Iterator[str]:
    for probe in ("numpy", "torch", "jax", "cupy"):
        skipped = facts.found.get(probe, {}).get("skipped")
        if skipped:
            yield _line("product", f"{probe}: left out: {skipped}")
        for name, value in facts.stages(probe).items():
            if name.startswith("product ") and isinstance(value, dict):
                yield _line("product", f"{probe} {name.removeprefix('product ')}: {_answer(value)}")


def _answer(value: dict[str, Any]) -> str:
    if "error" in value:
        return "failed"
    ways = {None: "", False: ", by JAX's own operations", True: ", by the custom call"}
    launcher = f", launched {value['launcher']}" if value.get("launcher") else ""
    answered = f"{value['engine']} engine, {value['strategy']}{ways[value.get('custom_call')]}{launcher}"
    return f"right; {answered}; first call {value['first_call_seconds']} s"
