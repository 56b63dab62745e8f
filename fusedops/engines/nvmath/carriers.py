"""Carriers: what a ``nvmath.linalg.advanced.Matmul`` is made and planned with, without memory. Public names alone."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import cupy
import numpy as np
from cuda.core import Device
from nvmath.linalg.advanced import Matmul, MatmulComputeType, MatmulEpilog, MatmulOptions

from ...column_form import WORKSPACE_LIMIT, ColumnForm
from ...dlpack import numpy_dtype
from ...epilogs import Epilog
from ...problem import Problem
from ...residuals import aux_dtype, mask_bytes, padded_preact

__all__ = ["INVENTED", "matmul_options", "planned_matmul", "private_stream"]

INVENTED = 1 << 40
"""The address of every carrier: planning reads its alignment, and nothing reads its memory."""

_COMPUTE = {"float64": MatmulComputeType.COMPUTE_64F, "float32": MatmulComputeType.COMPUTE_32F}

_quiet = logging.getLogger("fusedops.nvmath")
_quiet.setLevel(logging.ERROR)


@cache
def private_stream(ordinal: int) -> Any:
    """Return the stream of a device that planning may drain."""
    with cupy.cuda.Device(ordinal):
        return cupy.cuda.Stream(non_blocking=True)


def planned_matmul(form: ColumnForm, problem: Problem, handle: int) -> Any:
    """Return a planned ``Matmul`` with dense carriers of this problem's extents."""
    ordinal = problem.device.ordinal
    Device(ordinal).set_current()  # in each thread that plans; nvmath's events need it
    batch = (form.batch_count,) if form.batch_count > 1 else ()
    b_order = "row" if form.epilog is Epilog.BGRADB else "column"
    a = _carrier((*batch, form.m, form.k), problem.a.dtype, "column", ordinal)
    b = _carrier((*batch, form.k, form.n), problem.a.dtype, b_order, ordinal)
    c = _carrier((*batch, form.m, form.n), problem.out.dtype, "column", ordinal)
    stream = private_stream(ordinal)
    matmul = Matmul(a, b, c, beta=0.0, options=matmul_options(problem, handle), stream=stream)
    epilog = None if form.epilog is Epilog.DEFAULT else MatmulEpilog[form.epilog.name]
    matmul.plan(epilog=epilog, epilog_inputs=_epilog_carriers(form, problem, batch), stream=stream)
    return matmul


def matmul_options(problem: Problem, handle: int | None = None) -> MatmulOptions:
    """Return how every ``Matmul`` of a problem is made; without a cuBLASLt handle it takes its thread's."""
    compute = _COMPUTE[problem.compute_dtype]
    if problem.precision == "tf32":
        compute = MatmulComputeType.COMPUTE_32F_FAST_TF32
    return MatmulOptions(
        inplace=True,
        compute_type=compute,
        handle=handle,
        memory_limit=WORKSPACE_LIMIT,
        logger=_quiet,
    )


def _epilog_carriers(form: ColumnForm, problem: Problem, batch: tuple[int, ...]) -> dict[str, Any] | None:
    ordinal, out_dtype = problem.device.ordinal, problem.out.dtype
    if form.epilog.bias:
        return {"bias": _carrier((form.m,), out_dtype, "column", ordinal)}
    takes = form.epilog.takes
    if takes is None:
        return None
    rows = mask_bytes(form.m) if takes.format == "relu_mask" else padded_preact(form.m)
    return {takes.name: _carrier((*batch, rows, form.n), aux_dtype(takes, out_dtype), "column", ordinal)}


def _carrier(shape: tuple[int, ...], dtype: str, order: str, ordinal: int) -> Any:
    """Return a dense CuPy array over an invented address; its last two axes in the given order."""
    cupy_dtype = numpy_dtype(dtype)
    itemsize = cupy_dtype.itemsize
    steps = [itemsize]
    memory_order = (*shape[:-2], shape[-1], shape[-2]) if order == "column" and len(shape) > 1 else shape
    for extent in reversed(memory_order[1:]):
        steps.append(steps[-1] * extent)
    steps.reverse()
    if order == "column" and len(shape) > 1:
        steps[-2:] = steps[-1], steps[-2]
    size = max(int(np.prod(shape)), 1) * itemsize
    memory = cupy.cuda.UnownedMemory(INVENTED, size, None, ordinal)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, dtype=cupy_dtype, memptr=pointer, strides=tuple(steps))
