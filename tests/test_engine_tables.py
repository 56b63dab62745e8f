"""The tables that decide on a GPU, as far as they are data: known-bad algorithms, split problems, buckets of m."""

from __future__ import annotations

import numpy as np
import pytest

import fusedops
from fusedops.arrays import ArraySpec, Device
from fusedops.column_form import bucketed, column_form
from fusedops.engines.cells import SPLIT_CELLS, split_cell
from fusedops.engines.guard import KNOWN_BAD, Traits, refusal
from fusedops.epilogs import Epilog
from fusedops.problem import Problem, Settings, make_problem
from fusedops.residuals import aux_dtype, aux_shape

CUDA = Device("cuda", 0)


def problem(epilog: str, m: int = 32, n: int = 64, k: int = 16, dtype: str = "float16", **changes: object) -> Problem:
    """Return a problem on a GPU, made from specs alone; ``a_order`` and ``b_order`` may be "col_major"."""
    member = Epilog[epilog]

    def matrix(rows: int, cols: int, order: object) -> ArraySpec:
        strides = (1, max(rows, 1)) if order == "col_major" else (max(cols, 1), 1)
        return ArraySpec((rows, cols), strides, dtype, CUDA)

    specs: dict[str, ArraySpec | None] = {
        "a": matrix(m, k, changes.get("a_order")),
        "b": matrix(k, n, changes.get("b_order")),
        "bias": ArraySpec.dense((n,), dtype, CUDA) if member.bias else None,
    }
    if member.takes:
        specs[member.takes.name] = ArraySpec.dense(
            aux_shape(member.takes, (), m, n), aux_dtype(member.takes, dtype), CUDA
        )
    return make_problem(Settings(member, precision=changes.get("precision")), specs, None, None)


REPORTED = [(66, 2, 11528), (66, 12, 11528), (66, 3, 57608)]


@pytest.mark.parametrize(("algorithm", "splits", "k"), REPORTED)
def test_the_reported_algorithm_is_refused(algorithm: int, splits: int, k: int) -> None:
    """Split-K of algorithm 66 where k is no multiple of 64."""
    assert refusal(Traits(algorithm, splits, k)) is not None


@pytest.mark.parametrize(("algorithm", "splits", "k"), [(66, 1, 11528), (66, 4, 4096), (23, 4, 11528)])
def test_others_are_not(algorithm: int, splits: int, k: int) -> None:
    """The guard refuses what it must, not what it can."""
    assert refusal(Traits(algorithm, splits, k)) is None


def test_every_known_fault_names_its_report() -> None:
    """An entry says where it was reported, when it strikes and in which versions."""
    for entry in KNOWN_BAD:
        assert all((entry.name, entry.report, entry.condition, entry.versions))


SPLIT = [
    ("an extent of 0", problem("RELU_BIAS", k=0)),
    ("an extent of 0", problem("DEFAULT", m=0)),
    ("GELU in float64, and in float32 without TF32", problem("GELU_BIAS", dtype="float32")),
    ("GELU in float64, and in float32 without TF32", problem("DGELU", dtype="float64")),
    ("backward epilogs with k = 1", problem("DRELU_BGRAD", k=1)),
    ("BGRADA with row-major a", problem("BGRADA")),
    ("BGRADB with column-major b", problem("BGRADB", b_order="col_major")),
]


@pytest.mark.parametrize(("name", "split"), SPLIT, ids=lambda value: value if isinstance(value, str) else "")
def test_what_an_epilog_refuses_is_split(name: str, split: Problem) -> None:
    """Each cell of the table holds what it says."""
    cell = split_cell(split)
    assert cell is not None
    assert cell.name == name


def test_the_rest_is_fused() -> None:
    """No cell holds an ordinary problem of 16-bit operands, nor of TF32."""
    orders = {"BGRADA": {"a_order": "col_major"}}
    for epilog in Epilog:
        assert split_cell(problem(epilog.name, **orders.get(epilog.name, {}))) is None, epilog
    assert split_cell(problem("GELU", dtype="float32", precision="tf32")) is None


def test_auxiliary_arrays_off_their_alignment_are_split() -> None:
    """A mask that the caller passes at an odd address, or asks for at one."""
    assert split_cell(problem("DRELU"), aux_alignment=8) is not None
    assert split_cell(problem("RELU_AUX"), aux_alignment=1) is not None
    assert split_cell(problem("RELU_BIAS"), aux_alignment=1) is None


def test_support_tells_every_cell() -> None:
    """The list cannot grow unseen: `support` prints all of it."""
    assert list(fusedops.support().split) == [cell.name for cell in SPLIT_CELLS]


@pytest.mark.parametrize("m", [*range(1, 300), 1000, 4095, 4096, 4097, 50432])
def test_a_bucket_is_named_by_its_largest_extent(m: int) -> None:
    """All members of a bucket ask the heuristic for one and the same problem, at most an eighth larger than theirs."""
    form = column_form(problem("RELU_BIAS", m=m))
    largest = bucketed(form)
    if largest is None:
        assert m <= 16 or m & (m - 1) == 0 or m % (1 << (m.bit_length() - 4)) == 0
        return
    assert m < largest.n <= m * 1.125
    assert bucketed(largest) is None
    assert largest == column_form(problem("RELU_BIAS", m=largest.n))


def test_a_column_major_operand_keeps_its_leading_dimension_legal() -> None:
    """The stretched problem's leading dimension is at least its number of rows."""
    form = bucketed(column_form(problem("DEFAULT", m=33, a_order="col_major")))
    assert form is not None
    assert form.B.ld >= form.n
    assert np.lcm(form.n, 4) == form.n


def test_a_batch_stands_for_itself() -> None:
    """The distance of one matrix to the next depends on m, so a batch is never stretched."""
    specs = {"a": ArraySpec.dense((3, 33, 16), "float16", CUDA), "b": ArraySpec.dense((3, 16, 8), "float16", CUDA)}
    assert bucketed(column_form(make_problem(Settings(Epilog.DEFAULT), specs, None, None))) is None
