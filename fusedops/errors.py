"""The door's part of every message: inner errors are short and name the argument, the door adds the op, once."""

from __future__ import annotations

__all__ = ["OURS", "named"]

OURS = (TypeError, ValueError, NotImplementedError, ImportError, MemoryError, RuntimeError)
"""The types that the package raises; a framework's own subclasses of them pass unchanged."""


def named(op: str, error: Exception) -> Exception:
    """Return ``error`` with the op's name before its message, and its own traceback."""
    if type(error) not in OURS:
        return error
    return type(error)(f"{op}: {error}").with_traceback(error.__traceback__)
