"""The key of a call and the bounded table from key to plan.

The key is made of the settings as the caller gave them and of the arrays' signatures; planning reads nothing else, so
two calls with equal keys have equal plans. A cache keyed by the finished `Problem` was rejected: building one costs
ten times the look-up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from .frameworks import Framework
from .plans import Plan
from .problem import Settings

__all__ = ["CACHE_SIZE", "PlanCache", "key_of"]

Array = Any
Operands = tuple[Array, ...]

CACHE_SIZE = 16_384
"""Plans kept at most; the oldest half goes when it is full. A plan of the reference engine holds 3.2 KB, so 52 MB; one
on a GPU holds its layouts and its algorithm besides."""


class PlanCache:
    """A bounded table from key to plan, safe for many threads; looking up takes no lock."""

    def __init__(self, size: int = CACHE_SIZE) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self._size = size
        self._lock = threading.Lock()
        # Looking up one key of a dictionary is safe beside a writer.
        self.get: Callable[[Hashable], Plan | None] = self._plans.get

    def get_or_make(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """Return the plan under ``key``; of two threads that make it at once, the first one's is kept."""
        made = make()
        with self._lock:
            if len(self._plans) >= self._size:
                for old in list(self._plans)[: self._size // 2 + 1]:
                    del self._plans[old]
            return self._plans.setdefault(key, made)

    def clear(self) -> None:
        """Forget every plan; who holds one keeps it."""
        with self._lock:
            self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)


def key_of(
    framework: Framework, settings: Settings, operands: Operands, out: Array, aux_out: Mapping[str, Array] | None
) -> Hashable:
    """Return the key: the lead, the settings as given, and the signature of every array."""
    return (
        framework,
        settings,
        # 1 == True, and planning refuses one of them.
        type(settings[2]),
        type(settings[3]),
        type(settings[6]),
        framework.signatures(operands),
        out if out is None else framework.signature(out),
        None if aux_out is None else tuple((name, framework.signature(x)) for name, x in aux_out.items()),
    )
