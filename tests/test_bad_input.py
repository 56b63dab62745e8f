"""What a caller may do wrong: the error is built-in, names op and argument, says what to do, and harms nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from bad_input_cases import FAULTS, STRIDED, TRACED, VALID, Arguments, Fault, made, of, values
from frameworks import FRAMEWORKS, TORCH, TestFramework

import fusedops
from fusedops.testing import to_numpy

POSITIONAL = {"mlp": ("x", "w1", "w2"), "mlp_grad": ("dout", "x", "w1", "w2"), "options": (), "options.set_default": ()}
FUNCTIONS = {op: getattr(fusedops, op) for op in VALID if op not in ("Plan", "options.set_default")}
FUNCTIONS["options.set_default"] = fusedops.options.set_default
NAMES = {"Plan": "plan", "options.set_default": "options"}
"""The names in messages, where they are not those of the table."""

# One call -------------------------------------------------------------------------------------------------------------


def called(function: Any, op: str, arguments: Arguments) -> Any:
    """Return what ``function`` gives for the arguments of ``op``, by position where it takes them so."""
    rest = dict(arguments)
    positional = [rest.pop(name) for name in POSITIONAL.get(op, ("a", "b"))]
    return function(*positional, **rest)


def traced(function: Any, op: str, arguments: Arguments) -> None:
    """Call with the arrays as tracers."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}

    def program(arrays: Arguments) -> None:
        called(function, op, {**arguments, **arrays})

    jax.eval_shape(program, arrays)


def of_framework(arguments: Arguments, framework: TestFramework) -> Arguments:
    """Return arguments with the arrays that the framework makes."""
    return {name: made(x, framework) for name, x in arguments.items()}


def arguments_of(op: str, fault: Fault, framework: TestFramework) -> Arguments:
    """Return the arguments of a faulty call."""
    given = fault.given(framework) if callable(fault.given) else fault.given
    planned = {name: x for name, x in fault.planned.items() if name != "epilog"}
    arguments = {**VALID[op], **planned, **given}
    if op == "epilog_matmul" and "bias" in given and "epilog" not in given:
        arguments["epilog"] = "BIAS"
    return of_framework(arguments, framework)


def function_of(op: str, fault: Fault, framework: TestFramework) -> Any:
    """Return what is called: the function, or a plan of the right arguments."""
    if op != "Plan":
        return FUNCTIONS[op]
    return called(fusedops.plan, "plan", of_framework({**VALID["plan"], **fault.planned}, framework))


# What a call must leave as it was -------------------------------------------------------------------------------------


def bits(x: Any) -> Any:
    """Return all bits of an argument, and of what it holds; for what has none, the object itself."""
    if isinstance(x, (dict, tuple)):
        return [bits(item) for item in (x.values() if isinstance(x, dict) else x)]
    if type(x) is torch.Tensor and x.is_nested:
        return [bits(item) for item in x.unbind()]
    if type(x) is torch.Tensor and not x.is_meta:
        return x.detach().to_dense().resolve_neg().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()
    if isinstance(x, torch.Tensor) or (isinstance(x, jax.Array) and x.is_deleted()):
        return x
    is_array = isinstance(x, np.ndarray) or hasattr(x, "__array_namespace__") or hasattr(x, "__cuda_array_interface__")
    return to_numpy(x).tobytes() if is_array else x


def assert_same(before: Any, after: Any) -> None:
    """Raise unless two results of `bits` are equal."""
    if isinstance(before, list):
        for x, y in zip(before, after, strict=True):
            assert_same(x, y)
    elif isinstance(before, bytes):
        assert before == after, "an array was changed"
    else:
        assert before is after


def assert_error(error: Exception, kind: type[Exception], start: str, text: str) -> None:
    """Raise unless an error has just this type, names its op once and first, and holds the pieces of ``text``."""
    message = str(error)
    assert type(error) is kind, f"{type(error).__name__}: {message}"
    assert message.startswith(start), message
    assert not re.search(r"\b(matmul|epilog_matmul|plan|explain|mlp|mlp_grad|options): ", message[len(start) :]), (
        message
    )
    assert re.search(".*".join(map(re.escape, text.split(" ... "))), message, re.DOTALL), f"{text} is not in {message}"


