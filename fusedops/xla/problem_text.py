"""The text that a compiled program carries for each product, and what it says: a problem and its two factors.

It is content alone, no address, device or counter, in one spelling: so equal products have equal texts in every
process, and a compiled program can be kept on disk or run on another machine. What follows from the rest (shapes from
extents, dtypes of auxiliary arrays, dense strides) is left out. The text of a released version is read for ever: a
change of its meaning is a new `FORMAT`.
"""

from __future__ import annotations

import json
from typing import Any

from ..arrays import ArraySpec, Device, row_major_strides
from ..column_form import WORKSPACE_LIMIT, WORKSPACE_SPARE
from ..dtypes import dtype_named
from ..epilogs import Aux, Epilog
from ..layout import BatchLayout, MatrixLayout, span
from ..operands import Operand, drop_vectors
from ..problem import Problem
from ..residuals import aux_dtype, aux_shape

__all__ = ["FORMAT", "TARGET", "Buffers", "buffers_of", "problem_of", "text_of"]

TARGET = "fusedops_matmul"
"""The name of the custom call."""

FORMAT = 1

Buffers = tuple[tuple[str, int], ...]
"""The names and sizes in bytes of a call's operands or results, in order."""

_FLAGS = ("transpose_a", "transpose_b", "vector_a", "vector_b")


def text_of(problem: Problem, alpha: float, beta: float) -> str:
    """Return a product as JSON, in one spelling."""
    assert problem.activation is None, "a second step is not part of the call"
    said = {
        "format": FORMAT,
        "epilog": problem.epilog.name,
        "batch": problem.batch_shape or None,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "dtype": problem.a.dtype,
        "out_dtype": problem.out.dtype,
        "a": _layout(problem.a),
        "b": _layout(problem.b),
        "c": None if problem.c is None else _layout(problem.c),
        "out": _layout(problem.out),
        "bias": None if problem.bias is None else problem.bias.stride,
        "flags": [flag for flag in _FLAGS if getattr(problem, flag)] or None,
        "out_strides": _strides(problem.out_spec),
        "aux_strides": _strides(problem.aux_spec),
        "aux_in_strides": _strides(problem.aux_in_spec),
        "precision": problem.precision,
        "deterministic": problem.deterministic,
        "alpha": float(alpha),
        "beta": float(beta),
    }
    given = {name: value for name, value in said.items() if value is not None}
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def problem_of(text: str, device: Device) -> tuple[Problem, float, float]:
    """Return the problem on a device, and its alpha and beta.

    Raises
    ------
    ValueError
        When the text is of another format, or of none.
    """
    try:
        said = json.loads(text)
        if said["format"] == FORMAT:
            return _problem(said, device), said["alpha"], said["beta"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the call's text says no product ({error!r}): {text}") from error
    raise ValueError(
        f"the program was made by a fusedops that writes format {said['format']}, and this one reads {FORMAT}: compile "
        "or export the program again, or install the version that made it."
    )


def _problem(said: dict[str, Any], device: Device) -> Problem:
    epilog = Epilog[said["epilog"]]
    batch, m, n, k = tuple(said.get("batch", ())), said["m"], said["n"], said["k"]
    dtype, out_dtype = said["dtype"], said["out_dtype"]
    count = 1
    for extent in batch:
        count *= extent

    def operand(name: str, rows: int, cols: int, of: str) -> Operand:
        order, ld, stride = said[name]
        return Operand(MatrixLayout(rows, cols, order, ld), BatchLayout(count, stride), of)

    def spec(name: str, shape: tuple[int, ...], of: str) -> ArraySpec:
        strides = said.get(f"{name}_strides")
        return ArraySpec(shape, row_major_strides(shape) if strides is None else tuple(strides), of, device)

    def aux(name: str, form: Aux | None) -> ArraySpec | None:
        return None if form is None else spec(name, aux_shape(form, batch, m, n), aux_dtype(form, out_dtype))

    flags = {flag: flag in said.get("flags", ()) for flag in _FLAGS}
    return Problem(
        epilog=epilog,
        activation=None,
        batch_shape=batch,
        m=m,
        n=n,
        k=k,
        a=operand("a", m, k, dtype),
        b=operand("b", k, n, dtype),
        c=operand("c", m, n, out_dtype) if "c" in said else None,
        bias=BatchLayout(count, said["bias"]) if "bias" in said else None,
        out=operand("out", m, n, out_dtype),
        out_spec=spec("out", drop_vectors((*batch, m, n), flags["vector_a"], flags["vector_b"]), out_dtype),
        aux_spec=aux("aux", epilog.gives),
        aux_in_spec=aux("aux_in", epilog.takes),
        **flags,
        compute_dtype=str(dtype_named(dtype).compute),
        precision=said.get("precision"),
        deterministic=said.get("deterministic"),
        device=device,
    )


def _layout(operand: Operand) -> tuple[str, int, int]:
    return operand.matrix.order, operand.matrix.ld, operand.batch.stride


def _strides(spec: ArraySpec | None) -> tuple[int, ...] | None:
    """Return the strides of an array that are not the dense ones, which extents of 1 may have."""
    return None if spec is None or spec.strides == row_major_strides(spec.shape) else spec.strides


def buffers_of(problem: Problem) -> tuple[Buffers, Buffers]:
    """Return what a call reads and what it writes.

    An operand over which the batch is broadcast is one item. The workspace comes last: memory of XLA's, whose contents
    are nobody's.
    """
    itemsize = dtype_named(problem.out.dtype).itemsize
    operands = [("a", _bytes(problem.a)), ("b", _bytes(problem.b))]
    if problem.bias is not None:
        operands.append(("bias", ((problem.bias.count - 1) * problem.bias.stride + problem.n) * itemsize))
    if problem.c is not None:
        operands.append(("c", _bytes(problem.c)))
    if problem.epilog.takes is not None and problem.aux_in_spec is not None:
        operands.append((problem.epilog.takes.name, problem.aux_in_spec.extent))
    results = [("out", _bytes(problem.out))]
    if problem.epilog.gives is not None and problem.aux_spec is not None:
        results.append((problem.epilog.gives.name, problem.aux_spec.extent))
    return tuple(operands), (*results, ("workspace", WORKSPACE_LIMIT + WORKSPACE_SPARE))


def _bytes(operand: Operand) -> int:
    """Return the bytes from an operand's first element to the end of its last."""
    elements = (operand.batch.count - 1) * operand.batch.stride + span(operand.matrix)
    return elements * dtype_named(operand.dtype).itemsize
