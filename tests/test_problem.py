"""The tables and the `Problem`: what each epilog takes and gives, in which dtypes and shapes, as plain data."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from cases import CASES, Case, build
from frameworks import TestFramework, np_dtype

import fusedops
from fusedops import Epilog
from fusedops.arrays import ArraySpec
from fusedops.dlpack import view_of
from fusedops.dtypes import DTYPES, MATRIX_DTYPES, name_of
from fusedops.epilogs import epilog_named, forward_epilog
from fusedops.problem import Problem, Settings, make_problem
from fusedops.residuals import aux_dtype, aux_shape, mask_bytes, padded_preact

Ints = tuple[int, ...]

EPILOGS = {
    # adds a bias, activation, reads, gives
    "DEFAULT": (False, None, None, None),
    "RELU": (False, "relu", None, None),
    "RELU_AUX": (False, "relu", None, "relu_aux"),
    "BIAS": (True, None, None, None),
    "RELU_BIAS": (True, "relu", None, None),
    "RELU_AUX_BIAS": (True, "relu", None, "relu_aux"),
    "DRELU": (False, "relu", "relu_aux", None),
    "DRELU_BGRAD": (False, "relu", "relu_aux", "drelu_bgrad"),
    "GELU": (False, "gelu_tanh", None, None),
    "GELU_AUX": (False, "gelu_tanh", None, "gelu_aux"),
    "GELU_BIAS": (True, "gelu_tanh", None, None),
    "GELU_AUX_BIAS": (True, "gelu_tanh", None, "gelu_aux"),
    "DGELU": (False, "gelu_tanh", "gelu_aux", None),
    "DGELU_BGRAD": (False, "gelu_tanh", "gelu_aux", "dgelu_bgrad"),
    "BGRADA": (False, None, None, "bgrada"),
    "BGRADB": (False, None, None, "bgradb"),
}


# Epilogs --------------------------------------------------------------------------------------------------------------


def test_the_table_of_epilogs() -> None:
    """Sixteen epilogs, each with its own column of facts."""
    table = {
        epilog.name: (
            epilog.bias,
            epilog.activation,
            epilog.takes and epilog.takes.name,
            epilog.gives and epilog.gives.name,
        )
        for epilog in Epilog
    }
    assert table == EPILOGS
    assert len(Epilog) == 16


def test_names_are_those_of_nvmath() -> None:
    """Each of nvmath's members is found by its name, and there is no other."""
    theirs = pytest.importorskip("nvmath.linalg.advanced").MatmulEpilog
    assert {member.name for member in theirs} == set(Epilog.__members__)
    for member in theirs:
        assert epilog_named(member).name == member.name


@pytest.mark.parametrize("epilog", Epilog, ids=lambda epilog: epilog.name)
def test_an_epilog_is_found_by_name_and_by_member(epilog: Epilog) -> None:
    """A name and a member are the same thing."""
    assert epilog_named(epilog.name) is epilog_named(epilog) is epilog


@pytest.mark.parametrize("other", ["relu", "BIAS_RELU", "", None, 4, np.dtype("float32")])
def test_other_names_are_refused(other: object) -> None:
    """What names no epilog is an error that lists them all."""
    with pytest.raises(ValueError, match=r"expected one of DEFAULT, .*BGRADB"):
        epilog_named(other)


def test_forward_epilogs() -> None:
    """A bias and an activation choose the epilog that saves nothing."""
    for name in ("DEFAULT", "RELU", "GELU", "BIAS", "RELU_BIAS", "GELU_BIAS"):
        bias, activation, _, _ = EPILOGS[name]
        assert forward_epilog(bias, activation).name == name  # type: ignore[arg-type]


