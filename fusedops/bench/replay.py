"""GPU time of layers inside a CUDA graph: what ``torch.compile(mode="reduce-overhead")`` adds to the bare kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fusedops

from .sampling import Table, host_samples

__all__ = ["replay_table"]

Rows = dict[str, Callable[[], object]]
_TOKENS = _WIDTH = 4096
_LAYERS = 8
KERNELS = "fusedops.matmul(out=), captured: the bare kernels"


def replay_table(rounds: int, calls: int) -> Table:
    """Measure eight layers ``relu(x @ w + b)`` of 4096 x 4096 bfloat16, captured in several ways.

    Parameters
    ----------
    rounds, calls : int
        Samples of each row, and replays in a sample.

    Returns
    -------
    Table
        In microseconds a replay. The device is busy all the time, so that the clock of the host measures it.

    Raises
    ------
    ImportError
        Without PyTorch or a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise ImportError("there is no CUDA device here; the replay benchmark measures a graph on one.")
    with torch.no_grad():
        rows = _rows(torch)

        def many(replay: Callable[[], object]) -> Callable[[], object]:
            def run() -> None:
                for _ in range(calls):
                    replay()
                torch.cuda.synchronize()

            return run

        together = {name: many(replay) for name, replay in rows.items()}
        title = f"GPU time of {_LAYERS} layers relu(x @ w + b), {_TOKENS} x {_WIDTH} bfloat16, microseconds"
        device = torch.cuda.get_device_name()
        table = host_samples(title, device, {}, together, (KERNELS,), rounds, 1, torch.cuda.synchronize)
    samples = {row: [sample / calls for sample in values] for row, values in table.samples.items()}
    return Table(table.title, table.device, table.date, table.versions, samples, table.baselines)


def _rows(torch: Any) -> Rows:
    x = torch.randn(_TOKENS, _WIDTH, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(_WIDTH, _WIDTH, device="cuda", dtype=torch.bfloat16) / _WIDTH**0.5 for _ in range(_LAYERS)]
    bias = torch.randn(_WIDTH, device="cuda", dtype=torch.bfloat16)
    outs = [torch.empty_like(x) for _ in range(2)]

    def bare() -> Any:
        h = x
        for i, w in enumerate(weights):
            h = fusedops.matmul(h, w, bias=bias, activation="relu", out=outs[i % 2])
        return h

    class Layers(torch.nn.Module):  # type: ignore[misc]
        """Weights as a module holds them: others are copied at each replay."""

        def __init__(self, layer: Callable[..., Any]) -> None:
            super().__init__()
            self.layer = layer
            self.weights = torch.nn.ParameterList(weights)
            self.bias = torch.nn.Parameter(bias)

        def forward(self, h: Any) -> Any:
            for w in self.weights:
                h = self.layer(h, w, self.bias)
            return h

    def ours(h: Any, w: Any, b: Any) -> Any:
        return fusedops.matmul(h, w, bias=b, activation="relu")

    def own(h: Any, w: Any, b: Any) -> Any:
        return torch.relu(torch.addmm(b, h, w))

    graph = torch.cuda.CUDAGraph()
    bare()
    with torch.cuda.graph(graph):
        bare()
    compiled = [torch.compile(Layers(layer), mode="reduce-overhead", fullgraph=True) for layer in (ours, own)]
    return {
        KERNELS: lambda: (graph.replay(), outs),  # which the graph writes, and does not own
        "fusedops.matmul, torch.compile(mode=reduce-overhead)": lambda: compiled[0](x),
        "torch relu(addmm), torch.compile(mode=reduce-overhead)": lambda: compiled[1](x),
    }
