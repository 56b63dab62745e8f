"""Two products as one: the backward pass through an activation between them is an epilog of one of its products.

Differentiated on their own, the first product's derivative would be a step between two products, which XLA cannot put
into either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, batching

from ..epilogs import Epilog
from .composite import Composite
from .product import product
from .product_spec import ProductSpec, new_letter
from .unfused import aligned, compute_dtype, gated

__all__ = ["LayersSpec", "layers"]

Array = Any


@dataclass(frozen=True, slots=True)
class LayersSpec:
    """Two products, the result of the first being the ``a`` of the second; no ``c`` and no factors.

    Arrays go in the order x, w1, w2, then b1 and b2 where there are such.
    """

    first: ProductSpec
    second: ProductSpec

    @property
    def activation(self) -> str | None:
        return self.first.epilog.activation

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays, in order."""
        b1, b2 = self.first.bias is not None, self.second.bias is not None
        return ("x", "w1", "w2", *["b1"] * b1, *["b2"] * b2)

    def batched(self, letter: str, on: dict[str, bool]) -> LayersSpec:
        """Return the layers over one axis more, which the hidden layer has."""
        first = self.first.batched(letter, (on["x"], on["w1"], on.get("b1", False)))
        second = self.second.batched(letter, (True, on["w2"], on.get("b2", False)))
        return LayersSpec(first, second)


@dataclass(frozen=True, slots=True)
class _Linear:
    """What the linear map is about: the layers, and of which arrays there are tangents."""

    spec: LayersSpec
    moving: tuple[str, ...]


def _steps(spec: LayersSpec, *arrays: Array) -> list[Array]:
    given = dict(zip(spec.names, arrays, strict=True))
    hidden = product(spec.first, given["x"], given["w1"], *_there(given, "b1"))[0]
    return product(spec.second, hidden, given["w2"], *_there(given, "b2"))


def _there(given: dict[str, Array], name: str) -> list[Array]:
    return [given[name]] if name in given else []


layers = Composite("fusedops_layers", _steps)


def _batched(
    arrays: Sequence[Array], dims: Sequence[int | None], *, what: LayersSpec, call: ClosedJaxpr
) -> tuple[list[Array], list[int]]:
    on = {name: dim is not None for name, dim in zip(what.names, dims, strict=True)}
    if not (on["x"] or on["w1"]):  # the first product is one for all
        return layers.batched_steps(what, arrays, dims)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    letter = new_letter(replace(what.first, b=what.first.b + what.second.b))
    results = layers(what.batched(letter, on), *moved)
    return results, [0] * len(results)


batching.primitive_batchers[layers.primitive] = _batched


# Forward mode --------------------------------------------------------------------------------------------------------


def _differentiated(
    primals: Sequence[Array], tangents: Sequence[Any], *, what: LayersSpec, call: ClosedJaxpr
) -> tuple[list[Array], list[Any]]:
    given = dict(zip(what.names, primals, strict=True))
    first = what.first
    if what.activation == "gelu_tanh":
        saving = Epilog.GELU_AUX if first.bias is None else Epilog.GELU_AUX_BIAS
        first = replace(first, epilog=saving)
    hidden, *preact = product(first, given["x"], given["w1"], *_there(given, "b1"))
    out = product(what.second, hidden, given["w2"], *_there(given, "b2"))
    moving = {name: t for name, t in zip(what.names, tangents, strict=True) if type(t) is not ad.Zero}
    residuals = (given["x"], given["w1"], given["w2"], hidden, *preact)
    return out, linear_layers(_Linear(what, tuple(moving)), *residuals, *moving.values())


ad.primitive_jvps[layers.primitive] = _differentiated


def _known(spec: LayersSpec) -> int:
    """Return how many arrays of the linear map are residuals."""
    return 5 if spec.activation == "gelu_tanh" else 4


