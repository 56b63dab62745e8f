"""JAX on a GPU: every product is the custom call, right against float64, with no Python in the loop."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import CASES, Case
from devices import JAX
from frameworks import np_dtype
from running import check

import fusedops
from fusedops import Epilog
from fusedops.activations import ACTIVATIONS
from fusedops.testing import assert_within, matmul_oracle, to_numpy
from fusedops.xla import counters

Array = Any

GPU = jax.devices("cuda")[0]
TARGET = "fusedops_matmul"


def on_gpu(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> Array:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape) * 0.5
    return jax.device_put(values.astype(np_dtype(dtype)), GPU)


def compiled_text(function: Callable[..., Any], *arrays: Array) -> str:
    """Return the program that XLA made of a function."""
    return str(jax.jit(function).lower(*arrays).compile().as_text())


def calls_in(text: str) -> int:
    return text.count(f'custom_call_target="{TARGET}"')


# Values --------------------------------------------------------------------------------------------------------------

FORWARD = [case for case in CASES if case.a == "row" and case.b in ("row", "flag")]


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_case(case: Case) -> None:
    """Result and auxiliary output are as near to float64 as their dtypes allow."""
    keeps_all_bits = {"precision": "ieee"} if case.dtype == "float32" and "precision" not in case.options else {}
    check(case, JAX, **keeps_all_bits)  # JAX's own way on a GPU is TF32


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients(dtype: str, activation: str | None) -> None:
    """Each gradient is at most twice as far from float64 as JAX's own."""
    x, w, b = on_gpu(48, 72, dtype=dtype), on_gpu(72, 40, dtype=dtype), on_gpu(40, dtype=dtype)
    dout = np.random.default_rng(1).standard_normal((48, 40))
    functions = {
        None: lambda z: z,
        "relu": jax.nn.relu,
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "gelu_erf": partial(jax.nn.gelu, approximate=False),
        "silu": jax.nn.silu,
    }

    def loss(f: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *arrays: jnp.sum(f(*arrays).astype("float32") * dout.astype("float32"))

    def own(x: Array, w: Array, b: Array) -> Array:
        return functions[activation](x @ w + b)

    def ours(x: Array, w: Array, b: Array) -> Array:
        return fusedops.matmul(x, w, bias=b, activation=activation)

    exact = jax.device_put([np.asarray(a, "float64") for a in (x, w, b)], jax.devices("cpu")[0])
    want = jax.grad(lambda *arrays: jnp.sum(own(*arrays) * dout), (0, 1, 2))(*exact)
    got = jax.jit(jax.grad(loss(ours), (0, 1, 2)))(x, w, b)
    theirs = jax.jit(jax.grad(loss(own), (0, 1, 2)))(x, w, b)
    eps = float(jnp.finfo(dtype).eps) if dtype != "float32" else 2.0**-11  # of TF32
    for name, right, mine, jaxs in zip(("x", "w", "b"), want, got, theirs, strict=True):
        error = np.abs(np.asarray(mine, "float64") - right).max()
        allowed = 2 * np.abs(np.asarray(jaxs, "float64") - right).max() + eps * np.abs(right).max()
        assert error <= allowed, (name, error, allowed)


@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh"])
def test_mlp_gradients(activation: str | None) -> None:
    """Two layers, their backward product carrying the activation's derivative."""
    arrays = [on_gpu(*shape, dtype="float16") for shape in ((32, 48), (48, 64), (64,), (64, 24), (24,))]
    act = {None: lambda z: z, "relu": jax.nn.relu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}[activation]

    def ours(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
        return fusedops.mlp(x, w1, w2, b1=b1, b2=b2, activation=activation).astype("float32").sum()

    def own(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
        return (act(x @ w1 + b1) @ w2 + b2).sum()

    exact = jax.device_put([np.asarray(a, "float64") for a in arrays], jax.devices("cpu")[0])
    want = jax.grad(own, (0, 1, 2, 3, 4))(*exact)
    got = jax.jit(jax.grad(ours, (0, 1, 2, 3, 4)))(*arrays)
    for right, mine in zip(want, got, strict=True):
        np.testing.assert_allclose(np.asarray(mine, "float64"), right, rtol=2e-2, atol=2e-2 * np.abs(right).max())
    text = compiled_text(jax.grad(ours, (0, 1, 2, 3, 4)), *arrays)
    assert calls_in(text) == 5  # the hidden layer; the result is not needed; w2, hidden, x, w1


def test_transforms() -> None:
    """A vmap of the gradient with an unbatched weight, forward over reverse, scan and while_loop, as JAX's own."""
    x, w, b = on_gpu(4, 16, 32, dtype="float16"), on_gpu(32, 24, dtype="float16"), on_gpu(24, dtype="float16")

    def ours(x: Array, w: Array, b: Array) -> Array:
        return fusedops.matmul(x, w, bias=b, activation="gelu_tanh").astype("float32").sum()

    def own(x: Array, w: Array, b: Array) -> Array:
        return jax.nn.gelu((x @ w + b).astype("float32"), approximate=True).sum()

    for transform in (
        lambda f: jax.vmap(jax.grad(f, (0, 1, 2)), (0, None, None)),
        lambda f: jax.vmap(lambda x, w, b: jax.jvp(jax.grad(f, (1, 2)), (x, w, b), (x, w, b))[1], (0, None, None)),
    ):
        got, want = (
            jax.jit(transform(ours))(x, w, b),
            transform(own)(*jax.tree.map(lambda v: v.astype("float32"), (x, w, b))),
        )
        for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            scale = float(jnp.abs(right).max())
            np.testing.assert_allclose(np.asarray(mine, "float32"), right, rtol=2e-2, atol=2e-2 * scale)


# No Python in the loop -----------------------------------------------------------------------------------------------


def test_a_loop_of_more_than_five_operations_runs_no_python() -> None:
    """A while_loop of 20 steps and a chain replayed 1000 times ask Python for no plan after they were compiled."""
    x, w, b = on_gpu(64, 64, dtype="float16"), on_gpu(64, 64, dtype="float16") * 0.1, on_gpu(64, dtype="float16")

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        i, x = state
        for _ in range(6):
            x = jnp.tanh(fusedops.matmul(x, w, bias=b, activation="relu"))
        return i + 1, x

    loop = jax.jit(lambda x: jax.lax.while_loop(lambda state: state[0] < 20, step, (0, x))[1])
    first = np.asarray(loop(x))
    before = counters()
    for _ in range(1000):
        last = loop(x)
    assert np.array_equal(np.asarray(last), first)
    after = counters()
    assert after["instantiations"] == before["instantiations"]

    want = jnp.asarray(x, "float32")
    for _ in range(20 * 6):
        want = jnp.tanh(jax.nn.relu(want @ w.astype("float32") + b.astype("float32")))
    np.testing.assert_allclose(np.asarray(last, "float32"), want, atol=2e-2)


def test_a_chain_is_captured_in_a_command_buffer() -> None:
    """Six calls in a row become a graph: later runs launch it, and do not execute the handler."""
    x, w, b = on_gpu(64, 64, dtype="float16"), on_gpu(64, 64, dtype="float16") * 0.1, on_gpu(64, dtype="float16")

    @jax.jit
    def chain(x: Array, w: Array, b: Array) -> Array:
        for _ in range(6):
            x = fusedops.matmul(x, w, bias=b, activation="relu")
        return x

    want = np.asarray(chain(x, w, b))
    for _ in range(20):
        chain(x, w, b)
    before = counters()["executions"]
    for _ in range(300):
        out = chain(x, w, b)
    assert np.array_equal(np.asarray(out), want)
    assert counters()["executions"] - before < 6 * 300 / 4


def test_no_memory_beyond_results_and_the_workspace() -> None:
    """The compiled program's temporary memory is the workspace limit; nothing is copied for a transposed operand."""
    x, w, b = on_gpu(4096, 1024), on_gpu(2048, 1024), on_gpu(2048)
    f = partial(fusedops.matmul, activation="relu", transpose_b=True)
    compiled = jax.jit(lambda x, w, b: f(x, w, bias=b)).lower(x, w, b).compile()
    text = compiled.as_text()
    assert calls_in(text) == 1
    assert " transpose(" not in text
    assert " copy(" not in text
    assert compiled.memory_analysis().temp_size_in_bytes <= (32 << 20) + 4096


def test_the_gradient_of_a_product_of_a_stored_transpose_copies_nothing() -> None:
    """``b`` stored ``(n, k)``, as other libraries keep weights: both gradients come in their operands' own layouts."""
    x, w, dout = (on_gpu(*shape, seed=i) for i, shape in enumerate(((256, 192), (128, 192), (256, 128))))

    def gradients(x: Array, w: Array, dout: Array) -> Any:
        return jax.vjp(partial(fusedops.matmul, transpose_b=True), x, w)[1](dout)

    text = compiled_text(gradients, x, w, dout)
    assert calls_in(text) == 2
    assert " transpose(" not in text
    assert " copy(" not in text
    wide = [to_numpy(array).astype(np.float64) for array in (x, w, dout)]
    for ours, right in zip(jax.jit(gradients)(x, w, dout), (wide[2] @ wide[1], wide[2].T @ wide[0]), strict=True):
        assert ours.shape == right.shape
        np.testing.assert_allclose(to_numpy(ours).astype(np.float64), right, rtol=2e-2, atol=2e-1)


def test_the_gradient_of_a_product_is_two_products() -> None:
    """Its operands are read transposed where they lie."""
    x, w = on_gpu(512, 256), on_gpu(256, 128)
    text = compiled_text(jax.grad(lambda x, w: fusedops.matmul(x, w).astype("float32").sum(), (0, 1)), x, w)
    assert calls_in(text) == 2
    assert " transpose(" not in text


# Threads, errors, other processes ------------------------------------------------------------------------------------


def test_threads_of_two_frameworks_at_one_problem() -> None:
    """Eight threads of JAX and eight of PyTorch, each with a bias of its own, see no other's."""
    values = np.random.default_rng(3).standard_normal((64, 64)).astype("float16")
    f = jax.jit(partial(fusedops.matmul, activation="relu"))
    wrong: list[str] = []

    def run(i: int, make: Callable[[np.ndarray], Array], op: Callable[..., Array]) -> None:
        bias = np.full(64, i, "float16")
        expected = matmul_oracle(values, values, bias=bias, activation="relu")
        mine, own_bias = make(values), make(bias)
        for _ in range(200):
            out = op(mine, mine, bias=own_bias)
        try:
            assert_within(out, expected.out, expected.scale, 64)
        except AssertionError as error:
            wrong.append(f"{i}: {error}")

    def on_torch(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x.copy()).cuda()

    pairs = [(lambda x: jax.device_put(x, GPU), f), (on_torch, partial(fusedops.matmul, activation="relu"))]
    threads = [threading.Thread(target=run, args=(i, *pairs[i % 2])) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_eager_and_epilogs() -> None:
    """Arrays outside of any trace; a mask made and read by the library."""
    x, w, dout = on_gpu(33, 40, dtype="float16"), on_gpu(40, 72, dtype="float16"), on_gpu(33, 16, dtype="float16")
    w2 = on_gpu(72, 16, dtype="float16")
    hidden, saved = fusedops.epilog_matmul(x, w, epilog=Epilog.RELU_AUX)
    dpreact, sums = fusedops.epilog_matmul(dout, w2, transpose_b=True, epilog="DRELU_BGRAD", relu_aux=saved["relu_aux"])
    z = np.asarray(x, "float64") @ np.asarray(w, "float64")
    want = np.where(z >= 0, np.asarray(dout, "float64") @ np.asarray(w2, "float64").T, 0)
    np.testing.assert_allclose(np.asarray(hidden, "float64"), np.maximum(z, 0), atol=2e-2)
    np.testing.assert_allclose(np.asarray(dpreact, "float64"), want, atol=4e-2)
    np.testing.assert_allclose(np.asarray(sums["drelu_bgrad"], "float64"), want.sum(0), atol=0.3)


def test_a_failing_call_names_its_problem_and_harms_nothing() -> None:
    """What no plan can be made for is an error of the program's first run."""
    x = on_gpu(16, 16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="fusedops"):
        jax.jit(
            lambda x: jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((16, 16), x.dtype))(x, x, problem="no problem")
        )(x).block_until_ready()
    out = jax.jit(lambda x: fusedops.matmul(x, x, activation="relu"))(x)
    expected = matmul_oracle(to_numpy(x), to_numpy(x), activation="relu")
    assert_within(out, expected.out, expected.scale, 16)


TRAVEL = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    import fusedops
    import fusedops.xla

    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 48)), "float16")
    w = jnp.asarray(np.random.default_rng(1).standard_normal((48, 64)), "float16")

    def f(x, w):
        return fusedops.matmul(x, w, activation="relu")
