"""Options: what a program decides once, for a block or for the process.

Only what may differ between two calls of one problem without changing its result is an option; what is part of the
problem (``precision``, ``deterministic``) is an argument, because a trace would freeze an option without a word.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any

__all__ = ["Options", "current_options", "options"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options in force.

    Attributes
    ----------
    mixed : {"lead", "error"}
        Whether operands of several frameworks may meet in one call.
    verify : bool
        Whether a plan on a GPU is run on known data when it is made, before it is trusted.
    """

    mixed: str = "lead"
    verify: bool = False


_CHOICES: dict[str, tuple[Any, ...]] = {"mixed": ("lead", "error"), "verify": (False, True)}
_process_default = Options()
_block: ContextVar[Options | None] = ContextVar("fusedops_options", default=None)


def current_options() -> Options:
    """Return the options of the innermost block, else those of the process."""
    return _block.get() or _process_default


class options:
    """Change options for a ``with`` block, or with `set_default` for the process.

    Parameters
    ----------
    mixed : {"lead", "error"}
        "lead" (the default) lets operands of other frameworks join the lead's through DLPack, without a copy; "error"
        makes such a call a TypeError.
    verify : bool
        True runs every new plan on a GPU once on data whose result is known, and makes a wrong one a RuntimeError. It
        costs a synchronisation a plan, and nothing a call. Plans that were made before are not run again.

    Raises
    ------
    TypeError
        For an option that does not exist.
    ValueError
        For a value that an option cannot have.

    Notes
    -----
    A block's options live in a `contextvars.ContextVar`: other threads and tasks do not see them.

    Examples
    --------
    >>> import fusedops
    >>> with fusedops.options(mixed="error"):
    ...     fusedops.options.current().mixed
    'error'
    """

    def __init__(self, **changes: Any) -> None:
        self._changes = _checked(changes)
        self._tokens: list[Token[Options | None]] = []

    def __enter__(self) -> Options:
        self._tokens.append(_block.set(replace(current_options(), **self._changes)))
        return current_options()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _block.reset(self._tokens.pop())

    @staticmethod
    def current() -> Options:
        """Return the options in force."""
        return current_options()

    @staticmethod
    def set_default(**changes: Any) -> None:
        """Change options for the whole process, outside of any block."""
        global _process_default
        _process_default = replace(_process_default, **_checked(changes))


def _checked(changes: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(Options)]
    for name, value in changes.items():
        if name not in names:
            raise TypeError(f"options: there is no option {name!r}; there is {', '.join(names)}.")
        if not any(type(value) is type(choice) and value == choice for choice in _CHOICES[name]):
            raise ValueError(f"options: {name} is {value!r}, expected one of {', '.join(map(repr, _CHOICES[name]))}.")
    return changes
