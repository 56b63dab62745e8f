"""The plan cache: the key holds everything that planning reads and nothing else, and plans keep no one's data."""

from __future__ import annotations

import gc
import threading
import timeit
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import JAX, NUMPY, TORCH, TestFramework, np_dtype

import fusedops
from fusedops import planned
from fusedops.dtypes import name_of
from fusedops.frameworks import kind_of
from fusedops.plan_cache import PlanCache, key_of
from fusedops.problem import Settings
from fusedops.testing import assert_within, epilog_oracle, matmul_oracle, to_numpy

Array = Any
Arrays = dict[str, np.ndarray]

RNG = np.random.default_rng(5)
M = 6  # one shape for all: square, so that no layout, transpose or axis of the bias shows in a shape


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> PlanCache:
    """An empty cache in the place of the process's own."""
    fresh = PlanCache()
    monkeypatch.setattr(planned, "_plans", fresh)
    return fresh


# Everything that planning reads ---------------------------------------------------------------------------------------


def numbers(dtype: str = "float32", order: str = "C", buffer_of: int = M) -> np.ndarray:
    """Return an M x M array in an order, or within wider rows."""
    values = RNG.standard_normal((M, buffer_of)).astype(np_dtype(dtype))[:, :M]
    return values if buffer_of > M else np.asarray(values, order=order)  # type: ignore[call-overload]


A, B, BIAS, C = numbers(), numbers(), RNG.standard_normal(M).astype("float32"), numbers()
MASK = RNG.integers(0, 256, (M, 16), dtype=np.uint8)
PREACT = RNG.standard_normal((M, 8)).astype("float32")

Variant = tuple[str, Arrays, dict[str, Any]]


def halves(dtype: str) -> Arrays:
    """Return the plain operands in another dtype."""
    return {name: x.astype(np_dtype(dtype)) for name, x in (("a", A), ("b", B), ("bias", BIAS))}


PLAIN = {"a": A, "b": B, "bias": BIAS}
VARIANTS: dict[str, Variant] = {
    "plain": ("matmul", PLAIN, {}),
    "without bias": ("matmul", {"a": A, "b": B}, {}),
    "relu": ("matmul", PLAIN, {"activation": "relu"}),
    "gelu_tanh": ("matmul", PLAIN, {"activation": "gelu_tanh"}),
    "gelu_erf": ("matmul", PLAIN, {"activation": "gelu_erf"}),
    "silu": ("matmul", PLAIN, {"activation": "silu"}),
    "alpha": ("matmul", PLAIN, {"alpha": 0.25}),
    "c": ("matmul", {**PLAIN, "c": C}, {}),
    "beta": ("matmul", {**PLAIN, "c": C}, {"beta": -2.0}),
    "beta 0": ("matmul", {**PLAIN, "c": C}, {"beta": 0.0}),
    "transpose_a": ("matmul", PLAIN, {"transpose_a": True}),
    "transpose_b": ("matmul", PLAIN, {"transpose_b": True}),
    "both transposed": ("matmul", PLAIN, {"transpose_a": True, "transpose_b": True}),
    "a by columns": ("matmul", {**PLAIN, "a": np.asfortranarray(A)}, {}),
    "b by columns": ("matmul", {**PLAIN, "b": np.asfortranarray(B)}, {}),
    "wide rows": ("matmul", {**PLAIN, "a": numbers(buffer_of=M + 3)}, {}),
    "float64": ("matmul", halves("float64"), {}),
    "float16": ("matmul", halves("float16"), {}),
    "bfloat16": ("matmul", halves("bfloat16"), {}),
    "float16 to float32": ("matmul", {**halves("float16"), "bias": BIAS}, {"out_dtype": "float32"}),
    "ieee": ("matmul", PLAIN, {"precision": "ieee"}),
    "deterministic": ("matmul", PLAIN, {"deterministic": True}),
    "BIAS": ("epilog_matmul", PLAIN, {"epilog": "BIAS"}),
    "RELU_AUX": ("epilog_matmul", {"a": A, "b": B}, {"epilog": "RELU_AUX"}),
    "GELU_AUX": ("epilog_matmul", {"a": A, "b": B}, {"epilog": "GELU_AUX"}),
    "DRELU": ("epilog_matmul", {"a": A, "b": B, "relu_aux": MASK}, {"epilog": "DRELU"}),
    "DGELU": ("epilog_matmul", {"a": A, "b": B, "gelu_aux": PREACT}, {"epilog": "DGELU"}),
    "DGELU_BGRAD": ("epilog_matmul", {"a": A, "b": B, "gelu_aux": PREACT}, {"epilog": "DGELU_BGRAD"}),
    "BGRADA": ("epilog_matmul", {"a": A, "b": B}, {"epilog": "BGRADA"}),
    "BGRADB": ("epilog_matmul", {"a": A, "b": B}, {"epilog": "BGRADB"}),
}


