"""Runs a case of the table on a framework and compares it with the float64 answer; every comparison raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from cases import Arrays, Case, build, expect
from frameworks import TestFramework

import fusedops
from fusedops.dtypes import name_of
from fusedops.residuals import aux_shape
from fusedops.testing import assert_within, to_numpy

Array = Any


def split(case: Case, result: Any) -> tuple[Array, Array | None]:
    """Return result and auxiliary output, whichever way the op returns them."""
    if case.traits is None or case.traits.gives is None:
        return result, None
    out, aux = result
    assert list(aux) == [case.traits.gives.name]
    return out, aux[case.traits.gives.name]


def call(case: Case, framework: TestFramework, arrays: Arrays, **more: Any) -> tuple[Array, Array | None]:
    """Return what the op gives for the arrays of a case in a framework."""
    theirs = {name: framework.make(x) for name, x in arrays.items()}
    op = getattr(fusedops, case.op)
    return split(case, op(theirs.pop("a"), theirs.pop("b"), **theirs, **case.settings, **more))


def check_result(case: Case, framework: TestFramework, arrays: Arrays, out: Array, aux: Array | None) -> None:
    """Raise unless result and auxiliary output have the right type, dtype, shape and values."""
    expected = expect(case, arrays)
    assert isinstance(out, framework.type)
    assert name_of(out.dtype) == case.result_dtype
    if case.data == "not_finite" and case.activation == "gelu_erf":
        # At an infinite pre-activation PyTorch's op gives NaN and JAX's infinity; each keeps its own.
        out = np.where(np.isinf(expected.out), expected.out, to_numpy(out)).astype(to_numpy(out).dtype)
    assert_within(out, expected.out, expected.scale, case.k, dtype=tanh_dtype(case), what=f"{case.name} out")
    if case.traits is None or case.traits.gives is None:
        assert aux is None
        return
    gives = case.traits.gives
    assert isinstance(aux, framework.type)
    assert tuple(aux.shape) == aux_shape(gives, case.batch_shape, case.m, case.n)
    assert expected.aux is not None
    if gives.format == "relu_mask":
        check_mask(case, arrays, to_numpy(aux))
    elif gives.format == "preact":
        n = case.n
        assert_within(aux[..., :n], expected.aux[..., :n], expected.aux_scale[..., :n], case.k, what=f"{case.name} aux")
    else:
        terms = case.m * case.k if gives.format == "sum_over_m" else case.k
        what = f"{case.name} {gives.name}"
        assert_within(aux, expected.aux, expected.aux_scale, terms, dtype=tanh_dtype(case), what=what)


def tanh_dtype(case: Case) -> str | None:
    """Return float16 where a float32 result comes from a fused GELU of 16-bit operands, whose tanh has 11 bits."""
    activation = case.traits.activation if case.traits else case.activation
    return "float16" if activation == "gelu_tanh" and case.out_dtype == "float32" else None


def check_mask(case: Case, arrays: Arrays, mask: np.ndarray) -> None:
    """Raise unless every bit is right whose pre-activation rounding in float32 cannot move across 0."""
    assert mask.dtype == np.uint8
    preact = expect(replace(case, epilog="BIAS" if "bias" in arrays else "DEFAULT"), arrays)
    got = np.unpackbits(mask, axis=-1, count=case.n, bitorder="little")
    certain = (np.abs(preact.out) > 1e-5 * preact.scale) | (preact.scale == 0)
    assert np.array_equal(got[certain], (preact.out >= 0)[certain])


def check(case: Case, framework: TestFramework, **more: Any) -> None:
    """Run a case on a framework and compare."""
    arrays = build(case)
    out, aux = call(case, framework, arrays, **more)
    check_result(case, framework, arrays, out, aux)
