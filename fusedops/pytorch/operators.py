"""The products as operators of PyTorch, ``torch.ops.fusedops``: what its compiler, its transforms and its modes see.

========================  =================================================================
operator                  what it gives
========================  =================================================================
``product``               ``out``
``product_aux``           ``(out, aux)``, for the epilogs with an auxiliary output
``product_out``           nothing, and writes ``out``
``product_aux_out``       nothing, and writes ``out`` and ``aux_out``
========================  =================================================================

They take the operands in the order of `problem.OPERANDS`, then the fields of `How`. Derivatives are registered by
``autograd.py``, ``vmap`` by ``batching.py``, sharding by ``sharding.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..arrays import ArraySpec, Device
from ..dtypes import name_of
from ..frameworks import kind_of
from ..frameworks.torch import is_any_autocast
from ..lead import common_kind
from ..planned import run
from ..problem import OPERANDS, Problem, make_problem
from .how import How

__all__ = ["LIBRARY", "TORCH", "is_autocast", "launch", "without_autocast"]

Tensor = Any
Operands = tuple[Tensor | None, ...]

LIBRARY = torch.library.Library("fusedops", "DEF")
TORCH = kind_of(torch.empty(0, device="meta")).framework

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? bias, Tensor? c, Tensor? relu_aux, Tensor? gelu_aux, int transpose_a, "
    "int transpose_b, str epilog, float alpha, float beta, str? out_dtype, str? precision, bool? deterministic"
)
LIBRARY.define(f"product({_ARGUMENTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(f"product_aux({_ARGUMENTS}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(f"product_out({_ARGUMENTS}, Tensor(a!) out) -> ()", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"product_aux_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) aux_out) -> ()", tags=torch.Tag.pt2_compliant_tag
)

_COUNT = len(OPERANDS)


def launch(how: How, *operands: Tensor | None) -> Any:
    """Return ``out`` or ``(out, aux)``, without derivatives: at once where no mode has to see the operator."""
    kind = None if torch.compiler.is_compiling() else common_kind(operands)
    if kind is not None and kind.plain and not TORCH.needs_rules(operands):
        out, aux = run(TORCH, how.settings, operands, how.alpha, how.beta, None, None)[1]
        return out if aux is None else (out, aux)
    operator = torch.ops.fusedops.product if how.gives is None else torch.ops.fusedops.product_aux
    return operator(*operands, *how.arguments)


# On a device ----------------------------------------------------------------------------------------------------------

# Asked here, because the compiler of some versions cannot trace the question.
_WITH_AUTOCAST = frozenset(kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind))


def is_autocast(device: torch.device) -> bool:
    """Return whether autocast is on for a device; some, as "meta", have none."""
    if not torch.compiler.is_compiling() and not is_any_autocast():  # the quick question first
        return False
    return device.type in _WITH_AUTOCAST and bool(torch.is_autocast_enabled(device.type))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a block in which PyTorch's own operations keep their operands' dtypes."""
    if not is_autocast(device):
        return nullcontext()
    block: AbstractContextManager[Any] = torch.autocast(device.type, enabled=False)
    return block


def _computed(arguments: tuple[Any, ...], out: Tensor | None = None, aux: Tensor | None = None) -> Any:
    operands, how = arguments[:_COUNT], How(*arguments[_COUNT:])
    aux_out = {how.gives: aux} if how.gives is not None and aux is not None else None
    with without_autocast(operands[0].device):
        return run(TORCH, how.settings, operands, how.alpha, how.beta, out, aux_out)[1]


def _product(*arguments: Any) -> Tensor:
    return _computed(arguments)[0].contiguous()


def _product_aux(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, aux = _computed(arguments)
    return out.contiguous(), aux.contiguous()


def _product_out(*arguments: Any) -> None:
    _computed(arguments[:-1], arguments[-1])


def _product_aux_out(*arguments: Any) -> None:
    _computed(arguments[:-2], *arguments[-2:])


_KERNELS: dict[str, Callable[..., Any]] = {
    "product": _product,
    "product_aux": _product_aux,
    "product_out": _product_out,
    "product_aux_out": _product_aux_out,
}
for _name, _kernel in _KERNELS.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)


# On tensors without memory --------------------------------------------------------------------------------------------


def _problem(arguments: tuple[Any, ...], out: Tensor | None = None, aux: Tensor | None = None) -> Problem:
    how = How(*arguments[_COUNT:])
    specs = {name: _spec(x) for name, x in zip(OPERANDS, arguments[:_COUNT], strict=True)}
    aux_specs = {how.gives: _spec(aux)} if how.gives is not None and aux is not None else None
    return make_problem(how.settings, specs, _spec(out), aux_specs)


def _spec(x: Tensor | None) -> ArraySpec | None:
    # Extents may be symbols, which no cache can hold.
    if x is None:
        return None
    return ArraySpec(tuple(x.shape), tuple(x.stride()), name_of(x.dtype), Device(x.device.type, x.device.index or 0))


def _empty_results(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Return what the results look like, uninitialised."""
    problem = _problem(arguments)
    a = arguments[0]
    out = a.new_empty(problem.out_spec.shape, dtype=getattr(torch, problem.out_spec.dtype))
    if problem.aux_spec is None:
        return out, None
    return out, a.new_empty(problem.aux_spec.shape, dtype=getattr(torch, problem.aux_spec.dtype))


def _fake_out(*arguments: Any) -> None:
    _problem(arguments[:-1], arguments[-1])


def _fake_aux_out(*arguments: Any) -> None:
    _problem(arguments[:-2], *arguments[-2:])


torch.library.register_fake("fusedops::product", lambda *arguments: _empty_results(*arguments)[0], lib=LIBRARY)
torch.library.register_fake("fusedops::product_aux", _empty_results, lib=LIBRARY)
torch.library.register_fake("fusedops::product_out", _fake_out, lib=LIBRARY)
torch.library.register_fake("fusedops::product_aux_out", _fake_aux_out, lib=LIBRARY)
