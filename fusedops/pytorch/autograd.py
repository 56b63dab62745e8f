"""How a product is differentiated: backward by products and PyTorch's own activation gradients, forward likewise.

What is kept for the backward pass: the operands whose partner needs a gradient; relu's output, whose sign says where
its derivative is 1, so that it is 0 at exactly 0 as PyTorch's own is; for GELU the pre-activation, which its epilog
gives beside the result. Both are results of the one `Product`, so that a second derivative flows through them.

``torch.autograd.Function`` with ``setup_context`` and ``jvp``, registered for the operators too:
`torch.library.register_autograd` has no forward mode, and gives tangents of zero without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from ..lifetime import settle
from ..problem import OPERANDS
from .how import How
from .operators import LIBRARY, TORCH, launch
from .steps import Vectors, gated, in_steps, readable, without_padding

__all__ = [
    "REST",
    "apply",
    "check_no_transform",
    "gradient_of_a",
    "gradient_of_b",
    "is_recorded",
    "keeper",
    "product",
]

Tensor = Any
Multiply = Callable[..., Tensor]
Keeper = Callable[[Tensor], None] | None

REST = (None, None, None, None)
"""What a product of two arrays alone lacks."""


def product(how: How, *operands: Tensor | None, sources: Any = None) -> Any:
    """Return ``out`` or ``(out, aux)``, and record every derivative.

    Parameters
    ----------
    how : How
        The options.
    *operands : tensor or None
        In the order of `OPERANDS`.
    sources : list of (Framework, array), optional
        The owners of memory that is not PyTorch's, to be kept until a backward pass has read it too.
    """
    rule = _rule(how)
    if rule.in_steps:
        return in_steps(product, how, *operands)
    results = apply(Product, *operands[:4], rule, keeper(sources))
    return results[0] if rule.gives is None and type(results) is tuple else results


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the options decide about derivatives: once for all calls, because a look-up is all that each can afford."""

    how: How
    in_steps: bool
    saving: How
    activation: str | None
    gives: str | None
    tangent: How
    of_a: How
    of_b: How


@lru_cache(maxsize=4096)
def _rule(how: How) -> _Rule:
    epilog, ta, tb = how.member, bool(how.transpose_a), bool(how.transpose_b)
    return _Rule(
        how=how,
        in_steps=bool(epilog.takes or (epilog.gives and epilog.gives.format.startswith("sum"))),
        saving=how.saving,
        activation=epilog.activation,
        gives=how.gives,
        tangent=how.of(how.alpha, ta, tb, how.out_dtype),
        of_a=how.of(how.alpha, tb, True) if ta else how.of(how.alpha, False, not tb),
        of_b=how.of(how.alpha, True, ta) if tb else how.of(how.alpha, not ta, False),
    )


def apply(function: Any, *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)``, outside of ``torch.func`` by a function without ``setup_context``.

    PyTorch binds the arguments of one that has it by `inspect` on every call, which costs 40 us.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return _direct(function).apply(*arguments)


@cache
def _direct(function: Any) -> Any:
    """Return a function with the forward pass of another, which sets up its own context."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = function.forward(*arguments)
        function.setup_context(ctx, arguments, output)
        return output

    rules = {"forward": staticmethod(forward), "backward": function.backward, "jvp": function.jvp}
    return type(f"Direct{function.__name__}", (torch.autograd.Function,), rules)


def keeper(sources: Any) -> Keeper:
    """Return what keeps foreign memory until the work that is queued beside a tensor is done, None for none."""
    return (lambda x: settle(TORCH, TORCH.device(x), (x,), sources)) if sources else None


class Product(torch.autograd.Function):  # type: ignore[misc]
    """A product with a forward epilog; GELU gives its pre-activation too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, rule: _Rule, keep: Keeper) -> Any:
        return launch(rule.saving, a, b, bias, c, None, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        a, b, bias, c, rule, keep = inputs
        out, aux = output if type(output) is tuple else (output, None)
        activation = rule.activation
        residual = aux if activation == "gelu_tanh" else out if activation == "relu" else None
        ctx.rule, ctx.keep, ctx.dtypes = rule, keep, (a.dtype, out.dtype)
        ctx.vectors = Vectors.of(a, b)
        ctx.full_shape = ctx.vectors.full(out).shape
        ctx.shapes = tuple([None if x is None else x.shape for x in (a, b, bias, c)])
        ctx.set_materialize_grads(False)
        if aux is not None and activation == "relu":
            ctx.mark_non_differentiable(aux)
        needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, residual)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(a, b, residual)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, daux: Tensor | None = None) -> tuple[Tensor | None, ...]:
        a, b, residual = ctx.saved_tensors
        activation, vectors = ctx.rule.activation, ctx.vectors
        dpreact = None if dout is None else gated(activation, vectors.full(dout), _gate(activation, vectors, residual))
        if daux is not None and activation == "gelu_tanh":
            extra = without_padding(daux, ctx.full_shape[-1])
            dpreact = extra if dpreact is None else dpreact + extra
        if dpreact is None:
            return (None,) * 6
        gradients = _gradients(ctx, a, b, dpreact)
        if ctx.keep is not None:
            ctx.keep(dpreact)
        return (*gradients, None, None)

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, dbias: Tensor | None, dc: Tensor | None, *_: Any) -> Any:
        a, b, residual = ctx.saved_tensors
        rule, vectors = ctx.rule, ctx.vectors
        activation, beta = rule.activation, rule.how.beta
        terms = [vectors.full(product(rule.tangent, readable(da), b, *REST))] if da is not None else []
        terms += [vectors.full(product(rule.tangent, a, readable(db), *REST))] if db is not None else []
        terms += [dbias] if dbias is not None else []
        terms += [beta * vectors.full(dc)] if dc is not None and beta != 0.0 else []
        if not terms:  # c, where beta is 0
            terms = [torch.zeros((), dtype=ctx.dtypes[1], device=a.device)]
        total = reduce(add, terms).broadcast_to(ctx.full_shape)
        tangent = vectors.dropped(gated(activation, total, _gate(activation, vectors, residual)))
        if activation == "gelu_tanh":
            return tangent, F.pad(total, (0, residual.shape[-1] - total.shape[-1]))
        return tangent if rule.gives is None else (tangent, None)


