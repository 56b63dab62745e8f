"""Operation descriptors: one ``nvmath.linalg.advanced.Matmul`` for each family of problems, made without memory."""

from __future__ import annotations

import logging
import threading
import weakref
from functools import cache
from typing import Any

import cupy
import numpy as np
from nvmath.bindings import cublasLt
from nvmath.linalg.advanced import Matmul, MatmulComputeType, MatmulEpilog, MatmulOptions

from ...column_form import ColumnForm
from ...dlpack import numpy_dtype
from ...epilogs import Epilog
from ...problem import Problem
from ...residuals import aux_dtype, mask_bytes, padded_preact

__all__ = ["FAMILIES_KEPT", "INVENTED", "WORKSPACE_LIMIT", "Descriptor", "family", "matmul_options"]

WORKSPACE_LIMIT = 32 << 20
"""Bytes of workspace that an algorithm may ask for: a rule, because what happens to be free would change results."""

FAMILIES_KEPT = 1024
"""Descriptors kept at most; the oldest half goes when there are more."""

INVENTED = 1 << 40
"""The address of every carrier: planning reads its alignment, and nothing reads its memory."""

_COMPUTE = {"float64": MatmulComputeType.COMPUTE_64F, "float32": MatmulComputeType.COMPUTE_32F}
_BIAS_STRIDE = int(cublasLt.MatmulDescAttribute.BIAS_BATCH_STRIDE)

_quiet = logging.getLogger("fusedops.nvmath")
_quiet.setLevel(logging.ERROR)


class Descriptor:
    """An operation descriptor, the ``Matmul`` that owns it, and the lock of the pointers in it."""

    __slots__ = ("__weakref__", "address", "buffer", "handle", "lock", "matmul", "pointer")

    def __init__(self, matmul: Any) -> None:
        self.matmul = matmul
        self.handle: int = matmul.handle
        self.pointer: int = matmul.mm_desc
        self.lock = threading.Lock()
        self.buffer = np.zeros(1, np.uint64)
        self.address: int = self.buffer.ctypes.data
        weakref.finalize(self, matmul.free).atexit = False

    def set(self, attribute: int, value: int) -> None:
        """Set a pointer or stride of 8 bytes; the caller holds the lock."""
        self.buffer[0] = value
        cublasLt.matmul_desc_set_attribute(self.pointer, attribute, self.address, 8)


_families: dict[Any, Descriptor] = {}


@cache
def _handle(ordinal: int) -> int:
    """Return the process's cuBLASLt handle of a device, which is never destroyed."""
    with cupy.cuda.Device(ordinal):
        return int(cublasLt.create())


@cache
def _private_stream(ordinal: int) -> Any:
    with cupy.cuda.Device(ordinal):
        return cupy.cuda.Stream(non_blocking=True)


def family(form: ColumnForm, problem: Problem) -> Descriptor:
    """Return the descriptor of a problem's family, made by a ``Matmul`` where it is the first."""
    bias_stride = form.bias.stride if form.bias else 0
    per_batch = (form.batch_count, form.n) if form.batch_count > 1 else ()
    key = (
        form.epilog,
        form.m,
        problem.a.dtype,
        problem.out.dtype,
        problem.precision,
        bias_stride,
        per_batch,
        problem.device.ordinal,
    )
    descriptor = _families.get(key)
    if descriptor is None:
        if len(_families) >= FAMILIES_KEPT:
            for old in list(_families)[: FAMILIES_KEPT // 2]:
                del _families[old]
        try:
            planned = _planned_matmul(form, problem)
        except (AssertionError, RuntimeError, TypeError, ValueError, cublasLt.cuBLASLtError) as error:
            # In nvmath's words, which are those of the transposed problem.
            raise RuntimeError(f"nvmath cannot plan {problem}: {error}") from error
        descriptor = _families[key] = Descriptor(planned)
        if bias_stride:
            descriptor.set(_BIAS_STRIDE, bias_stride)
    return descriptor


def _planned_matmul(form: ColumnForm, problem: Problem) -> Any:
    """Return a planned ``Matmul`` with dense carriers of this problem's extents."""
    ordinal = problem.device.ordinal
    batch = (form.batch_count,) if form.batch_count > 1 else ()
    b_order = "row" if form.epilog is Epilog.BGRADB else "column"
    a = _carrier((*batch, form.m, form.k), problem.a.dtype, "column", ordinal)
    b = _carrier((*batch, form.k, form.n), problem.a.dtype, b_order, ordinal)
    c = _carrier((*batch, form.m, form.n), problem.out.dtype, "column", ordinal)
    stream = _private_stream(ordinal)
    matmul = Matmul(a, b, c, beta=0.0, options=matmul_options(problem), stream=stream)
    epilog = None if form.epilog is Epilog.DEFAULT else MatmulEpilog[form.epilog.name]
    matmul.plan(epilog=epilog, epilog_inputs=_epilog_carriers(form, problem, batch), stream=stream)
    return matmul


def matmul_options(problem: Problem) -> MatmulOptions:
    """Return how every ``Matmul`` of a problem is made."""
    compute = _COMPUTE[problem.compute_dtype]
    if problem.precision == "tf32":
        compute = MatmulComputeType.COMPUTE_32F_FAST_TF32
    return MatmulOptions(
        inplace=True,
        compute_type=compute,
        handle=_handle(problem.device.ordinal),
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
