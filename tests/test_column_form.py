"""The column form, run on an emulator of cuBLASLt, leaves in memory what the caller's row-major call says.

All values are small integers, so every sum is exact in any order and memory can be compared bit by bit; what lies
between and around the elements of ``out`` must stay as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from column_order import Memory, gelu, gelu_slope, launch, relu
from hypothesis import given, reject, settings

from fusedops import Epilog
from fusedops.arrays import ArraySpec, alignment_class
from fusedops.column_form import ColumnForm, column_form
from fusedops.problem import Problem, Settings, make_problem
from fusedops.residuals import aux_shape

Array = np.ndarray[Any, Any]
Ints = tuple[int, ...]

extents = st.sampled_from([2, 1, 3, 5, 17, 2, 1, 3, 5, 17, 0])
axes = st.sampled_from([(), (3,), (2,), (2, 3), (3, 1), (1, 2), (2, 2), (1,), (3,), (2, 0)])


# Arrays in memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """An array, and the flat buffer it lies in."""

    array: Array
    memory: Memory

    @property
    def spec(self) -> ArraySpec:
        array = self.array
        return ArraySpec(array.shape, tuple(s // array.itemsize for s in array.strides), str(array.dtype))

    def over(self, data: Array) -> Array:
        """Return the array's elements in another buffer of the same layout."""
        return np.lib.stride_tricks.as_strided(data[self.memory.start :], self.array.shape, self.array.strides)

    def __getitem__(self, index: Any) -> Placed:
        """Return a part of the array that begins where the array does."""
        return Placed(self.array[index], self.memory)


def place(shape: Ints, strides: Ints, start: int, seed: int, dtype: str = "float64") -> Placed:
    """Return an array of random integers in a buffer of others."""
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    rng = np.random.default_rng(seed)
    low, high = (0, 256) if dtype == "uint8" else (-3, 4)
    data = rng.integers(low, high, start + reach + 5).astype(dtype)
    steps = [s * data.itemsize for s in strides]
    return Placed(np.lib.stride_tricks.as_strided(data[start:], shape, steps), Memory(data, start))


def batch_strides(batch: Ints, item: int) -> Ints:
    """Return the strides of batch axes whose items lie ``item`` elements apart."""
    strides = []
    for extent in reversed(batch):
        strides.append(item if extent != 1 else 77)
        item *= max(extent, 1)
    return tuple(reversed(strides))


@st.composite
def matrices(draw: st.DrawFn, batch: Ints, rows: int, cols: int, written: bool = False) -> Placed:
    """Draw a batch of matrices: by rows or columns, with a leading dimension, packed, spread, shared or interleaved."""
    by_rows = written or draw(st.sampled_from([True, True, False]))
    runs, length = (rows, cols) if by_rows else (cols, rows)
    how = draw(st.sampled_from(["packed"] * 4 + ["apart", "interleaved"] + ([] if written else ["shared", "sliding"])))
    count = int(np.prod(batch))
    ld = max(length, 1) + draw(st.sampled_from([0, 0, 1, 3]))
    if how == "interleaved":
        item, ld = ld, ld * max(count, 1)
    else:
        item = {"packed": ld * max(runs, 1), "apart": ld * max(runs, 1) + 2, "shared": 0, "sliding": 1}[how]
    inner = (ld if runs != 1 else draw(st.sampled_from([ld, 0, 91])), 1)
    strides = (*batch_strides(batch, item), *(inner if by_rows else inner[::-1]))
    return place((*batch, rows, cols), strides, draw(st.integers(0, 3)), draw(st.integers(0, 999)))


# Calls ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of the explicit level with every array in memory, and what the package makes of it."""

    problem: Problem
    arrays: dict[str, Placed]
    alpha: float
    beta: float

    def view(self, name: str) -> Array:
        """Return an operand as ``(..., m, k)`` or ``(..., k, n)``, ``c`` and ``out`` as ``(..., m, n)``."""
        x, problem = self.arrays[name].array, self.problem
        if name in ("a", "b"):
            x = np.swapaxes(x, -1, -2) if getattr(problem, f"transpose_{name}") else x
        if problem.vector_b and name in ("b", "c", "out"):
            x = x[..., None]
        return x[..., None, :] if problem.vector_a and name in ("a", "c", "out") else x


