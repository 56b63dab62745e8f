"""The handler of the custom call, registered for the CPU over the stand-in for cuBLASLt: what XLA does with it."""

from __future__ import annotations

import gc
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("nvmath")

from native.handler_on_cpu import call_of, example, plans, problem_for, run_example, serve
from native.stand_in import stand_in

from fusedops import Epilog, epilog_matmul
from fusedops.native.build import SOURCES
from fusedops.residuals import aux_shape
from fusedops.xla import handler
from fusedops.xla.handler import Planner, counters

Array = Any
Arrays = dict[str, Any]

ORDER = ("a", "b", "bias", "c", "relu_aux", "gelu_aux")


@pytest.fixture(autouse=True)
def planner() -> Iterator[Planner]:
    """A planner of the test's own, and nothing left of what was compiled before it."""
    jax.clear_caches()
    gc.collect()
    stand_in().reset()
    made = serve()
    yield made
    stand_in().reset()
    made.forget()


def normal(*shape: int, seed: int = 0) -> Array:
    """Return random float32 numbers, the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, "float32")


def since(before: dict[str, int]) -> dict[str, int]:
    """Return what the counters have gone up by."""
    return {name: count - before[name] for name, count in counters().items()}


# Values --------------------------------------------------------------------------------------------------------------


def arrays_for(epilog: Epilog, batch: tuple[int, ...] = (), **arrays: Any) -> Arrays:
    """Return operands of m=3, n=4, k=5, and what else an epilog wants."""
    arrays = {"a": normal(*batch, 3, 5), "b": normal(5, 4, seed=1), **arrays}
    if epilog.bias:
        arrays.setdefault("bias", normal(4, seed=2))
    if epilog.takes:
        shape = aux_shape(epilog.takes, batch, 3, 4)
        bits = np.random.default_rng(3).integers(0, 256, shape, "uint8")
        arrays[epilog.takes.name] = bits if epilog.takes.format == "relu_mask" else normal(*shape, seed=4)
    return arrays


def unpadded(result: Array, n: int) -> Array:
    """Return a result or an auxiliary array without what pads its rows."""
    result = np.asarray(result)
    if result.dtype == "uint8":
        return np.unpackbits(result, axis=-1, count=n, bitorder="little")
    return result[..., :n]


def check(epilog: Epilog, arrays: Arrays, alpha: float = 1.0, beta: float = 1.0) -> None:
    """Compare the custom call with the reference engine."""
    a, b, rest = arrays["a"], arrays["b"], {name: x for name, x in arrays.items() if name not in ("a", "b")}
    expected = epilog_matmul(a, b, epilog=epilog, alpha=alpha, beta=beta, **rest)
    out, aux = expected if isinstance(expected, tuple) else (expected, {})
    call = call_of(problem_for(epilog.name, **arrays), alpha, beta)
    results = jax.jit(call)(*(arrays[name] for name in ORDER if name in arrays))
    for result, want in zip(results, (out, *aux.values()), strict=True):
        assert (result.shape, result.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(unpadded(result, 4), unpadded(want, 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("epilog", list(Epilog), ids=lambda epilog: epilog.name)
def test_every_epilog_gives_its_values(epilog: Epilog, batch: tuple[int, ...]) -> None:
    check(epilog, arrays_for(epilog, batch, b=normal(*batch, 5, 4)))


@pytest.mark.parametrize(
    "arrays",
    [
        {"a": normal(5, 3), "transpose_a": True},
        {"b": normal(4, 5), "transpose_b": True},
        {"a": normal(2, 3, 5)},
        {"b": normal(2, 5, 4)},
        {"a": normal(2, 5, 3), "b": normal(2, 4, 5), "transpose_a": True, "transpose_b": True},
        {"a": normal(2, 3, 5), "bias": normal(2, 1, 4)},
        {"c": normal(3, 4)},
        {"a": normal(2, 3, 5), "c": normal(3, 4)},
    ],
    ids=lambda arrays: " ".join(f"{name}{getattr(x, 'shape', '')}" for name, x in arrays.items()),
)
def test_layouts_batches_and_c(arrays: Arrays) -> None:
    check(Epilog.GELU_BIAS, arrays_for(Epilog.GELU_BIAS, **arrays), alpha=0.5, beta=-2.0)


@pytest.mark.parametrize(("c", "beta", "reads"), [(None, 1.0, False), (np.nan, 0.0, False), (3.0, -0.5, True)])
def test_c_is_given_to_cublaslt_where_it_is_read(c: float | None, beta: float, reads: bool) -> None:
    """Where its factor is 0, or where there is none, the result stands in its place."""
    more = {} if c is None else {"c": np.full((3, 4), c, "float32")}
    check(Epilog.DEFAULT, arrays_for(Epilog.DEFAULT, **more), beta=beta)
    assert (stand_in().count("last_c") != stand_in().count("last_d")) is reads


def test_programs_are_planned_for_addresses_of_16_bytes_or_for_the_steps_of_the_bias() -> None:
    run_example()
    check(Epilog.BIAS, arrays_for(Epilog.BIAS, (2,), b=normal(2, 5, 3), bias=normal(2, 1, 3)))
    assert plans().alignments == [16, 4]


# How often -----------------------------------------------------------------------------------------------------------


def compiled_example() -> tuple[Any, list[Array], Array]:
    """Return a compiled product, its operands and its value."""
    arrays, expected = example()
    operands = [jax.numpy.asarray(x) for x in arrays.values()]
    return jax.jit(call_of(problem_for("RELU_BIAS", **arrays))).lower(*operands).compile(), operands, expected


def test_an_executable_instantiates_once_and_later_runs_plan_nothing(planner: Planner) -> None:
    before = counters()
    compiled, operands, expected = compiled_example()
    assert (since(before)["instantiations"], since(before)["holders"], len(plans().made)) == (1, 1, 1)
    planner.forget()
    jax.clear_caches()
    gc.collect()
    outs = [compiled(*operands)[0] for _ in range(1000)]
    np.testing.assert_allclose(outs[-1], expected, rtol=1e-5)
    after = since(before)
    assert (after["instantiations"], after["executions"], len(plans().made)) == (1, 1000, 1)


def test_a_loop_instantiates_once() -> None:
    a = normal(4, 4)
    call = call_of(problem_for(a=a, b=a), alpha=0.5)
    before = counters()
    out = jax.jit(lambda x: jax.lax.scan(lambda c, _: (call(c, x)[0], None), x, length=10)[0])(a)
    assert (since(before)["instantiations"], since(before)["executions"]) == (1, 10)
    np.testing.assert_allclose(out, np.linalg.matrix_power(a / 2, 10) @ a, rtol=1e-3, atol=1e-5)


def test_equal_calls_are_planned_once_and_others_apart() -> None:
    arrays, _ = example()
    problem = problem_for("RELU_BIAS", **arrays)
    for alpha in (1.0, 2.0, 1.0):
        jax.jit(call_of(problem, alpha)).lower(*arrays.values()).compile()
    assert len(plans().made) == 2


def test_a_state_goes_with_the_last_that_holds_it(planner: Planner) -> None:
    start = counters()
    compiled, operands, _ = compiled_example()
    planner.forget()
    assert (since(start)["live_states"], since(start)["holders"]) == (1, 1)
    compiled(*operands)[0].block_until_ready()
    descriptors = stand_in().count("live_descriptors")
    del compiled
    jax.clear_caches()
    gc.collect()
    assert (since(start)["live_states"], since(start)["holders"]) == (0, 0)
    assert stand_in().count("live_descriptors") == descriptors - 1


def test_a_planner_keeps_a_bounded_number_of_states(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "STATES_KEPT", 4)
    start = counters()["live_states"]
    arrays, _ = example()
    problem = problem_for("RELU_BIAS", **arrays)
    for alpha in range(9):
        jax.jit(call_of(problem, float(alpha))).lower(*arrays.values()).compile()
    jax.clear_caches()
    gc.collect()
    assert 0 < counters()["live_states"] - start <= 4


# Errors --------------------------------------------------------------------------------------------------------------


def failing(call: Callable[..., Any], *operands: Array) -> str:
    """Return the message of a call that fails, and see that the next one works."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(call)(*operands))
    stand_in().reset()
    plans().before = lambda: None
    run_example(seed=1, m=7)
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("no such \u00e9pilog"), "INVALID_ARGUMENT"),
        (RuntimeError("no algorithm"), "INTERNAL"),
        (MemoryError("full"), "RESOURCE_EXHAUSTED"),
        (KeyboardInterrupt(), "CANCELLED"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_what_planning_raises_is_the_error_of_the_program(error: BaseException, code: str) -> None:
    def fails() -> None:
        raise error

    arrays, _ = example()
    plans().before = fails
    message = failing(call_of(problem_for("RELU_BIAS", **arrays)), *arrays.values())
    assert message.startswith(f"{code}: fusedops: {type(error).__name__}: {error}")


def test_a_long_message_is_cut_between_letters() -> None:
    def fails() -> None:
        raise ValueError("\u00e9" * 9999)

    arrays, _ = example()
    plans().before = fails
    assert "\u00e9" * 2000 in failing(call_of(problem_for("RELU_BIAS", **arrays)), *arrays.values())


def test_a_text_that_says_no_product_is_refused() -> None:
    arrays, _ = example()
    message = failing(call_of(problem_for("RELU_BIAS", **arrays), text="[]"), *arrays.values())
    assert message.startswith("INVALID_ARGUMENT: fusedops: ValueError: the call's text says no product")


OTHERS: dict[str, tuple[Callable[[list[Array]], list[Array]], str]] = {
    "fewer rows": (lambda xs: [xs[0][:2], *xs[1:]], "operand 0 (a) has 40 bytes, expected 60: "),
    "half as wide": (lambda xs: [xs[0], xs[1].astype("float16"), xs[2]], "operand 1 (b) has 40 bytes, expected 80: "),
    "no floats": (lambda xs: [*xs[:2], xs[2].astype("int32")], "operand 2 (bias) has -1 bytes, expected 16: "),
    "one too few": (lambda xs: xs[:2], "the call has 2 operands, expected 3 by {"),
    "one too many": (lambda xs: [*xs, xs[2]], "the call has 4 operands, expected 3 by {"),
}


@pytest.mark.parametrize(("change", "said"), OTHERS.values(), ids=OTHERS)
def test_a_call_with_other_operands_than_it_was_made_for_is_refused(
    change: Callable[[list[Array]], list[Array]], said: str
) -> None:
    arrays, _ = example()
    message = failing(call_of(problem_for("RELU_BIAS", **arrays)), *change(list(arrays.values())))
    assert f"INVALID_ARGUMENT: fusedops: {said}" in message
    assert '"epilog":"RELU_BIAS"' in message


@pytest.mark.parametrize(
    ("status", "named"), [(15, "CUBLAS_STATUS_NOT_SUPPORTED (15)"), (99, "a status without a name (99)")]
)
def test_what_cublaslt_answers_is_named(status: int, named: str) -> None:
    arrays, _ = example()
    stand_in().set("fail", status)
    message = failing(call_of(problem_for("RELU_BIAS", **arrays)), *arrays.values())
    assert f"INTERNAL: fusedops: cuBLASLt answered {named} on device 0 to {{" in message


def test_without_a_planner_what_to_call_is_named() -> None:
    shared = handler.handler_object()
    shared.handler_serve(False, handler._Provider(), None)
    arrays, _ = example()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"FAILED_PRECONDITION: fusedops: .* fusedops\.xla\.ensure_registered"
    ):
        jax.jit(call_of(problem_for("RELU_BIAS", **arrays)))(*arrays.values())
    serve()
    run_example()


