"""Keeps foreign memory safe until the work that reads it is done.

On the CPU only JAX computes after a call has returned. An owner that writes to its array right after the call would
then change what XLA still reads, and nothing orders the two; so a call with a JAX lead and foreign memory returns when
its result is there. NumPy arrays need none of it: JAX takes them under its own rules.
"""

from __future__ import annotations

from typing import Any

from .frameworks import Framework

__all__ = ["settle"]


def settle(lead: Framework, results: tuple[Any, ...]) -> None:
    """Return when memory that the lead does not own may be written or freed again."""
    for result in results:
        if result is not None:
            lead.wait(result)
