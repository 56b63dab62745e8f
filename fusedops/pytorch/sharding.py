"""DTensor: over which axes a product may be spread, and what its results are then.

=====  ==================  ==================  =========================================
axis   ``a``               ``b``               ``out``
=====  ==================  ==================  =========================================
batch  sharded, if it has  sharded, if it has  sharded
m      sharded             replicated          sharded
n      replicated          sharded             sharded, with its slice of bias
k      sharded             sharded             partial sums, of the product alone
=====  ==================  ==================  =========================================

A product with an epilog whose k is sharded is computed in steps: the product alone, whose parts DTensor adds, then bias
and activation, once. Registered when the first DTensor arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..epilogs import Epilog
from ..problem import OPERANDS
from .how import How

__all__ = ["splits_k"]

Tensor = Any
Spec = Any
Placement = Any
Specs = tuple[Spec | None, ...]
Strategy = tuple[list[Placement], list[Placement]]

_COUNT = len(OPERANDS)
_GRANULE = {"preact": 8, "relu_mask": 128}
"""Columns of which a padded auxiliary array is made: where each device has whole ones, its part has no padding."""


def splits_k(how: How, operands: tuple[Tensor | None, ...]) -> bool:
    """Return whether k is sharded, under a product that is more than a sum over it."""
    a, b, bias, c, *_ = operands
    if how.member is Epilog.DEFAULT and c is None and bias is None:
        return False
    return _is_sharded(a, _axis_of_k(a, how.transpose_a, last=True)) or _is_sharded(
        b, _axis_of_k(b, how.transpose_b, last=False)
    )


def _axis_of_k(x: Tensor, transposed: int, last: bool) -> int:
    return int(x.ndim) - (1 if x.ndim == 1 or last != bool(transposed) else 2)


def _is_sharded(x: Tensor, axis: int) -> bool:
    return any(placement.is_shard(axis) for placement in getattr(x, "placements", ()))


def _strategies(*arguments: Any) -> list[Strategy]:
    """Return what may be done along one axis of the mesh: placements of the results, and those of the arguments."""
    specs, how = arguments[:_COUNT], How(*arguments[_COUNT:])
    letters = _Letters.of(specs, how)
    ways = [letter for letter in (*letters.out, "k") if _may_be_split(letter, specs, how)]
    found = [letters.along(letter) for letter in (None, *ways)]
    return [(results, [*operands, *[None] * (len(arguments) - _COUNT)]) for results, operands in found]


def _may_be_split(letter: str, specs: Specs, how: How) -> bool:
    epilog, (_, b, bias, c, *_) = how.member, specs
    if letter == "k":
        return epilog in (Epilog.DEFAULT, Epilog.BGRADA, Epilog.BGRADB) and bias is None and c is None
    formats = [aux.format for aux in (epilog.takes, epilog.gives) if aux is not None]
    granule = max([_GRANULE.get(format, 1) for format in formats], default=1)
    if letter == "n" and granule > 1:
        assert b is not None
        n = b.shape[-2 if how.transpose_b else -1]
        return bool(n % (granule * b.mesh.size()) == 0)
    return True


@dataclass(frozen=True)
class _Letters:
    """A letter for each axis of the arrays; a dot for one of extent 1 that is broadcast."""

    batch: str
    operands: tuple[str | None, ...]
    out: str
    aux: str | None
    summed: str
    """What the auxiliary output is a sum over."""

    @classmethod
    def of(cls, specs: Specs, how: How) -> _Letters:
        a, b, bias, c, relu_aux, gelu_aux = specs
        assert a is not None
        assert b is not None
        of_a = "k" if a.ndim == 1 else "km" if how.transpose_a else "mk"
        of_b = "k" if b.ndim == 1 else "nk" if how.transpose_b else "kn"
        core = "".join(letter for letter in "mn" if letter in of_a + of_b)
        extents = torch.broadcast_shapes(a.shape[: a.ndim - len(of_a)], b.shape[: b.ndim - len(of_b)])
        batch = "".join(map(str, range(len(extents))))

        def letters(x: Spec | None, own: str) -> str | None:
            if x is None:
                return None
            count = x.ndim - len(own)
            leading = zip(batch[len(batch) - count :], x.shape[:count], extents[len(batch) - count :], strict=True)
            return "".join(letter if n == whole else "." for letter, n, whole in leading) + own

        of_bias = "n" if bias is None or bias.ndim == 1 else ".n"
        padded = [letters(x, "mn") for x in (relu_aux, gelu_aux)]
        operands = (letters(a, of_a), letters(b, of_b), letters(bias, of_bias), letters(c, core), *padded)
        format = how.member.gives.format if how.member.gives else ""
        aux: str | None
        if format in ("sum_over_m", "sum_b_over_k"):
            aux = f"{batch}.n" if batch else "n"
        elif format == "sum_a_over_k":
            aux = f"{batch}m." if batch else "m"
        else:
            aux = f"{batch}mn" if format else None
        return cls(batch, operands, batch + core, aux, "m" if format == "sum_over_m" else "k")

    def along(self, letter: str | None) -> Strategy:
        """Return the placements where a letter is spread over the mesh, or nothing is."""

        def placed(own: str | None) -> Placement:
            if own is None:
                return None
            return Shard(own.index(letter)) if letter is not None and letter in own else Replicate()

        out = Partial() if letter == "k" else placed(self.out)
        if self.aux is None:
            return [out], [placed(own) for own in self.operands]
        aux = Partial() if letter == self.summed and letter not in self.aux else placed(self.aux)
        return [out, aux], [placed(own) for own in self.operands]


register_sharding([torch.ops.fusedops.product.default, torch.ops.fusedops.product_aux.default])(_strategies)
