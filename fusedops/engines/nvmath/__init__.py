"""Programs: problems that nvmath has planned, ready for any addresses of one alignment class. The only importer of
nvmath.

An operation descriptor comes from a ``nvmath.linalg.advanced.Matmul``, made without memory: its operands are CuPy
arrays over invented addresses. What a descriptor says (epilog, types, the leading dimension of auxiliary arrays) is
the same for every ``m``, ``k`` and layout, so problems of one family share it, and a new shape costs three layouts and
a heuristic.

The heuristic is asked with the one alignment of the whole call for all four matrices: it never asks for that of bias
and auxiliary arrays, and a kernel chosen for aligned ones faults on others. The result takes the place of ``c`` too,
as in nvmath's in-place form, so that it may be float32 for 16-bit operands and have a leading dimension.

What is launched is cuBLASLt itself: through the package's native launcher, or without a C compiler through the binding,
``nvmath.bindings.cublasLt.matmul``. ``Matmul.execute`` costs 30 to 45 us a call, the binding 7. The tests hold all to
the same bits, and an nvmath whose names have changed is used by ``execute.py``, which reads public ones alone.
``peers.py`` is nvmath as its users call it, for the benchmarks.

A descriptor holds pointers that every call sets, so it has a lock, and belongs to one launcher: C has its own copy.
Planning happens on a private stream, because ``Matmul.plan`` drains the one that it gets, and with a cuBLASLt handle a
device that lives as long as the process, because nvmath's own are destroyed with the thread that made them.
"""

from .choice import cuBLASLtError, library_functions, native_program, plan_program, sound_programs
from .programs import Program

__all__ = [
    "Program",
    "cuBLASLtError",
    "library_functions",
    "native_program",
    "plan_program",
    "sound_programs",
]
