"""Streams, lifetime and capture: order by a slow producer, memory by dropping and refilling it, graphs by replay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import permutations
from typing import Any

import cupy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fusedops
from fusedops.lifetime import held_count
from fusedops.testing import to_numpy

Array = Any
N = 2048


def slow_torch(value: float) -> torch.Tensor:
    """Return a tensor that the current stream fills with ``value`` after some milliseconds."""
    x = torch.full((N, N), -1.0, device="cuda")
    torch.cuda._sleep(20_000_000)
    return x.fill_(value)


def slow_cupy(value: float) -> Array:
    """Return an array that the current stream fills with ``value`` after some milliseconds."""
    x = cupy.full((N, N), -1.0, "float32")
    busy = cupy.ones((4096, 4096), "float32")
    for _ in range(8):
        busy = busy @ busy * 0
    x[...] = busy[0, 0] + value
    return x


SIDE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": lambda: torch.cuda.stream(torch.cuda.Stream()),
    "cupy": lambda: cupy.cuda.Stream(non_blocking=True),
}
SLOW = {"torch": slow_torch, "cupy": slow_cupy}
READY = {"torch": lambda v: torch.full((N, N), v, device="cuda"), "cupy": lambda v: cupy.full((N, N), v, "float32")}


@pytest.mark.parametrize(("lead", "source"), [*permutations(SLOW, 2)])
def test_a_foreign_producer_on_a_side_stream_is_waited_for(lead: str, source: str) -> None:
    """The lead's stream runs after what the source's framework has queued on its current stream."""
    a = READY[lead](1.0)
    fusedops.matmul(a, READY[source](1.0))
    torch.cuda.synchronize()
    with SIDE[source]():
        b = SLOW[source](2.0)
        out = fusedops.matmul(a, b)
    assert float(to_numpy(out).min()) == float(to_numpy(out).max()) == 2.0 * N


@pytest.mark.parametrize("lead", [*SLOW])
def test_a_jax_source_is_waited_for(lead: str) -> None:
    """XLA's stream is not the lead's; the import orders the two."""
    a = READY[lead](1.0)
    x = jax.random.normal(jax.random.key(0), (N, N), jnp.float32)
    b = jax.jit(lambda x: (x @ x @ x @ x) * 0 + 2)(x)
    out = fusedops.matmul(a, b)
    assert float(to_numpy(out).min()) == float(to_numpy(out).max()) == 2.0 * N


def test_a_torch_source_with_a_jax_lead() -> None:
    """A tensor still being filled joins a JAX lead at the right value."""
    a = jnp.ones((N, N), jnp.float32)
    out = fusedops.matmul(a, slow_torch(2.0))
    assert float(out.min()) == float(out.max()) == 2.0 * N


def refill(framework: str, count: int = 8) -> None:
    """Take whatever memory the framework has free and fill it."""
    taken = [READY[framework](float("nan")) for _ in range(count)]  # all at once: one dropped would be taken again
    assert len(taken) == count


@pytest.mark.parametrize(("lead", "source"), [*permutations(SLOW, 2)])
def test_a_source_may_be_dropped_and_its_memory_refilled(lead: str, source: str) -> None:
    """A foreign operand outlives the launch that reads it, though its owner forgets it at once."""
    a = SLOW[lead](1.0)
    b = READY[source](2.0)
    torch.cuda.synchronize()
    with SIDE[lead]():
        a = SLOW[lead](1.0)
        out = fusedops.matmul(a, b)
    del b
    gc.collect()
    refill(source)
    torch.cuda.synchronize()
    assert float(to_numpy(out).min()) == float(to_numpy(out).max()) == 2.0 * N


def keep_busy(framework: str) -> None:
    """Queue a tenth of a second on the framework's current stream."""
    current = torch.cuda.current_stream().cuda_stream if framework == "torch" else cupy.cuda.get_current_stream().ptr
    with torch.cuda.stream(torch.cuda.ExternalStream(current)):
        torch.cuda._sleep(200_000_000)


@pytest.mark.parametrize(("lead", "source"), [*permutations(SLOW, 2)])
def test_a_source_lives_until_its_reader_is_done(lead: str, source: str) -> None:
    """A foreign operand that its owner has dropped stays an object while a launch waits to read it, and no longer."""
    a, b = READY[lead](1.0), READY[source](2.0)
    fusedops.matmul(a, b)  # planned and loaded
    torch.cuda.synchronize()
    before = held_count()
    owned = weakref.ref(b)
    side = SIDE[lead]()
    with side:
        keep_busy(lead)
        out = fusedops.matmul(a, b)
    del b
    assert held_count() == before + 1  # asked, and the launch has not run
    assert owned() is not None
    torch.cuda.synchronize()
    fusedops.matmul(a, READY[source](3.0))
    assert owned() is None
    assert float(to_numpy(out).min()) == float(to_numpy(out).max()) == 2.0 * N


