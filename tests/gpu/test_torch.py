"""PyTorch on a GPU: gradients, compiled programs, graphs and modes, each over fused launches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jvp, vmap

import fusedops
from fusedops.activations import ACTIVATIONS
from fusedops.engines.fused import Fused
from fusedops.engines.split import Split
from fusedops.lifetime import held_count

Array = Any
Function = Callable[..., Any]

FUNCTIONS: dict[str | None, Function] = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
}


def on_gpu(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5).to(dtype).cuda()


def moving(*arrays: torch.Tensor) -> list[torch.Tensor]:
    """Return leaves that require a gradient."""
    return [x.detach().clone().requires_grad_() for x in arrays]


def ours(activation: str | None) -> Function:
    return lambda x, w, b: fusedops.matmul(x, w, bias=b, activation=activation)


def own(activation: str | None) -> Function:
    return lambda x, w, b: FUNCTIONS[activation](x @ w + b)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """What one test compiled does not count against the recompilations of the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The epilogs that are launched, in order."""
    seen: list[str] = []
    launch = Fused.__call__

    def counted(self: Fused, *arguments: Any) -> Any:
        seen.append(self.problem.epilog.name)
        return launch(self, *arguments)

    monkeypatch.setattr(Fused, "__call__", counted)
    return seen


# Derivatives ---------------------------------------------------------------------------------------------------------


def assert_as_near(got: list[torch.Tensor], theirs: list[torch.Tensor], exact: list[torch.Tensor], eps: float) -> None:
    """Raise unless each result is at most twice as far from float64 as PyTorch's own."""
    for mine, own_result, right in zip(got, theirs, exact, strict=True):
        right = right.double()
        error = (mine.double() - right).abs().max()
        allowed = 2 * (own_result.double() - right).abs().max() + eps * right.abs().max()
        assert error <= allowed, (error, allowed)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", ["(k, n)", "(n, k)"])
