"""The rules of what a product reads: operands, bias, ``c`` and the residual of a backward epilog.

Each takes specs and extents and returns what the problem keeps; each error names the argument in the caller's terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import ArraySpec, Device
from .dtypes import MATRIX_DTYPES
from .epilogs import Epilog
from .layout import BatchLayout, MatrixLayout, batch_layout, matrix_layout, row_major_layout
from .residuals import aux_dtype, aux_shape

Specs = dict[str, ArraySpec | None]
Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix operand: its layout as stored after the requested transpose, its batch and its dtype."""

    matrix: MatrixLayout
    batch: BatchLayout
    dtype: str


def required(specs: Specs, name: str) -> ArraySpec:
    spec = specs.get(name)
    if spec is None:
        raise TypeError(f"{name} is None, expected an array.")
    return spec


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected True or False.")


def check_matrix_dtypes(a: ArraySpec, b: ArraySpec) -> None:
    for name, spec in (("a", a), ("b", b)):
        if spec.dtype not in MATRIX_DTYPES:
            raise TypeError(f"{name} is {spec.dtype}, expected one of {', '.join(MATRIX_DTYPES)}.")
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}. Nothing is cast silently; convert one of them.")


def check_devices(specs: Specs, out: ArraySpec | None, aux_out: Specs | None) -> None:
    outputs = {"out": out, **{f'aux_out["{name}"]': spec for name, spec in (aux_out or {}).items()}}
    where = {name: spec.device for name, spec in {**specs, **outputs}.items() if spec is not None}
    for name, device in where.items():
        if device != where["a"]:
            raise ValueError(f"a is on {where['a']} and {name} is on {device}. Move one of them to the other's device.")


def check_dtype(name: str, spec: ArraySpec, expected: str) -> None:
    if spec.dtype != expected:
        raise TypeError(f"{name} is {spec.dtype}, expected {expected}. Nothing is cast silently; convert {name}.")


def check_dense(name: str, spec: ArraySpec, shape: Ints, dtype: str) -> None:
    check_dtype(name, spec, dtype)
    dense = ArraySpec.dense(shape, dtype)
    if spec.shape != shape:
        raise ValueError(f"{name} has shape {spec.shape}, expected {shape}.")
    pairs = zip(shape, spec.strides, dense.strides, strict=True)
    if 0 not in shape and any(step != want and extent > 1 for extent, step, want in pairs):
        raise ValueError(
            f"{name} has strides {spec.strides}, expected the dense {dense.strides}. Pass a contiguous copy."
        )


def as_matrix(name: str, spec: ArraySpec, transpose: bool, row: bool) -> tuple[ArraySpec, bool]:
    """Return the operand as ``(..., rows, cols)`` and whether it was a vector (a row for a, a column for b)."""
    if spec.ndim == 0:
        raise ValueError(f"{name} has no axes, expected at least one.")
    if spec.ndim > 1 and not transpose:
        return spec, False
    shape, strides = spec.shape, spec.strides
    if spec.ndim == 1:
        if transpose:
            raise ValueError(f"transpose_{name} is True, but {name} is a vector of shape {shape}. Leave it out.")
        shape, strides = ((1, *shape), (1, *strides)) if row else ((*shape, 1), (*strides, 1))
    if transpose:
        shape = (*shape[:-2], shape[-1], shape[-2])
        strides = (*strides[:-2], strides[-1], strides[-2])
    return ArraySpec(shape, strides, spec.dtype, spec.device), spec.ndim == 1


def drop_vectors(shape: Ints, vector_a: bool, vector_b: bool) -> Ints:
    """Return the caller's shape of a ``(..., m, n)`` array, without the axes that vectors do not have."""
    return shape[:-2] + (() if vector_a else shape[-2:-1]) + (() if vector_b else shape[-1:])