# Auxiliary arrays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (3,), (2, 0)])
def test_shapes_of_auxiliary_arrays(batch: Ints) -> None:
    """Whole groups of 128 bits for the mask, of 8 elements for the pre-activation; one sum an item."""
    for m, n in ((5, n) for n in range(600)):
        shapes = {epilog.gives.name: aux_shape(epilog.gives, batch, m, n) for epilog in Epilog if epilog.gives}
        along_n = (*batch, 1, n) if batch else (n,)
        assert shapes == {
            "relu_aux": (*batch, m, (n + 127) // 128 * 16),
            "gelu_aux": (*batch, m, (n + 7) // 8 * 8),
            "drelu_bgrad": along_n,
            "dgelu_bgrad": along_n,
            "bgradb": along_n,
            "bgrada": (*batch, m, 1) if batch else (m,),
        }
        assert (mask_bytes(n), padded_preact(n)) == (shapes["relu_aux"][-1], shapes["gelu_aux"][-1])


def test_what_an_epilog_reads_is_what_another_gave() -> None:
    """The residual of a backward epilog has the shape and dtype that its forward epilog gave it."""
    for epilog in Epilog:
        if epilog.takes:
            assert epilog.takes == Epilog[f"{epilog.name[1:5]}_AUX"].gives


@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_of_auxiliary_arrays(out: str) -> None:
    """The mask is bytes; all others have the dtype of the result."""
    for epilog in Epilog:
        if epilog.gives:
            assert aux_dtype(epilog.gives, out) == ("uint8" if epilog.gives.name == "relu_aux" else out)


# Dtypes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_the_table_of_dtypes(name: str) -> None:
    """Size and DLPack code are what NumPy, or PyTorch for bfloat16, has for the name."""
    assert DTYPES[name].itemsize == np_dtype(name).itemsize
    array: Any = torch.zeros(2, dtype=torch.bfloat16) if name == "bfloat16" else np.zeros(2, name)
    assert view_of(array).spec.dtype == name


def test_matrix_dtypes() -> None:
    """Four dtypes have products, 16-bit ones summed in float32."""
    assert {name: DTYPES[name].compute for name in MATRIX_DTYPES} == {
        "float16": "float32",
        "bfloat16": "float32",
        "float32": "float32",
        "float64": "float64",
    }


SPELLINGS = {
    "float32": ["float32", np.float32, np.dtype("float32"), torch.float32, jnp.float32, jnp.zeros(1, "f4").dtype],
    "bfloat16": ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16, jnp.bfloat16],
    "bool": ["bool", np.bool_, bool, torch.bool, jnp.bool_],
    "uint8": ["uint8", np.uint8, torch.uint8, jnp.uint8],
}


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, all_ in SPELLINGS.items() for dtype in all_])
def test_every_spelling_of_a_dtype(name: str, dtype: object) -> None:
    """Whatever library's object it is, its name is NumPy's."""
    assert name_of(dtype) == name


OUT_DTYPES = [
    ("float16", None, "float16"),
    ("float16", "float32", "float32"),
    ("bfloat16", torch.float32, "float32"),
    ("bfloat16", jnp.bfloat16, "bfloat16"),
    ("float32", np.float32, "float32"),
    ("float64", None, "float64"),
]


@pytest.mark.parametrize(("dtype", "asked", "given"), OUT_DTYPES)
def test_out_dtype(dtype: str, asked: object, given: str) -> None:
    """16-bit operands give their own dtype or float32, others their own."""
    problem = problem_of((5, 7), (7, 3), dtype, out_dtype=asked)
    assert (problem.a.dtype, problem.out.dtype, problem.out_spec.dtype) == (dtype, given, given)


@pytest.mark.parametrize(
    ("dtype", "asked"),
    [
        ("float16", "bfloat16"),
        ("bfloat16", "float16"),
        ("float32", "float64"),
        ("float32", "float16"),
        ("float64", "f4"),
    ],
)
def test_out_dtypes_that_there_are_not(dtype: str, asked: str) -> None:
    """Any other is refused with those that there are."""
    with pytest.raises(TypeError, match=rf"out_dtype is {asked}; {dtype} operands give {dtype}"):
        problem_of((5, 7), (7, 3), dtype, out_dtype=asked)


# The record -----------------------------------------------------------------------------------------------------------


