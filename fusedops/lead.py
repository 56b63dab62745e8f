"""Which framework leads a call, and how the operands of others join it.

The lead is a JAX tracer's framework if there is a tracer, else that of the first operand that is not NumPy's, else
NumPy. It decides framework, device, stream, allocator and result type. A foreign operand comes in over its own memory
or not at all.
"""

from __future__ import annotations

from typing import Any

from .arrays import ArraySpec, Device
from .frameworks import Framework, Kind, kind_by_type, kind_of
from .options import current_options
from .problem import OPERANDS

__all__ = ["Sources", "common_kind", "join_lead", "kind_of_argument", "lead_of", "spec_of_argument"]

Array = Any
Operands = tuple[Array, ...]
Sources = list[tuple[Framework, Array]]
"""Foreign operands as the caller gave them, with their frameworks."""


def kind_of_argument(name: str, x: Array) -> Kind:
    """Return the kind of an argument; TypeError that names it where it is no array."""
    try:
        return kind_of(x)
    except TypeError as error:
        raise TypeError(f"{name} {error}") from None


def spec_of_argument(name: str, x: Array, framework: Framework) -> ArraySpec:
    """Return the spec of an argument; an error that names it where the package cannot compute with such an array."""
    try:
        spec = framework.spec(x)
        framework.signature(x)  # refuses what has no memory of its own
        return spec
    except (TypeError, ValueError, BufferError) as error:
        raise _value_or_type_error(error)(f"{name} cannot be used: {error}") from None


def lead_of(operands: Operands, names: tuple[str, ...], required: int) -> tuple[str, Kind]:
    """Return the name of the operand that leads, and its kind."""
    kinds = _kinds(dict(zip(names, operands, strict=True)), names[:required])
    lead = _lead(kinds)
    return next(name for name, kind in kinds.items() if kind == lead), lead


def join_lead(
    operands: Operands, names: tuple[str, ...] = OPERANDS, required: int = 2
) -> tuple[Kind, Operands, Sources]:
    """Return the lead, the operands as its arrays, and those whose memory is foreign.

    NumPy's does not count as foreign: every lead takes it in by its own rules.

    Parameters
    ----------
    operands, names : tuple
        The arguments and what the caller knows them by; all but the first ``required`` may be None.
    """
    named = dict(zip(names, operands, strict=True))
    kinds = _kinds(named, names[:required])
    lead = _lead(kinds)
    if all(kind.framework is lead.framework for kind in kinds.values()):
        return lead._replace(plain=all(kind.plain for kind in kinds.values())), operands, []
    if current_options().mixed == "error":
        each = ", ".join(f"{name} is {kind.framework.name}" for name, kind in kinds.items())
        raise TypeError(f'operands of several frameworks: {each}. options(mixed="error") forbids it; convert them.')
    leader = next(name for name, kind in kinds.items() if kind == lead)
    spec_of_argument(leader, named[leader], lead.framework)
    lead_device = lead.framework.device(named[leader])
    joined = {
        name: _join(name, x, kinds[name], lead, lead_device) if name in kinds else None for name, x in named.items()
    }
    own = (lead.framework.name, "numpy")
    foreign = [name for name, kind in kinds.items() if kind.framework.name not in own]
    # Both the array and what it was imported as: dropping the import may let its owner write to the memory.
    sources = [(kinds[name].framework, named[name]) for name in foreign]
    sources += [(lead.framework, joined[name]) for name in foreign]
    return lead, tuple(joined.values()), sources


def common_kind(operands: Operands) -> Kind | None:
    """Return the kind of all operands where their types are known to share one: then none of them is foreign.

    Spelled out, because a generator costs 2 us of every call.
    """
    a, b, bias, c, relu_aux, gelu_aux = operands
    own = type(a)
    kind = kind_by_type(own)
    if (
        (type(b) is own or kind_by_type(type(b)) is kind)
        and (bias is None or type(bias) is own or kind_by_type(type(bias)) is kind)
        and (c is None or type(c) is own or kind_by_type(type(c)) is kind)
        and (relu_aux is None or type(relu_aux) is own or kind_by_type(type(relu_aux)) is kind)
        and (gelu_aux is None or type(gelu_aux) is own or kind_by_type(type(gelu_aux)) is kind)
    ):
        return kind
    return None


def _kinds(named: dict[str, Array], required: tuple[str, ...]) -> dict[str, Kind]:
    return {name: kind_of_argument(name, x) for name, x in named.items() if x is not None or name in required}


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
    _check_foreign(name, x, source)
    device = source.device(x)
    if device != lead_device and not lead.traced:
        raise ValueError(
            f"{name} is a {source.name} array on {device}, and the lead is a {target.name} array on {lead_device}. "
            "Move one of them to the other's device."
        )
    try:
        return target.from_foreign(x, source)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        text = f"{name} is a {source.name} array that {target.name} cannot take over: {error}"
        raise _value_or_type_error(error)(text) from error


def _check_foreign(name: str, x: Array, source: Framework) -> None:
    """Raise in the package's own words what a DLPack import would refuse in another's, or take in wrongly."""
    spec = spec_of_argument(name, x, source)
    try:
        source.check_export(x)
    except TypeError as error:
        raise TypeError(f"{name} cannot be used: {error}") from None
    if any(step < 0 for step in spec.strides):
        raise ValueError(f"{name} has negative strides {spec.strides}. Pass a contiguous copy of {name}.")


def _value_or_type_error(error: Exception) -> type[Exception]:
    """Return the built-in type in which an array library's refusal is told."""
    return ValueError if isinstance(error, ValueError) else TypeError
