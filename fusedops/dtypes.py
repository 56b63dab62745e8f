"""Element types: one table that every layer reads.

Types are named by their NumPy names everywhere inside the package, so that a record of a problem can be printed, hashed
and stored without importing a framework.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DTYPES", "MATRIX_DTYPES", "DType", "dtype_named", "name_of"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its name, size in bytes, DLPack code, and what a product of it may compute in and return."""

    name: str
    itemsize: int
    dlpack_code: int
    compute: str | None = None
    out: tuple[str, ...] = ()


_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float16", 2, _FLOAT, "float32", ("float16", "float32")),
        DType("bfloat16", 2, _BFLOAT, "float32", ("bfloat16", "float32")),
        DType("float32", 4, _FLOAT, "float32", ("float32",)),
        DType("float64", 8, _FLOAT, "float64", ("float64",)),
        DType("uint8", 1, _UINT),
        DType("uint16", 2, _UINT),
        DType("uint32", 4, _UINT),
        DType("uint64", 8, _UINT),
        DType("int8", 1, _INT),
        DType("int16", 2, _INT),
        DType("int32", 4, _INT),
        DType("int64", 8, _INT),
        DType("bool", 1, _BOOL),
        DType("complex64", 8, _COMPLEX),
        DType("complex128", 16, _COMPLEX),
    )
}

MATRIX_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.compute)
"""The types that operands of a product may have."""


def dtype_named(name: str) -> DType:
    """Return the table's entry, or one without any use for a type that the package does not compute with."""
    return DTYPES.get(name) or DType(name, 0, -1)


def name_of(dtype: object) -> str:
    """Return the NumPy name of a dtype as any framework spells it: ``torch.float32``, ``np.float32``, ``"float32"``.

    A NumPy dtype of the other byte order keeps the name that tells it, ``">f4"``, and so is none of the table's.
    """
    if not getattr(dtype, "isnative", True):
        return str(dtype)
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if isinstance(name, str):
        return name
    return str(dtype).rsplit(".", 1)[-1].strip("'>")