"""

WRITES = """
    exported = jax.export.export(jax.jit(f), disabled_checks=fusedops.xla.EXPORT_CHECKS)(x, w)
    open(sys.argv[1], "wb").write(exported.serialize(vjp_order=1))
    np.save(sys.argv[1] + ".npy", np.asarray(jax.jit(f)(x, w)))
"""

READS = """
    fusedops.xla.ensure_registered()
    imported = jax.export.deserialize(open(sys.argv[1], "rb").read())
    assert "fusedops_matmul" in imported.mlir_module()
    assert np.array_equal(np.asarray(imported.call(x, w)), np.load(sys.argv[1] + ".npy"))
    grads = jax.grad(lambda x, w: imported.call(x, w).astype("float32").sum(), (0, 1))(x, w)
    want = jax.grad(lambda x, w: f(x, w).astype("float32").sum(), (0, 1))(x, w)
    for g, e in zip(grads, want):
        assert np.allclose(np.asarray(g, "float32"), np.asarray(e, "float32"), rtol=1e-2, atol=1e-2)
    print("right")
"""


def python(code: str, *arguments: str, **environment: str) -> str:
    """Return what a new interpreter prints."""
    source = textwrap.dedent(TRAVEL) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "program")
    python(WRITES, path)
    assert python(READS, path).split() == ["right"]


CACHED = """
    from fusedops.xla import counters

    out = jax.jit(f)(x, w)
    want = np.maximum(np.asarray(x, "float64") @ np.asarray(w, "float64"), 0)
    assert np.allclose(np.asarray(out, "float64"), want, rtol=1e-2, atol=1e-2)
    print(counters()["instantiations"])
"""


def test_the_compilation_cache_serves_a_second_process(tmp_path: Path) -> None:
    """It holds the program; the plan is made anew from the problem that stands in it."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    python(CACHED, **settings)
    entries = {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")}
    assert int(python(CACHED, **settings)) >= 1
    assert {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")} == entries
