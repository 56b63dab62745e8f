"""Which framework leads a call, and how the operands of others join it.

The lead is a JAX tracer's framework if there is a tracer, else that of the first operand that is not NumPy's, else
NumPy. It decides framework, device, stream, allocator and result type. A foreign operand comes in over its own memory
or not at all.
"""

from __future__ import annotations

from typing import Any

from .arrays import Device
from .frameworks import Framework, Kind, kind_of
from .options import current_options
from .problem import OPERANDS

__all__ = ["join_lead", "kind_of_argument"]

Array = Any
Operands = tuple[Array, ...]


def kind_of_argument(name: str, x: Array) -> Kind:
    """Return the kind of an argument; TypeError that names it where it is no array."""
    try:
        return kind_of(x)
    except TypeError as error:
        raise TypeError(f"{name} {error}") from None


def join_lead(operands: Operands, names: tuple[str, ...] = OPERANDS, required: int = 2) -> tuple[Kind, Operands, bool]:
    """Return the lead, the operands as its arrays, and whether foreign memory is among them, other than
    NumPy's, which every lead takes in by its own rules.

    Parameters
    ----------
    operands, names : tuple
        The arguments and what the caller knows them by; all but the first ``required`` may be None.
    """
    named = dict(zip(names, operands, strict=True))
    kinds = {name: kind_of_argument(name, x) for name, x in named.items() if x is not None or name in names[:required]}
    lead = _lead(kinds)
    if all(kind.framework is lead.framework for kind in kinds.values()):
        return lead, operands, False
    if current_options().mixed == "error":
        each = ", ".join(f"{name} is {kind.framework.name}" for name, kind in kinds.items())
        raise TypeError(f'operands of several frameworks: {each}. options(mixed="error") forbids it; convert them.')
    lead_device = next(kind.framework.device(named[name]) for name, kind in kinds.items() if kind == lead)
    joined = {
        name: _join(name, x, kinds[name], lead, lead_device) if name in kinds else None for name, x in named.items()
    }
    foreign = any(kind.framework.name not in (lead.framework.name, "numpy") for kind in kinds.values())
    return lead, tuple(joined.values()), foreign


def _lead(kinds: dict[str, Kind]) -> Kind:
    for kind in kinds.values():
        if kind.traced:
            return kind
    for kind in kinds.values():
        if kind.framework.name != "numpy":
            return kind
    return next(iter(kinds.values()))


def _join(name: str, x: Array, kind: Kind, lead: Kind, lead_device: Device) -> Array:
    """Return one operand as the lead's; the same object where it is one."""
    source, target = kind.framework, lead.framework
    if source is target:
        return x
    if lead.traced and source.name != "numpy":
        raise TypeError(
            f"{name} is a {source.name} array, and JAX is tracing: the trace would keep its value of now. Convert it "
            "with jax.dlpack.from_dlpack before, and pass it to the traced function as an argument."
        )
    if source.requires_grad(x):
        raise TypeError(
            f"{name} is a {source.name} array that requires a gradient, which {target.name} cannot record. Detach it, "
            f"or convert the other operands to {source.name}."
        )
    device = source.device(x)
    if device != lead_device and not lead.traced:
        raise ValueError(
            f"{name} is a {source.name} array on {device}, and the lead is a {target.name} array on {lead_device}. "
            "Move one of them to the other's device."
        )
    _check_layout(name, x, source)
    try:
        return target.from_foreign(x, source)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TypeError(f"{name} is a {source.name} array that {target.name} cannot take over: {error}") from error


def _check_layout(name: str, x: Array, source: Framework) -> None:
    """Raise in the package's own words what a DLPack import would refuse in another's."""
    spec = source.spec(x)
    if any(step < 0 for step in spec.strides):
        raise ValueError(f"{name} has negative strides {spec.strides}. Pass a contiguous copy of {name}.")
