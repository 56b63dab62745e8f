"""DTensor, FSDP and tensor parallelism, by two processes on the CPU through gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_cases import ACTIVATIONS, array

import fusedops

Array = Any
Check = Callable[[Any], None]

WORLD = 2


def _in_process(rank: int, check: Check, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        check(init_device_mesh("cpu", (WORLD,)))
        dist.barrier()  # a process that leaves early ends the others' connections
    finally:
        dist.destroy_process_group()


def in_processes(check: Check) -> None:
    """Run a check in every process; an error in one is raised here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_in_process, (check, port), WORLD)


def collectives(comm: CommDebugMode) -> int:
    return sum(comm.get_comm_counts().values())


# A product -----------------------------------------------------------------------------------------------------------

NONE = Replicate()
PLACED = {
    # a (8, 16), b (16, 32), bias (32,); and what moves between the devices: forward, at most
    "m": (Shard(0), NONE, NONE, 0),
    "n": (NONE, Shard(1), Shard(0), 0),
    "k": (Shard(1), Shard(0), NONE, 1),
    "nothing": (NONE, NONE, NONE, 0),
}


def _products(mesh: Any, extents: tuple[int, int, int]) -> None:
    m, k, n = extents
    arrays = array(m, k), array(k, n), array(n)
    for name, (*placements, moved) in PLACED.items():
        for activation, function in ACTIVATIONS.items():
            for transposed in (False, True):  # after one another on equal shapes where k is n
                _product(mesh, arrays, placements, moved, activation, function, transposed, name)


def _product(
    mesh: Any,
    arrays: tuple[Array, ...],
    placements: list[Any],
    moved: int,
    activation: str | None,
    function: Callable[[Array], Array],
    transposed: bool,
    name: str,
) -> None:
    a, b, bias = (x.clone().requires_grad_() for x in arrays)
    stored = b.detach().T.contiguous().requires_grad_() if transposed else b
    of_b = Shard(1 - placements[1].dim) if transposed and placements[1].is_shard() else placements[1]
    spread = [
        distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
        for x, placement in zip((a, stored, bias), (placements[0], of_b, placements[2]), strict=True)
    ]
    with CommDebugMode() as comm:
        out = fusedops.matmul(spread[0], spread[1], bias=spread[2], activation=activation, transpose_b=transposed)
    assert isinstance(out, DTensor)
    if activation == "gelu_tanh" and name == "n" and out.shape[-1] % (8 * WORLD):
        moved = 2  # a padded pre-activation is whole on each device
    assert collectives(comm) <= moved, (name, activation, comm.get_comm_counts())
    wanted = function(a @ (stored.T if transposed else stored) + bias)
    torch.testing.assert_close(out.full_tensor(), wanted)
    got = torch.autograd.grad((out**2).sum(), spread)
    want = torch.autograd.grad((wanted**2).sum(), (a, stored, bias))
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine.full_tensor(), right)


@pytest.mark.parametrize("extents", [(8, 16, 32), (8, 16, 16), (7, 9, 5)], ids=str)
def test_products(extents: tuple[int, int, int]) -> None:
    """By rows, by columns, by k: values, gradients, the bias once, and nothing gathered; uneven extents too."""
    in_processes(partial(_products, extents=extents))


def _compiled(mesh: Any) -> None:
    arrays = array(8, 16), array(16, 32), array(32)
    call = torch.compile(
        lambda a, b, bias: fusedops.matmul(a, b, bias=bias, activation="relu"), backend="aot_eager", fullgraph=True
    )
    for *placements, _ in PLACED.values():
        spread = [distribute_tensor(x, mesh, [p]) for x, p in zip(arrays, placements, strict=True)]
        torch.testing.assert_close(call(*spread).full_tensor(), torch.relu(arrays[0] @ arrays[1] + arrays[2]))


def test_compiled_products() -> None:
    in_processes(_compiled)


def _vector(mesh: Any) -> None:
    a, b, bias = array(8, 16), array(16), array(1)
    spread = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [NONE])
    for placement in (NONE, Shard(0)):
        out = fusedops.matmul(*spread, bias=distribute_tensor(bias, mesh, [placement]))
        torch.testing.assert_close(out.full_tensor(), a @ b + bias)


def test_a_column_with_a_bias() -> None:
    """A bias of one number is never sharded, since the result has no axis of columns."""
    in_processes(_vector)


def _batch(mesh: Any) -> None:
    a, b = array(4, 3, 5), array(4, 5, 6)
    spread = [distribute_tensor(x, mesh, [Shard(0)]) for x in (a, b)]
    with CommDebugMode() as comm:
        out = fusedops.matmul(*spread, activation="gelu_tanh")
    assert collectives(comm) == 0
    torch.testing.assert_close(out.full_tensor(), ACTIVATIONS["gelu_tanh"](a @ b))


def test_a_batch() -> None:
    in_processes(_batch)


# Modules -------------------------------------------------------------------------------------------------------------


class Linear(torch.nn.Linear):
    """A linear layer by this package."""

    def forward(self, x: Array) -> Array:
        return fusedops.matmul(x, self.weight, bias=self.bias, transpose_b=True)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Linear(16, 32, dtype=torch.float64), Linear(32, 8, dtype=torch.float64)

    def forward(self, x: Array) -> Array:
        return self.second(torch.relu(self.first(x)))


def _stepped(network: Any, x: Array) -> list[Array]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(x).square().sum().backward()
    optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in network.parameters()]


def _modules(mesh: Any) -> None:
    x = array(4, 16)
    wanted = _stepped(Network(), x)
    sharded = Network()
    fully_shard(sharded.first)
    fully_shard(sharded)
    parallel = parallelize_module(Network(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    for network in (sharded, parallel):
        torch.testing.assert_close(_stepped(network, x * 1), wanted)


def test_wrapped_modules() -> None:
    """One step of FSDP, whose gradients are means of equal ones, and of tensor parallelism, is the step alone."""
    in_processes(_modules)


def _mlp(mesh: Any) -> None:
    arrays = array(4, 16), array(16, 32), array(32, 8), array(32), array(8)
    placements = (NONE, Shard(1), Shard(0), Shard(0), NONE)
    for activation, function in ACTIVATIONS.items():
        spread = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(arrays, placements, strict=True)]
        x, w1, w2, b1, b2 = (t.clone().requires_grad_() for t in arrays)
        with CommDebugMode() as comm:
            out = fusedops.mlp(*spread[:3], b1=spread[3], b2=spread[4], activation=activation)
        assert collectives(comm) <= 1  # none where the sum itself is left to whoever reads the result
        wanted = function(x @ w1 + b1) @ w2 + b2
        torch.testing.assert_close(out.full_tensor(), wanted)
        got = torch.autograd.grad(out.sum(), spread)
        want = torch.autograd.grad(wanted.sum(), (x, w1, w2, b1, b2))
        for mine, right in zip(got, want, strict=True):
            torch.testing.assert_close(mine.full_tensor(), right)


def test_an_mlp_by_columns_then_rows() -> None:
    """One sum between the devices at most."""
    in_processes(_mlp)
