"""The text of a custom call says exactly its problem, in one spelling, and nothing of where it was written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_column_form import Call, calls

from fusedops import Epilog
from fusedops.arrays import ArraySpec, Device
from fusedops.column_form import WORKSPACE_LIMIT, WORKSPACE_SPARE
from fusedops.problem import Problem, Settings, make_problem
from fusedops.xla.problem_text import buffers_of, problem_of, text_of

CUDA = Device("cuda", 3)


def moved(problem: Problem, device: Device) -> Problem:
    """Return a problem on another device."""

    def of(spec: ArraySpec | None) -> Any:
        return spec and replace(spec, device=device)

    parts = {name: of(getattr(problem, name)) for name in ("out_spec", "aux_spec", "aux_in_spec")}
    return replace(problem, device=device, **parts)


def dense_problem(epilog: str = "DEFAULT", batch: tuple[int, ...] = (), dtype: str = "float16", **more: Any) -> Problem:
    """Return a problem of dense arrays ``(batch, 6, 5)`` and ``(5, 4)``."""
    shapes = {"a": (*batch, 6, 5), "b": (5, 4), **more.pop("shapes", {})}
    specs: dict[str, ArraySpec | None] = {
        name: ArraySpec.dense(shape, "uint8" if name == "relu_aux" else more.get("out_dtype", dtype), Device("xla"))
        for name, shape in shapes.items()
    }
    for name in "ab":
        specs[name] = ArraySpec.dense(shapes[name], dtype, Device("xla"))
    return make_problem(Settings(Epilog[epilog], None, **more), specs, None, None)


@given(calls(), st.sampled_from([None, "ieee", "tf32"]), st.sampled_from([None, False, True]))
@settings(max_examples=300, deadline=None)
def test_the_text_says_the_problem(call: Call, precision: str | None, deterministic: bool | None) -> None:
    problem = replace(call.problem, precision=precision, deterministic=deterministic)
    text = text_of(problem, call.alpha, call.beta)
    assert problem_of(text, CUDA) == (moved(problem, CUDA), call.alpha, call.beta)
    assert text_of(problem_of(text, CUDA)[0], call.alpha, call.beta) == text


@given(calls())
@settings(max_examples=100, deadline=None)
def test_an_operand_has_the_bytes_that_its_elements_reach(call: Call) -> None:
    assume(0 not in (call.problem.m, call.problem.n, call.problem.k, call.problem.batch_count))
    operands, results = buffers_of(call.problem)
    for name, size in operands:
        x = call.arrays["aux_in" if name in ("relu_aux", "gelu_aux") else name].array
        assert size == sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)) + x.itemsize
    assert results[0][0] == "out"
    assert results[-1] == ("workspace", WORKSPACE_LIMIT + WORKSPACE_SPARE)


@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.1, -3e-300), (float("inf"), 1e17)])
def test_the_factors_are_exact(factors: tuple[float, float]) -> None:
    assert problem_of(text_of(dense_problem(), *factors), CUDA)[1:] == factors


def test_the_text_is_content_alone_and_short() -> None:
    problem = dense_problem("RELU_BIAS", shapes={"bias": (4,)})
    texts = {text_of(moved(problem, device), 1, 1) for device in (Device("xla"), Device("cuda", 1))}
    assert texts == {text_of(problem, 1.0, 1.0)}
    (text,) = texts
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert len(text) < 256


def test_what_differs_has_another_text() -> None:
    problems = [
        dense_problem(),
        dense_problem(dtype="bfloat16"),
        dense_problem(out_dtype="float32"),
        dense_problem(deterministic=False),
        dense_problem(dtype="float32", precision="tf32"),
        dense_problem(dtype="float32", precision="ieee"),
        dense_problem("RELU"),
        dense_problem(batch=(1,)),
        dense_problem(shapes={"b": (4, 5)}, transpose_b=True),
    ]
    assert len({text_of(problem, 1.0, 1.0) for problem in problems}) == len(problems)


@pytest.mark.parametrize(
    ("epilog", "shapes", "operands", "results"),
    [
        ("DEFAULT", {"a": (3, 6, 5), "c": (6, 4)}, {"a": 180, "b": 40, "c": 48}, {"out": 144}),
        (
            "GELU_AUX_BIAS",
            {"b": (3, 5, 4), "bias": (3, 1, 4)},
            {"a": 60, "b": 120, "bias": 24},
            {"out": 144, "gelu_aux": 288},
        ),
        ("DRELU_BGRAD", {"relu_aux": (6, 16)}, {"a": 60, "b": 40, "relu_aux": 96}, {"out": 48, "drelu_bgrad": 8}),
        ("BGRADB", {}, {"a": 60, "b": 40}, {"out": 48, "bgradb": 8}),
    ],
)
def test_the_buffers_come_in_order_with_their_bytes(
    epilog: str, shapes: dict[str, Any], operands: dict[str, int], results: dict[str, int]
) -> None:
    found = buffers_of(dense_problem(epilog, shapes=shapes))
    workspace = WORKSPACE_LIMIT + WORKSPACE_SPARE
    assert found == (tuple(operands.items()), (*results.items(), ("workspace", workspace)))


def test_another_format_is_named() -> None:
    text = text_of(dense_problem(), 1.0, 1.0).replace('"format":1', '"format":2')
    with pytest.raises(ValueError, match=r"writes format 2, and this one reads 1"):
        problem_of(text, CUDA)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format":1}', '{"format":1,"epilog":"NONE"}'])
def test_what_is_no_product_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="says no product"):
        problem_of(text, CUDA)