def _gate(activation: str | None, vectors: Vectors, residual: Tensor | None) -> Tensor | None:
    """Return what the activation's derivative reads, ``(..., m, n)``: a pre-activation has all its axes."""
    return vectors.full(residual) if activation == "relu" and residual is not None else residual


def _gradients(ctx: Any, a: Tensor | None, b: Tensor | None, dpreact: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a, b, bias and c, each where it is needed, from that of the pre-activation."""
    needs_a, needs_b, needs_bias, needs_c, *_ = ctx.needs_input_grad
    how, vectors = ctx.rule.how, ctx.vectors
    multiply = product if torch.is_grad_enabled() else launch
    rounded = dpreact
    if needs_a or needs_b:
        rounded = readable(dpreact if dpreact.dtype is ctx.dtypes[0] else dpreact.to(ctx.dtypes[0]))
    of_a, of_b, of_bias, of_c = ctx.shapes
    da = gradient_of_a(multiply, how, of_a, b, rounded) if needs_a else None
    db = gradient_of_b(multiply, how, of_b, a, rounded) if needs_b else None
    dbias = dpreact.sum_to_size(of_bias) if needs_bias else None
    dc = None
    if needs_c and how.beta != 0.0:
        dc = vectors.dropped(dpreact if how.beta == 1.0 else how.beta * dpreact).sum_to_size(of_c)
    return da, db, dbias, dc


def gradient_of_a(multiply: Multiply, how: How, shape: torch.Size, b: Tensor, dpreact: Tensor) -> Tensor:
    """Return ``alpha * dpreact @ b^T`` as ``a`` is stored, summed over the batch where ``a`` has none."""
    b = b.unsqueeze(-1) if b.ndim == 1 else b
    factors = (b, dpreact) if how.transpose_a else (dpreact, b)
    da = multiply(_rule(how).of_a, *factors, *REST)
    return da if da.shape == shape else da.sum_to_size((1, *shape) if len(shape) == 1 else shape).reshape(shape)


def gradient_of_b(multiply: Multiply, how: How, shape: torch.Size, a: Tensor, dpreact: Tensor) -> Tensor:
    """Return ``alpha * a^T @ dpreact`` as ``b`` is stored, summed over the batch where ``b`` has none."""
    a = a.unsqueeze(0) if a.ndim == 1 else a
    if len(shape) <= 2 < dpreact.ndim and not how.transpose_a:  # the sum over the batch is part of the product
        a, dpreact = a.flatten(0, -2), dpreact.flatten(0, -2)
    factors = (dpreact, a) if how.transpose_b else (a, dpreact)
    db = multiply(_rule(how).of_b, *factors, *REST)
    return db if db.shape == shape else db.sum_to_size((*shape, 1) if len(shape) == 1 else shape).reshape(shape)


# The operators --------------------------------------------------------------------------------------------------------


def is_recorded(operands: tuple[Tensor | None, ...]) -> bool:
    given = [x for x in operands if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return True
    return torch._C._is_fwd_grad_enabled() and any(forward_ad.unpack_dual(x).tangent is not None for x in given)


def check_no_transform(name: str) -> None:
    """Raise where an operator itself would be differentiated by ``torch.func``, whose levels it cannot follow."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"torch.ops.fusedops.{name} has no derivative under torch.func, which torch.compile would need here. Leave "
            "out torch.compile, or use torch.autograd.grad in the compiled function."
        )


def _recorded(name: str) -> Any:
    """Return the operator's kernel for tensors with derivatives."""
    operator = getattr(torch.ops.fusedops, name)

    def kernel(*arguments: Any) -> Any:
        operands = arguments[: len(OPERANDS)]
        if not is_recorded(operands):
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments)
        check_no_transform(name)
        return product(How(*arguments[len(OPERANDS) :]), *operands)

    return kernel


def _written(name: str, count: int) -> Any:
    """Return the kernel of an operator that writes into its last arguments."""
    operator = getattr(torch.ops.fusedops, name)

    def kernel(*arguments: Any) -> None:
        if is_recorded((*arguments[: len(OPERANDS)], *arguments[-count:])):
            raise ValueError(
                "out cannot be written while an operand or out requires a gradient, which the write would lose. Leave "
                "it out, or call under torch.no_grad()."
            )
        with torch._C._AutoDispatchBelowAutograd():
            operator(*arguments)

    return kernel


for _name in ("product", "product_aux"):
    LIBRARY.impl(_name, _recorded(_name), "Autograd")
for _name, _count in (("product_out", 1), ("product_aux_out", 2)):
    LIBRARY.impl(_name, _written(_name, _count), "Autograd")