def expected(variant: Variant) -> Any:
    """Return the float64 answer of a variant."""
    op, arrays, settings = variant
    chosen = {name: x for name, x in settings.items() if name not in ("out_dtype", "precision", "deterministic")}
    rest = {name: x for name, x in arrays.items() if name not in ("a", "b")}
    return (matmul_oracle if op == "matmul" else epilog_oracle)(arrays["a"], arrays["b"], **rest, **chosen)


EXPECTED = {name: expected(variant) for name, variant in VARIANTS.items()}


def check(name: str, arrays: dict[str, Array]) -> None:
    """Call one variant and compare result, auxiliary output and dtype."""
    op, source, settings = VARIANTS[name]
    rest = {key: x for key, x in arrays.items() if key not in ("a", "b")}
    result = getattr(fusedops, op)(arrays["a"], arrays["b"], **rest, **settings)
    out, aux = result if isinstance(result, tuple) else (result, {})
    want = EXPECTED[name]
    assert name_of(out.dtype) == settings.get("out_dtype", name_of(source["a"].dtype))
    assert_within(out, want.out, want.scale, M, what=name)
    for key, got in aux.items():
        if key == "relu_aux":
            bits = [np.unpackbits(to_numpy(x), axis=-1, count=M) for x in (got, want.aux)]
            assert np.array_equal(*bits)
        else:
            width = M if key == "gelu_aux" else want.aux.shape[-1]
            assert_within(got[..., :width], want.aux[..., :width], want.aux_scale[..., :width], M, what=f"{name} {key}")
    assert (want.aux is None) == (not aux)


def every_ordered_pair(names: list[str]) -> Iterator[str]:
    """Yield names so that each comes right after each other."""
    for first in names:
        for second in names:
            yield from (first, second)


@pytest.mark.parametrize("framework", [NUMPY, TORCH, JAX], ids=str)
def test_each_gets_its_own_result(cache: PlanCache, framework: TestFramework) -> None:
    """At one shape in one process, whichever setting changed last, the result is that of the call's own settings."""
    theirs = {name: {key: framework.make(x) for key, x in arrays.items()} for name, (_, arrays, _) in VARIANTS.items()}
    for name in every_ordered_pair(list(VARIANTS)):
        check(name, theirs[name])
    assert len(cache) <= len(VARIANTS)


@pytest.mark.parametrize("framework", [NUMPY, TORCH], ids=str)
def test_the_layout_of_out_belongs_to_the_key(cache: PlanCache, framework: TestFramework) -> None:
    """Fresh, dense, in wider rows: in any order each is written where it lies."""
    a, b = framework.make(A), framework.make(B)
    want = EXPECTED["without bias"]
    for width in (None, M, M + 1, M + 5, M, None, M + 1):
        out = None if width is None else framework.make(np.zeros((M, width), "float32"))[:, :M]
        result = fusedops.matmul(a, b, out=out)
        assert out is None or result is out
        assert_within(result, want.out, want.scale, M)
    assert len(cache) == 4


SETTINGS = [
    Settings(),
    Settings(epilog=fusedops.Epilog.DEFAULT),
    Settings(activation="relu"),
    Settings(transpose_a=True),
    Settings(transpose_b=True),
    Settings(out_dtype="float32"),
    Settings(precision="ieee"),
    Settings(deterministic=True),
    Settings(deterministic=False),
]


def key(framework: TestFramework, settings: Settings, *arrays: np.ndarray | None) -> Any:
    """Return the key of a call without ``out``."""
    theirs = tuple(x if x is None else framework.make(x) for x in arrays)
    return key_of(kind_of(theirs[0]).framework, settings, (*theirs, *[None] * (6 - len(theirs))), None, None)


