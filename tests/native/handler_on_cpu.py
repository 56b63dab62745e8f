"""The custom call on the CPU: the handler registered there, over the stand-in for cuBLASLt."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from native.stand_in import stand_in, stand_in_program

from fusedops.arrays import ArraySpec, Device
from fusedops.epilogs import Epilog
from fusedops.native.launcher import Launcher, NativeProgram
from fusedops.problem import Problem, Settings, make_problem
from fusedops.xla.handler import TARGET, Planner, handler_object, register_for
from fusedops.xla.problem_text import buffers_of, text_of

Array = Any
CPU = Device("cpu")
WORKSPACE = 64
"""Bytes without which no program runs, so that a call which passes none fails."""


class Plans:
    """What plans: programs of the stand-in, counted; ``before`` is called first."""

    def __init__(self) -> None:
        self._launcher = Launcher(handler_object(), stand_in().functions)
        self.reset()

    def reset(self) -> None:
        """Forget what was planned, and plan at once."""
        self.made: list[Problem] = []
        self.alignments: list[int] = []
        self.before: Callable[[], Any] = lambda: None

    def __call__(self, problem: Problem, alignment: int) -> NativeProgram:
        self.made.append(problem)
        self.alignments.append(alignment)
        self.before()
        program = stand_in_program(problem, self._launcher, workspace=WORKSPACE)
        assert program is not None
        return program


@cache
def plans() -> Plans:
    """Return the planner's plans of this process."""
    return Plans()


def serve() -> Planner:
    """Register the handler, with a planner that has planned nothing yet."""
    plans().reset()
    return register_for("cpu", CPU, plans(), stand_in().functions["cublasLtCreate"])


def problem_for(epilog: str = "DEFAULT", **arrays: Array) -> Problem:
    """Return the problem of arrays by name; ``transpose_a``, ``transpose_b`` are flags."""
    flags = {name: arrays.pop(name) for name in ("transpose_a", "transpose_b") if name in arrays}
    specs: dict[str, ArraySpec | None] = {
        name: ArraySpec.dense(x.shape, str(x.dtype), CPU) for name, x in arrays.items()
    }
    return make_problem(Settings(Epilog[epilog], None, **flags), specs, None, None)


def call_of(problem: Problem, alpha: float = 1.0, beta: float = 1.0, text: str | None = None) -> Callable[..., Any]:
    """Return the custom call as a function of the operands in order; it returns out and the auxiliary output."""
    sizes = dict(buffers_of(problem)[1])
    specs = [problem.out_spec] + ([problem.aux_spec] if problem.aux_spec else [])
    types = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
    workspace = jax.ShapeDtypeStruct((sizes["workspace"],), "uint8")
    said = text_of(problem, alpha, beta) if text is None else text

    def call(*operands: Array) -> list[Array]:
        return list(jax.ffi.ffi_call(TARGET, [*types, workspace])(*operands, problem=said)[:-1])

    return call


def example(m: int = 3, k: int = 5, n: int = 4, seed: int = 0) -> tuple[dict[str, Array], Array]:
    """Return a, b and a bias, and ``relu(a @ b + bias)``."""
    rng = np.random.default_rng(seed)
    a, b, bias = (rng.standard_normal(shape, "float32") for shape in ((m, k), (k, n), (n,)))
    return {"a": a, "b": b, "bias": bias}, np.maximum(a @ b + bias, 0)


def run_example(seed: int = 0, m: int = 3) -> None:
    """Compile and run a product, and check it."""
    arrays, expected = example(m=m, seed=seed)
    (out,) = jax.jit(call_of(problem_for("RELU_BIAS", **arrays)))(*arrays.values())
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def announce_and_sleep(seconds: float) -> None:
    """Say that a callback is under way, and stay in it."""
    print("planning", flush=True)
    time.sleep(seconds)
