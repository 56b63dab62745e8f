"""``torch.vmap`` of the operators: one axis more, in front, over which each operand walks or repeats."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import batch_layout, matrix_layout, row_major_layout
from ..problem import OPERANDS
from .how import How
from .operators import LIBRARY, launch
from .steps import Vectors

__all__: list[str] = []

Tensor = Any

_COUNT = len(OPERANDS)


def _batched(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    """Return the results with the new axis in front, and where it is."""
    how = How(*arguments[_COUNT:])
    on = [dim is not None for dim in dims[:_COUNT]]
    a, b, bias, c, *auxiliary = [
        x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments[:_COUNT], dims, strict=False)
    ]
    vectors = Vectors(a.ndim - on[0] == 1, b.ndim - on[1] == 1)
    _check_transposes(how, vectors)
    a, b = vectors.matrices(a, b)
    if c is not None:
        c = vectors.full(c)
    if bias is not None and on[2] and bias.ndim == 2:
        bias = bias.unsqueeze(-2)
    own = torch.broadcast_shapes(a.shape[on[0] : -2], b.shape[on[1] : -2])
    batch = (info.batch_size, *own)
    if not (on[0] or on[1]):
        a = a.expand(batch[0], *(1,) * (len(own) - a.ndim + 2), *a.shape)
        on[0] = True
    a, b = _over(a, on[0], batch), _over(b, on[1], batch)
    bias = bias if bias is None or bias.ndim == 1 else _over(bias, on[2], batch, row_major=True)
    c = None if c is None else _over(c, on[3], batch, row_major=True)
    auxiliary = [x if x is None else x.expand(*batch, *x.shape[-2:]).contiguous() for x in auxiliary]
    results = launch(how, a, b, bias, c, *auxiliary)
    if how.member.gives is None:
        return vectors.dropped(results), 0
    out, aux = results
    return (vectors.dropped(out), _without_batch(aux, how.member.gives.format, own)), (0, 0)


def _check_transposes(how: How, vectors: Vectors) -> None:
    for name, transposed, is_vector in (("a", how.transpose_a, vectors.a), ("b", how.transpose_b, vectors.b)):
        if transposed and is_vector:
            raise ValueError(f"transpose_{name} is True, but {name} is a vector. Leave it out.")


def _over(x: Tensor, walks: bool, batch: tuple[int, ...], row_major: bool = False) -> Tensor:
    """Return ``(..., r, c)`` with batch axes that broadcast to ``batch``, with strides that a product takes."""
    if walks:
        missing = len(batch) + 2 - x.ndim
        x = x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:]) if missing else x
    try:
        (row_major_layout if row_major else matrix_layout)("it", x.shape[-2:], x.stride()[-2:])
        batch_layout("it", x.shape[:-2], x.stride()[:-2], batch)
    except ValueError:
        return x.expand(*batch, *x.shape[-2:]).contiguous()
    return x


def _without_batch(aux: Tensor, of: str, own: tuple[int, ...]) -> Tensor:
    """Return an auxiliary output as each call gave it: a sum has no axis of 1 where there was no batch."""
    if own or not of.startswith("sum"):
        return aux
    return aux.squeeze(-1 if of == "sum_a_over_k" else -2)


for _name in ("product", "product_aux"):
    torch.library.register_vmap(f"fusedops::{_name}", _batched, lib=LIBRARY)
