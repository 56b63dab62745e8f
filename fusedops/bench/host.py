"""Host time of one call: what a call costs the CPU, for arrays so small that the GPU is never what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import fusedops

from ..engines.base import NO_NVMATH
from .sampling import Table, host_samples

__all__ = ["host_table"]

Rows = dict[str, Callable[[], object]]
_N = 128
_FIRST_NEW_M = 300
_LAYERS = 6
ADDMM = "torch._addmm_activation"
LINEAR = "torch relu(F.linear)"
STATEFUL = "nvmath reset_operands_unchecked + execute"
XLA = "jax.jit(relu(x @ w + b))"
XLA_CUBLAS = "the same without XLA's Triton products"
XLA_CHAIN = "the same six times in one jax.jit"
LINEAR_GRADIENTS = "torch relu(F.linear), forward + backward"


def host_table(rounds: int, calls: int) -> Table:
    """Measure ``relu(a @ b + bias)`` on 128 x 128 float16, by every way that this machine has.

    Parameters
    ----------
    rounds, calls : int
        Samples of each row, and calls in a sample.

    Returns
    -------
    Table
        In microseconds a call.

    Raises
    ------
    ImportError
        Without PyTorch, CuPy or nvmath-python, or without a GPU.
    """
    try:
        import cupy
        import torch
    except ImportError as error:
        raise ImportError(f"{error.name} is missing. {NO_NVMATH}") from error
    if not cupy.cuda.is_available():
        raise ImportError("there is no CUDA device here; the host benchmark measures launches on one.")
    from ..engines.nvmath.peers import library_version

    with torch.no_grad():
        rows = {
            **_torch_rows(torch, (rounds + 1) * calls),
            **_gradient_rows(torch),
            **_cupy_rows(cupy),
            **_nvmath_rows(torch),
            **_jax_rows(),
        }
        title = f"host time of relu(a @ b + bias), {_N} x {_N} float16, microseconds a call"
        device = torch.cuda.get_device_name()
        versions = {"CUDA driver": str(cupy.cuda.runtime.driverGetVersion()), "cuBLASLt": library_version()}
        drain = torch.cuda.synchronize
        baselines = (ADDMM, LINEAR, LINEAR_GRADIENTS, STATEFUL, *[row for row in (XLA, XLA_CHAIN) if row in rows])
        return host_samples(title, device, versions, rows, baselines, rounds, calls, drain)


def _torch_rows(torch: Any, new_shapes: int) -> Rows:
    a, b = (torch.randn(_N, _N, device="cuda").half() for _ in range(2))
    bias, out, stored = torch.randn(_N, device="cuda").half(), torch.empty_like(a), b.T.contiguous()
    linear = torch.nn.functional.linear
    plan = fusedops.plan(a, b, bias=bias, activation="relu")
    tall = torch.randn(_FIRST_NEW_M + new_shapes, _N, device="cuda").half()
    lengths = count(_FIRST_NEW_M)
    return {
        ADDMM: lambda: torch._addmm_activation(bias, a, b),
        LINEAR: lambda: torch.relu(linear(a, stored, bias)),
        "torch F.linear": lambda: linear(a, stored, bias),
        "fusedops.matmul, torch": lambda: fusedops.matmul(a, b, bias=bias, activation="relu"),
        "fusedops.matmul, torch, out=": lambda: fusedops.matmul(a, b, bias=bias, activation="relu", out=out),
        "fusedops.plan, torch": lambda: plan(a, b, bias=bias),
        "fusedops.matmul, torch, a new m": lambda: fusedops.matmul(
            tall[: next(lengths)], b, bias=bias, activation="relu"
        ),
    }


def _gradient_rows(torch: Any) -> Rows:
    """Return a training step of one layer: the gradients of input, weight and bias."""
    x, stored, dout = (torch.randn(_N, _N, device="cuda").half() for _ in range(3))
    bias = torch.randn(_N, device="cuda").half()
    moving = [t.requires_grad_() for t in (x, stored, bias)]
    linear = torch.nn.functional.linear

    def gradients(forward: Callable[[], Any]) -> Callable[[], object]:
        def step() -> object:
            with torch.enable_grad():
                return torch.autograd.grad(forward(), moving, dout)

        return step

    return {
        LINEAR_GRADIENTS: gradients(lambda: torch.relu(linear(x, stored, bias))),
        "fusedops.matmul, torch, forward + backward": gradients(
            lambda: fusedops.matmul(x, stored, bias=bias, activation="relu", transpose_b=True)
        ),
    }


def _cupy_rows(cupy: Any) -> Rows:
    a, b = (cupy.random.standard_normal((_N, _N)).astype("float16") for _ in range(2))
    bias, out = cupy.random.standard_normal(_N).astype("float16"), cupy.empty((_N, _N), "float16")
    return {
        "cupy maximum(a @ b + bias, 0)": lambda: cupy.maximum(a @ b + bias, 0),
        "fusedops.matmul, cupy": lambda: fusedops.matmul(a, b, bias=bias, activation="relu"),
        "fusedops.matmul, cupy, out=": lambda: fusedops.matmul(a, b, bias=bias, activation="relu", out=out),
    }


def _nvmath_rows(torch: Any) -> Rows:
    from ..engines.nvmath.peers import stateful_relu_bias, stateless_relu_bias

    # The layouts that nvmath's own bias needs: columns, with the bias along them.
    a, b = (torch.randn(_N, _N, device="cuda").half().T for _ in range(2))
    bias = torch.randn(_N, device="cuda").half()
    execute, reset, reset_unchecked = stateful_relu_bias(a, b, bias)
    return {
        "nvmath matmul (stateless)": lambda: stateless_relu_bias(a, b, bias),
        "nvmath execute alone": execute,
        "nvmath reset_operands + execute": lambda: (reset(), execute()),
        STATEFUL: lambda: (reset_unchecked(), execute()),
    }


def _jax_rows() -> Rows:
    """Return the rows of JAX, none where it has no GPU."""
    try:
        import jax
        import jax.numpy as jnp

        gpu = jax.devices("cuda")[0]
    except (ImportError, RuntimeError):
        return {}
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = (jax.device_put(jax.random.normal(key, (_N, _N), jnp.float16) * 0.1, gpu) for key in keys[:2])
    b = jax.device_put(jax.random.normal(keys[2], (_N,), jnp.float16), gpu)

    def own(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(x @ w + b)

    def ours(x: Any, w: Any, b: Any) -> Any:
        return fusedops.matmul(x, w, bias=b, activation="relu")

    def chained(layer: Callable[..., Any]) -> Callable[..., Any]:
        def chain(x: Any, w: Any, b: Any) -> Any:
            for _ in range(_LAYERS):
                x = layer(x, w, b)
            return x

        return chain

    through_cublas = jax.jit(own, compiler_options={"xla_gpu_enable_triton_gemm": False})
    compiled = [jax.jit(own), through_cublas, *map(jax.jit, (ours, chained(own), chained(ours)))]
    names = (XLA, XLA_CUBLAS, "jax.jit(fusedops.matmul)", XLA_CHAIN, "fusedops.matmul six times in one jax.jit")
    rows = {name: partial(f, x, w, b) for name, f in zip(names, compiled, strict=True)}
    return {**rows, "fusedops.matmul, jax": lambda: ours(x, w, b)}
