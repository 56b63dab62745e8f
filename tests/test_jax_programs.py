"""Programs that travel: exported, compiled ahead of time, kept on disk, run by another process.

What is tested in one process runs once more with every product a custom call, in ``test_jax_custom_call.py``; where
another process is needed, it is started for either lowering.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import ACTIVATIONS, assert_same, compiled

import fusedops
import fusedops.xla

Array = Any
Arrays = tuple[Array, ...]
Function = Callable[..., Any]

TESTS = Path(__file__).parent
TARGET = "fusedops_matmul"
SECONDS = 120

TRACED = "/jax/core/compile/jaxpr_trace_duration"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


def two_layers(x: Array, w1: Array, b1: Array, w2: Array) -> Array:
    """Return two products, each with an epilog of its own."""
    hidden = fusedops.matmul(x, w1, bias=b1, activation="gelu_tanh")
    return fusedops.matmul(hidden, w2, transpose_b=True, activation="relu", alpha=0.5)


def two_layers_of_jax(x: Array, w1: Array, b1: Array, w2: Array) -> Array:
    return ACTIVATIONS["relu"](0.5 * (ACTIVATIONS["gelu_tanh"](x @ w1 + b1) @ w2.mT))


def arrays(rows: int = 6) -> Arrays:
    """Return operands in float32, which every process has."""
    rng = np.random.default_rng(rows)
    return tuple(jnp.asarray(rng.standard_normal(s) * 0.5, "float32") for s in ((rows, 8), (8, 12), (12,), (5, 12)))


def gradients(f: Function) -> Function:
    return jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2, 3))


def calls_in(text: str) -> int:
    """Return how many custom calls a program has, before or after XLA compiled it."""
    return len(re.findall(rf'custom_call @{TARGET}\b|custom_call_target="{TARGET}"', text))


def exported(f: Function, *types: Any) -> Any:
    """Return what the bytes of an exported program hold."""
    program = jax.export.export(jax.jit(f), platforms=("cpu", "cuda"), disabled_checks=fusedops.xla.EXPORT_CHECKS)(
        *types
    )
    return jax.export.deserialize(program.serialize(vjp_order=1))


# Exported -------------------------------------------------------------------------------------------------------------


def test_one_export_is_for_cuda_and_for_the_cpu() -> None:
    program = exported(two_layers, *arrays())
    assert program.platforms == ("cpu", "cuda")
    assert calls_in(program.mlir_module()) >= 2
    assert_same(program.call(*arrays()), two_layers_of_jax(*arrays()), rtol=1e-5)
    assert_same(gradients(program.call)(*arrays()), gradients(two_layers_of_jax)(*arrays()), rtol=1e-5)


def test_without_the_checks_the_custom_call_is_named() -> None:
    """What `EXPORT_CHECKS` is for."""
    with pytest.raises(ValueError, match=TARGET):
        jax.export.export(jax.jit(two_layers), platforms=("cuda",))(*arrays())


SYMBOLS = {
    "rows": ("r, 8; 8, 12; 12; 5, 12", {}),
    "every extent": ("r, k; k, n; n; p, n", {}),
    "a difference": ("r - 1, 8; 8, 12; 12; 5, 12", {}),
    "a batch": ("s, r, k; k, n; n; 5, n", {}),
    "a batch of everything": ("s, r, k; s, k, n; s, 1, n; s, 5, n", {}),
    "two batch axes": ("s, 3, r, 8; 8, 12; 12; 5, 12", {}),
    "rows, mapped": ("r, 8; v, 8, 12; v, 12; 5, 12", {"in_axes": (None, 0, 0, None)}),
}
"""Shapes of the operands, and over which of their axes the function is mapped."""


def symbolic(shapes: str) -> list[Any]:
    """Return the types of arrays whose extents may be symbols."""
    scope = jax.export.SymbolicScope()
    return [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), "float32") for shape in shapes.split(";")
    ]


def drawn(types: list[Any], **extents: int) -> Arrays:
    """Return random arrays of shapes whose symbols have these values."""
    rng = np.random.default_rng(list(extents.values()))
    shapes = [[int(eval(str(extent), {}, extents)) for extent in t.shape] for t in types]
    return tuple(jnp.asarray(rng.standard_normal(shape) * 0.5, "float32") for shape in shapes)


@pytest.mark.parametrize(("symbols", "mapped"), SYMBOLS.values(), ids=SYMBOLS)
def test_extents_that_are_symbols_are_lowered_unfused(symbols: str, mapped: dict[str, Any]) -> None:
    types = symbolic(symbols)
    ours, theirs = (jax.vmap(f, **mapped) if mapped else f for f in (two_layers, two_layers_of_jax))
    program = exported(ours, *types)
    assert calls_in(program.mlir_module()) == calls_in(program.vjp().mlir_module()) == 0
    for r, k, n, p, s, v in ((3, 8, 12, 5, 2, 2), (1, 1, 1, 1, 1, 1)):
        own = drawn(types, r=r, k=k, n=n, p=p, s=s, v=v)
        got, want = (compiled(lambda *xs, f=f: (f(*xs), gradients(f)(*xs)), *own) for f in (program.call, theirs))
        assert_same(got, want, rtol=1e-5, what=f"{r=}, {k=}, {n=}")


def test_residuals_of_symbolic_extents() -> None:
    """Their rows are padded to a multiple that is a symbol too."""

    def there_and_back(x: Array, w: Array, dout: Array, w2: Array) -> Any:
        _, saved = fusedops.epilog_matmul(x, w, epilog="GELU_AUX")
        return fusedops.epilog_matmul(dout, w2, transpose_b=True, epilog="DGELU_BGRAD", **saved)

    def of_jax(x: Array, w: Array, dout: Array, w2: Array) -> Any:
        (dpreact,) = jax.vjp(ACTIVATIONS["gelu_tanh"], x @ w)[1](dout @ w2.T)
        return dpreact, {"dgelu_bgrad": jnp.sum(dpreact, 0)}

    types = symbolic("m, k; k, n; m, p; n, p")
    program = exported(there_and_back, *types)
    for m, n in ((3, 9), (1, 1)):
        own = drawn(types, m=m, k=4, n=n, p=5)
        assert_same(program.call(*own), of_jax(*own), rtol=1e-5, what=f"{m=}, {n=}")


# Ahead of time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda f: f, gradients], ids=["value", "gradients"])
def test_a_program_compiled_ahead_of_time_is_not_traced_again(transform: Any, events: Counter[str]) -> None:
    program = jax.jit(transform(two_layers)).lower(*arrays()).compile()
    assert events[TRACED] >= 1
    events.clear()
    got = jax.block_until_ready([program(*arrays()) for _ in range(3)])
    assert not {TRACED, LOWERED} & set(events), events
    assert_same(got, [transform(two_layers_of_jax)(*arrays())] * 3, rtol=1e-5)


def test_donated_weights_are_updated_in_place() -> None:
    """A step of gradient descent: memory of a donated weight is that of the new one."""

    def step(f: Function) -> Function:
        def updated(x: Array, w1: Array, b1: Array, w2: Array) -> Any:
            _, *slopes = gradients(f)(x, w1, b1, w2)
            return [w - 0.1 * slope for w, slope in zip((w1, b1, w2), slopes, strict=True)]

        return updated

    want = step(two_layers_of_jax)(*arrays())
    x, *weights = map(jnp.copy, arrays())
    places = [w.unsafe_buffer_pointer() for w in weights]
    got = jax.jit(step(two_layers), donate_argnums=(1, 2, 3))(x, *weights)
    assert [w.is_deleted() for w in weights] == [True] * 3
    assert [w.unsafe_buffer_pointer() for w in got] == places
    assert_same(got, want, rtol=1e-5)


def chain(x: Array, weights: list[Array], biases: list[Array]) -> Array:
    for w, b in zip(weights, biases, strict=True):
        x = fusedops.matmul(x, w, bias=b, activation="gelu_tanh")
    return jnp.sum(x)


STEPS = ("unfused.py", "local.py")
"""Where a product is made of operations of JAX or a call: these run while it is traced."""


UNSEEN = count(start=100)
"""Extents that nothing was traced for yet."""


def steps_in(run: Callable[[], Any]) -> int:
    """Return how many functions of these files a function calls, itself or by others."""
    calls = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        path = Path(frame.f_code.co_filename)
        calls += event == "call" and path.name in STEPS and path.parent.name == "xla"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(f, (1, 2))], ids=["value", "gradients"])
def test_equal_layers_are_traced_once(transform: Any, platform: str) -> None:
    """However deep a model is: its products, what they lower to, and their backward pass."""

    def steps_for(depth: int) -> int:
        d = next(UNSEEN)
        layers = jnp.ones((4, d)), [jnp.ones((d, d))] * depth, [jnp.ones(d)] * depth
        program = jax.jit(transform(chain))
        return steps_in(lambda: program.trace(*layers).lower(lowering_platforms=(platform,)))

    assert steps_for(24) == steps_for(3) > 0


# In another process ---------------------------------------------------------------------------------------------------

LOWERINGS = {"own operations": "", "custom call": "import xla_on_cpu"}
"""What a process does first."""

COMMON = """
import sys
from pathlib import Path
import jax
import numpy as np
"""

PROGRAM = """
import fusedops.xla
from test_jax_programs import *

