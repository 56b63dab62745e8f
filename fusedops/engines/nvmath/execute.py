"""The long way to launch a program: ``Matmul.execute`` on real operands, with the program's own algorithm.

It is the check of the short way, to the bit: what is launched is what nvmath's public interface computes.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from nvmath.bindings import cublasLt
from nvmath.linalg.advanced import Algorithm, Matmul, MatmulEpilog

from ...column_form import ColumnMatrix
from ...dlpack import numpy_dtype
from ...epilogs import Epilog
from ...problem import Problem
from ...residuals import aux_dtype, mask_bytes, padded_preact
from .descriptors import matmul_options
from .programs import Program

__all__ = ["execute"]

Array = Any


def execute(
    problem: Problem, program: Program, a: int, b: int, out: int, bias: int, aux: int, alpha: float, beta: float
) -> Array | None:
    """Compute into ``out``, in place of the ``c`` that stands there, and return nvmath's auxiliary output.

    Parameters
    ----------
    problem, program
        What to compute, and with which algorithm.
    a, b, out, bias, aux : int
        Addresses in the caller's terms; ``aux`` is read by backward epilogs only.
    alpha, beta : float
        Factors of the product and of what ``out`` holds.

    Returns
    -------
    cupy.ndarray or None
        The auxiliary output in column order, the transpose of the caller's.
    """
    form, ordinal = program.form, problem.device.ordinal
    operands = [_over(at, matrix, form.batch_count) for at, matrix in ((b, form.A), (a, form.B), (out, form.D))]
    stream = cupy.cuda.get_current_stream(ordinal)
    found = cublasLt.MatmulHeuristicResult.from_ptr(program.algorithm)
    with Matmul(*operands, alpha=alpha, beta=beta, options=matmul_options(problem), stream=stream) as matmul:
        epilog = None if form.epilog is Epilog.DEFAULT else MatmulEpilog[form.epilog.name]
        inputs = _epilog_inputs(problem, program, bias, aux)
        matmul.plan(algorithms=[Algorithm(found)], epilog=epilog, epilog_inputs=inputs, stream=stream)
        result = matmul.execute(stream=stream)
    return next(iter(result[1].values())) if isinstance(result, tuple) else None


def _over(address: int, matrix: ColumnMatrix, batch_count: int) -> Array:
    """Return a CuPy array over a matrix of the column form."""
    dtype = numpy_dtype(matrix.dtype)
    shape: tuple[int, ...] = (matrix.rows, matrix.cols)
    steps: tuple[int, ...] = (1, matrix.ld)
    if matrix.transposed:
        shape, steps = shape[::-1], steps[::-1]
    if batch_count > 1 and matrix.batch.stride:
        shape, steps = (batch_count, *shape), (matrix.batch.stride, *steps)
    return _array(address, shape, dtype, tuple(step * dtype.itemsize for step in steps))


def _array(address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Array:
    memory = cupy.cuda.UnownedMemory(address, int(np.prod(shape)) * dtype.itemsize, None)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0), strides=strides)


def _epilog_inputs(problem: Problem, program: Program, bias: int, aux: int) -> dict[str, Array] | None:
    form = program.form
    if form.epilog.bias:
        dtype = numpy_dtype(problem.out.dtype)
        if form.bias is not None and form.bias.stride:
            per_item = tuple(step * dtype.itemsize for step in (form.bias.stride, 1, 1))
            return {"bias": _array(bias, (form.batch_count, form.m, 1), dtype, per_item)}
        return {"bias": _array(bias, (form.m,), dtype, (dtype.itemsize,))}
    takes = form.epilog.takes
    if takes is None:
        return None
    rows = mask_bytes(form.m) if takes.format == "relu_mask" else padded_preact(form.m)
    dtype = numpy_dtype(aux_dtype(takes, problem.out.dtype))
    batch = (form.batch_count,) if form.batch_count > 1 else ()
    steps = (*[rows * form.n for _ in batch], 1, rows)
    return {takes.name: _array(aux, (*batch, rows, form.n), dtype, tuple(step * dtype.itemsize for step in steps))}