@st.composite
def operands(draw: st.DrawFn) -> tuple[Ints, Ints, list[bool], dict[str, Placed]]:
    """Draw a and b with or without batch axes, stored transposed or not, or vectors: batch, (m, n), flags, arrays."""
    joint = draw(axes)
    ones = tuple(1 for _ in joint)
    batches = [draw(st.sampled_from([joint, joint, joint, ()])), draw(st.sampled_from([(), ones, joint]))]
    vectors = [not batch and draw(st.sampled_from([False, False, True])) for batch in batches]
    flags = [not vector and draw(st.booleans()) for vector in vectors]
    m, n, k = 1 if vectors[0] else draw(extents), 1 if vectors[1] else draw(extents), draw(extents)
    arrays = {}
    for name, batch, vector, flag, (rows, cols) in zip("ab", batches, vectors, flags, [(m, k), (k, n)], strict=True):
        if vector:
            arrays[name] = place((k,), (draw(st.integers(1, 2)),), draw(st.integers(0, 2)), draw(st.integers(0, 99)))
        else:
            arrays[name] = draw(matrices(batch, *((cols, rows) if flag else (rows, cols))))
    return np.broadcast_shapes(*batches), (m, n), flags, arrays


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a call of any epilog, over any layouts that the package takes."""
    epilog = draw(st.sampled_from(list(Epilog)))
    joint, (m, n), flags, arrays = draw(operands())
    without_vectors = (..., *[0 if arrays[name].array.ndim == 1 else slice(None) for name in "ab"])
    if draw(st.booleans()):
        arrays["c"] = draw(matrices(draw(st.sampled_from([joint, ()])), m, n, written=True))[without_vectors]
    arrays["out"] = draw(matrices(joint, m, n, written=True))[without_vectors]
    if epilog.bias:
        item = draw(st.sampled_from([None, None, n, n + 3, 0]))
        shape, strides = ((n,), (1,)) if item is None else ((*joint, 1, n), (*batch_strides(joint, item), 55, 1))
        arrays["bias"] = place(shape, strides, draw(st.integers(0, 2)), draw(st.integers(0, 99)))
    for aux, name in ((epilog.takes, "aux_in"), (epilog.gives, "aux_out")):
        if aux is not None:
            shape, dtype = aux_shape(aux, joint, m, n), "uint8" if aux.format == "relu_mask" else "float64"
            strides = ArraySpec.dense(shape, dtype).strides
            arrays[name] = place(shape, strides, draw(st.integers(0, 2)), draw(st.integers(0, 99)), dtype)
    return planned(epilog, flags, arrays, draw(st.sampled_from([1.0, 2.0])), draw(st.sampled_from([1.0, -3.0])))


def planned(epilog: Epilog, flags: list[bool], arrays: dict[str, Placed], alpha: float, beta: float) -> Call:
    """Return the call with its problem; a layout that the package refuses is no example."""
    specs = {name: arrays[name].spec for name in ("a", "b", "c", "bias") if name in arrays}
    if epilog.takes:
        specs[epilog.takes.name] = arrays["aux_in"].spec
    aux_out = {epilog.gives.name: arrays["aux_out"].spec} if epilog.gives else None
    try:
        problem = make_problem(Settings(epilog, None, *flags), specs, arrays["out"].spec, aux_out)
    except ValueError:
        reject()
    return Call(problem, arrays, alpha, beta)


def in_columns(call: Call) -> ColumnForm:
    """Run a call on the emulator, over the same memory."""
    roles = {"A": "b", "B": "a", "C": "c", "D": "out", "bias": "bias", "aux_in": "aux_in", "aux_out": "aux_out"}
    memory = {role: call.arrays[name].memory for role, name in roles.items() if name in call.arrays}
    form = column_form(call.problem)
    launch(form, memory, call.alpha, call.beta)
    return form


def in_rows(call: Call) -> tuple[Array, Array | None]:
    """Return ``(..., m, n)`` and the auxiliary output as the caller's row-major formulas say."""
    epilog, n = call.problem.epilog, call.problem.n
    a, b = call.view("a"), call.view("b")
    z = call.alpha * (a @ b)
    if "c" in call.arrays:
        z = z + call.beta * call.view("c")
    if "bias" in call.arrays:
        z = z + call.arrays["bias"].array
    if epilog.takes and epilog.takes.name == "relu_aux":
        z = z * np.unpackbits(call.arrays["aux_in"].array, axis=-1, count=n, bitorder="little")
    elif epilog.takes:
        z = z * gelu_slope(call.arrays["aux_in"].array[..., :n])
    aux = None
    if epilog.gives is not None:
        batch = call.problem.batch_shape
        aux = {
            "relu_mask": lambda: z >= 0,
            "preact": lambda: z,
            "sum_over_m": lambda: z.sum(axis=-2, keepdims=bool(batch)),
            "sum_a_over_k": lambda: np.broadcast_to(a, (*batch, *a.shape[-2:])).sum(axis=-1, keepdims=bool(batch)),
            "sum_b_over_k": lambda: np.broadcast_to(b, (*batch, *b.shape[-2:])).sum(axis=-2, keepdims=bool(batch)),
        }[epilog.gives.format]()
    if epilog.takes or epilog.activation is None:
        return z, aux
    return (relu(z) if epilog.activation == "relu" else gelu(z)), aux


