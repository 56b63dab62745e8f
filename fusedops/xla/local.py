"""One device's part of a product: from letters and extents to a `Problem`, and to the custom call that computes it.

What the memory of each array must look like is asked of XLA by the call's layouts, so that nothing is reshaped or
transposed in the program: a letter order that a kernel can read in place costs no copy. Letters of the rows that
follow one another in every array become one axis ``m``; the others, and those that all arrays share, become the batch.

It needs neither nvmath nor a GPU: a program may be made for another machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import ArraySpec, Device
from ..dtypes import name_of
from ..engines.cells import split_cell
from ..problem import Problem, Settings, make_problem
from ..residuals import aux_dtype, aux_shape
from .problem_text import TARGET, buffers_of, text_of
from .product_spec import ProductSpec
from .unfused import compute_dtype, epilogue, unfused

__all__ = ["local_product"]

Array = Any
Sizes = dict[str, int]

_GPU = Device("cuda")


def local_product(spec: ProductSpec, *operands: Array) -> list[Array]:
    """Return the results of a product on one device, fused where an epilog takes it."""
    if spec.bilinear and spec.columns and spec.out[-1] in spec.rows:  # written row by row, it need not be copied
        return local_product(replace(spec, a=spec.b, b=spec.a), *reversed(operands))
    order = _memory_order(spec)
    sizes = dict(zip(spec.a + spec.b, (*operands[0].shape, *operands[1].shape), strict=True))
    problem = _problem(spec, order, sizes, name_of(operands[0].dtype))
    if split_cell(problem) is None:
        return _custom_call(spec, order, sizes, problem, operands)
    wide = compute_dtype(operands[0])
    alone = spec.product_alone(wide)
    if alone == spec:  # there is nothing to multiply
        return unfused(spec, *operands)
    return epilogue(spec, local_product(alone, *operands[:2])[0], operands)


@dataclass(frozen=True, slots=True)
class _MemoryOrder:
    """Which letters make up the batch and each axis of the product, each group in the order that memory must have."""

    batch: str
    m: str
    n: str
    k: str
    transpose_a: bool
    transpose_b: bool

    def batch_of(self, own: str) -> str:
        """Return the batch letters that an operand has: none or, broadcast where it had some, all."""
        return self.batch if set(self.batch) & set(own) else ""

    def a(self, own: str) -> str:
        return self.batch_of(own) + (self.k + self.m if self.transpose_a else self.m + self.k)

    def b(self, own: str) -> str:
        return self.batch_of(own) + (self.n + self.k if self.transpose_b else self.k + self.n)

    def row_major(self, own: str) -> str:
        """Return the order of a bias, ``c``, residual or result with some of the result's letters."""
        return self.batch_of(own) + "".join(letter for letter in self.m + self.n if letter in own)

    def operands(self, spec: ProductSpec) -> tuple[str, ...]:
        a, b, *rest = spec.operands
        return (self.a(a), self.b(b), *map(self.row_major, rest))

    def results(self, spec: ProductSpec) -> tuple[str, ...]:
        return tuple(map(self.row_major, spec.results))


def _memory_order(spec: ProductSpec) -> _MemoryOrder:
    apart = spec.bias or ""
    if spec.gives and spec.gives.format in ("sum_over_m", "sum_b_over_k"):
        apart += spec.aux or ""  # there is one sum for each of these
    m = _joined(spec.rows, [x for x in (spec.a, spec.out, spec.c) if x is not None], apart)
    n = _joined(spec.columns, [spec.b, spec.out], "") if spec.bilinear else spec.out[-1:]
    k = spec.summed
    batch = "".join(letter for letter in spec.out if letter not in m + n)
    return _MemoryOrder(batch, m, n, k, spec.a[-1:] in set(m), spec.b[-1:] in set(k))


def _joined(letters: str, orders: list[str], apart: str) -> str:
    """Return the longest tail of ``letters`` whose letters follow one another in every order, none of them apart."""
    tails = (letters[i:] for i in range(len(letters)))
    fits = (tail for tail in tails if all(tail in order for order in orders) and not set(tail) & set(apart))
    return next(fits, "")


def _problem(spec: ProductSpec, order: _MemoryOrder, sizes: Sizes, dtype: str) -> Problem:
    """Return what the arrays look like to a kernel, as a problem of a batch with one axis, or of none."""
    m, n, k = (math.prod(sizes[letter] for letter in group) for group in (order.m, order.n, order.k))
    count = math.prod(sizes[letter] for letter in order.batch)
    batch = (count,) if order.batch else ()

    def array(own: str, shape: tuple[int, ...], of: str = spec.out_dtype) -> ArraySpec:
        items = (count,) if order.batch_of(own) else ()
        return ArraySpec.dense((*items, *shape), of, _GPU)

    specs: dict[str, ArraySpec | None] = {
        "a": array(spec.a, (k, m) if order.transpose_a else (m, k), dtype),
        "b": array(spec.b, (n, k) if order.transpose_b else (k, n), dtype),
        "c": None if spec.c is None else array(spec.c, (m, n)),
        "bias": None if spec.bias is None else array(spec.bias, (1, n) if order.batch_of(spec.bias) else (n,)),
    }
    takes = spec.epilog.takes
    if takes is not None:
        dtype_of_aux = aux_dtype(takes, spec.out_dtype)
        specs[takes.name] = ArraySpec.dense(aux_shape(takes, batch, m, n), dtype_of_aux, _GPU)
    settings = Settings(
        spec.epilog,
        None,
        order.transpose_a,
        order.transpose_b,
        spec.out_dtype,
        spec.precision,
        spec.deterministic,
    )
    return make_problem(settings, specs, None, None)


def _custom_call(
    spec: ProductSpec, order: _MemoryOrder, sizes: Sizes, problem: Problem, operands: tuple[Array, ...]
) -> list[Array]:
    workspace = dict(buffers_of(problem)[1]).get("workspace", 0)
    letters = spec.operands
    wanted = order.operands(spec)
    given = [_over_batch(x, own, want, sizes) for x, own, want in zip(operands, letters, wanted, strict=True)]
    own = [have for _, have in given]
    arrays = [x for x, _ in given]
    types = jax.make_jaxpr(partial(_with_workspace, spec, workspace))(*operands).out_avals
    results = jax.ffi.ffi_call(
        TARGET,
        types,
        input_layouts=[_layout(have, want) for have, want in zip(own, wanted, strict=True)],
        output_layouts=[
            *[_layout(have, want) for have, want in zip(spec.results, order.results(spec), strict=True)],
            *[(0,)] * (len(types) - len(spec.results)),
        ],
    )(*arrays, problem=text_of(problem, spec.alpha, spec.beta))
    return list(results[: len(spec.results)])


def _with_workspace(spec: ProductSpec, workspace: int, *operands: Array) -> list[Array]:
    """Return arrays of the types of the call's results; the workspace varies over the mesh as the result does."""
    results = unfused(spec, *operands)
    if not workspace:
        return results
    return [*results, lax.broadcast(jnp.sum(results[0]).astype(jnp.uint8), (workspace,))]


def _over_batch(x: Array, own: str, wanted: str, sizes: Sizes) -> tuple[Array, str]:
    """Return an operand with all the letters it is wanted with, and its letters: one stride must walk the batch."""
    missing = "".join(letter for letter in wanted if letter not in own)
    if not missing:
        return x, own
    return lax.broadcast(x, [sizes[letter] for letter in missing]), missing + own


def _layout(own: str, wanted: str) -> tuple[int, ...]:
    """Return the axes of an array from major to minor."""
    return tuple(own.index(letter) for letter in wanted)
