"""Algorithms of cuBLASLt that are known to give wrong results, and how they are told apart.

An algorithm in this table is never launched, whoever proposes it: the heuristic, a record, a tuning run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["KNOWN_BAD", "KnownBad", "Traits", "refusal"]


@dataclass(frozen=True, slots=True)
class Traits:
    """What the table asks of an algorithm: its id, its number of splits of k, and the k that it is to run on."""

    algorithm_id: int
    split_k: int
    k: int


@dataclass(frozen=True, slots=True)
class KnownBad:
    """One fault.

    Attributes
    ----------
    name : str
        For messages.
    report : str
        The public report.
    condition : str
        When it strikes, in words.
    versions : str
        Versions of cuBLASLt in which it was seen.
    strikes : callable
        The condition; it may refuse more than is known to fail, never less.
    """

    name: str
    report: str
    condition: str
    versions: str
    strikes: Callable[[Traits], bool]


KNOWN_BAD = (
    KnownBad(
        name="split-K drops the tail of k",
        report="triton-lang, fork pull request 2767",
        condition=(
            "algorithm 66 with split-K: the last k % 64 terms are left out where (k // 64) % splits is 0 and splits > "
            "k % 64; refused for every k that is no multiple of 64"
        ),
        versions="13.1.0 and before",
        strikes=lambda traits: traits.algorithm_id == 66 and traits.split_k > 1 and traits.k % 64 != 0,
    ),
)


def refusal(traits: Traits) -> KnownBad | None:
    """Return the entry that forbids an algorithm, or None."""
    return next((entry for entry in KNOWN_BAD if entry.strikes(traits)), None)
