"""From facts to findings: the checks, one row each, and those of products and of the probes themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import checks_machine, checks_native, checks_software
from .facts import Facts
from .findings import Finding, note, ok, problem
from .remedies import REPORT

__all__ = ["CHECKS", "findings_of"]

Check = Callable[[Facts], Iterator[Finding]]

_LEVELS = ("problem", "note", "ok")
_OWN_ERRORS = {
    # stages whose failure has a finding of its own
    *((name, "import") for name in ("numpy", "torch", "jax", "cupy")),
    ("native", "launcher"),
    ("jax", "handler"),
    ("jax", "registered"),
    ("nvmath", "engine"),
    ("together", "engine"),
}


def products(facts: Facts) -> Iterator[Finding]:
    """Are small products right?"""
    for probe in ("numpy", "torch", "jax", "cupy", "together"):
        right = []
        for name, value in facts.stages(probe).items():
            kind, _, where = name.partition(" ")
            if kind not in ("own", "product", "k") or not isinstance(value, dict):
                continue
            shown, error = f"{probe}, {name.removeprefix('product ')}", value.get("error")
            if kind == "own":
                if error or not value.get("right"):
                    yield problem("own-product-failed", f"{shown}: {error or 'it is wrong'}", _again(probe))
                continue
            if error:
                is_wrong = error.startswith("AssertionError")
                yield problem("product-wrong" if is_wrong else "product-failed", f"{shown}: {error}", REPORT)
            elif value.get("right") is False:
                yield problem("product-wrong", f"{shown}: the last terms of k are left out", REPORT)
            else:
                right.append(where.removeprefix("tail "))
                if value.get("own_right") is False:
                    yield note("own-product-wrong", f"{probe} on {where.removeprefix('tail ')}: a @ b at k = 11528")
        if right:
            yield ok("product-right", f"{probe}: {', '.join(dict.fromkeys(right))}")


def launchers(facts: Facts) -> Iterator[Finding]:
    """Are products launched in the fastest way?"""
    ways = [
        value["launcher"]
        for probe in ("torch", "cupy")
        for name, value in facts.stages(probe).items()
        if name.startswith("product") and value.get("launcher") not in (None, "native")
    ]
    if ways and facts.stage("native", "launcher"):  # without a launcher there is a finding of that
        yield note("launcher-slow", ways[0], f"{facts.install} --upgrade")


def probes(facts: Facts) -> Iterator[Finding]:
    """Did the probes themselves end well?"""
    for probe, found in facts.found.items():
        failure = found.get("failure")
        if failure:
            where = f" in its stage {failure['stage']!r}" if failure["stage"] else ""
            yield problem(f"probe-{failure['kind']}", f"{probe}{where}: {failure['text']}", _again(probe))
        for stage, value in facts.stages(probe).items():
            error = value.get("error") if isinstance(value, dict) else None
            is_product = stage.startswith(("own ", "product ", "k tail "))
            is_import = probe == "together" and stage.startswith("import ")  # that framework's own probe says it
            if error and not is_product and not is_import and (probe, stage) not in _OWN_ERRORS:
                yield problem("probe-failed", f"{probe}, {stage}: {error}", REPORT)


def _again(probe: str) -> str:
    """Return the command that shows what takes a process down."""
    modules = {"torch": "torch", "jax": "jax", "cupy": "cupy", "numpy": "numpy", "nvmath": "nvmath"}
    return f"python -X faulthandler -c 'import {modules[probe]}'" if probe in modules else REPORT


CHECKS: tuple[Check, ...] = (
    checks_machine.devices,
    checks_machine.driver_age,
    checks_software.packages,
    checks_software.frameworks,
    checks_software.cublaslt,
    checks_native.compiled,
    checks_native.handler,
    checks_native.cache,
    checks_native.records,
    checks_machine.environment,
    launchers,
    products,
    probes,
)


def findings_of(found: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Return what the facts mean, problems first.

    Parameters
    ----------
    found : mapping
        As `fusedops.doctor.probes.probe_all` returns it.
    """
    facts, findings = Facts(found), list[Finding]()
    for check in CHECKS:
        try:
            findings += check(facts)
        except Exception as error:  # facts of a shape that nobody foresaw
            said = f"{check.__name__}: {type(error).__name__}: {error}"
            findings.append(problem("probe-failed", said, REPORT))
    return sorted(dict.fromkeys(findings), key=lambda finding: _LEVELS.index(finding.level))