def problem_of(a: Ints, b: Ints, dtype: str = "float32", **settings: Any) -> Problem:
    """Return the problem of two dense operands."""
    specs = {"a": ArraySpec.dense(a, dtype), "b": ArraySpec.dense(b, dtype)}
    return make_problem(Settings(**settings), specs, None, None)


SHAPES = [
    ((5, 7), (7, 3)),
    ((7,), (7, 3)),
    ((5, 7), (7,)),
    ((7,), (7,)),
    ((2, 5, 7), (7,)),
    ((7,), (2, 7, 3)),
    ((4, 2, 5, 7), (4, 2, 7, 3)),
    ((4, 1, 5, 7), (1, 1, 7, 3)),
    ((2, 1, 5, 7), (7, 3)),
    ((0, 7), (7, 3)),
    ((5, 0), (0, 3)),
    ((0, 5, 7), (7, 3)),
]


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_shapes_are_those_of_numpy(a: Ints, b: Ints) -> None:
    """Vectors, batches and extents of 0 give what ``numpy.matmul`` gives."""
    problem = problem_of(a, b)
    product = np.ones(a) @ np.ones(b)
    assert problem.out_spec.shape == product.shape
    assert (problem.vector_a, problem.vector_b) == (len(a) == 1, len(b) == 1)
    assert problem.flops == 2 * product.size * a[-1]
    assert problem.batch_count == np.prod(problem.batch_shape)
    assert (problem.m, problem.n, problem.k) == (
        1 if problem.vector_a else a[-2],
        1 if problem.vector_b else b[-1],
        a[-1],
    )


def test_transposes_are_read_in_place() -> None:
    """A flag reads the other order of the same memory."""
    problem = problem_of((7, 5), (3, 7), transpose_a=True, transpose_b=True)
    assert (problem.m, problem.n, problem.k) == (5, 3, 7)
    assert [(x.matrix.order, x.matrix.ld) for x in (problem.a, problem.b)] == [("col_major", 5), ("col_major", 7)]


def test_precision_belongs_to_float32() -> None:
    """Where the operands are not float32 it has no effect, so it makes no other problem."""
    assert problem_of((5, 7), (7, 3), "float32", precision="tf32").precision == "tf32"
    for dtype in ("float16", "bfloat16", "float64"):
        assert problem_of((5, 7), (7, 3), dtype, precision="tf32") == problem_of((5, 7), (7, 3), dtype)


PLAIN = (int, str, bool, type(None), Epilog)


def check_plain(value: object, path: str) -> None:
    """Raise unless a value is a plain one, or a record or tuple of them, all the way down."""
    if is_dataclass(value):
        assert type(value).__module__.startswith("fusedops."), path
        for field in fields(value):
            check_plain(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        assert type(value) is tuple or type(value).__module__.startswith("fusedops."), path
        for i, item in enumerate(value):
            check_plain(item, f"{path}[{i}]")
    else:
        assert type(value) in PLAIN, f"{path} is a {type(value)}"


PLAIN_CASES = [case for case in CASES if case.dtype == "float32" and case.trap is None][::23]


def planned(framework: TestFramework, case: Case) -> Problem:
    """Return the problem of a case's arrays in a framework."""
    arrays = {name: framework.make(x) for name, x in build(case).items()}
    chosen = {name: value for name, value in case.settings.items() if name not in ("alpha", "beta")}
    return fusedops.plan(arrays.pop("a"), arrays.pop("b"), **arrays, **chosen).problem


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_a_problem_is_plain_data(framework: TestFramework, case: Case) -> None:
    """Nothing of an array, a device or a framework is in it, whoever's arrays it was made from."""
    problem = planned(framework, case)
    check_plain(problem, "problem")
    again = planned(framework, case)
    assert again is not problem
    assert again == problem
    assert hash(again) == hash(problem)


def test_an_array_in_a_problem_would_be_found() -> None:
    """The check of plain data can fail."""
    for foreign in (np.int64(3), torch.Size([3]), np.ones(3), [3]):
        with pytest.raises(AssertionError):
            check_plain(ArraySpec((3,), (1,), foreign), "spec")  # type: ignore[arg-type]
