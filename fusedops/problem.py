"""`Problem`: everything about one call that is settled before any data is touched, and every rule that it must obey.

Built from specs and settings alone, without a framework, a device or an address; a plan is made from it and from
nothing else. All shapes are the caller's: ``a`` is ``(..., m, k)`` and ``b`` is ``(..., k, n)`` after the requested
transposes.

A vector ``a`` counts as ``(1, k)`` and a vector ``b`` as ``(k, 1)``; the axis of 1 is dropped from ``out`` again, and
kept in auxiliary arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .activations import FUSED, check_activation
from .arrays import ArraySpec, Device
from .dtypes import dtype_named
from .epilogs import Epilog, epilog_named, forward_epilog
from .layout import BatchLayout, broadcast_batch
from .operands import (
    Ints,
    Operand,
    Specs,
    as_matrix,
    aux_in_spec,
    bias_batch,
    c_operand,
    check_devices,
    check_flag,
    check_matrix_dtypes,
    drop_vectors,
    matrix_operand,
    required,
    row_major_operand,
)
from .results import aux_out_spec, chosen_out_dtype, full_out_spec

__all__ = ["OPERANDS", "Problem", "Settings", "checked_settings", "make_problem"]

OPERANDS = ("a", "b", "bias", "c", "relu_aux", "gelu_aux")
"""The array arguments that a call reads, in the order in which they are asked for the lead."""

PRECISIONS = (None, "ieee", "tf32")


class Settings(NamedTuple):
    """The keyword arguments that belong to the problem, as the caller gave them.

    ``epilog`` None stands for whichever forward epilog the activation and the bias ask for.
    """

    epilog: object = None
    activation: object = None
    transpose_a: bool = False
    transpose_b: bool = False
    out_dtype: object = None
    precision: object = None
    deterministic: bool | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One fused product, ready to be planned.

    Attributes
    ----------
    epilog : Epilog
        What the product carries.
    activation : str or None
        An activation that no epilog has, applied to the result as a second step.
    batch_shape, m, n, k
        The extents.
    a, b, c, out : Operand
        Layouts as the product reads them, ``c`` None where there is none.
    bias : BatchLayout or None
        The bias over the batch.
    out_spec, aux_spec : ArraySpec
        The results as the caller gets them; ``aux_spec`` None where the epilog gives none.
    aux_in_spec : ArraySpec or None
        The residual that a backward epilog reads.
    transpose_a, transpose_b, vector_a, vector_b : bool
        How the caller's arrays become ``a`` and ``b``.
    compute_dtype : str
        In which products are summed and the epilog is computed, before one rounding to ``out``.
    precision : {None, "ieee", "tf32"}
        None unless the operands are float32.
    deterministic : bool or None
        Whether the same bits are asked for from run to run.
    device : Device
        Where all of it lives.
    """

    epilog: Epilog
    activation: str | None
    batch_shape: Ints
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    c: Operand | None
    bias: BatchLayout | None
    out: Operand
    out_spec: ArraySpec
    aux_spec: ArraySpec | None
    aux_in_spec: ArraySpec | None
    transpose_a: bool
    transpose_b: bool
    vector_a: bool
    vector_b: bool
    compute_dtype: str
    precision: str | None
    deterministic: bool | None
    device: Device

    @property
    def batch_count(self) -> int:
        count = 1
        for extent in self.batch_shape:
            count *= extent
        return count

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product alone."""
        return 2 * self.batch_count * self.m * self.n * self.k


def make_problem(settings: Settings, specs: Specs, out: ArraySpec | None, aux_out: Specs | None) -> Problem:
    """Check a call from its settings and the specs of its arrays, and return its problem.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what to do; without the op's name, which the door adds.
    """
    specs = {name: spec and spec.normalised() for name, spec in specs.items()}
    out = out and out.normalised()
    epilog, activation = checked_settings(settings, specs.get("bias") is not None)
    a, b = required(specs, "a"), required(specs, "b")
    check_matrix_dtypes(a, b)
    check_devices(specs, out, aux_out)
    out_dtype = chosen_out_dtype(settings.out_dtype, a.dtype)
    a2, vector_a = as_matrix("a", a, settings.transpose_a, row=True)
    b2, vector_b = as_matrix("b", b, settings.transpose_b, row=False)
    m, k, n = a2.shape[-2], a2.shape[-1], b2.shape[-1]
    if b2.shape[-2] != k:
        raise ValueError(_k_mismatch(a2, b2, settings))
    batch_shape = broadcast_batch(a2.shape[:-2], b2.shape[:-2])
    full_out = full_out_spec(out, out_dtype, (*batch_shape, m, n), vector_a, vector_b, a.device)
    return Problem(
        epilog=epilog,
        activation=activation,
        batch_shape=batch_shape,
        m=m,
        n=n,
        k=k,
        a=matrix_operand("a", a2, batch_shape),
        b=matrix_operand("b", b2, batch_shape),
        c=c_operand(specs.get("c"), batch_shape, m, n, out_dtype, (vector_a, vector_b)),
        bias=bias_batch(specs.get("bias"), epilog, batch_shape, n, out_dtype),
        out=row_major_operand("out", full_out, batch_shape),
        out_spec=out or ArraySpec.dense(drop_vectors(full_out.shape, vector_a, vector_b), out_dtype, a.device),
        aux_spec=aux_out_spec(aux_out, epilog.gives, batch_shape, m, n, out_dtype, a.device),
        aux_in_spec=aux_in_spec(specs, epilog, batch_shape, m, n, out_dtype, a.device),
        transpose_a=bool(settings.transpose_a),
        transpose_b=bool(settings.transpose_b),
        vector_a=vector_a,
        vector_b=vector_b,
        compute_dtype=str(dtype_named(a.dtype).compute),
        precision=settings.precision if a.dtype == "float32" else None,  # type: ignore[arg-type]
        deterministic=settings.deterministic,
        device=a.device,
    )


def checked_settings(settings: Settings, has_bias: bool) -> tuple[Epilog, str | None]:
    """Return the epilog of a call, and the activation that is a second step, None where there is none."""
    check_flag("transpose_a", settings.transpose_a)
    check_flag("transpose_b", settings.transpose_b)
    if settings.deterministic is not None and not isinstance(settings.deterministic, bool):
        raise TypeError(f"deterministic is {settings.deterministic!r}, expected None, True or False.")
    if not (settings.precision is None or isinstance(settings.precision, str)) or settings.precision not in PRECISIONS:
        raise ValueError(f'precision is {settings.precision!r}, expected None, "ieee" or "tf32".')
    if settings.epilog is not None:
        return epilog_named(settings.epilog), None
    check_activation(settings.activation)
    fused = settings.activation if settings.activation in FUSED else None
    second = None if fused else settings.activation
    return forward_epilog(has_bias, fused), second  # type: ignore[arg-type, return-value]


def _k_mismatch(a: ArraySpec, b: ArraySpec, settings: Settings) -> str:
    (m, k), (k_b, n) = a.shape[-2:], b.shape[-2:]
    text = f"a and b do not share k: a is (m={m}, k={k}), b is (k={k_b}, n={n})."
    if n == k:
        value = not settings.transpose_b
        return f"{text} If b is stored as {'(n, k)' if value else '(k, n)'}, pass transpose_b={value}."
    if m == k_b:
        value = not settings.transpose_a
        return f"{text} If a is stored as {'(k, m)' if value else '(m, k)'}, pass transpose_a={value}."
    return f"{text} Pass operands whose k agree."
