"""JAX's engine: a problem as a product of letters, bound as a primitive in a trace, compiled once for arrays.

It computes on whatever device XLA was given: by the custom call on CUDA, by JAX's own operations elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..frameworks import Framework
from ..problem import Problem
from ..xla import LayersSpec, ProductSpec, layers, product
from .base import Results

__all__ = ["XlaProduct", "prepare", "two_layers"]

Array = Any

_BATCH = "abcdefghijloqrstuvwxyz"
"""Letters of batch axes: all but those of the extents, and that of the result of a second layer, p."""


def prepare(problem: Problem, framework: Framework) -> XlaProduct:
    """Return the launch of a problem."""
    return XlaProduct(problem, framework)


class XlaProduct:
    """A problem whose arrays are JAX's."""

    strategy = "xla"
    why = "XLA compiles it: on CUDA to the fused product, elsewhere to JAX's own operations"

    def __init__(self, problem: Problem, framework: Framework) -> None:
        self.problem = problem
        self.framework = framework
        self._activation = problem.activation
        self._wide = problem.compute_dtype == "float64"
        self._compiled = jax.jit(self._compute, static_argnames=("alpha", "beta"))

    def facts(self) -> dict[str, Any]:
        """Return nothing: algorithm and workspace are the compiled program's."""
        return {}

    def __call__(
        self, operands: tuple[Array, ...], alpha: float, beta: float, out: Array | None, aux_out: Array | None
    ) -> Results:
        if self._wide and not jax.config.jax_enable_x64:
            raise TypeError("a and b are float64, which JAX narrows to float32 unless jax_enable_x64 is set.")
        if beta == 0.0:
            operands = (*operands[:3], None, *operands[4:])
        # A trace takes the primitive itself; eagerly, one dispatch costs less than one for each operation.
        traced = any(isinstance(x, jax.core.Tracer) for x in operands)
        results: Results = (self._compute if traced else self._compiled)(operands, alpha=alpha, beta=beta)
        return results

    def _compute(self, operands: tuple[Array | None, ...], *, alpha: float, beta: float) -> Results:
        spec, arrays = self.spelled(operands, alpha, beta)
        out, *aux = product(spec, *arrays)
        if self._activation is not None:
            wide = out.astype(self.problem.compute_dtype)
            out = getattr(self.framework, self._activation)(wide).astype(out.dtype)
        wanted, aux_spec = self.problem.out_spec.shape, self.problem.aux_spec
        return out.reshape(wanted), aux[0].reshape(aux_spec.shape) if aux_spec else None

    def spelled(self, operands: tuple[Array | None, ...], alpha: float, beta: float) -> tuple[ProductSpec, list[Array]]:
        """Return the problem in letters, and its operands without the axes of 1 that are broadcast."""
        problem = self.problem
        batch = _BATCH[: len(problem.batch_shape)]
        a, b, bias, c, relu_aux, gelu_aux = [None if x is None else jnp.asarray(x) for x in operands]
        assert a is not None
        assert b is not None
        a = a[None, :] if problem.vector_a else a
        b = b[:, None] if problem.vector_b else b
        if c is not None:
            c = c[..., None] if problem.vector_b else c
            c = c[..., None, :] if problem.vector_a else c
        if bias is not None and bias.ndim > 1:
            bias = jnp.squeeze(bias, -2)
        letters_a, a = self._over_batch(a, batch, "km" if problem.transpose_a else "mk")
        letters_b, b = self._over_batch(b, batch, "nk" if problem.transpose_b else "kn")
        letters_bias, bias = self._over_batch(bias, batch, "n")
        letters_c, c = self._over_batch(c, batch, "mn")
        spec = ProductSpec(
            a=str(letters_a),
            b=str(letters_b),
            out=batch + "mn",
            bias=letters_bias,
            c=letters_c,
            epilog=problem.epilog,
            alpha=alpha,
            beta=beta if c is not None else 1.0,
            out_dtype=problem.out.dtype,
            precision=problem.precision,
            deterministic=problem.deterministic,
        )
        residual = relu_aux if relu_aux is not None else gelu_aux
        return spec, [x for x in (a, b, bias, c, residual) if x is not None]

    def _over_batch(self, x: Array | None, batch: str, core: str) -> tuple[str | None, Array | None]:
        """Return the letters of an operand, and the operand without the batch axes over which it is broadcast."""
        if x is None:
            return None, None
        own = x.ndim - len(core)
        extents = self.problem.batch_shape[len(batch) - own :]
        repeated = [i for i in range(own) if x.shape[i] == 1 and extents[i] != 1]
        letters = "".join(letter for i, letter in enumerate(batch[len(batch) - own :]) if i not in repeated)
        return letters + core, jnp.squeeze(x, repeated) if repeated else x


def two_layers(
    first: XlaProduct, second: XlaProduct, x: Array, w1: Array, w2: Array, b1: Array | None, b2: Array | None
) -> Array:
    """Return what the second product gives for the result of the first, as one operation."""
    spec, (x, w1, *bias) = first.spelled((x, w1, b1, None, None, None), 1.0, 1.0)
    problem = second.problem
    to_out = ProductSpec(
        a=spec.out,
        b="pn" if problem.transpose_b else "np",
        out=spec.out[:-1] + "p",
        bias=None if b2 is None else "p",
        epilog=problem.epilog,
        out_dtype=problem.out.dtype,
        precision=problem.precision,
        deterministic=problem.deterministic,
    )
    arrays = [x, w1, jnp.asarray(w2), *bias, *[jnp.asarray(b) for b in (b2,) if b is not None]]
    return _layers_compiled(*arrays, spec=LayersSpec(spec, to_out))


@partial(jax.jit, static_argnames="spec")
def _layers_compiled(*arrays: Array, spec: LayersSpec) -> Array:
    return layers(spec, *arrays)[0]