def test_every_setting_makes_another_key() -> None:
    """No two settings share a key; a field that `Settings` gains must gain a row here."""
    keys = {key(NUMPY, settings, A, B) for settings in SETTINGS}
    assert len(keys) == len(SETTINGS)
    defaults = Settings()._asdict()
    changed = {name for chosen in SETTINGS for name, value in chosen._asdict().items() if value != defaults[name]}
    assert changed == set(Settings._fields)


OPERANDS = (A, B, BIAS, C, MASK, PREACT)
CHANGES: dict[str, Callable[[np.ndarray], np.ndarray | None]] = {
    "absent": lambda x: None,
    "shape": lambda x: np.ascontiguousarray(x[..., :-1]),
    "dtype": lambda x: x.astype("float64"),
    "strides": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", range(len(OPERANDS)))
@pytest.mark.parametrize("framework", [NUMPY, TORCH, JAX], ids=str)
def test_every_operand_is_in_the_key(framework: TestFramework, place: int, change: str) -> None:
    """Presence, shape, dtype and strides of each; JAX arrays have no strides, and a and b are always there."""
    if (change, place) in (("absent", 0), ("absent", 1)):
        return
    operands = list(OPERANDS)
    operands[place] = CHANGES[change](operands[place])
    same = framework is JAX and change == "strides"
    assert (key(framework, Settings(), *OPERANDS) == key(framework, Settings(), *operands)) is same


def test_one_is_not_true(cache: PlanCache) -> None:
    """A flag of 1 is refused also after the plan for True was made, whose key would be equal."""
    for _ in range(2):
        with pytest.raises(TypeError, match="transpose_a is 1, expected True or False"):
            fusedops.matmul(A, B, transpose_a=1)  # type: ignore[arg-type]
        fusedops.matmul(A, B, transpose_a=True)


def test_out_of_another_kind_is_refused_after_the_plan_was_made(cache: PlanCache) -> None:
    """The type of ``out`` belongs to the key, or a plan for a mutable array could write to an immutable one."""
    strict = pytest.importorskip("array_api_strict")
    tvm_ffi = pytest.importorskip("tvm_ffi")
    frozen = jnp.zeros((M, M), "float32")
    for lead in (tvm_ffi.from_dlpack(A), strict.asarray(A)):
        own = strict.zeros((M, M), dtype=strict.float32) if hasattr(lead, "__array_namespace__") else np.zeros_like(A)
        fusedops.matmul(lead, B, out=own)
        with pytest.raises(TypeError, match="JAX arrays never change"):
            fusedops.matmul(lead, B, out=frozen)
    assert not np.any(np.asarray(frozen))


# And nothing else -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", [NUMPY, TORCH, JAX], ids=str)
def test_contents_and_addresses_are_not_in_the_key(framework: TestFramework) -> None:
    """Other arrays of the same kind have the same key, hash and all."""
    first = key(framework, Settings(), A, B, BIAS)
    second = key(framework, Settings(), A + 1, B * np.nan, np.zeros_like(BIAS))
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize("framework", [NUMPY, TORCH, JAX], ids=str)
def test_new_contents_give_new_results_through_one_plan(cache: PlanCache, framework: TestFramework) -> None:
    """A plan made for other data, factors and alignments computes these."""
    for i in range(20):
        a, b = (x + np.float32(i) for x in (A, B))
        want = matmul_oracle(a, b, alpha=1.0 + i)
        assert_within(fusedops.matmul(framework.make(a), framework.make(b), alpha=1.0 + i), want.out, want.scale, M)
    assert len(cache) == 1


@pytest.mark.parametrize(
    "make", [np.ones, torch.ones, lambda shape: jnp.ones(shape, "float32")], ids=["numpy", "torch", "jax"]
)
def test_plans_hold_no_operand(cache: PlanCache, make: Callable[[tuple[int, ...]], Array]) -> None:
    """Nothing that a call was given, or gave, outlives the caller's own references."""
    arrays = [make((M, M)), make((M, M)), make((M,)), make((M, M))]
    arrays.append(fusedops.matmul(arrays[0], arrays[1], bias=arrays[2], c=arrays[3], activation="relu"))
    with fusedops.plan(*arrays[:2], bias=arrays[2]) as plan:
        arrays.append(plan(*arrays[:2], bias=arrays[2]))
        watched = [weakref.ref(x) for x in arrays]
        arrays.clear()
        gc.collect()
        assert [ref() for ref in watched] == [None] * 6
    assert len(cache) == 1


def test_a_thousand_calls_after_a_collection(cache: PlanCache) -> None:
    """Nothing that a plan needs is kept alive by its first call alone."""
    want = EXPECTED["relu"]
    plan = fusedops.plan(A, B, bias=BIAS, activation="relu")
    fusedops.matmul(A, B, bias=BIAS, activation="relu")
    gc.collect()
    for _ in range(1000):
        direct = fusedops.matmul(A, B, bias=BIAS, activation="relu")
        assert np.array_equal(plan(A, B, bias=BIAS), direct)
    assert_within(direct, want.out, want.scale, M)
    assert len(cache) == 1


# Bounds and threads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_cache_is_bounded_and_stays_right(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Fifty problems through a small table: it never grows beyond its size, and every result is right."""
    small = PlanCache(size=size)
    monkeypatch.setattr(planned, "_plans", small)
    for i in [*range(50), 3, 3, 49, 0]:
        a, b = np.full((2, i + 1), 2.0), np.ones((i + 1, 3))
        assert np.array_equal(fusedops.matmul(a, b), np.full((2, 3), 2.0 * (i + 1)))
        assert 1 <= len(small) <= size


def test_the_oldest_half_goes() -> None:
    """What was planned last is still there after the table was halved."""
    table = PlanCache(size=8)
    for i in range(9):
        table.get_or_make(i, lambda i=i: i)  # type: ignore[misc, arg-type]
    assert [table.get(i) for i in (0, 1, 2, 3)] == [None] * 4
    assert [table.get(i) for i in (5, 6, 7, 8)] == [5, 6, 7, 8]


def test_of_two_plans_made_at_once_the_first_is_kept() -> None:
    """All threads that raced to plan a problem use the same plan."""
    table = PlanCache()
    plans: list[Any] = [object(), object()]
    assert table.get_or_make("key", lambda: plans[0]) is plans[0]
    assert table.get_or_make("key", lambda: plans[1]) is plans[0]


def in_threads(work: Callable[[int], None], threads: int = 8) -> None:
    """Run ``work(i)`` in threads that start together, and raise what any raises."""
    barrier = threading.Barrier(threads)

    def run(i: int) -> None:
        barrier.wait()
        work(i)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run, i) for i in range(threads)]:
            future.result()


