"""The long way: ``Matmul.plan`` and ``Matmul.execute``, nvmath's public interface and nothing else.

It is the way of an nvmath that lacks what the fast ways read, and their check, to the bit. A launch costs a new
``Matmul``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import cupy
import numpy as np
from cuda.core import Device
from nvmath.bindings.cublasLt import cuBLASLtError
from nvmath.linalg.advanced import Algorithm, Matmul, MatmulEpilog, MatmulPlanPreferences, MatmulReductionScheme

from ...column_form import ColumnForm, ColumnMatrix, column_form
from ...dlpack import numpy_dtype
from ...epilogs import Epilog
from ...frameworks.cupy import CuPy
from ...problem import Problem
from ...residuals import aux_dtype, mask_bytes, padded_preact
from ..guard import Traits, refusal
from .carriers import INVENTED, matmul_options, private_stream
from .programs import Program

__all__ = ["ExecuteLaunch", "plan_program", "sound_programs"]

Array = Any

_CUPY = CuPy()
_CANDIDATES = 16
_SCHEMES = (MatmulReductionScheme.MASK, MatmulReductionScheme.NONE)
"""Ways to split k: any, and none."""


def plan_program(problem: Problem, alignment: int) -> Program:
    """Return the program of a problem for addresses that are multiples of ``alignment`` bytes.

    Raises
    ------
    RuntimeError
        When the library offers no algorithm that is not known to be wrong.
    """
    programs = sound_programs(problem, alignment)
    if not programs:
        raise RuntimeError(f"cuBLASLt has no algorithm for {problem}. Please report it with this line.")
    return programs[0]


def sound_programs(problem: Problem, alignment: int) -> list[Program]:
    """Return a program for each algorithm that ``Matmul.plan`` proposes and that is not known to be wrong."""
    form = column_form(problem)
    ordinal = problem.device.ordinal
    at = INVENTED + alignment  # a multiple of that and of no more
    schemes = [MatmulReductionScheme.NONE] if problem.deterministic else list(_SCHEMES)
    found: list[Algorithm] = []
    with cupy.cuda.Device(ordinal):
        for scheme in schemes:
            preferences = MatmulPlanPreferences(limit=_CANDIDATES, reduction_scheme_mask=scheme)
            stream = private_stream(ordinal)
            # Without any algorithm nvmath raises, and another scheme may have one.
            with (
                suppress(RuntimeError, cuBLASLtError),
                _matmul(form, problem, (at, at, at), 1.0, 0.0, stream) as matmul,
            ):
                found += _planned(matmul, form, problem, at, at, stream, preferences=preferences)
    traits = [(algorithm, Traits(algorithm.algorithm_id, algorithm.split_k, form.k)) for algorithm in found]
    return [
        Program(form, each.algorithm_id, each.split_k, 0, ExecuteLaunch(form, problem, algorithm), algorithm)
        for algorithm, each in traits
        if refusal(each) is None
    ]


class ExecuteLaunch:
    """``Matmul.execute`` on arrays over the addresses of a call; ``kept`` lives as long as the algorithm is needed."""

    def __init__(self, form: ColumnForm, problem: Problem, algorithm: Algorithm, kept: object = None) -> None:
        self._form = form
        self._problem = problem
        self._algorithm = algorithm
        self._kept = kept

    def __call__(
        self,
        a: int,
        b: int,
        c: int,
        out: int,
        bias: int,
        aux: int,
        workspace: int,
        alpha: float,
        beta: float,
        stream: int,
        /,
    ) -> None:
        form, problem = self._form, self._problem
        ordinal = problem.device.ordinal
        gives = form.epilog.gives
        with cupy.cuda.Device(ordinal), _CUPY.on_stream(stream, problem.device):
            there = cupy.cuda.get_current_stream(ordinal)
            if c != out and beta != 0.0 and form.C is not None:
                # The computation is in place of c, and the caller's stays as it is.
                result, source = (_over(at, x, form.batch_count) for at, x in ((out, form.D), (c, form.C)))
                result[...] = source
            with _matmul(form, problem, (b, a, out), alpha, beta, there) as matmul:
                _planned(matmul, form, problem, bias, aux, there, algorithms=[self._algorithm])
                computed = matmul.execute(stream=there)
            if gives is not None:
                written = next(iter(computed[1].values()))
                _copy_out(written, bias if gives.format.startswith("sum") else aux)


def _matmul(
    form: ColumnForm, problem: Problem, addresses: tuple[int, int, int], alpha: float, beta: float, stream: Any
) -> Matmul:
    """Return a ``Matmul`` over A, B and D, which is computed in place of the ``c`` that stands there."""
    matrices = zip(addresses, (form.A, form.B, form.D), strict=True)
    operands = [_over(at, matrix, form.batch_count) for at, matrix in matrices]
    Device(problem.device.ordinal).set_current()  # in each thread; nvmath's events need it
    return Matmul(*operands, alpha=alpha, beta=beta, options=matmul_options(problem), stream=stream)


def _planned(
    matmul: Matmul, form: ColumnForm, problem: Problem, bias: int, aux: int, stream: Any, **how: Any
) -> list[Algorithm]:
    """Plan a ``Matmul``, and return its algorithms."""
    epilog = None if form.epilog is Epilog.DEFAULT else MatmulEpilog[form.epilog.name]
    return list(
        matmul.plan(epilog=epilog, epilog_inputs=_epilog_inputs(form, problem, bias, aux), stream=stream, **how)
    )


def _copy_out(written: Array, address: int) -> None:
    """Copy an auxiliary output in dense column order, as nvmath returns it, to the caller's memory: the same bytes."""
    rows = written if written.ndim == 1 else written.swapaxes(-1, -2)
    flat = cupy.ascontiguousarray(rows).ravel()
    _array(address, flat.shape, flat.dtype, (flat.dtype.itemsize,))[...] = flat


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
    memory = cupy.cuda.UnownedMemory(address, int(np.prod(shape)) * dtype.itemsize, None, cupy.cuda.Device().id)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0), strides=strides)


def _epilog_inputs(form: ColumnForm, problem: Problem, bias: int, aux: int) -> dict[str, Array] | None:
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
