"""Two layers as one operator, ``torch.ops.fusedops.layers``, whose backward product carries GELU's derivative.

The hidden layer and its pre-activation are results beside ``out``, so that a second derivative flows through them;
where one is recorded, the backward pass is made of differentiable steps instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.nn.functional as F

from ..epilogs import forward_epilog
from .autograd import (
    REST,
    Keeper,
    apply,
    check_no_transform,
    gradient_of_a,
    gradient_of_b,
    is_recorded,
    keeper,
    product,
)
from .calls import autocast_to, cast, is_distributed, results
from .how import How
from .operators import LIBRARY, TORCH, launch, without_autocast
from .steps import gated, readable, without_padding

__all__ = ["layers"]

Tensor = Any
Operands = tuple[Tensor | None, ...]
Moving = tuple[Tensor, Tensor | None]
"""A tensor and its tangent."""

_COUNT = 5
LIBRARY.define(
    "layers(Tensor x, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, str? activation, bool transpose_w1, "
    "bool transpose_w2, str? precision, bool? deterministic) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@dataclass(frozen=True, slots=True)
class _How:
    """The options of two layers."""

    activation: str | None
    transpose_w1: bool
    transpose_w2: bool
    precision: str | None
    deterministic: bool | None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the operator after the operands."""
        return self.activation, self.transpose_w1, self.transpose_w2, self.precision, self.deterministic

    def first(self, bias: Tensor | None) -> How:
        """Return how the hidden layer is computed."""
        name = forward_epilog(bias is not None, self.activation).name  # type: ignore[arg-type]
        return How(False, self.transpose_w1, name, precision=self.precision, deterministic=self.deterministic)

    def second(self, bias: Tensor | None) -> How:
        """Return how the result is computed of the hidden layer."""
        name = "DEFAULT" if bias is None else "BIAS"
        return How(False, self.transpose_w2, name, precision=self.precision, deterministic=self.deterministic)

    def backward(self, epilog: str) -> How:
        """Return how the cotangent goes back through the second layer."""
        return replace(self.second(None), epilog=epilog, transpose_b=not self.transpose_w2)


def layers(
    operands: Operands,
    activation: str | None,
    transpose_w1: bool,
    transpose_w2: bool,
    precision: str | None,
    deterministic: bool | None,
    sources: Any = None,
) -> Tensor:
    """Return ``activation(x @ w1 + b1) @ w2 + b2`` and record every derivative; the activation is a fused one."""
    how = _How(activation, transpose_w1, transpose_w2, precision, deterministic)
    x = operands[0]
    assert x is not None
    dtype = autocast_to(x.device)
    if dtype is None:
        return _results(how, operands, sources)[0]
    with without_autocast(x.device):
        return _results(how, tuple([cast(t, dtype) for t in operands]), sources)[0]


def _results(how: _How, operands: Operands, sources: Any) -> tuple[Tensor, ...]:
    if is_distributed(operands):  # each of the products finds its own way over the devices
        x, w1, w2, b1, b2 = operands
        hidden = results(how.first(b1), x, w1, b1, None, None, None)
        return (results(how.second(b2), hidden, w2, b2, None, None, None),)
    if torch.compiler.is_compiling():
        given: tuple[Tensor, ...] = torch.ops.fusedops.layers(*operands, *how.arguments)
        return given
    if TORCH.records(operands):
        return apply(Layers, *operands, how, keeper(sources))  # type: ignore[no-any-return]
    return _computed(how, *operands)


def _computed(how: _How, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None) -> tuple[Tensor, ...]:
    """Return ``(out, hidden)``, with GELU ``(out, hidden, preact)``."""
    first = launch(how.first(b1).saving, x, w1, b1, None, None, None)
    hidden, *preact = first if type(first) is tuple else (first,)
    return launch(how.second(b2), hidden, w2, b2, None, None, None), hidden, *preact


