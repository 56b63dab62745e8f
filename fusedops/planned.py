"""A product of the lead's own arrays, by its plan: found under the arrays' signatures, or made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .engines import Results
from .errors import OURS, named
from .frameworks import Framework
from .plan_cache import PlanCache, key_of
from .plans import Plan, make_plan
from .problem import Settings

__all__ = ["AuxOut", "plan_of", "run"]

Array = Any
Operands = tuple[Array, ...]
AuxOut = Mapping[str, Array] | None

_plans = PlanCache()


def run(
    framework: Framework,
    settings: Settings,
    operands: Operands,
    alpha: float,
    beta: float,
    out: Array | None,
    aux_out: AuxOut,
) -> tuple[Plan, Results]:
    """Return the plan of a call and what it gives."""
    made = _planned(framework, framework.settled(settings, operands[0]), operands, out, aux_out)
    if out is None and aux_out is None and made.launch is not None and type(alpha) is type(beta) is float:
        return made, made.launch(operands, alpha, beta, None, None)
    return made, made.run(operands, alpha, beta, out, aux_out)


def plan_of(op: str, framework: Framework, settings: Settings, operands: Operands) -> Plan:
    """Return the plan of a product of the lead's own arrays, or of what stands for them, without running it."""
    try:
        return _planned(framework, framework.settled(settings, operands[0]), operands, None, None)
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
