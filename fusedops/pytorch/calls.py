"""The way of a call that PyTorch has to see: autocast first, then the product with its derivatives, then a second step.

Under ``torch.compile`` and ``torch.export`` all of it is traced, and the operators are what is left of it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..dtypes import name_of
from ..outputs import check_no_gradient, check_output_kinds, named_outputs
from ..plans import real
from ..problem import Settings, checked_settings
from ..results import check_aux_names, check_mapping
from .autograd import product as recorded
from .how import How
from .operators import TORCH, is_autocast, launch, without_autocast
from .steps import in_steps

__all__ = ["autocast_to", "cast", "is_distributed", "product", "results", "traced"]

Tensor = Any
Operands = tuple[Tensor | None, ...]


def product(
    settings: Settings,
    operands: Operands,
    alpha: float,
    beta: float,
    out: Tensor | None = None,
    aux_out: Mapping[str, Tensor] | None = None,
    sources: Any = None,
) -> Any:
    """Return what the caller of `matmul` or `epilog_matmul` gets.

    Parameters
    ----------
    settings, operands, alpha, beta, out, aux_out
        As the caller gave them, every array a tensor.
    sources : list of (Framework, array), optional
        The owners of memory that is not PyTorch's.
    """
    how, second = _how(settings, operands[2] is not None)
    if not (type(alpha) is type(beta) is float and alpha == beta == 1.0):
        how = replace(how, alpha=real("alpha", alpha), beta=real("beta", beta))
    a = operands[0]
    assert a is not None
    dtype = autocast_to(a.device)
    if dtype is None:
        return _product(how, second, operands, out, aux_out, sources)
    _, b, bias, c, relu_aux, gelu_aux = operands
    wide = dtype if how.out_dtype is None else getattr(torch, how.out_dtype)
    those = (cast(a, dtype), cast(b, dtype), cast(bias, wide), cast(c, wide), relu_aux, cast(gelu_aux, wide))
    with without_autocast(a.device):
        return _product(how, second, those, out, aux_out, sources)


def _how(settings: Settings, has_bias: bool) -> tuple[How, str | None]:
    """Return the options of a product with factors of 1, and the activation that is a second step."""
    if not torch.compiler.is_compiling():
        with suppress(TypeError):  # what cannot be part of a key is refused below
            kinds: Hashable = type(settings[2]), type(settings[3]), type(settings[6])  # 1 == True, and one is refused
            return _cached_how(settings, has_bias, kinds)
    return _new_how(settings, has_bias)


def _new_how(settings: Settings, has_bias: bool, kinds: Hashable = None) -> tuple[How, str | None]:
    epilog, second = checked_settings(settings, has_bias)
    out_dtype = None if settings.out_dtype is None else name_of(settings.out_dtype)
    flags = (settings.transpose_a, settings.transpose_b)
    how = How(*flags, epilog.name, 1.0, 1.0, out_dtype, settings.precision, settings.deterministic)  # type: ignore[arg-type]
    return how, second


_cached_how = lru_cache(maxsize=4096)(_new_how)


def autocast_to(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies on a device, None where it is off."""
    if not is_autocast(device):
        return None
    return torch.get_autocast_dtype(device.type)


def cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a tensor as autocast casts it: every float but float64."""
    if x is None or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(dtype)


def is_distributed(operands: Operands) -> bool:
    """Return whether an operand is a DTensor, spread over several devices."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in operands)


def results(how: How, *operands: Tensor | None, sources: Any = None) -> Any:
    """Return ``out`` or ``(out, aux)``, by the shortest way that loses no derivative."""
    if is_distributed(operands):
        from . import sharding

        if sharding.splits_k(how, operands):
            return in_steps(results, how, *operands)
    if not torch.compiler.is_compiling() and TORCH.records(operands):
        return recorded(how, *operands, sources=sources)
    return launch(how, *operands)


def _product(
    how: How,
    second: str | None,
    operands: Operands,
    out: Tensor | None,
    aux_out: Mapping[str, Tensor] | None,
    sources: Any,
) -> Any:
    gives = how.gives
    if out is None and aux_out is None:
        given = results(how, *operands, sources=sources)
        value, aux = given if gives else (given, None)
    else:
        value, aux = _written(how, operands, out, aux_out)
    if second is not None:
        activated = getattr(TORCH, second)(value)
        value = activated if out is None else out.copy_(activated)
    return value if gives is None else (value, {gives: aux})


def _written(
    how: How, operands: Operands, out: Tensor | None, aux_out: Mapping[str, Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """Return the caller's own arrays, written; of two, a new one for that which is not given."""
    check_mapping(aux_out)
    check_aux_names(aux_out, how.gives)
    outputs = named_outputs(out, aux_out)
    if not torch.compiler.is_compiling():
        check_output_kinds(TORCH, outputs)
        check_no_gradient(TORCH, operands, outputs)
    aux = next(iter(aux_out.values())) if aux_out else None
    if how.gives is None:
        assert out is not None
        torch.ops.fusedops.product_out(*operands, *how.arguments, out)
    elif out is not None and aux is not None:
        torch.ops.fusedops.product_aux_out(*operands, *how.arguments, out, aux)
    else:  # the operator writes both or makes both
        made, made_aux = launch(how, *operands)
        out = made if out is None else out.copy_(made)
        aux = made_aux if aux is None else aux.copy_(made_aux)
    return out, aux


def traced(
    op: str,
    settings: Settings,
    operands: Operands,
    alpha: float,
    beta: float,
    out: Tensor | None,
    aux_out: Mapping[str, Tensor] | None,
    stream: int | None,
) -> Any:
    """Return what the caller of ``op`` gets while PyTorch's compiler traces it."""
    if stream is not None:
        raise ValueError(f"{op}: stream is given, and a compiled program runs on the current stream. Leave stream out.")
    if not all(x is None or isinstance(x, torch.Tensor) for x in operands):
        raise TypeError(f"{op}: an operand is no tensor, and PyTorch is compiling. Convert it before.")
    return product(settings, operands, alpha, beta, out, aux_out)
