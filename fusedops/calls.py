"""The steps that every call takes.

It finds its lead and lets foreign operands in (`lead.py`), goes by the lead's own rules where it has some for such a
call (`pytorch`), else runs its plan (`planned.py`), keeps foreign memory alive (`lifetime.py`), and gives an error the
name of the op, once.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from .errors import OURS, named
from .lead import common_kind, join_lead
from .lifetime import settle
from .planned import AuxOut, run
from .plans import Plan, make_plan
from .problem import Settings
from .streams import launch_stream

__all__ = ["AuxOut", "call", "is_compiled_by_torch", "new_plan"]

Array = Any
Operands = tuple[Array, ...]


def call(
    op: str,
    settings: Settings,
    operands: Operands,
    alpha: float,
    beta: float,
    out: Array | None,
    aux_out: AuxOut,
    stream: int | None,
) -> Any:
    """Return what the caller of ``op`` gets."""
    if is_compiled_by_torch():
        from . import pytorch

        return pytorch.traced(op, settings, operands, alpha, beta, out, aux_out, stream)
    if stream is not None:
        with launch_stream(op, stream, operands):
            return call(op, settings, operands, alpha, beta, out, aux_out, None)
    try:
        kind, sources = common_kind(operands), None
        if kind is None:
            kind, operands, sources = join_lead(operands)
        framework = kind.framework
        if framework.has_rules and (not kind.plain or framework.needs_rules(operands)):
            value = _pytorch().product(settings, operands, alpha, beta, out, aux_out, sources)
            if sources:
                settle(framework, framework.device(operands[0]), (value,), sources)
            return value
        made, results = run(framework, settings, operands, alpha, beta, out, aux_out)
    except OURS as error:
        raise named(op, error) from error.__cause__
    if sources:
        settle(framework, made.problem.device, results, sources)
    return results[0] if made.gives is None else made.packed(results)


@cache
def _pytorch() -> Any:
    """Return PyTorch's rules, which load its registries: most calls do not need them."""
    from . import pytorch

    return pytorch


def new_plan(op: str, settings: Settings, operands: Operands, out: Array | None, aux_out: AuxOut) -> Plan:
    """Return a plan of its own, which no cache shares, for the caller of ``op``."""
    try:
        if settings.epilog is not None and settings.activation is not None:
            raise ValueError("epilog and activation are both given. Leave one of them out.")
        lead, joined, _ = join_lead(operands)
        return make_plan(lead.framework, lead.framework.settled(settings, joined[0]), joined, out, aux_out)
    except OURS as error:
        raise named(op, error) from error.__cause__


def is_compiled_by_torch() -> bool:
    """Return whether ``torch.compile`` or ``torch.export`` is tracing, which is to see PyTorch's rules alone."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
