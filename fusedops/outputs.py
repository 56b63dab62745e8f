"""The arrays that a call writes: whose they must be, and what they must not share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from .frameworks import Framework
from .lead import kind_of_argument
from .problem import OPERANDS

__all__ = ["check_no_gradient", "check_output_kinds", "check_outputs", "named_outputs"]

Array = Any


def named_outputs(out: Array | None, aux_out: Mapping[str, Array] | None) -> dict[str, Array]:
    """Return the arrays that a call writes, by what the caller knows them by."""
    outputs = {} if out is None else {"out": out}
    return {**outputs, **{f'aux_out["{name}"]': x for name, x in (aux_out or {}).items()}}


def check_output_kinds(framework: Framework, outputs: dict[str, Array]) -> None:
    """Raise a TypeError unless the lead can write these arrays; types are part of signatures, so plan time knows."""
    for name, out in outputs.items():
        kind = kind_of_argument(name, out)
        if not framework.mutable or not kind.framework.mutable:
            raise TypeError(f"{name} is given, but JAX arrays never change. Leave {name} out and use the result.")
        if kind.framework is not framework and framework.makes_results:
            raise TypeError(
                f"{name} is a {kind.framework.name} array, and the call is led by {framework.name}. Pass {name} as a "
                f"{framework.name} array."
            )


def check_outputs(
    framework: Framework,
    operands: tuple[Array, ...],
    outputs: dict[str, Array],
    names: tuple[str, ...] = OPERANDS,
) -> None:
    """Check the arrays of ``out=`` and ``aux_out=`` against the operands, before anything is written.

    Raises
    ------
    ValueError
        For one that is read-only, that an operand or another output overlaps, or into which a gradient would have to
        flow.
    """
    named = check_no_gradient(framework, operands, outputs, names)
    _check_overlap(framework, named, outputs)


def check_no_gradient(
    framework: Framework,
    operands: tuple[Array, ...],
    outputs: dict[str, Array],
    names: tuple[str, ...] = OPERANDS,
) -> dict[str, Array]:
    """Raise where a write would lose a gradient; return the operands that there are by name."""
    named = {name: x for name, x in zip(names, operands, strict=True) if x is not None}
    for name, x in {**named, **outputs}.items():
        if framework.requires_grad(x):
            raise ValueError(
                f"{', '.join(outputs)} cannot be written while {name} requires a gradient, which the write would lose. "
                "Leave it out, or call under torch.no_grad()."
            )
    return named


def _check_overlap(framework: Framework, operands: dict[str, Array], outputs: dict[str, Array]) -> None:
    written = {name: framework.view(x) for name, x in outputs.items()}
    for name, view in written.items():
        if view.readonly:
            raise ValueError(f"{name} is read-only. Pass an array that may be written.")
        for other, x in operands.items():
            if view.overlaps(framework.view(x)):
                raise ValueError(f"{name} shares memory with {other}. Pass an array of its own.")
    for (name, view), (other, view_of_other) in combinations(written.items(), 2):
        if view.overlaps(view_of_other):
            raise ValueError(f"{name} shares memory with {other}. Pass an array of its own.")