def value_and_gradients(f):
    return jax.jit(lambda *xs: (f(*xs), *gradients(f)(*xs)))
"""


def output_of(code: str, lowering: str, *arguments: str, **more: str) -> list[str]:
    """Return the lines that a process prints which must succeed."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    source = "\n".join((LOWERINGS[lowering], COMMON, textwrap.dedent(code)))
    command = [sys.executable, "-c", source, *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.fixture(params=LOWERINGS)
def lowering(request: pytest.FixtureRequest) -> str:
    """How products are lowered for the CPU in the other processes."""
    if request.param == "custom call":
        pytest.importorskip("nvmath")
        if not sys.platform.startswith("linux"):
            pytest.skip("native code is compiled on Linux alone")
    return request.param


EXPORTS = f"""
{PROGRAM}
program = jax.export.export(jax.jit(two_layers), platforms=("cpu", "cuda"), disabled_checks=fusedops.xla.EXPORT_CHECKS)
Path(sys.argv[1]).write_bytes(program(*arrays()).serialize(vjp_order=2))
"""

RUNS = """
program = jax.export.deserialize(bytearray(Path(sys.argv[1]).read_bytes()))
given = [np.load(f"{sys.argv[1]}{i}.npy") for i in range(4)]
total = lambda *xs: jax.numpy.sum(jax.numpy.sin(program.call(*xs)))
slopes = lambda *xs: jax.grad(total, (0, 1, 2, 3))(*xs)
curved = jax.grad(lambda *xs: sum(jax.numpy.sum(jax.numpy.cos(x)) for x in slopes(*xs)), (0, 1, 2, 3))
for i, x in enumerate([program.call(*given), *slopes(*given), *curved(*given)]):
    np.save(f"{sys.argv[1]}-{i}.npy", x)
if len(sys.argv) > 2:
    from fusedops.xla import counters
    print(counters()["executions"])
else:
    print("fusedops" in sys.modules)
"""


def test_an_exported_program_runs_in_another_process(lowering: str, tmp_path: Path) -> None:
    """Value, gradients and gradients of these; where it holds operations of JAX, without this package."""
    path = str(tmp_path / "program")
    output_of(EXPORTS, lowering, path)
    for i, x in enumerate(arrays()):
        np.save(f"{path}{i}.npy", x)
    is_call = lowering == "custom call"
    (printed,) = output_of(RUNS, lowering, path, *["counted"] * is_call)
    assert int(printed) >= 2 + 6 if is_call else printed == "False"

    def curved(*xs: Array) -> Array:
        return sum(jnp.sum(jnp.cos(x)) for x in gradients(two_layers_of_jax)(*xs))

    want = [two_layers_of_jax(*arrays()), *gradients(two_layers_of_jax)(*arrays())]
    want += jax.grad(curved, (0, 1, 2, 3))(*arrays())
    assert_same([np.load(f"{path}-{i}.npy") for i in range(len(want))], list(map(np.asarray, want)), rtol=1e-4)


CACHED = f"""
{PROGRAM}
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name.rpartition("/")[2]))
for activation in sys.argv[1].split():
    f = value_and_gradients(lambda x, w, b, _: fusedops.matmul(x, w, bias=b, activation=activation))
    theirs = value_and_gradients(lambda x, w, b, _: ACTIVATIONS[activation](x @ w + b))
    program = f.lower(*arrays())
    before = fusedops.xla.counters()["instantiations"]
    found.clear()
    program = program.compile()
    planned = fusedops.xla.counters()["instantiations"] - before
    print(found.count("cache_hits"), found.count("cache_misses"), planned)
    assert_same(program(*arrays()), theirs(*arrays()), rtol=1e-5, what=activation)
"""


def test_a_compiled_program_is_found_on_disk_by_another_process(lowering: str, tmp_path: Path) -> None:
    """Programs that differ in their epilog alone are not taken for each other, and each call is planned anew."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    relu, gelu = (3, 4) if lowering == "custom call" else (0, 0)  # gelu_tanh has another forward product to save by
    assert output_of(CACHED, lowering, "relu", **settings) == [f"0 1 {relu}"]
    assert output_of(CACHED, lowering, "relu gelu_tanh", **settings) == [f"1 0 {relu}", f"0 1 {gelu}"]


TEXTS = f"""
{PROGRAM}
for _ in range(int(sys.argv[1])):  # what a process did before leaves no trace
    value_and_gradients(two_layers)(*arrays(rows=9))
traced = value_and_gradients(two_layers).trace(*arrays())
print(traced.lower(lowering_platforms=("cpu", "cuda")).as_text())
"""


def test_a_program_has_the_same_text_in_another_process(lowering: str) -> None:
    texts = [output_of(TEXTS, lowering, str(i), PYTHONHASHSEED=str(i)) for i in range(2)]
    assert calls_in("\n".join(texts[0])) >= 2
    assert texts[0] == texts[1]


IN_PLACE = f"""
{PROGRAM}
x, w, many, weights = (jnp.zeros(shape, "float32") for shape in ((6, 8), (8, 12), (3, 6, 8), (3, 8, 12)))
x_t, w_t, weights_t = x.T.copy(), w.T.copy(), weights.mT.copy()

def product(*flags):
    return lambda x, w: fusedops.matmul(x, w, **dict.fromkeys(flags, True))

def slopes(*flags):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(product(*flags)(x, w))), (0, 1))