def with_vectors(spec: ArraySpec, vector_a: bool, vector_b: bool) -> ArraySpec:
    """Return the spec as ``(..., m, n)``, with the axes that vectors do not have as axes of 1."""
    shape, strides = spec.shape, spec.strides
    if vector_b:
        shape, strides = (*shape, 1), (*strides, 1)
    if vector_a:
        shape, strides = (*shape[:-1], 1, shape[-1]), (*strides[:-1], 1, strides[-1])
    return ArraySpec(shape, strides, spec.dtype, spec.device)


def matrix_operand(name: str, spec: ArraySpec, batch_shape: Ints) -> Operand:
    return Operand(
        matrix_layout(name, spec.shape[-2:], spec.strides[-2:]),
        batch_layout(name, spec.shape[:-2], spec.strides[:-2], batch_shape),
        spec.dtype,
    )


def row_major_operand(name: str, spec: ArraySpec, batch_shape: Ints) -> Operand:
    return Operand(
        row_major_layout(name, spec.shape[-2:], spec.strides[-2:]),
        batch_layout(name, spec.shape[:-2], spec.strides[:-2], batch_shape),
        spec.dtype,
    )


def bias_batch(spec: ArraySpec | None, epilog: Epilog, batch_shape: Ints, n: int, dtype: str) -> BatchLayout | None:
    if not epilog.bias:
        if spec is not None:
            raise ValueError(f'epilog "{epilog.name}" takes no bias. Leave bias out, or choose an epilog with BIAS.')
        return None
    if spec is None:
        raise ValueError(f'epilog "{epilog.name}" needs bias of shape (n,) = ({n},), and bias is None.')
    check_dtype("bias", spec, dtype)
    if spec.ndim == 0 or spec.shape[-1] != n or (spec.ndim > 1 and spec.shape[-2] != 1):
        batched = f", or (..., 1, n) = {(*batch_shape, 1, n)} for each item of the batch" if batch_shape else ""
        raise ValueError(
            f"bias has shape {spec.shape}, expected (n,) = ({n},){batched}. "
            "A bias per row: matmul(b.mT, a.mT, bias=bias).mT."
        )
    if spec.strides[-1] != 1 and n > 1:
        raise ValueError(f"bias has stride {spec.strides[-1]} along n, expected 1. Pass a contiguous copy of bias.")
    return batch_layout("bias", spec.shape[:-2], spec.strides[:-2], batch_shape)


def c_operand(
    spec: ArraySpec | None, batch_shape: Ints, m: int, n: int, dtype: str, vectors: tuple[bool, bool]
) -> Operand | None:
    if spec is None:
        return None
    check_dtype("c", spec, dtype)
    expected = drop_vectors((*batch_shape, m, n), *vectors)
    core = len(expected) - len(batch_shape)
    if spec.ndim < core or spec.shape[spec.ndim - core :] != expected[len(batch_shape) :]:
        raise ValueError(f"c has shape {spec.shape}, expected that of the result, {expected}.")
    return row_major_operand("c", with_vectors(spec, *vectors), batch_shape)


def aux_in_spec(
    specs: Specs, epilog: Epilog, batch_shape: Ints, m: int, n: int, out_dtype: str, device: Device
) -> ArraySpec | None:
    aux = epilog.takes
    for name in ("relu_aux", "gelu_aux"):
        if specs.get(name) is not None and (aux is None or aux.name != name):
            wanted = f"it takes {aux.name}" if aux else "it takes none"
            raise ValueError(f'{name} is given, but epilog "{epilog.name}" does not read it; {wanted}.')
    if aux is None:
        return None
    spec = specs.get(aux.name)
    if spec is None:
        maker = "RELU_AUX" if aux.name == "relu_aux" else "GELU_AUX"
        raise ValueError(f'epilog "{epilog.name}" needs {aux.name}, which "{maker}" or "{maker}_BIAS" gave.')
    check_dense(aux.name, spec, aux_shape(aux, batch_shape, m, n), aux_dtype(aux, out_dtype))
    return spec
