"""The probes: one row each, and the order in which they run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .facts import Facts
from .processes import run_processes

__all__ = ["PROBES", "Probe", "probe_all"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe.

    Attributes
    ----------
    name : str
        By which its facts are found.
    target : str
        ``"module:function"``, called in a process of its own.
    needs : str or None
        The framework without which there is nothing to probe.
    needs_gpu : bool
        Whether there is nothing to probe without a CUDA device.
    first : bool
        Whether others are chosen by what it finds.
    """

    name: str
    target: str
    needs: str | None = None
    needs_gpu: bool = False
    first: bool = False


PROBES = (
    Probe("system", "fusedops.doctor.system:examine", first=True),
    Probe("driver", "fusedops.doctor.driver:examine", first=True),
    Probe("files", "fusedops.doctor.files:examine", first=True),
    Probe("torch", "fusedops.doctor.products:torch", needs="torch"),
    Probe("jax", "fusedops.doctor.products:jax", needs="jax"),
    Probe("native", "fusedops.doctor.files:native"),
    Probe("numpy", "fusedops.doctor.products:numpy"),
    Probe("cupy", "fusedops.doctor.products:cupy", needs="cupy", needs_gpu=True),
    Probe("nvmath", "fusedops.doctor.products:nvmath", needs="nvmath", needs_gpu=True),
    Probe("together", "fusedops.doctor.products:together", needs_gpu=True),
)


_GENTLE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""JAX would take three quarters of a GPU that somebody may be working on."""


def probe_all(probes: Sequence[Probe], limit: float) -> dict[str, dict[str, Any]]:
    """Return what every probe found, by its name, as `fusedops.doctor.processes.run_processes` tells it.

    Parameters
    ----------
    probes : sequence of Probe
        Usually `PROBES`.
    limit : float
        Seconds that each may take.
    """
    at_once = max(1, min(4, os.cpu_count() or 1))
    early = {probe.name: probe.target for probe in probes if probe.first}
    found = run_processes(early, {}, limit, at_once)
    facts = Facts(found)
    argument = {"gpu": facts.has_gpu, "engine": facts.has_engine, "installed": facts.installed}
    skipped = {probe.name: _reason(probe, facts) for probe in probes if not probe.first}
    later = {probe.name: probe.target for probe in probes if not probe.first and not skipped[probe.name]}
    # A GPU that takes one process at a time gets them one by one.
    is_shared = all(device.get("mode") == "default" for device in facts.devices)
    found |= run_processes(later, argument, limit, at_once if is_shared else 1, _GENTLE)
    for name, why in skipped.items():
        if why:
            found[name] = {"stages": {}, "seconds": 0.0, "failure": None, "skipped": why}
    return {probe.name: found[probe.name] for probe in probes}


def _reason(probe: Probe, facts: Facts) -> str | None:
    """Return why a probe is left out."""
    if probe.needs and probe.needs not in facts.installed:
        return "not installed"
    return "no CUDA device" if probe.needs_gpu and not facts.has_gpu else None