def check_aux(call: Call, want: Array) -> None:
    """Raise unless the auxiliary output holds what is wanted, whatever its padding holds."""
    gives = call.problem.epilog.gives
    assert gives is not None
    got = call.arrays["aux_out"].array
    if gives.format == "relu_mask":
        got = np.unpackbits(got, axis=-1, count=call.problem.n, bitorder="little")
    elif gives.format == "preact":
        got = got[..., : call.problem.n]
    if gives.format == "sum_over_m" and call.problem.epilog.activation == "gelu_tanh":
        assert np.allclose(got, want, rtol=1e-13, atol=1e-13)  # sums of no integers, in another order
        return
    assert np.array_equal(got, want)


def check(call: Call) -> ColumnForm:
    """Raise unless the column form leaves in memory what the caller's formulas say, and touches nothing else."""
    expected = {name: placed.memory.data.copy() for name, placed in call.arrays.items()}
    want, want_aux = in_rows(call)
    out = call.arrays["out"]
    out.over(expected["out"])[...] = want.reshape(out.array.shape)
    form = in_columns(call)
    for name in set(expected) - {"aux_out"}:
        assert np.array_equal(call.arrays[name].memory.data, expected[name]), name
    if want_aux is not None:
        check_aux(call, want_aux)
    return form


# What must hold -------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(calls())
def test_memory_is_what_the_caller_asked_for(call: Call) -> None:
    """Any epilog over any layouts: the column form computes in place what the row-major formulas say."""
    form = check(call)
    assert form.batch_count == (1 if form.folded else call.problem.batch_count)
    batches = [x.batch for x in (form.A, form.B, form.C, form.D) if x is not None]
    batches += [form.bias] if form.bias is not None else []
    assert {batch.count for batch in batches} == {form.batch_count}
    assert (form.m, form.k) == (call.problem.n, call.problem.k)


@pytest.mark.parametrize("epilog", Epilog, ids=lambda epilog: epilog.name)
def test_every_epilog(epilog: Epilog) -> None:
    """A plain call of each, square so that no axis can stand for another by its extent."""
    assert not check(simple(epilog, (), 17, 17, 17)).folded


