"""What the PyTorch tests share: products beside their plain expressions, in float64 unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import fusedops

Array = Any
Function = Callable[..., Any]
Shape = tuple[int, ...]

ACTIVATIONS: dict[str | None, Function] = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
}


def array(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def leaves(arrays: list[Array]) -> list[Array]:
    """Return arrays that require a gradient."""
    return [x.detach().clone().requires_grad_() for x in arrays]


@dataclass(frozen=True)
class Product:
    """A call of `fusedops.matmul`: the shapes of its arrays by name, in the order a, b, bias, c, and its options."""

    name: str
    shapes: dict[str, Shape]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def arrays(self) -> list[Array]:
        return [array(*shape, seed=i) for i, shape in enumerate(self.shapes.values())]

    def ours(self, activation: str | None) -> Function:
        def call(*arrays: Array) -> Array:
            named = dict(zip(self.shapes, arrays, strict=True))
            return fusedops.matmul(named.pop("a"), named.pop("b"), **named, activation=activation, **self.options)

        return call

    def own(self, activation: str | None) -> Function:
        """Return the same as PyTorch's own operations."""

        def call(*arrays: Array) -> Array:
            named = dict(zip(self.shapes, arrays, strict=True))
            a, b = named["a"], named["b"]
            row, column = a.ndim == 1, b.ndim == 1
            a = a.mT if self.options.get("transpose_a") else a
            b = b.mT if self.options.get("transpose_b") else b
            z = self.options.get("alpha", 1.0) * ((a[None] if row else a) @ (b[:, None] if column else b))
            if "c" in named:
                c = named["c"][..., None] if column else named["c"]
                z = z + self.options.get("beta", 1.0) * (c[..., None, :] if row else c)
            z = ACTIVATIONS[activation](z + named["bias"] if "bias" in named else z)
            z = z[..., 0, :] if row else z
            return z[..., 0] if column else z

        return call


PRODUCTS = (
    Product("plain", {"a": (4, 5), "b": (5, 3), "bias": (3,)}),
    Product("factors", {"a": (4, 5), "b": (5, 3), "bias": (3,), "c": (4, 3)}, {"alpha": 0.5, "beta": -2.0}),
    Product("c unread", {"a": (4, 5), "b": (5, 3), "c": (4, 3)}, {"beta": 0.0}),
    Product("transposed", {"a": (5, 4), "b": (3, 5), "bias": (3,)}, {"transpose_a": True, "transpose_b": True}),
    Product("a transposed", {"a": (5, 4), "b": (5, 3)}, {"transpose_a": True}),
    Product("b transposed", {"a": (4, 5), "b": (3, 5)}, {"transpose_b": True, "alpha": 3.0}),
    Product("row", {"a": (5,), "b": (5, 3), "bias": (3,), "c": (3,)}),
    Product("column", {"a": (4, 5), "b": (5,), "bias": (1,), "c": (4,)}),
    Product("dot", {"a": (5,), "b": (5,)}),
    Product("batch", {"a": (2, 4, 5), "b": (5, 3), "bias": (3,), "c": (2, 4, 3)}),
    Product("batch, a transposed", {"a": (2, 5, 4), "b": (5, 3)}, {"transpose_a": True}),
    Product("batch, b transposed", {"a": (2, 4, 5), "b": (3, 5)}, {"transpose_b": True}),
    Product("two batches", {"a": (2, 4, 5), "b": (2, 5, 3), "bias": (2, 1, 3)}),
    Product("batch of b", {"a": (4, 5), "b": (2, 5, 3), "bias": (2, 1, 3), "c": (1, 4, 3)}),
    Product("batch of 1", {"a": (1, 4, 5), "b": (2, 5, 3)}),
    Product("batch, column", {"a": (2, 4, 5), "b": (5,)}),
    Product("batch, row", {"a": (5,), "b": (2, 5, 3), "bias": (2, 1, 3)}),
    Product("one token", {"a": (1, 5), "b": (5, 1), "bias": (1,)}),
    Product("k = 0", {"a": (4, 0), "b": (0, 3), "bias": (3,)}),
    Product("k = 0, batch", {"a": (2, 4, 0), "b": (0, 3), "bias": (3,)}),
    Product("m = 0", {"a": (0, 4), "b": (4, 3), "bias": (3,)}),
    Product("n = 0, batch", {"a": (2, 4, 5), "b": (5, 0), "bias": (0,)}),
)


def layer_arrays(dtype: torch.dtype = torch.float64) -> list[Array]:
    """Return x, w1, w2, b1, b2 of a small mlp with a batch."""
    shapes = ((2, 4, 5), (5, 3), (3, 6), (3,), (6,))
    return [array(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def mlp(activation: str | None) -> Function:
    return lambda x, w1, w2, b1, b2: fusedops.mlp(x, w1, w2, b1=b1, b2=b2, activation=activation)


def plain_mlp(activation: str | None) -> Function:
    return lambda x, w1, w2, b1, b2: ACTIVATIONS[activation](x @ w1 + b1) @ w2 + b2
