"""``options(verify=True)``: a plan's program is run on known data before it is trusted.

Every epilog is made neutral (bias 0, masks full, values and pre-activations where an activation and its derivative are
1 to 1), and the operands are such that the last terms of k alone count: each element of the result must be their sum. A
kernel that drops the end of k, which cuBLASLt is known to have, gives another.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from ..dlpack import numpy_dtype
from ..layout import span
from ..operands import Operand
from ..problem import Problem
from .nvmath import Program

__all__ = ["verify"]

Array = Any
_TAIL = 8
_FLAT = 32.0
"""A pre-activation that gelu_tanh leaves as it is, with a derivative of 1, to the last bit."""


def verify(problem: Problem, program: Program) -> None:
    """Raise a RuntimeError unless the program sums the last terms of k."""
    with cupy.cuda.Device(problem.device.ordinal):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            wrong = _largest_error(problem, program, stream)
    if wrong != 0:
        raise RuntimeError(
            f"algorithm {program.algorithm_id} with split_k={program.split_k} gives wrong results on {problem}: off by "
            f"{wrong} where {_right(problem)} is right. Please report it with this line."
        )


def _largest_error(problem: Problem, program: Program, stream: Any) -> float:
    a, at_a = _matrix(problem.a)
    b, at_b = _matrix(problem.b)
    out, at_out = _matrix(problem.out)
    a[..., -_TAIL:] = 1
    b[...] = _FLAT
    out[...] = np.nan
    bias, aux = _bias_or_sum(problem), _aux(problem)
    workspace = cupy.empty(max(program.workspace, 1), cupy.uint8)
    at_bias, at_aux = (0 if x is None else int(x.data.ptr) for x in (bias, aux))
    program.launch(at_a, at_b, at_out, at_out, at_bias, at_aux, int(workspace.data.ptr), 1.0, 0.0, int(stream.ptr))
    return float(cupy.abs(out.astype(np.float64) - _right(problem)).max())


def _right(problem: Problem) -> float:
    """Return what each element of the result must be: exact in every dtype."""
    return _FLAT * min(_TAIL, problem.k)


def _matrix(operand: Operand) -> tuple[Array, int]:
    """Return zeros laid out as an operand, ``(batch, rows, cols)``, and their address."""
    dtype, layout, batch = numpy_dtype(operand.dtype), operand.matrix, operand.batch
    buffer = cupy.zeros(max((batch.count - 1) * batch.stride + span(layout), 1), dtype)
    steps = (layout.ld, 1) if layout.order == "row_major" else (1, layout.ld)
    strides = tuple(step * dtype.itemsize for step in (batch.stride, *steps))
    shape = (batch.count, layout.rows, layout.cols)
    return cupy.ndarray(shape, dtype, memptr=buffer.data, strides=strides), int(buffer.data.ptr)


def _bias_or_sum(problem: Problem) -> Array | None:
    """Return a bias of 0, or room for the sum that the epilog writes in its place."""
    dtype = numpy_dtype(problem.out.dtype)
    if problem.bias is not None:
        return cupy.zeros((problem.bias.count - 1) * problem.bias.stride + problem.n, dtype)
    if problem.aux_spec is not None and problem.epilog.gives and problem.epilog.gives.format.startswith("sum"):
        return cupy.zeros(problem.aux_spec.shape, dtype)
    return None


def _aux(problem: Problem) -> Array | None:
    """Return a full mask or pre-activations of derivative 1, or room for those that the epilog writes."""
    gives = problem.epilog.gives
    written = problem.aux_spec if gives and not gives.format.startswith("sum") else None
    spec = problem.aux_in_spec or written
    if spec is None:
        return None
    value = 255 if spec.dtype == "uint8" else _FLAT
    return cupy.full(spec.shape, value, numpy_dtype(spec.dtype))