def simple(
    epilog: Epilog,
    batch: Ints,
    m: int,
    n: int,
    k: int,
    *,
    b_batch: Ints = (),
    bias: Ints | None = None,
    c: Ints | None = None,
    ld: int = 0,
    flag_a: bool = False,
) -> Call:
    """Return a call over dense arrays; ``a`` with a leading dimension where one is given."""
    shapes = {"a": (*batch, *((k, m) if flag_a else (m, k))), "b": (*b_batch, k, n), "out": (*batch, m, n)}
    if epilog.bias:
        shapes["bias"] = (n,) if bias is None else bias
    if c is not None:
        shapes["c"] = c
    arrays = {name: place(shape, ArraySpec.dense(shape, "float64").strides, 0, 1) for name, shape in shapes.items()}
    if ld:
        arrays["a"] = place(shapes["a"], (*batch_strides(batch, m * ld), ld, 1), 0, 1)
    for aux, name in ((epilog.takes, "aux_in"), (epilog.gives, "aux_out")):
        if aux is not None:
            shape, dtype = aux_shape(aux, batch, m, n), "uint8" if aux.format == "relu_mask" else "float64"
            arrays[name] = place(shape, ArraySpec.dense(shape, dtype).strides, 0, 1, dtype)
    return planned(epilog, [flag_a, False], arrays, 1.0, 1.0)


FOLDS = {
    "dense": simple(Epilog.DEFAULT, (3,), 4, 5, 6),
    "two axes": simple(Epilog.RELU, (2, 3), 4, 5, 6),
    "leading dimension": simple(Epilog.DEFAULT, (3,), 4, 5, 6, ld=9),
    "one row an item": simple(Epilog.DEFAULT, (3,), 1, 5, 6, ld=9),
    "shared bias": simple(Epilog.BIAS, (3,), 4, 5, 6),
    "c that goes on": simple(Epilog.DEFAULT, (3,), 4, 5, 6, c=(3, 4, 5)),
    "mask": simple(Epilog.RELU_AUX_BIAS, (3,), 4, 5, 6),
    "pre-activation": simple(Epilog.GELU_AUX, (3,), 4, 5, 6),
    "residual": simple(Epilog.DGELU, (3,), 4, 5, 6),
    "a summed over k": simple(Epilog.BGRADA, (3,), 4, 5, 6),
}
STAYS = {
    "no batch": simple(Epilog.DEFAULT, (), 4, 5, 6),
    "b for each item": simple(Epilog.DEFAULT, (3,), 4, 5, 6, b_batch=(3,)),
    "bias for each item": simple(Epilog.BIAS, (3,), 4, 5, 6, bias=(3, 1, 5)),
    "shared c": simple(Epilog.DEFAULT, (3,), 4, 5, 6, c=(4, 5)),
    "columns": simple(Epilog.DEFAULT, (3,), 4, 5, 6, flag_a=True),
    "out summed over m": simple(Epilog.DRELU_BGRAD, (3,), 4, 5, 6),
    "b summed over k": simple(Epilog.BGRADB, (3,), 4, 5, 6),
}


@pytest.mark.parametrize("call", FOLDS.values(), ids=FOLDS.keys())
def test_folds(call: Call) -> None:
    """Rows that simply go on from item to item, everything else shared: one product."""
    form = check(call)
    assert form.folded
    assert (form.batch_count, form.n) == (1, call.problem.batch_count * call.problem.m)


@pytest.mark.parametrize("call", STAYS.values(), ids=STAYS.keys())
def test_does_not_fold(call: Call) -> None:
    """What differs from item to item, or is summed for each, keeps its batch."""
    form = check(call)
    assert not form.folded
    assert (form.batch_count, form.n) == (call.problem.batch_count, call.problem.m)


def test_sums_of_operands_change_places() -> None:
    """The caller's a is cuBLASLt's B, and so are the sums over them."""
    forms = {epilog: column_form(simple(epilog, (), 4, 5, 6).problem) for epilog in Epilog}
    swapped = {epilog: form.epilog for epilog, form in forms.items() if form.epilog is not epilog}
    assert swapped == {Epilog.BGRADA: Epilog.BGRADB, Epilog.BGRADB: Epilog.BGRADA}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 2**48)), max_size=6))
def test_alignment_class(addresses: list[int | None]) -> None:
    """The largest power of two, at most 16, that divides every address; absent arrays ask for nothing."""
    given_ones = [address or 0 for address in addresses]
    want = max(power for power in (1, 2, 4, 8, 16) if all(address % power == 0 for address in given_ones))
    assert alignment_class(*addresses) == want