@pytest.mark.parametrize("framework", [NUMPY, TORCH, JAX], ids=str)
@pytest.mark.parametrize("size", [4, 4096])
def test_eight_threads_on_one_problem(monkeypatch: pytest.MonkeyPatch, framework: TestFramework, size: int) -> None:
    """Threads that plan and call one problem at once, each with its own bias, never see each other's."""
    monkeypatch.setattr(planned, "_plans", PlanCache(size))
    a, b = framework.make(A), framework.make(B)
    want = EXPECTED["without bias"]

    def work(i: int) -> None:
        bias = framework.make(np.full(M, i, "float32"))
        for _ in range(40):
            assert_within(fusedops.matmul(a, b, bias=bias), want.out + i, want.scale + i, M)

    in_threads(work)


def test_threads_while_the_cache_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads of many problems through a table too small for them: bounded, and every result right."""
    small = PlanCache(size=8)
    monkeypatch.setattr(planned, "_plans", small)

    def work(i: int) -> None:
        for j in range(40):
            k = (i * 7 + j) % 20 + 1
            assert np.array_equal(fusedops.matmul(np.ones((2, k)), np.ones((k, 2))), np.full((2, 2), k))
            assert len(small) <= 8

    in_threads(work)


def test_looking_up_one_of_ten_thousand_plans_is_as_quick_as_one_of_ten() -> None:
    """A look-up is that of a dictionary; what it costs does not grow with what is kept."""
    x, w = np.ones((4, 3), "float32"), np.ones((3, 2), "float32")
    framework = kind_of(x).framework
    made = fusedops.plan(x, w)
    taken = []
    for size in (10, 10_000):
        cache = PlanCache()
        keys = [
            key_of(framework, Settings(activation=i), (x, w, None, None, None, None), None, None) for i in range(size)
        ]
        for one in keys:
            cache.get_or_make(one, lambda: made)
        assert len(cache) == size
        taken.append(min(timeit.repeat(lambda: cache.get(keys[-1]), number=20_000, repeat=9)))  # noqa: B023
    assert taken[1] < 3 * taken[0]