def assert_fails(call: Any, kind: type[Exception], start: str, text: str) -> None:
    """Raise unless a call fails as it should."""
    try:
        call()
    except Exception as error:
        assert_error(error, kind, start, text)
    else:
        pytest.fail(f"no error, expected {start}{text}")


# The table ------------------------------------------------------------------------------------------------------------


def check(op: str, fault: Fault, framework: TestFramework) -> None:
    """Raise unless one call answers as the table says, twice, and every argument keeps its bits."""
    function = function_of(op, fault, framework)
    arguments, answer = arguments_of(op, fault, framework), fault.answer(framework)
    call = partial(traced if framework is TRACED else called, function, op, arguments)
    start = f"{NAMES.get(op, op)}{f', {fault.part}' if fault.part else ''}: "
    before = bits(arguments)
    with fault.within():
        if answer is None:
            call()
        else:
            assert_fails(call, answer[0], start, answer[1])
            assert_fails(call, answer[0], start, answer[1])
    assert_same(before, bits(arguments))


@pytest.fixture(scope="module", autouse=True)
def _whole_tracebacks() -> Iterator[None]:
    """Keep JAX from looking at every frame of every error, which takes longer than the calls."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


RUNS = [
    pytest.param(fault, framework, id=f"{fault.label}-{'+'.join(fault.ops.split())}-{framework.name}")
    for fault in FAULTS
    for framework in fault.on
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("fault", "framework"), RUNS)
def test_fault(fault: Fault, framework: TestFramework) -> None:
    """Every function of a row answers as the row says."""
    for op in fault.ops.split():
        check(op, fault, framework)


@pytest.mark.parametrize("op", [op for op in VALID if not op.startswith("options")])
@pytest.mark.parametrize("framework", [*FRAMEWORKS, TRACED], ids=str)
def test_the_valid_call_is_valid(op: str, framework: TestFramework) -> None:
    """Otherwise its rows would see the fault of another argument."""
    check(op, Fault(op, "", Exception, "", {}, (framework,), {framework: None}, {}, "", FAULTS[0].within), framework)


def test_rows_are_unique() -> None:
    """A row of the name of another would be one of them for whoever reads the report."""
    runs = [(op, fault.label, framework.name) for fault in FAULTS for op in fault.ops.split() for framework in fault.on]
    assert len(set(runs)) == len(runs)


# What a table cannot hold ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
@pytest.mark.parametrize(
    ("given", "alike"),
    [
        ({"transpose_a": True}, {"transpose_a": 1}),
        ({"transpose_b": False}, {"transpose_b": 0}),
        ({"deterministic": True}, {"deterministic": 1}),
    ],
    ids=str,
)
def test_a_cached_plan_lets_no_fault_through(framework: TestFramework, given: Arguments, alike: Arguments) -> None:
    """What compares equal to a right argument is refused after the right call too."""
    (name,) = given
    arguments = of_framework({"a": of(5, 5), "b": of(5, 5)}, framework)
    fusedops.matmul(*arguments.values(), **given)
    call = partial(fusedops.matmul, *arguments.values(), **alike)
    assert_fails(call, TypeError, "matmul: ", f"{name} is {alike[name]}, expected")


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
def test_a_freed_plan(framework: TestFramework) -> None:
    """It is not called and explained again; freeing it again is nothing."""
    arguments = of_framework(VALID["plan"], framework)
    with called(fusedops.plan, "plan", arguments) as plan:
        called(plan, "plan", arguments)
    plan.free()
    for call in (partial(called, plan, "plan", arguments), plan.explain):
        assert_fails(call, RuntimeError, "plan: ", "the plan was freed. Make a new one")


@pytest.mark.parametrize("framework", STRIDED, ids=str)
@pytest.mark.parametrize("name", ["a", "c", "bias"])
def test_out_between_the_rows_of_an_operand_is_written(framework: TestFramework, name: str) -> None:
    """Arrays that take turns in one buffer share no element."""
    buffer = framework.make(values(8, 16))
    operand = {"a": buffer[::2, :5], "c": buffer[::2, :6], "bias": buffer[0, :6]}[name]
    out = buffer[1::2, :6] if name != "c" else buffer[::2, 6:12]
    arguments = {**of_framework(VALID["matmul"], framework), name: operand}
    want, before = to_numpy(called(fusedops.matmul, "matmul", arguments)), bits(arguments)
    assert called(fusedops.matmul, "matmul", {**arguments, "out": out}) is out
    assert np.array_equal(to_numpy(out), want)
    assert_same(before, bits(arguments))


def test_out_under_no_grad_is_written() -> None:
    """What the message of a lost gradient offers."""
    arguments = of_framework(VALID["matmul"], TORCH)
    want, out = called(fusedops.matmul, "matmul", arguments), torch.zeros(4, 6)
    arguments["b"].requires_grad_()
    with torch.no_grad():
        assert called(fusedops.matmul, "matmul", {**arguments, "out": out}) is out
    assert torch.equal(out, want)


def test_a_call_on_meta_tensors_computes_nothing() -> None:
    """They have no address, which no product may be given."""
    a, b, out = torch.empty(4, 5, device="meta"), torch.empty(5, 6, device="meta"), torch.empty(4, 6, device="meta")
    assert fusedops.matmul(a, b).is_meta
    assert fusedops.matmul(a, b, out=out) is out


def test_options_are_as_they_were_after_a_fault() -> None:
    """A value that no option has changes nothing."""
    with pytest.raises(ValueError, match="mixed"):
        fusedops.options.set_default(mixed="no")
    assert fusedops.options.current().mixed == "lead"


# What is not installed ------------------------------------------------------------------------------------------------

WITHOUT = """
    import sys
    from importlib.machinery import PathFinder

    class Without(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] == "{missing}" else super().find_spec(name, path, target)

    sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
    sys.path[:0] = {path}