def test_gradients(dtype: torch.dtype, activation: str | None, stored: str) -> None:
    """Of every operand, with a batch of rows, in both orders of the weight."""
    arrays = on_gpu(3, 16, 72, dtype=dtype), on_gpu(72, 40, dtype=dtype), on_gpu(40, dtype=dtype)
    dout = on_gpu(3, 16, 40, dtype=dtype, seed=1)

    def call(x: Array, w: Array, b: Array) -> Array:
        if stored == "(k, n)":
            return ours(activation)(x, w, b)
        return fusedops.matmul(x, w.T.contiguous(), bias=b, activation=activation, transpose_b=True)

    def gradients(f: Function, *arrays: Array) -> list[Array]:
        leaves = moving(*arrays)
        out = f(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    exact = gradients(own(activation), *(x.double() for x in arrays))
    assert_as_near(gradients(call, *arrays), gradients(own(activation), *arrays), exact, torch.finfo(dtype).eps)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_a_product_with_gradients_is_still_fused(activation: str | None, launched: list[str]) -> None:
    """Forward and backward take one launch a product, with the epilog in the first."""
    leaves = moving(on_gpu(32, 64), on_gpu(64, 48), on_gpu(48))
    ours(activation)(*leaves).sum().backward()
    forward = {"relu": "RELU_BIAS", "gelu_tanh": "GELU_AUX_BIAS"}.get(activation or "", "BIAS")
    assert launched == [forward, "DEFAULT", "DEFAULT"]


@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh", "silu"])
def test_mlp_gradients(activation: str | None, launched: list[str]) -> None:
    """Two layers, GELU's derivative carried by the backward product."""
    shapes = ((2, 16, 48), (48, 64), (64, 24), (64,), (24,))
    arrays = [on_gpu(*shape) for shape in shapes]

    def gradients(f: Function, *arrays: Array) -> list[Array]:
        leaves = moving(*arrays)
        out = f(*leaves)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    def mlp(x: Array, w1: Array, w2: Array, b1: Array, b2: Array) -> Array:
        return fusedops.mlp(x, w1, w2, b1=b1, b2=b2, activation=activation)

    def plain(x: Array, w1: Array, w2: Array, b1: Array, b2: Array) -> Array:
        return FUNCTIONS[activation](x @ w1 + b1) @ w2 + b2

    exact = gradients(plain, *(x.double() for x in arrays))
    assert_as_near(gradients(mlp, *arrays), gradients(plain, *arrays), exact, torch.finfo(torch.float16).eps)
    assert ("DGELU" in launched) == (activation == "gelu_tanh")


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_transforms(activation: str | None) -> None:
    """Second derivatives, forward mode and vmap, as of PyTorch's own operations."""
    x, w, b = (on_gpu(*shape, dtype=torch.float64) for shape in ((4, 5, 6), (6, 3), (3,)))

    def loss(f: Function) -> Function:
        return lambda *arrays: (f(*arrays) ** 2).sum()

    def double_backward(f: Function) -> list[Array]:
        leaves = moving(x[0], w, b)
        first = torch.autograd.grad(loss(f)(*leaves), leaves, create_graph=True)
        return list(torch.autograd.grad(sum((g**2).sum() for g in first), leaves))

    transforms: tuple[Function, ...] = (
        double_backward,
        lambda f: jvp(f, (x[0], w, b), (x[1], w, b)),
        lambda f: hessian(loss(f), (1, 2))(x[0], w, b),
        lambda f: vmap(grad(loss(f), (0, 1, 2)), (0, None, None))(x, w, b),
        lambda f: vmap(f, (None, 1, None), out_dims=-1)(x[0], w.unsqueeze(1).expand(6, 2, 3), b),
    )
    for transform in transforms:
        torch.testing.assert_close(transform(ours(activation)), transform(own(activation)))


def test_memory_kept_for_the_backward_of_relu() -> None:
    """No more than PyTorch keeps of its own two operations."""
    x, w, b = moving(on_gpu(4096, 1024), on_gpu(1024, 2048), on_gpu(2048))

    def kept(f: Function) -> int:
        out = f(x, w, b)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        del out
        gc.collect()
        return before - torch.cuda.memory_allocated()

    for f in (ours("relu"), own("relu")):
        f(x, w, b)
    assert kept(ours("relu")) <= kept(lambda x, w, b: torch.relu(F.linear(x, w.T, b)))


def test_an_overwritten_result_is_refused_in_the_backward_pass() -> None:
    """``out=`` over what autograd has saved is seen by its version."""
    x, y, w = on_gpu(16, 16), on_gpu(16, 16, seed=1), moving(on_gpu(16, 16))[0]
    results = [x @ w, ours(None)(x, w, None)]
    fusedops.matmul(y, y, out=x)
    for result in results:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


# Streams and memory --------------------------------------------------------------------------------------------------


def test_the_backward_pass_runs_on_the_streams_of_the_forward() -> None:
    """A producer on a side stream, still running, then a backward pass that nobody waits for."""
    w, b = moving(on_gpu(512, 512, dtype=torch.float32), on_gpu(512, dtype=torch.float32))
    ours("relu")(torch.zeros(512, 512, device="cuda"), w, b).sum().backward()
    w.grad = b.grad = None
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.full((512, 512), -1.0, device="cuda")
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        ours(None)(x, w, b).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(w.grad, torch.full_like(w, 1024.0))
    torch.testing.assert_close(b.grad, torch.full_like(b, 512.0))


def test_a_foreign_operand_lives_until_the_backward_pass_has_read_it() -> None:
    """CuPy's weight, dropped after the forward pass, its memory refilled while the backward pass waits."""
    n = 1024
    x = torch.ones(n, n, device="cuda", requires_grad=True)
    fusedops.matmul(x, cupy.full((n, n), 2.0, "float32")).sum().backward()
    x.grad = None
    torch.cuda.synchronize()
    weight = cupy.full((n, n), 2.0, "float32")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    cupy.cuda.get_current_stream().synchronize()
    with torch.cuda.stream(side):
        out = fusedops.matmul(x, weight)
        total = out.sum()
        torch.cuda._sleep(200_000_000)
        total.backward()
    assert held_count() >= 1
    del weight, out, total
    gc.collect()
    taken = [cupy.full((n, n), cupy.nan, "float32") for _ in range(8)]
    torch.cuda.synchronize()
    assert len(taken) == 8
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0 * n))


