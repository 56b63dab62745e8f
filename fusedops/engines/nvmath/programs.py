"""`Program`: a product that is planned for one alignment class, however it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ...column_form import ColumnForm

__all__ = ["Launch", "Program"]


class Launch(Protocol):
    """Queue the product on ``stream``; raise a ``cuBLASLtError`` where the library refuses it.

    All are addresses in the caller's terms, 0 where there is no such array. ``bias`` is also where an epilog writes a
    sum, ``aux`` where it reads or writes a mask or pre-activation. ``c`` is ``out`` where there is no ``c``. They go by
    position.
    """

    def __call__(
        self,
        a: int,
        b: int,
        c: int,
        out: int,
        bias: int,
        aux: int,
        workspace: int,
        alpha: float,
        beta: float,
        stream: int,
        /,
    ) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A planned product for one alignment class.

    Attributes
    ----------
    form : ColumnForm
        What cuBLASLt was asked for.
    algorithm_id, split_k : int
        The algorithm.
    workspace : int
        Bytes that a launch needs.
    launch : Launch
        The way to launch it, which owns all that it needs.
    found : object
        The algorithm as its planner knows it.
    """

    form: ColumnForm
    algorithm_id: int
    split_k: int
    workspace: int
    launch: Launch
    found: Any
