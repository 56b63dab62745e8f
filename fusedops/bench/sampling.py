"""Interleaved samples: every row once a round, so that what drifts on the machine drifts for all of them."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..support import support

__all__ = ["Table", "host_samples"]


@dataclass(frozen=True, slots=True)
class Table:
    """Samples in microseconds by row, and what they were taken on.

    Attributes
    ----------
    title, device, date : str
    versions : dict
    samples : dict
        Row to its samples, in the order of the rounds.
    baselines : tuple of str
        The rows that the others are compared with.
    """

    title: str
    device: str
    date: str
    versions: dict[str, str | None]
    samples: dict[str, list[float]]
    baselines: tuple[str, ...]

    @property
    def medians(self) -> dict[str, float]:
        """The median of each row."""
        return {row: statistics.median(values) for row, values in self.samples.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return samples and medians as plain data."""
        return {**asdict(self), "medians": self.medians}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Table:
        """Return the table that `as_dict` gave."""
        kept = {name: value for name, value in data.items() if name != "medians"}
        return cls(**{**kept, "baselines": tuple(kept["baselines"])})

    def markdown(self) -> str:
        """Return the table as the documentation shows it."""
        medians = self.medians
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        lines = [
            f"{self.title}; {self.device}, {self.date}; {versions}.",
            "",
            "| | us | " + " | ".join(f"/ {name}" for name in self.baselines) + " |",
            "|---|" + "---|" * (1 + len(self.baselines)),
        ]
        for row, median in medians.items():
            ratios = " | ".join(f"{median / medians[name]:.2f}" for name in self.baselines)
            lines.append(f"| {row} | {median:.1f} | {ratios} |")
        return "\n".join(lines)

    def __str__(self) -> str:
        medians = self.medians
        heads = "".join(f"{'/ ' + name:>28}" for name in self.baselines)
        lines = [self.title, f"{self.device}, {self.date}", f"{'':44}{'us':>8}{heads}"]
        for row, median in medians.items():
            ratios = "".join(f"{median / medians[name]:>28.2f}" for name in self.baselines)
            lines.append(f"{row:44}{median:>8.1f}{ratios}")
        return "\n".join(lines)


def host_samples(
    title: str,
    device: str,
    versions: Mapping[str, str | None],
    rows: Mapping[str, Callable[[], object]],
    baselines: tuple[str, ...],
    rounds: int,
    calls: int,
    drain: Callable[[], object],
) -> Table:
    """Return host times a call: ``calls`` calls a sample without waiting, the device drained between samples."""
    for call in rows.values():
        _sample(call, calls, drain)
    samples: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row, call in rows.items():
            samples[row].append(_sample(call, calls, drain))
    everything = {**support().versions, **versions}
    return Table(title, device, datetime.date.today().isoformat(), everything, samples, baselines)


def _sample(call: Callable[[], object], calls: int, drain: Callable[[], object]) -> float:
    drain()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    drain()
    return taken / calls * 1e6