def test_a_jax_source_is_kept_until_the_reader_is_done() -> None:
    """JAX knows nothing of the reader's stream, so the array is kept beside an event and dropped later."""
    side = torch.cuda.Stream()
    b = jnp.full((N, N), 2.0, jnp.float32).block_until_ready()
    with torch.cuda.stream(side):
        a = slow_torch(1.0)
        out = fusedops.matmul(a, b)
    del b
    assert held_count() >= 1
    taken = [jnp.full((N, N), jnp.nan, jnp.float32).block_until_ready() for _ in range(8)]
    assert len(taken) == 8
    assert float(out.min()) == float(out.max()) == 2.0 * N
    torch.cuda.synchronize()
    assert held_count() == 0


def test_a_torch_source_of_a_jax_lead_may_be_dropped() -> None:
    """XLA reads the tensor after the call has returned; it is kept until the result is ready."""
    a = jnp.ones((N, N), jnp.float32)
    b = torch.full((N, N), 2.0, device="cuda")
    torch.cuda.synchronize()
    busy = jax.jit(lambda x: x @ x @ x @ x * 0 + 1)(a)
    out = fusedops.matmul(busy, b)
    del b
    refill("torch")
    assert float(out.min()) == float(out.max()) == 2.0 * N


@pytest.mark.parametrize("framework", [*SLOW])
def test_the_default_stream_is_the_one_launched_on(framework: str) -> None:
    """Address 0 is the default stream, not a fresh one: the launch comes after what is queued there."""
    a = READY[framework](1.0)
    b = SLOW[framework](2.0)
    out = fusedops.matmul(a, b, stream=0)
    assert float(to_numpy(out).min()) == 2.0 * N


@pytest.mark.parametrize("framework", [*SLOW])
def test_the_stream_argument_is_launched_on(framework: str) -> None:
    """``stream=`` runs behind what is queued on that stream, and its results are that stream's."""
    a = READY[framework](1.0)
    fusedops.matmul(a, a)
    torch.cuda.synchronize()
    side: Any = torch.cuda.Stream() if framework == "torch" else cupy.cuda.Stream(non_blocking=True)
    address = side.cuda_stream if framework == "torch" else side.ptr
    with torch.cuda.stream(side) if framework == "torch" else side:
        b = SLOW[framework](2.0)
    out = fusedops.matmul(a, b, stream=address)
    assert not (side.query() if framework == "torch" else side.done)
    torch.cuda.synchronize()
    assert float(to_numpy(out).min()) == 2.0 * N


def half(*shape: int) -> torch.Tensor:
    """Return random float16 values."""
    return torch.randn(*shape, device="cuda").half()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_before_the_first_call_is_refused_and_the_process_lives() -> None:
    """Planning inside a capture is an error that names the warm-up."""
    a, b = half(48, 72), half(72, 40)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before capturing"), torch.cuda.graph(graph):
        fusedops.matmul(a, b, activation="relu")
    out = fusedops.matmul(a, b, activation="relu")
    assert torch.allclose(out.float(), torch.relu(a.float() @ b.float()), atol=0.1)


def captured(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of one call, and its result."""
    fusedops.matmul(a, b, bias=bias, activation="relu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fusedops.matmul(a, b, bias=bias, activation="relu")
    return graph, out


def expected(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(a.double() @ b.double() + bias.double())


def test_a_captured_call_follows_new_data() -> None:
    """A replay computes from what the operands hold then, bias among them."""
    a, b, bias = half(64, 128), half(128, 96), half(96)
    graph, out = captured(a, b, bias)
    for _ in range(3):
        for x in (a, b, bias):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.allclose(out.double(), expected(a, b, bias), atol=0.1)


def test_graphs_outlive_each_other_and_the_caches() -> None:
    """The first of two graphs destroyed, the plan cache emptied: the second still replays right."""
    arrays = [(half(64, 128), half(128, 96), half(96)) for _ in range(2)]
    graphs = [captured(*args) for args in arrays]
    first = graphs.pop(0)
    del first
    from fusedops import planned

    planned._plans.clear()
    gc.collect()
    a, b, bias = arrays[1]
    graph, out = graphs[0]
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.allclose(out.double(), expected(a, b, bias), atol=0.1)


def test_cupy_capture() -> None:
    """CuPy's own capture takes a planned call."""
    a = cupy.random.standard_normal((64, 64)).astype("float16")
    out = cupy.empty((64, 64), "float16")
    fusedops.matmul(a, a, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        fusedops.matmul(a, a, out=out)
        graph = stream.end_capture()
    a[...] = cupy.random.standard_normal((64, 64)).astype("float16")
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert np.allclose(cupy.asnumpy(out), cupy.asnumpy(a).astype("f8") @ cupy.asnumpy(a).astype("f8"), atol=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="multi-GPU")
def test_another_device_than_the_current_one() -> None:
    """The result is on the operands' device, and the current one stays current."""
    a = torch.randn(64, 64, device="cuda:1").half()
    out = fusedops.matmul(a, a)
    assert out.device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.allclose(out.double(), a.double() @ a.double(), atol=0.1)