class Layers(torch.autograd.Function):  # type: ignore[misc]
    """Two layers: ``(out, hidden)``, with GELU ``(out, hidden, preact)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, how: _How, keep: Keeper
    ) -> tuple[Tensor, ...]:
        return _computed(how, x, w1, w2, b1, b2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, w1, w2, b1, b2, how, keep = inputs
        _, hidden, *preact = output
        residual = preact[0] if preact else hidden if how.activation else None
        ctx.how, ctx.keep = how, keep
        ctx.shapes = tuple([None if t is None else t.shape for t in (x, w1, w2, b1, b2)])
        ctx.set_materialize_grads(False)
        needs_x, needs_w1, needs_w2, needs_b1, _, *_ = ctx.needs_input_grad
        below = needs_x or needs_w1 or needs_b1
        ctx.save_for_backward(
            x if needs_w1 else None,
            w1 if needs_x else None,
            w2 if below else None,
            hidden if needs_w2 else None,
            residual if below else None,
        )
        ctx.save_for_forward(x, w1, w2, hidden, residual)

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dhidden: Tensor | None = None, dpreact: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        x, w1, w2, hidden, residual = ctx.saved_tensors
        how = ctx.how
        of_x, of_w1, of_w2, of_b1, of_b2 = ctx.shapes
        needs_x, needs_w1, needs_w2, needs_b1, needs_b2, *_ = ctx.needs_input_grad
        multiply = product if torch.is_grad_enabled() else launch
        dout = None if dout is None else readable(dout)
        dx = dw1 = db1 = dw2 = db2 = None
        if dout is not None:
            dw2 = gradient_of_b(multiply, how.second(None), of_w2, hidden, dout) if needs_w2 else None
            db2 = dout.sum_to_size(of_b2) if needs_b2 else None
        if needs_x or needs_w1 or needs_b1:
            below = _through(how, multiply, w2, residual, dout, dhidden, dpreact)
            if below is not None:
                alone = how.first(None).with_epilog("DEFAULT")
                dx = gradient_of_a(multiply, alone, of_x, w1, below) if needs_x else None
                dw1 = gradient_of_b(multiply, alone, of_w1, x, below) if needs_w1 else None
                db1 = below.sum_to_size(of_b1) if needs_b1 else None
        gradients = (dx, dw1, dw2, db1, db2)
        if ctx.keep is not None and dout is not None:
            ctx.keep(dout)
        return (*gradients, None, None)

    @staticmethod
    def jvp(
        ctx: Any,
        dx: Tensor | None,
        dw1: Tensor | None,
        dw2: Tensor | None,
        db1: Tensor | None,
        db2: Tensor | None,
        *_: Any,
    ) -> tuple[Tensor | None, ...]:
        x, w1, w2, hidden, residual = ctx.saved_tensors
        how = ctx.how
        dz = _tangent(how.first(None).with_epilog("DEFAULT"), (x, dx), (w1, dw1), db1)
        dz = torch.zeros_like(hidden) if dz is None else dz  # a tangent of None is an error
        dhidden = gated(how.activation, dz, residual)
        dout = _tangent(how.second(None), (hidden, dhidden), (w2, dw2), db2)
        if how.activation != "gelu_tanh":
            return dout, dhidden
        return dout, dhidden, F.pad(dz, (0, residual.shape[-1] - dz.shape[-1]))


def _through(
    how: _How,
    multiply: Any,
    w2: Tensor,
    residual: Tensor | None,
    dout: Tensor | None,
    dhidden: Tensor | None,
    dpreact: Tensor | None,
) -> Tensor | None:
    """Return the gradient of the pre-activation from those of the three results; in one product where it can be."""
    if dout is not None and dhidden is None and how.activation == "gelu_tanh" and multiply is launch:
        below = launch(how.backward("DGELU"), dout, w2, None, None, None, residual)
    else:
        if dout is not None:
            back = multiply(how.backward("DEFAULT"), dout, w2, *REST)
            dhidden = back if dhidden is None else back + dhidden
        below = None if dhidden is None else gated(how.activation, dhidden, residual)
    if dpreact is not None and residual is not None:
        extra = without_padding(dpreact, w2.shape[1 if how.transpose_w2 else 0])
        below = extra if below is None else below + extra
    return None if below is None else readable(below)


def _tangent(how: How, left: Moving, right: Moving, dbias: Tensor | None) -> Tensor | None:
    """Return ``da @ b + a @ db + dbias``, of those that there are."""
    (a, da), (b, db) = left, right
    terms = [] if da is None else [product(how, readable(da), b, *REST)]
    terms += [] if db is None else [product(how, a, readable(db), *REST)]
    terms += [] if dbias is None else [dbias]
    if not terms:
        return None
    total = reduce(add, terms)
    return total.broadcast_to((*a.shape[:-1], total.shape[-1]))


# The operator ---------------------------------------------------------------------------------------------------------


def _kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands = arguments[:_COUNT]
    with without_autocast(operands[0].device):
        return _three(_computed(_How(*arguments[_COUNT:]), *operands))


def _three(given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what an operator gives, always as many: an empty pre-activation where there is none."""
    out, hidden, *preact = given
    return out, hidden, preact[0] if preact else out.new_empty(0)


def _recorded(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands = arguments[:_COUNT]
    if not is_recorded(operands):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fusedops.layers(*arguments)  # type: ignore[no-any-return]
    check_no_transform("layers")
    return _three(apply(Layers, *operands, _How(*arguments[_COUNT:]), None))


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("layers", _kernel, _device)
LIBRARY.impl("layers", _recorded, "Autograd")
torch.library.register_fake("fusedops::layers", _kernel, lib=LIBRARY)