def _tangent(what: _Linear, *arrays: Array) -> list[Array]:
    spec, known = what.spec, _known(what.spec)
    x, w1, w2, hidden, *preact = arrays[:known]
    moving = dict(zip(what.moving, arrays[known:], strict=True))
    wide = compute_dtype(x)
    dhidden = _moved(spec.first, wide, (x, moving.get("x")), (w1, moving.get("w1")), moving.get("b1"))
    if dhidden is not None:
        residual = preact[0][..., : hidden.shape[-1]] if preact else hidden
        dhidden = gated(spec.activation, jnp.broadcast_to(dhidden, hidden.shape), residual).astype(hidden.dtype)
    dout = _moved(spec.second, wide, (hidden, dhidden), (w2, moving.get("w2")), moving.get("b2"))
    sizes = dict(zip(spec.second.a + spec.second.b, (*hidden.shape, *w2.shape), strict=True))
    shape = [sizes[letter] for letter in spec.second.out]
    return [jnp.broadcast_to(dout, shape).astype(spec.second.out_dtype)]


def _moved(
    spec: ProductSpec, wide: str, a: tuple[Array, Array | None], b: tuple[Array, Array | None], dbias: Array | None
) -> Array | None:
    """Return the tangent of a product with a bias, in the compute dtype; None where nothing moves."""
    of = spec.product_alone(wide)
    terms = [] if a[1] is None else product(of, a[1], b[0])
    terms += [] if b[1] is None else product(of, a[0], b[1])
    terms += [] if dbias is None else [aligned(spec.bias, spec.out, dbias).astype(wide)]
    return reduce(add, terms) if terms else None


linear_layers = Composite("fusedops_linear_layers", _tangent)


# Backward ------------------------------------------------------------------------------------------------------------


def _transposed(cotangents: list[Any], *arrays: Any, what: _Linear, call: ClosedJaxpr) -> list[Any]:
    (dout,) = cotangents
    known = _known(what.spec)
    asked = [ad.is_undefined_primal(x) for x in arrays[known:]]
    if type(dout) is ad.Zero:
        zeros = [ad.Zero(x.aval) if ask else None for x, ask in zip(arrays[known:], asked, strict=True)]
        return [None] * known + zeros
    names = tuple(name for name, ask in zip(what.moving, asked, strict=True) if ask)
    gradients = iter(fusedops_backward_layers(dout, *arrays[:known], spec=what.spec, names=names))
    return [None] * known + [next(gradients) if ask else None for ask in asked]


ad.primitive_transposes[linear_layers.primitive] = _transposed


@partial(jax.jit, static_argnames=("spec", "names"))
def fusedops_backward_layers(
    dout: Array, x: Array, w1: Array, w2: Array, hidden: Array, *preact: Array, spec: LayersSpec, names: tuple[str, ...]
) -> list[Array]:
    """Return the gradients by name, in order, from the cotangent of the result."""
    first, second, dtype = spec.first, spec.second, str(x.dtype)
    wide = compute_dtype(x)
    grads: dict[str, Array] = {}
    if "w2" in names:
        (grads["w2"],) = product(second.of(second.a, second.out, second.b, dtype), hidden, dout)
    if "b2" in names:
        grads["b2"] = _summed(dout.astype(wide), second).astype(dtype)
    if {"x", "w1", "b1"} & set(names):
        of_hidden = second.of(second.out, second.b, second.a, dtype)
        if preact:
            (dpreact,) = product(replace(of_hidden, epilog=Epilog.DGELU), dout, w2, preact[0])
        else:
            (dhidden,) = product(of_hidden, dout, w2)
            dpreact = gated(spec.activation, dhidden, hidden)
        if "x" in names:
            (grads["x"],) = product(first.of(first.out, first.b, first.a, dtype), dpreact, w1)
        if "w1" in names:
            (grads["w1"],) = product(first.of(first.a, first.out, first.b, dtype), x, dpreact)
        if "b1" in names:
            grads["b1"] = _summed(dpreact.astype(wide), first).astype(dtype)
    return [grads[name] for name in names]


def _summed(x: Array, spec: ProductSpec) -> Array:
    """Return an array of the letters of ``out`` summed to those of the bias."""
    assert spec.bias is not None
    return lax.reduce_sum(x, [i for i, letter in enumerate(spec.out) if letter not in spec.bias])
