"""Derivatives and transforms of PyTorch's: each of a product is that of PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torch_cases import ACTIVATIONS, PRODUCTS, Function, Product, array, layer_arrays, leaves, mlp, plain_mlp

import fusedops
from fusedops import Epilog
from fusedops.frameworks import kind_of

Array = Any
Arrays = list[Array]
Transform = Callable[[Function, Arrays], Any]


def squares(f: Function) -> Function:
    return lambda *arrays: (f(*arrays) ** 2).sum()


def every(arrays: Arrays) -> tuple[int, ...]:
    return tuple(range(len(arrays)))


def backward(f: Function, arrays: Arrays) -> Any:
    moving = leaves(arrays)
    return torch.autograd.grad(squares(f)(*moving), moving, allow_unused=True, materialize_grads=True)


def backward_of_sum(f: Function, arrays: Arrays) -> Any:
    """The cotangent has stride 0."""
    moving = leaves(arrays)
    return torch.autograd.grad(f(*moving).sum(), moving, allow_unused=True, materialize_grads=True)


def each_alone(f: Function, arrays: Arrays) -> Any:
    """One operand needs a gradient, which takes the others as they are."""
    found = []
    for i in every(arrays):
        moving = [x.clone().requires_grad_(i == j) for j, x in enumerate(arrays)]
        total = squares(f)(*moving) + 0 * moving[i].sum()
        found.append(torch.autograd.grad(total, moving[i]))
    return found


def double_backward(f: Function, arrays: Arrays) -> Any:
    moving = leaves(arrays)
    first = torch.autograd.grad(
        squares(f)(*moving), moving, create_graph=True, allow_unused=True, materialize_grads=True
    )
    total = sum((g**2).sum() for g in first) + sum(0 * x.sum() for x in moving)
    return torch.autograd.grad(total, moving, allow_unused=True, materialize_grads=True)


def tangents(f: Function, arrays: Arrays) -> Any:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, 2 * x) for x in arrays]
        return forward_ad.unpack_dual(f(*duals)).tangent


def tangents_of_each(f: Function, arrays: Arrays) -> Any:
    return [
        jvp(lambda x, i=i: f(*arrays[:i], x, *arrays[i + 1 :]), (arrays[i],), (torch.ones_like(arrays[i]),))
        for i in every(arrays)
    ]


def spread_tangents(f: Function, arrays: Arrays) -> Any:
    """Tangents of stride 0."""
    moving = tuple(x.new_ones(()).expand(x.shape) for x in arrays)
    return jvp(f, tuple(arrays), moving)


def stacked(x: Array, axis: int = 0) -> Array:
    return torch.stack([x, 2 * x, 3 * x], axis)


def over_each(transform: Callable[[Function, tuple[int | None, ...]], Function], axis: int = 0) -> Transform:
    """Return what maps over an axis more of one operand at a time."""

    def run(f: Function, arrays: Arrays) -> Any:
        return [
            transform(f, tuple(axis if i == j else None for j in every(arrays)))(
                *[stacked(x, axis) if i == j else x for j, x in enumerate(arrays)]
            )
            for i in every(arrays)
        ]

    return run


def checkpointed(f: Function, arrays: Arrays) -> Any:
    return backward(lambda *moving: checkpoint(f, *moving, use_reentrant=False), arrays)


TRANSFORMS: dict[str, Transform] = {
    "value": lambda f, arrays: f(*arrays),
    "backward": backward,
    "backward of a sum": backward_of_sum,
    "each alone": each_alone,
    "double backward": double_backward,
    "dual numbers": tangents,
    "grad": lambda f, arrays: grad(squares(f), every(arrays))(*arrays),
    "vjp": lambda f, arrays: vjp(f, *arrays)[1](torch.ones_like(f(*arrays))),
    "jvp": lambda f, arrays: jvp(f, tuple(arrays), tuple(2 * x for x in arrays)),
    "jvp of each": tangents_of_each,
    "jvp of stride 0": spread_tangents,
    "hessian": lambda f, arrays: hessian(squares(f), every(arrays))(*arrays),
    "jacrev twice": lambda f, arrays: jacrev(jacrev(squares(f), every(arrays)), every(arrays))(*arrays),
    "jacfwd": lambda f, arrays: jacfwd(f, every(arrays))(*arrays),
    "vmap": over_each(lambda f, dims: vmap(f, dims)),
    "vmap over the last axis": over_each(lambda f, dims: vmap(f, dims, out_dims=-1), axis=-1),
    "vmap of vmap": lambda f, arrays: vmap(vmap(f), 1)(*[torch.stack([stacked(x)] * 2) for x in arrays]),
    "vmap of grad": over_each(lambda f, dims: vmap(grad(squares(f), tuple(range(len(dims)))), dims)),
    "grad of vmap": over_each(lambda f, dims: grad(squares(vmap(f, dims)), tuple(range(len(dims))))),
    "checkpoint": checkpointed,
}

JACOBIANS = ("hessian", "jacrev twice", "jacfwd")
"""Those for which PyTorch needs something to differentiate."""


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_transform(product: Product, name: str) -> None:
    """Of every product, with each activation."""
    if any(0 in shape for shape in product.shapes.values()) and name in JACOBIANS:
        name = "grad"
    if product.name == "c unread" and name == "vmap over the last axis":
        name = "vmap"  # the plain expression returns what it was not given
    for activation in ACTIVATIONS:
        got, want = (TRANSFORMS[name](f, product.arrays) for f in (product.ours(activation), product.own(activation)))
        torch.testing.assert_close(got, want, msg=lambda text, activation=activation: f"{activation}: {text}")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_mlp(name: str) -> None:
    for activation in ACTIVATIONS:
        got, want = (TRANSFORMS[name](f(activation), layer_arrays()) for f in (mlp, plain_mlp))
        torch.testing.assert_close(got, want, msg=lambda text, activation=activation: f"{activation}: {text}")


def test_an_mlp_that_saves_has_gradients() -> None:
    """Through what it saves too."""

    def ours(x: Array, w1: Array, w2: Array, b1: Array, b2: Array) -> Array:
        out, saved = fusedops.mlp(x, w1, w2, b1=b1, b2=b2, activation="gelu_tanh", save=True)
        return out.sum() + saved.hidden.sum() + saved.preact[..., : w1.shape[1]].sum()

    def own(x: Array, w1: Array, w2: Array, b1: Array, b2: Array) -> Array:
        preact = x @ w1 + b1
        hidden = ACTIVATIONS["gelu_tanh"](preact)
        return (hidden @ w2 + b2).sum() + hidden.sum() + preact.sum()

    torch.testing.assert_close(backward(ours, layer_arrays()), backward(own, layer_arrays()))


@pytest.mark.parametrize("epilog", Epilog, ids=lambda epilog: epilog.name)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
def test_epilogs(epilog: Epilog, batch: tuple[int, ...]) -> None:
    """The gradient of each, through all that it gives, by PyTorch's own check."""
    arrays = {"a": array(*batch, 3, 4), "b": array(4, 5)}
    if epilog.bias:
        arrays["bias"] = array(5)
    if epilog.takes:
        maker = {"relu_aux": "RELU_AUX", "gelu_aux": "GELU_AUX"}[epilog.takes.name]
        arrays |= fusedops.epilog_matmul(arrays["a"], arrays["b"], epilog=maker)[1]
    fixed = {name: x for name, x in arrays.items() if not x.is_floating_point()}
    names = [name for name in arrays if name not in fixed]

    def call(*moving: Array) -> Any:
        named = dict(zip(names, moving, strict=True)) | fixed
        given = fusedops.epilog_matmul(named.pop("a"), named.pop("b"), epilog=epilog, **named)
        if epilog.gives is None:
            return given
        out, aux = given
        (saved,) = aux.values()
        # What stands in the padding means nothing.
        return (out, saved[..., :5]) if saved.is_floating_point() else out

    moving = leaves([arrays[name] for name in names])
    assert torch.autograd.gradcheck(call, moving, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, moving)


