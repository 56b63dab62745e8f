"""nvmath's own calls, for the benchmarks: what a user of it would write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvmath.bindings import cublasLt
from nvmath.linalg.advanced import Matmul, MatmulEpilog, matmul

__all__ = ["library_version", "stateful_relu_bias", "stateless_relu_bias"]

Array = Any
Call = Callable[[], object]


def library_version() -> str:
    """Return the version of the cuBLASLt that is loaded, as it counts."""
    return str(cublasLt.get_version())


def stateless_relu_bias(a: Array, b: Array, bias: Array) -> Array:
    """Compute ``relu(a @ b + bias)`` by nvmath's function, the bias along the rows."""
    return matmul(a, b, epilog=MatmulEpilog.RELU_BIAS, epilog_inputs={"bias": bias})


def stateful_relu_bias(a: Array, b: Array, bias: Array) -> tuple[Call, Call, Call]:
    """Return calls that execute a planned ``Matmul``, give it its operands again, and do so unchecked."""
    planned = Matmul(a, b)
    inputs = {"bias": bias}
    planned.plan(epilog=MatmulEpilog.RELU_BIAS, epilog_inputs=inputs)
    return (
        planned.execute,
        lambda: planned.reset_operands(a=a, b=b, epilog_inputs=inputs),
        lambda: planned.reset_operands_unchecked(a=a, b=b, epilog_inputs=inputs),
    )