# Compiled programs and graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh", "silu"])
def test_compiled(activation: str | None, dynamic: bool) -> None:
    """In one graph, with gradients, at several lengths."""
    compiled = torch.compile(ours(activation), fullgraph=True, dynamic=dynamic)
    w, b = moving(on_gpu(64, 48), on_gpu(48))
    for length in (32, 57):
        x = moving(on_gpu(length, 64))[0]
        out, eager = compiled(x, w, b), ours(activation)(x, w, b)
        torch.testing.assert_close(out, eager)
        got, want = (torch.autograd.grad(o, (x, w, b), torch.ones_like(o)) for o in (out, eager))
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the compiler's own first capture
def test_reduce_overhead_over_changing_inputs() -> None:
    """A training loop in the compiler's graphs: right values each time, and a pool that does not grow."""
    w, b = moving(on_gpu(64, 64), on_gpu(64))
    compiled = torch.compile(
        lambda x, w, b: ours("relu")(ours("gelu_tanh")(x, w, b), w, b), fullgraph=True, mode="reduce-overhead"
    )
    reserved = 0
    for i in range(20):
        x = on_gpu(32, 64, seed=i)
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(compiled(x, w, b).sum(), (w, b))
        want = torch.autograd.grad(ours("relu")(ours("gelu_tanh")(x, w, b), w, b).sum(), (w, b))
        torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-2)
        if i == 9:
            reserved = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved


def test_graphs_of_a_training_step_outlive_each_other() -> None:
    """Two captured steps, forward and backward, the first destroyed, the second replayed over new data."""
    w, b = moving(on_gpu(64, 48, dtype=torch.float32), on_gpu(48, dtype=torch.float32))
    inputs = [on_gpu(32, 64, dtype=torch.float32, seed=i) for i in range(2)]

    def step(x: Array) -> tuple[Array, ...]:
        return torch.autograd.grad(ours("gelu_tanh")(x, w, b).sum(), (w, b))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in inputs:
            step(x)
    torch.cuda.current_stream().wait_stream(side)
    graphs, results = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(step(x))
        graphs.append(graph)
    del graphs[0], results[0]
    gc.collect()
    inputs[1].copy_(on_gpu(32, 64, dtype=torch.float32, seed=7))
    graphs[0].replay()
    torch.testing.assert_close(results[0], step(inputs[1]))


def test_an_exported_program() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Array, w: Array, b: Array) -> Array:
            return fusedops.matmul(x, w, bias=b, activation="relu")

    arrays = on_gpu(32, 64), on_gpu(64, 48), on_gpu(48)
    length = torch.export.Dim("length", max=1024)
    program = torch.export.export(Layer(), arrays, dynamic_shapes=({0: length}, None, None))
    assert "fusedops.product" in str(program.graph)
    for rows in (32, 7):
        torch.testing.assert_close(
            program.module()(arrays[0][:rows], *arrays[1:]), ours("relu")(arrays[0][:rows], *arrays[1:])
        )


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_operators_keep_the_rules(activation: str) -> None:
    """PyTorch's own check of schema, derivatives and fake tensors."""
    arrays = moving(on_gpu(16, 24, dtype=torch.float32), on_gpu(24, 8, dtype=torch.float32))
    bias = moving(on_gpu(8, dtype=torch.float32))[0]
    epilog = {"relu": "RELU_BIAS", "gelu_tanh": "GELU_AUX_BIAS"}[activation]
    operator = torch.ops.fusedops.product_aux if "AUX" in epilog else torch.ops.fusedops.product
    arguments = (*arrays, bias, None, None, None, 0, 0, epilog, 1.0, 1.0, None, None, None)
    torch.library.opcheck(operator.default, arguments)


# Modes ---------------------------------------------------------------------------------------------------------------


def test_autocast_casts_as_a_linear_layer_is_cast() -> None:
    x, w, b = moving(*(on_gpu(*shape, dtype=torch.float32) for shape in ((16, 24), (24, 8), (8,))))
    compiled = torch.compile(ours("relu"), fullgraph=True)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            wanted = torch.relu(F.linear(x, w.T, b))
            results = [ours("relu")(x, w, b), compiled(x, w, b)]
        for result in results:
            assert result.dtype is wanted.dtype is dtype
            torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
        for gradient in torch.autograd.grad(results[0].sum(), (x, w, b)):
            assert gradient.dtype is torch.float32