# Threads -------------------------------------------------------------------------------------------------------------


def test_many_threads_compile_and_run_at_once() -> None:
    before = counters()
    together = threading.Barrier(8)

    def work(thread: int) -> None:
        together.wait(timeout=30)
        for i in range(4):
            run_example(seed=8 * i + thread, m=2 + i)  # equal problems in all threads, each with its own bias

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert since(before)["executions"] == 32
    assert since(before)["in_flight"] == 0


def test_many_threads_run_one_executable() -> None:
    arrays, _ = example(m=64)
    call = jax.jit(call_of(problem_for("RELU_BIAS", **arrays)))

    def work(thread: int) -> None:
        own, expected = example(m=64, seed=thread)
        operands = [jax.numpy.asarray(x) for x in own.values()]
        for _ in range(50):
            np.testing.assert_allclose(call(*operands)[0], expected, rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(plans().made) == 1


# Registering ---------------------------------------------------------------------------------------------------------


def test_registering_happens_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(handler, "_outcome", [])
    monkeypatch.setattr(handler, "_register_cuda", lambda: asked.append(1) or "no way")  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: handler.ensure_registered(), range(16))) == {"no way"}
    assert asked == [1]


def test_a_reason_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_outcome", ["there is no compiler. Install one."])
    monkeypatch.setattr(handler, "_unwarned", [True])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert {handler.reason_or_warn() for _ in range(3)} == {"there is no compiler. Install one."}
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert "unfused on CUDA: there is no compiler. Install one." in str(warning.message)


@pytest.mark.parametrize(("visible", "ordinal"), [("all", 0), ("2,3", 2), ("1", 1)])
def test_programs_are_planned_on_the_first_device_that_jax_may_use(visible: str, ordinal: int) -> None:
    before = jax.config.values["jax_cuda_visible_devices"]
    jax.config.update("jax_cuda_visible_devices", visible)
    try:
        assert handler._first_ordinal() == ordinal
    finally:
        jax.config.update("jax_cuda_visible_devices", before)


def test_the_names_and_places_are_those_of_the_c_source() -> None:
    source = (SOURCES / "handler.c").read_text()
    (slots,) = re.findall(r"enum \{ (A, .*?), SLOTS \};", source)
    places = [getattr(handler, f"_{name}") for name in slots.split(", ")]
    assert places == list(range(len(places)))
    given = {epilog.takes.name for epilog in Epilog if epilog.takes} | {e.gives.name for e in Epilog if e.gives}
    assert given | {"a", "b", "bias", "c", "out", "workspace"} == set(handler._SLOTS)
    sums = {e.gives.name for e in Epilog if e.gives and e.gives.format.startswith("sum")}
    assert {name for name, slot in handler._SLOTS.items() if slot == handler._BIAS} == sums | {"bias"}