"""


def printed_without(missing: str, code: str) -> str:
    """Return what a new interpreter prints that cannot import a library."""
    head = WITHOUT.format(missing=missing, path=[path for path in sys.path if path])
    code = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def test_cuda_arrays_without_nvmath() -> None:
    """The message holds the command that installs it, for arrays that only say that they are on a GPU."""
    code = """
        import numpy as np, fusedops
        from producers import Producer

        a, b, out = (Producer(np.zeros(64, "float32"), (8, 8), device=(2, 0)) for _ in range(3))
        for op, given in ((fusedops.matmul, {}), (fusedops.epilog_matmul, {"epilog": "RELU"}), (fusedops.plan, {})):
            try:
                op(a, b, out=out, **given)
            except Exception as error:
                print(type(error).__name__, error)
    """
    lines = printed_without("nvmath", code).splitlines()
    for op, line in zip(("matmul", "epilog_matmul", "plan"), lines, strict=True):
        assert line.startswith(f"ImportError {op}: CUDA arrays need nvmath-python")
        assert line.endswith(": pip install 'fusedops[cuda12]' (on CUDA 13: 'fusedops[cuda13]').")


def test_bfloat16_without_ml_dtypes() -> None:
    """A producer of bfloat16, which NumPy computes for."""
    code = """
        import numpy as np, fusedops
        from producers import Producer

        a, b, out = (Producer(np.zeros(16, "uint16"), (4, 4), code=4) for _ in range(3))
        try:
            fusedops.matmul(a, b, out=out)
        except Exception as error:
            print(type(error).__name__, error)
    """
    text = "bfloat16 in NumPy arrays needs ml_dtypes: pip install ml_dtypes."
    assert printed_without("ml_dtypes", code) == f"ImportError matmul: {text}\n"
