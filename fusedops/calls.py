"""The steps that every call takes.

It finds its lead and lets foreign operands in (`lead.py`), looks up its plan by the arrays' signatures
(`plan_cache.py`, `plans.py`), runs it, keeps foreign memory alive (`lifetime.py`), and gives an error the name of the
op, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import OURS, named
from .frameworks import Framework, kind_by_type
from .lead import are_of_one_type, join_lead
from .lifetime import settle
from .plan_cache import PlanCache, key_of
from .plans import Plan, make_plan
from .problem import Settings
from .streams import launch_stream

__all__ = ["AuxOut", "call", "new_plan", "plan_of"]

Array = Any
Operands = tuple[Array, ...]
AuxOut = Mapping[str, Array] | None

_plans = PlanCache()


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
    if stream is not None:
        with launch_stream(op, stream, operands):
            return call(op, settings, operands, alpha, beta, out, aux_out, None)
    try:
        kind = kind_by_type(type(operands[0])) if are_of_one_type(operands) else None
        if kind is not None:
            framework, sources = kind.framework, None
        else:
            lead, operands, sources = join_lead(operands)
            framework = lead.framework
        if settings.precision is None and (precision := framework.float32_precision(operands[0])) is not None:
            settings = settings._replace(precision=precision)
        made = _planned(framework, settings, operands, out, aux_out)
        if out is None and aux_out is None and made.launch is not None and type(alpha) is type(beta) is float:
            results = made.launch(operands, alpha, beta, None, None)
        else:
            results = made.run(operands, alpha, beta, out, aux_out)
    except OURS as error:
        raise named(op, error) from error.__cause__
    if sources:
        settle(framework, made.problem.device, results, sources)
    return results[0] if made.gives is None else made.packed(results)


def new_plan(op: str, settings: Settings, operands: Operands, out: Array | None, aux_out: AuxOut) -> Plan:
    """Return a plan of its own, which no cache shares, for the caller of ``op``."""
    try:
        if settings.epilog is not None and settings.activation is not None:
            raise ValueError("epilog and activation are both given. Leave one of them out.")
        lead, joined, _ = join_lead(operands)
        if settings.precision is None:
            settings = settings._replace(precision=lead.framework.float32_precision(joined[0]))
        return make_plan(lead.framework, settings, joined, out, aux_out)
    except OURS as error:
        raise named(op, error) from error.__cause__


def plan_of(op: str, framework: Framework, settings: Settings, operands: Operands) -> Plan:
    """Return the plan of a product of the lead's own arrays, or of what stands for them, without running it."""
    try:
        if settings.precision is None:
            settings = settings._replace(precision=framework.float32_precision(operands[0]))
        return _planned(framework, settings, operands, None, None)
    except OURS as error:
        raise named(op, error) from error.__cause__


def _planned(framework: Framework, settings: Settings, operands: Operands, out: Array | None, aux_out: AuxOut) -> Plan:
    try:
        key = key_of(framework, settings, operands, out, aux_out)
        made = _plans.get(key)
    except (TypeError, ValueError, AttributeError, BufferError, RuntimeError):
        # What cannot be part of a key cannot be part of a problem; planning says which argument it is, and why.
        return make_plan(framework, settings, operands, out, aux_out)
    if made is not None:
        return made
    return _plans.get_or_make(key, lambda: make_plan(framework, settings, operands, out, aux_out))