programs = {{
    "transpose_a": (product("transpose_a"), x_t, w),
    "transpose_b": (product("transpose_b"), x, w_t),
    "both": (product("transpose_a", "transpose_b"), x_t, w_t),
    "gradients": (slopes(), x, w),
    "gradients of transpose_a": (slopes("transpose_a"), x_t, w),
    "gradients of transpose_b": (slopes("transpose_b"), x, w_t),
    "gradients of both": (slopes("transpose_a", "transpose_b"), x_t, w_t),
    "gradients of a batch": (slopes(), many, w),
    "gradients of a batch, transpose_b": (slopes("transpose_b"), many, w_t),
    "a weight for each item": (jax.vmap(product()), many, weights),
    "gradients of each item, transpose_b": (jax.vmap(slopes("transpose_b")), many, weights_t),
    "transposed by JAX": (lambda x, w: fusedops.matmul(x.T, w), x_t, w),
}}
for name, (f, *operands) in programs.items():
    text = jax.jit(f).lower(*operands).compile().as_text()
    moves = set(re.findall(r" (copy|transpose)\\(", text))
    print(f"{{name}}: {{calls_in(text)}} calls", *sorted(moves), sep=", ")
"""


@pytest.mark.parametrize("lowering", ["custom call"], indirect=True)
def test_arrays_are_read_and_written_in_place_in_another_process(lowering: str) -> None:
    """Whatever is transposed: operands where they lie, each gradient in the order of what it is the gradient of."""
    assert output_of(IN_PLACE, lowering) == [
        "transpose_a: 1 calls",
        "transpose_b: 1 calls",
        "both: 1 calls",
        "gradients: 3 calls",
        "gradients of transpose_a: 3 calls",
        "gradients of transpose_b: 3 calls",
        "gradients of both: 3 calls",
        "gradients of a batch: 3 calls",
        "gradients of a batch, transpose_b: 3 calls",
        "a weight for each item: 1 calls",
        "gradients of each item, transpose_b: 3 calls",
        "transposed by JAX: 1 calls, copy, transpose",
    ]