def test_deterministic_mode_selects_a_deterministic_plan() -> None:
    a, b = on_gpu(64, 4096), on_gpu(4096, 64)
    try:
        torch.use_deterministic_algorithms(True)
        made = fusedops.plan(a, b)
        assert made.problem.deterministic is True
        assert torch.equal(fusedops.matmul(a, b), fusedops.matmul(a, b))
    finally:
        torch.use_deterministic_algorithms(False)
    assert fusedops.plan(a, b).problem.deterministic is None


def test_a_tensor_without_memory_is_never_launched() -> None:
    with FakeTensorMode():
        a = torch.empty(16, 24, device="cuda", dtype=torch.float16)
        b = torch.empty(24, 8, device="cuda", dtype=torch.float16)
        out = fusedops.matmul(a, b, activation="gelu_tanh")
    assert (tuple(out.shape), out.dtype, out.device.type) == ((16, 8), torch.float16, "cuda")
    with pytest.raises(TypeError, match="memory"):
        fusedops.plan(on_gpu(16, 24), on_gpu(24, 8))(a, b)


def test_modules_and_parameters() -> None:
    """A module as users write it, called by `functional_call` too, and under inference mode."""

    class Layer(torch.nn.Linear):
        def forward(self, x: Array) -> Array:
            return fusedops.matmul(x, self.weight, bias=self.bias, activation="relu", transpose_b=True)

    layer = Layer(24, 8, device="cuda", dtype=torch.float16)
    x = on_gpu(16, 24)
    wanted = torch.relu(F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(functional_call(layer, dict(layer.named_parameters()), (x,)), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), wanted)
        out = torch.empty_like(wanted)
        assert fusedops.matmul(x, layer.weight, bias=layer.bias, transpose_b=True, out=out) is out


@pytest.mark.parametrize("epilog", ["DGELU_BGRAD", "DRELU_BGRAD", "BGRADA", "BGRADB", "RELU_AUX_BIAS"])
def test_epilogs_with_gradients(epilog: str) -> None:
    """The explicit level is differentiable too; on a GPU as on a CPU."""
    member = fusedops.Epilog[epilog]
    arrays = {"a": on_gpu(16, 24, dtype=torch.float64), "b": on_gpu(24, 40, dtype=torch.float64)}
    if member.bias:
        arrays["bias"] = on_gpu(40, dtype=torch.float64)
    if member.takes:
        maker = {"relu_aux": "RELU_AUX", "gelu_aux": "GELU_AUX"}[member.takes.name]
        arrays |= fusedops.epilog_matmul(arrays["a"], arrays["b"], epilog=maker)[1]

    def gradients(device: str) -> list[Array]:
        there = {name: x.to(device) for name, x in arrays.items()}
        leaves = {name: moving(x)[0] if x.is_floating_point() else x for name, x in there.items()}
        operands = dict(leaves)
        out, aux = fusedops.epilog_matmul(operands.pop("a"), operands.pop("b"), epilog=epilog, **operands)
        (saved,) = aux.values()
        total = (out**2).sum() + ((saved**2).sum() if saved.is_floating_point() else 0)
        return [x.cpu() for x in torch.autograd.grad(total, [x for x in leaves.values() if x.requires_grad])]

    torch.testing.assert_close(gradients("cuda"), gradients("cpu"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_on_another_device_than_the_current_one() -> None:
    arrays = [x.to("cuda:1") for x in (on_gpu(16, 24), on_gpu(24, 8), on_gpu(8))]
    leaves = moving(*arrays)
    gradients = torch.autograd.grad(ours("relu")(*leaves).sum(), leaves)
    assert {x.device.index for x in gradients} == {1}
    assert torch.cuda.current_device() == 0


def test_a_split_product_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that no epilog takes are steps of PyTorch's own, and differentiated as the others."""
    seen = []
    launch = Split.__call__
    monkeypatch.setattr(Split, "__call__", lambda self, *rest: (seen.append(self), launch(self, *rest))[1])
    x, w, b = (on_gpu(*shape, dtype=torch.float64) for shape in ((6, 1), (1, 5), (5,)))
    got, want = (
        torch.autograd.grad(f(*leaves).sum(), leaves)
        for f, leaves in ((ours("gelu_tanh"), moving(x, w, b)), (own("gelu_tanh"), moving(x, w, b)))
    )
    torch.testing.assert_close(got, want)
    assert seen
