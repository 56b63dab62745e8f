"""`Composite`: a primitive that stands for some steps, so that it can have a rule of its own where the steps have not.

It is traced once for each kind of arguments, runs and lowers as its steps, and is batched and differentiated through
them; whoever makes one replaces the rules that it is made for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .meshes import agreed
from .product import PROGRAMS_KEPT

__all__ = ["Composite", "through"]

Array = Any
Steps = Callable[..., list[Array]]


class Composite:
    """A primitive that computes ``steps(what, *arrays)``, a list of arrays.

    Parameters
    ----------
    name : str
        As it is printed in a jaxpr.
    steps : callable
        Takes what the primitive is about, which is hashable, and the arrays.
    """

    def __init__(self, name: str, steps: Steps) -> None:
        self.steps = steps
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self._traced = lru_cache(PROGRAMS_KEPT)(self._trace)
        self._compiled = jax.jit(self._bound, static_argnames="what")
        self.primitive.def_impl(self._run)
        self.primitive.def_abstract_eval(lambda *avals, what, call: call.out_avals)
        mlir.register_lowering(self.primitive, _lowered)
        batching.primitive_batchers[self.primitive] = self._batched
        ad.primitive_jvps[self.primitive] = self._differentiated

    def __call__(self, what: Hashable, *arrays: Array) -> list[Array]:
        """Return the results for arrays that may vary over different axes of a mesh."""
        return self._bound(*agreed(arrays), what=what)

    def batched_steps(
        self, what: Hashable, arrays: Sequence[Array], dims: Sequence[int | None]
    ) -> tuple[list[Array], list[int]]:
        """Return the results over one axis more, each step batched by its own rule."""
        results = jax.vmap(partial(self.steps, what), in_axes=tuple(dims))(*arrays)
        return results, [0] * len(results)

    def _bound(self, *arrays: Array, what: Hashable) -> list[Array]:
        mesh = jax.sharding.get_abstract_mesh()
        call = self._traced(what, tuple(map(jax.typeof, arrays)), mesh)
        results: list[Array] = self.primitive.bind(*arrays, what=what, call=call)
        return results

    def _trace(self, what: Hashable, avals: tuple[Any, ...], mesh: Any) -> ClosedJaxpr:
        return jax.make_jaxpr(partial(self.steps, what))(*avals)

    def _run(self, *arrays: Array, what: Hashable, call: ClosedJaxpr) -> list[Array]:
        """Run outside of any trace; compiled also under ``jax.disable_jit``, where it would never end."""
        with jax.disable_jit(False):
            results: list[Array] = self._compiled(*arrays, what=what)
            return results

    def _batched(
        self, arrays: Sequence[Array], dims: Sequence[int | None], *, what: Hashable, call: ClosedJaxpr
    ) -> tuple[list[Array], list[int]]:
        return self.batched_steps(what, arrays, dims)

    def _differentiated(
        self, primals: Sequence[Array], tangents: Sequence[Any], *, what: Hashable, call: ClosedJaxpr
    ) -> tuple[list[Array], list[Any]]:
        return through(partial(self.steps, what), primals, tangents)


def _lowered(ctx: Any, *arrays: Any, what: Hashable, call: ClosedJaxpr) -> Any:
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *arrays)


def through(function: Steps, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Array], list[Any]]:
    """Return values and tangents of a function, moving only what has a tangent."""
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moving(*values: Array) -> list[Array]:
        chosen = list(primals)
        for i, value in zip(moving, values, strict=True):
            chosen[i] = value
        return function(*chosen)

    outs, moved = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    none = [t.dtype == jax.dtypes.float0 for t in moved]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) if no else t for x, t, no in zip(outs, moved, none, strict=True)]
    return outs, zeros
