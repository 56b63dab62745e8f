"""The steps of an epilog as PyTorch's own operations, each with its own derivatives, and the shapes between them.

A vector operand leaves an axis out of the result; `full` puts it back, so that everything here is ``(..., m, n)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..dtypes import dtype_named
from ..layout import batch_layout, matrix_layout
from ..residuals import mask_bytes, padded_preact
from .how import How
from .operators import TORCH

__all__ = ["Vectors", "gated", "in_steps", "readable", "without_padding"]

Tensor = Any

_threshold_backward = torch.ops.aten.threshold_backward.default


@dataclass(frozen=True, slots=True)
class Vectors:
    """Which operands are vectors, whose axis of 1 the result lacks."""

    a: bool
    b: bool

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Vectors:
        return _NEITHER if a.ndim > 1 < b.ndim else cls(a.ndim == 1, b.ndim == 1)

    def matrices(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the operands as ``(..., m, k)`` and ``(..., k, n)``, as they are stored."""
        return a.unsqueeze(-2) if self.a else a, b.unsqueeze(-1) if self.b else b

    def full(self, x: Tensor) -> Tensor:
        """Return an array of the result's shape as ``(..., m, n)``."""
        x = x.unsqueeze(-1) if self.b else x
        return x.unsqueeze(-2) if self.a else x

    def dropped(self, x: Tensor) -> Tensor:
        """Return ``(..., m, n)`` in the result's shape."""
        x = x.squeeze(-2) if self.a else x
        return x.squeeze(-1) if self.b else x


_NEITHER = Vectors(False, False)


def readable(x: Tensor) -> Tensor:
    """Return what autograd made, with strides that a product takes: its own, or those of a contiguous copy."""
    x = x.resolve_neg()
    if x.is_contiguous():
        return x
    if x.ndim == 1:
        return x.contiguous()
    try:
        matrix_layout("it", x.shape[-2:], x.stride()[-2:])
        batch_layout("it", x.shape[:-2], x.stride()[:-2], x.shape[:-2])
    except ValueError:
        return x.contiguous()
    return x


def without_padding(x: Tensor, n: int) -> Tensor:
    """Return the columns of a padded pre-activation that mean something."""
    return x if x.shape[-1] == n else x.narrow(-1, 0, n)


def gated(activation: str | None, z: Tensor, residual: Tensor | None) -> Tensor:
    """Return ``z * act'``, ``(..., m, n)``, from relu's output or GELU's padded pre-activation."""
    if activation is None:
        return z
    assert residual is not None
    if activation == "relu":
        return _threshold_backward(z, residual, 0)
    return torch.ops.aten.gelu_backward(z, without_padding(residual, z.shape[-1]), approximate="tanh")


def in_steps(
    product: Callable[..., Tensor],
    how: How,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    relu_aux: Tensor | None,
    gelu_aux: Tensor | None,
) -> Any:
    """Return the results of any epilog: the product alone by ``product``, the rest by operations of PyTorch's."""
    epilog, vectors = how.member, Vectors.of(a, b)
    out_dtype = getattr(torch, how.out_dtype or str(a.dtype).removeprefix("torch."))
    wide = str(dtype_named(str(a.dtype).removeprefix("torch.")).compute)
    a, b = vectors.matrices(a, b)
    alone = how.of(how.alpha, how.transpose_a, how.transpose_b, wide)
    z = product(alone, a, b, None, None, None, None)
    if c is not None and how.beta != 0.0:
        z = z + how.beta * vectors.full(c).to(z.dtype)
    if bias is not None:
        z = z + bias.to(z.dtype)
    value = _activated(epilog.activation, z, relu_aux, gelu_aux)
    out = vectors.dropped(value.to(out_dtype))
    if epilog.gives is None:
        return out
    return out, _auxiliary(epilog.gives.format, how, a, b, z, value).to(_dtype_of(epilog.gives.format, out_dtype))


def _activated(activation: str | None, z: Tensor, relu_aux: Tensor | None, gelu_aux: Tensor | None) -> Tensor:
    n = z.shape[-1]
    if relu_aux is not None:
        return torch.where(TORCH.unpack_bits(relu_aux, n), z, torch.zeros_like(z))
    if gelu_aux is not None:
        return torch.ops.aten.gelu_backward(z, without_padding(gelu_aux, n).to(z.dtype), approximate="tanh")
    if activation is None:
        return z
    return torch.relu(z) if activation == "relu" else F.gelu(z, approximate="tanh")


def _auxiliary(of: str, how: How, a: Tensor, b: Tensor, z: Tensor, value: Tensor) -> Tensor:
    n, batched = z.shape[-1], z.ndim > 2
    if of == "relu_mask":
        return TORCH.pack_bits(z.detach() >= 0, mask_bytes(n))
    if of == "preact":
        return F.pad(z, (0, padded_preact(n) - n))
    if of == "sum_over_m":
        return value.sum(-2, keepdim=batched)
    # For every item of the batch, also where the operand itself has none.
    if of == "sum_a_over_k":
        total = a.to(z.dtype).sum(-2 if how.transpose_a else -1)
        return total.unsqueeze(-1).expand(*z.shape[:-1], 1) if batched else total
    total = b.to(z.dtype).sum(-1 if how.transpose_b else -2)
    return total.unsqueeze(-2).expand(*z.shape[:-2], 1, n) if batched else total


def _dtype_of(of: str, out_dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if of == "relu_mask" else out_dtype