# What is kept --------------------------------------------------------------------------------------------------------


@contextmanager
def kept() -> Any:
    """Collect the addresses of all that is saved for a backward pass."""
    found: set[int] = set()

    def pack(x: Array) -> Array:
        found.add(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found


def test_what_relu_keeps() -> None:
    """The result and the operands whose partner needs a gradient, and nothing else."""
    x, w, b = array(4, 5), array(5, 3), array(3)
    for moving, of_operands in (((x, w), {x, w}), ((x,), {w}), ((w,), {x}), ((b,), set())):
        for tensor in (x, w, b):
            tensor.requires_grad_(any(tensor is m for m in moving))
        with kept() as found:
            out = fusedops.matmul(x, w, bias=b, activation="relu")
        assert found == {out.data_ptr(), *(t.data_ptr() for t in of_operands)}


def test_an_overwritten_operand_is_refused_in_the_backward_pass() -> None:
    x, w = array(4, 4), array(4, 4).requires_grad_()
    result = fusedops.matmul(x, w)
    fusedops.matmul(array(4, 4, seed=1), array(4, 4, seed=2), out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_foreign_operand_takes_part() -> None:
    """The tensor's gradient is right, and NumPy's array needs none."""
    x = array(4, 5).requires_grad_()
    w = np.ones((5, 3))
    (got,) = torch.autograd.grad(fusedops.matmul(x, w, activation="relu").sum(), x)
    (want,) = torch.autograd.grad(torch.relu(x @ torch.from_numpy(w)).sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_narrow_types(dtype: torch.dtype, activation: str | None) -> None:
    """At most twice as far from float64 as PyTorch's own."""
    product = Product("narrow", {"a": (3, 16, 72), "b": (72, 40), "bias": (40,)})
    arrays = [0.3 * array(*shape, dtype=dtype, seed=i) for i, shape in enumerate(product.shapes.values())]
    ours, own = (backward_of_sum(f(activation), arrays) for f in (product.ours, product.own))
    exact = backward_of_sum(product.own(activation), [x.double() for x in arrays])
    for got, theirs, right in zip(ours, own, exact, strict=True):
        error, allowed = ((x.double() - right).abs().max() for x in (got, theirs))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * right.abs().max()


def test_a_wide_result_of_narrow_operands() -> None:
    """Where only an unread c moves, its tangent is zero in the result's dtype."""
    a, b, c = array(4, 8, dtype=torch.bfloat16), array(8, 8, dtype=torch.bfloat16), array(4, 8, dtype=torch.float32)

    def call(c: Array) -> Array:
        return fusedops.matmul(a, b, c=c, beta=0.0, out_dtype="float32")

    out, tangent = jvp(call, (c,), (c,))
    assert out.dtype is tangent.dtype is torch.float32
    assert not torch.any(tangent)


def test_a_module_through_functional_call() -> None:
    class Layer(torch.nn.Linear):
        def forward(self, x: Array) -> Array:
            return fusedops.matmul(x, self.weight, bias=self.bias, activation="relu", transpose_b=True)

    layer = Layer(5, 3, dtype=torch.float64)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    x = array(4, 5)
    got = grad(lambda p: functional_call(layer, p, (x,)).sum())(parameters)
    want = grad(lambda p: torch.relu(x @ p["weight"].T + p["bias"]).sum())(parameters)
    torch.testing.assert_close(got, want)


def test_plain_tensors_take_the_short_way() -> None:
    """Without a gradient, a mode, a transform or autocast, no call pays for PyTorch's dispatcher."""
    framework = kind_of(torch.empty(0)).framework
    operands = (torch.ones(4, 4), torch.ones(4, 4), None, None, None, None)
    assert not framework.needs_rules(operands)
    with torch.autocast("cpu"):
        assert framework.needs_rules(operands)
