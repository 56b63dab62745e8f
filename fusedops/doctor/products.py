"""The frameworks at work: the libraries that each brings, and small products checked against float64."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ..engines.base import LAUNCHER
from ..ops import explain, matmul
from ..testing import assert_within, k_tail_operands, matmul_oracle, to_numpy
from .files import kept_object
from .libraries import cuda_libraries, file_at
from .stages import Stages
from .subjects import SUBJECTS, Subject

__all__ = ["cupy", "jax", "numpy", "nvmath", "together", "torch"]

_M, _K, _N = 24, 64, 40
_TAIL_K = 11528
"""A k whose last 8 terms a known fault of cuBLASLt leaves out, at m = 1 and n = 8 in float16."""

_CASES = (("float16", None), ("float32", "ieee"))
"""Dtypes and precisions: what the environment says of TF32 must not decide whether a machine is well."""


def _examine(name: str, stages: Stages, argument: Mapping[str, Any]) -> None:
    """Find what a framework is and brings, and compute with it on each of its devices."""
    subject = stages.run("import", SUBJECTS[name], lambda subject: subject.facts)
    if subject is None:
        return
    devices = subject.facts["devices"]
    for device in devices:
        stages.run(f"own {device}", partial(_own, subject, device))
    stages.run("libraries", cuda_libraries)
    if name == "jax":
        _handler(stages, argument["gpu"])
    for device in devices:
        if not device.startswith("cuda") or name == "jax" or argument["engine"]:
            _products(subject, device, stages)


numpy, torch, jax, cupy = (partial(_examine, name) for name in ("numpy", "torch", "jax", "cupy"))


def _products(subject: Subject, device: str, stages: Stages) -> None:
    """Compute with this package on one device."""
    for dtype, precision in _CASES:
        stages.run(f"product {device} {dtype}", partial(_product, subject, device, dtype, precision))
    if device.startswith("cuda"):
        stages.run(f"k tail {device}", partial(_k_tail, subject, device))


def _own(subject: Subject, device: str) -> dict[str, Any]:
    """Let a framework multiply, so that it loads what it multiplies with."""
    a, b = (np.ones(shape, "float16") for shape in ((_M, _K), (_K, _N)))
    out = to_numpy(subject.own(subject.array(a, device), subject.array(b, device)))
    return {"right": bool((out == _K).all())}


def _product(subject: Subject, device: str, dtype: str, precision: str | None) -> dict[str, Any]:
    """Return which engine answered and how; AssertionError where the answer is wrong."""
    random = np.random.default_rng(0)
    shapes = (_M, _K), (_K, _N), (_N,)
    a, b, bias = (random.standard_normal(shape, "float32").astype(dtype) for shape in shapes)
    x, w, z = (subject.array(values, device) for values in (a, b, bias))
    said = explain(x, w, bias=z, activation="relu", precision=precision)
    calls, start = _custom_calls(said.engine), time.perf_counter()
    out = to_numpy(matmul(x, w, bias=z, activation="relu", precision=precision))
    seconds = time.perf_counter() - start
    expected = matmul_oracle(a, b, bias=bias, activation="relu")
    assert_within(out, expected.out, expected.scale, _K, dtype=dtype)
    return {
        "engine": said.engine,
        "strategy": said.strategy,
        "why": said.why,
        "launcher": LAUNCHER.get(said.engine),
        "custom_call": None if calls is None else _custom_calls(said.engine) != calls,
        "first_call_seconds": round(seconds, 3),
    }


def _k_tail(subject: Subject, device: str) -> dict[str, Any]:
    """Return whether the package and the framework itself add the last terms of k in a case known for losing them."""
    a, b = (subject.array(values.astype("float16"), device) for values in k_tail_operands(1, 8, _TAIL_K))
    ours, own = (bool((to_numpy(f(a, b)) == 8).all()) for f in (matmul, subject.own))
    return {"right": ours, "own_right": own}


# JAX's handler -------------------------------------------------------------------------------------------------------


def _custom_calls(engine: str) -> int | None:
    """Return how many custom calls XLA has run, None where there is no handler or another engine."""
    if engine != "xla":
        return None
    from ..xla.handler import counters

    try:
        return counters()["executions"]
    except RuntimeError:  # no compiler
        return None


def _handler(stages: Stages, gpu: bool) -> None:
    """Compile the handler, and where there is a GPU register it."""
    from ..xla.handler import ensure_registered, handler_object

    def compiled() -> dict[str, Any]:
        start = time.perf_counter()
        handler_object()
        return {**kept_object("handler"), "seconds": round(time.perf_counter() - start, 3)}

    stages.run("handler", compiled)
    if gpu:
        stages.run("registered", lambda: {"why_not": ensure_registered()})


# nvmath --------------------------------------------------------------------------------------------------------------


def _engine_library() -> dict[str, Any]:
    """Return the file whose functions the nvmath engine calls."""
    from ..engines.nvmath import library_functions

    path = file_at(library_functions()["cublasLtMatmul"])
    versions = {found["path"]: found["version"] for found in cuda_libraries()}
    return {"path": path, "version": versions.get(path or "")}


def nvmath(stages: Stages, argument: Mapping[str, Any]) -> None:
    """Find the cuBLASLt that the nvmath engine loads where no framework was before it."""
    stages.run("engine", _engine_library)
    stages.run("libraries", cuda_libraries)


def together(stages: Stages, argument: Mapping[str, Any]) -> None:
    """Let all frameworks multiply in one process, then the engine: whose libraries are loaded, and which it calls."""
    for name in (name for name in ("torch", "jax", "cupy") if name in argument["installed"]):
        subject = stages.run(f"import {name}", SUBJECTS[name], lambda subject: subject.facts)
        device = next((x for x in subject.facts["devices"] if x.startswith("cuda")), None) if subject else None
        if subject is None or device is None:
            continue
        stages.run(f"own {name}", partial(_own, subject, device))
        if name == "jax" or argument["engine"]:
            stages.run(f"product {name}", partial(_product, subject, device, "float16", None))
    if argument["engine"]:
        stages.run("engine", _engine_library)
    stages.run("libraries", cuda_libraries)
