"""The unfused computation, by the array's own library: what every fused result is compared with, and the CPU's default.

Products are summed in ``compute_dtype`` (float32 for 16-bit operands), the epilog is computed on that sum, and ``out``
and ``gelu_aux`` are rounded once, as the fused kernels do. In PyTorch and JAX every step is the library's own
operation, so its derivatives and transforms hold. With ``beta = 0``, ``c`` is not read, as in BLAS.
"""

from __future__ import annotations

from typing import Any

from ..frameworks import Framework
from ..problem import Problem
from ..residuals import mask_bytes, padded_preact
from .base import Results

Array = Any

__all__ = ["prepare"]


def prepare(problem: Problem, framework: Framework) -> Reference:
    """Return the launch of a problem."""
    return Reference(problem, framework)


class Reference:
    """A problem, ready to be computed by a framework's own operations."""

    strategy = "reference"

    def __init__(self, problem: Problem, framework: Framework) -> None:
        self.problem = problem
        self.framework = framework
        self.gives = problem.epilog.gives.format if problem.epilog.gives else None
        self.activation = problem.epilog.activation or problem.activation
        self.forward = getattr(framework, self.activation) if self.activation else None
        self.rounds = problem.compute_dtype != problem.out.dtype

    @property
    def why(self) -> str:
        if self.problem.device.kind == "cpu":
            return "the epilogs run on CUDA devices only"
        return f"no engine runs on {self.problem.device}"

    def facts(self) -> dict[str, Any]:
        """Return what only this engine knows of a problem."""
        return {}

    def __call__(
        self, operands: tuple[Array, ...], alpha: float, beta: float, out: Array | None, aux_out: Array | None
    ) -> Results:
        framework = self.framework
        entered = [x if x is None else framework.enter(x) for x in operands]
        if beta == 0.0:
            entered[3] = None
        value, aux = self._compute(entered, None if alpha == 1.0 else alpha, None if beta == 1.0 else beta)
        return _deliver(framework, value, out), _deliver(framework, aux, aux_out)

    def _compute(self, operands: list[Array], alpha: float | None, beta: float | None) -> Results:
        """Return the result and the auxiliary output; a factor of None is 1."""
        framework, problem = self.framework, self.problem
        a, b, bias, c, relu_aux, gelu_aux = operands
        a, b = self._matrices(a, b)
        z = self._product(a, b)
        z = self._linear(z, bias, c, alpha, beta)
        value, aux = self._backward(z, relu_aux, gelu_aux) if problem.epilog.takes else self._forward(z)
        if self.gives in ("sum_a_over_k", "sum_b_over_k"):
            aux = self._operand_sum(a, b)
        if self.rounds:
            value = framework.astype(value, problem.out.dtype)
        return self._without_vectors(value), aux

    def _matrices(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Return the operands as ``(..., m, k)`` and ``(..., k, n)``."""
        problem = self.problem
        if problem.transpose_a:
            a = self.framework.matrix_transpose(a)
        if problem.transpose_b:
            b = self.framework.matrix_transpose(b)
        return a[None, :] if problem.vector_a else a, b[:, None] if problem.vector_b else b

    def _product(self, a: Array, b: Array) -> Array:
        """Return ``a @ b`` in the compute dtype."""
        return self.framework.matmul(a, b, self.problem.compute_dtype, self.problem.precision)

    def _linear(self, z: Array, bias: Array | None, c: Array | None, alpha: float | None, beta: float | None) -> Array:
        """Return ``alpha * z + beta * c + bias``, ``(..., m, n)`` in the compute dtype."""
        if alpha is not None:
            z = z * alpha
        if c is not None:
            c = c[..., None] if self.problem.vector_b else c
            c = c[..., None, :] if self.problem.vector_a else c
            c = self._widened(c)
            z = z + (c if beta is None else c * beta)
        return z if bias is None else z + self._widened(bias)

    def _forward(self, z: Array) -> Results:
        value = self.forward(z) if self.forward else z
        if self.gives == "relu_mask":
            return value, self.framework.pack_bits(z >= 0, mask_bytes(self.problem.n))
        if self.gives == "preact":
            padded = self.framework.pad_last(z, padded_preact(self.problem.n))
            return value, self.framework.astype(padded, self.problem.out.dtype)
        return value, None

    def _backward(self, z: Array, relu_aux: Array | None, gelu_aux: Array | None) -> Results:
        """Return ``z`` times the activation's derivative, and its sum over m where the epilog gives one."""
        framework, n = self.framework, self.problem.n
        if relu_aux is not None:
            keep = framework.unpack_bits(relu_aux, n)
            value = framework.xp.where(keep, z, framework.xp.zeros_like(z))
        else:
            assert gelu_aux is not None
            value = z * framework.activation_derivative("gelu_tanh", self._widened(gelu_aux[..., :n]))
        if self.gives != "sum_over_m":
            return value, None
        total = framework.sum(value, axis=-2, keepdims=bool(self.problem.batch_shape))
        return value, framework.astype(total, self.problem.out.dtype)

    def _operand_sum(self, a: Array, b: Array) -> Array:
        """Return a or b summed over k, for every item of the batch."""
        framework, problem = self.framework, self.problem
        x, axis = (a, -1) if self.gives == "sum_a_over_k" else (b, -2)
        total = framework.sum(framework.astype(x, problem.compute_dtype), axis=axis, keepdims=bool(problem.batch_shape))
        total = framework.astype(total, problem.out.dtype)
        assert problem.aux_spec is not None
        if tuple(total.shape) != problem.aux_spec.shape:
            zeros = framework.zeros(problem.aux_spec.shape, problem.out.dtype, like=total)
            total = total + zeros
        return total

    def _widened(self, x: Array) -> Array:
        """Return an array of the result's dtype in the compute dtype."""
        return self.framework.astype(x, self.problem.compute_dtype) if self.rounds else x

    def _without_vectors(self, value: Array) -> Array:
        """Drop the axes of 1 that vectors were given."""
        if self.problem.vector_a:
            value = value[..., 0, :]
        return value[..., 0] if self.problem.vector_b else value


def _deliver(framework: Framework, value: Array | None, out: Array | None) -> Array | None:
    """Return a result in the caller's type, in the caller's array where one is given."""
    if value is None:
        return None
    if out is None:
        return framework.leave(value)
    framework.write(value, out)
    return out
