"""Programs of PyTorch's compiler: in one graph, over the operators, with eager's values and errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch_cases import ACTIVATIONS, PRODUCTS, Product, array, layer_arrays, leaves, mlp, plain_mlp

import fusedops
import fusedops.pytorch

Array = Any

# Warnings of the compiler about its own code and about this machine.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

COMPILED = [x for x in PRODUCTS if x.name in ("plain", "factors", "transposed", "row", "batch", "two batches")]


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test compiled serves no other; nor does what an earlier version of the operators left on the disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f: Any, **options: Any) -> Any:
    return torch.compile(f, fullgraph=True, **{"backend": "aot_eager", **options})


def value_and_gradients(f: Any, arrays: list[Array]) -> Any:
    moving = leaves(arrays)
    out = f(*moving)
    return out, torch.autograd.grad((out**2).sum(), moving)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("product", COMPILED, ids=str)
def test_product(product: Product, activation: str | None) -> None:
    got = value_and_gradients(compiled(product.ours(activation)), product.arrays)
    torch.testing.assert_close(got, value_and_gradients(product.own(activation), product.arrays))


@pytest.mark.parametrize("activation", [None, "gelu_tanh", "silu"])
def test_inductor(activation: str | None) -> None:
    product = COMPILED[0]
    got = value_and_gradients(compiled(product.ours(activation), backend="inductor"), product.arrays)
    torch.testing.assert_close(got, value_and_gradients(product.own(activation), product.arrays))


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_dynamic_extents_are_compiled_once(activation: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    product = COMPILED[0]
    call = torch.compile(product.ours(activation), backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for m in (4, 6, 9):
        arrays = [array(m, 5), *product.arrays[1:]]
        torch.testing.assert_close(
            value_and_gradients(call, arrays), value_and_gradients(product.own(activation), arrays)
        )
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation: str | None) -> None:
    got = value_and_gradients(compiled(mlp(activation)), layer_arrays())
    torch.testing.assert_close(got, value_and_gradients(plain_mlp(activation), layer_arrays()))


def test_the_backward_product_of_an_mlp_carries_the_derivative() -> None:
    """In the compiled program too."""
    graphs: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    call = torch.compile(mlp("gelu_tanh"), fullgraph=True, backend=aot_autograd(fw_compiler=seen))
    value_and_gradients(call, layer_arrays())
    assert any("DGELU" in graph for graph in graphs)


def test_epilogs() -> None:
    """With their auxiliary outputs, which a hand-written backward pass reads."""

    def step(a: Array, b: Array, bias: Array, dout: Array) -> tuple[Array, ...]:
        out, aux = fusedops.epilog_matmul(a, b, epilog="RELU_AUX_BIAS", bias=bias)
        back, sums = fusedops.epilog_matmul(dout, dout, epilog="DRELU_BGRAD", **aux)
        return out, aux["relu_aux"], back, sums["drelu_bgrad"]

    arrays = array(3, 4), array(4, 3), array(3), array(3, 3)
    torch.testing.assert_close(compiled(step)(*arrays), step(*arrays))


def test_out_is_written() -> None:
    def call(a: Array, b: Array, out: Array) -> Array:
        fusedops.matmul(a, b, activation="gelu_tanh", out=out)
        return out + 1

    a, b, out = array(3, 4), array(4, 5), torch.zeros(3, 5, dtype=torch.float64)
    wanted = fusedops.matmul(a, b, activation="gelu_tanh")
    torch.testing.assert_close(compiled(call)(a, b, out), wanted + 1)
    torch.testing.assert_close(out, wanted)
    written = torch.zeros(2, 4, 6, dtype=torch.float64)
    x, w1, w2, b1, b2 = layer_arrays()
    compiled(lambda *t: fusedops.mlp(*t, b1=b1, b2=b2, activation="relu", out=written))(x, w1, w2)
    torch.testing.assert_close(written, mlp("relu")(x, w1, w2, b1, b2))


def test_aux_out_is_written() -> None:
    def call(a: Array, b: Array, aux: Array) -> Array:
        return fusedops.epilog_matmul(a, b, epilog="GELU_AUX", aux_out={"gelu_aux": aux})[0]

    a, b, aux = array(3, 4), array(4, 8), torch.zeros(3, 8, dtype=torch.float64)
    torch.testing.assert_close(compiled(call)(a, b, aux), ACTIVATIONS["gelu_tanh"](a @ b))
    torch.testing.assert_close(aux, a @ b)


def test_autocast_is_that_of_eager() -> None:
    x, w, b = (t.float() for t in COMPILED[0].arrays)
    f = COMPILED[0].ours("relu")

    def inside(*arrays: Array) -> Array:
        with torch.autocast("cpu", torch.bfloat16):
            return f(*arrays)

    with torch.autocast("cpu", torch.bfloat16):
        wanted, around = f(x, w, b), compiled(f)(x, w, b)
    within = compiled(inside)(x, w, b)
    assert wanted.dtype is around.dtype is within.dtype is torch.bfloat16
    torch.testing.assert_close((around, within), (wanted, wanted))


FAULTS = {
    "k": (lambda a, b: fusedops.matmul(a, a), "do not share k"),
    "activation": (lambda a, b: fusedops.matmul(a, b, activation="gelu"), "ambiguous"),
    "flag": (lambda a, b: fusedops.matmul(a, b, transpose_a=1), "transpose_a is 1"),
    "dtype": (lambda a, b: fusedops.matmul(a, b.float()), "Nothing is cast silently"),
    "stream": (lambda a, b: fusedops.matmul(a, b, stream=0), "stream is given"),
    "operand": (lambda a, b: fusedops.matmul(a, None), "no tensor|is None"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_as_eager_tells_it(name: str) -> None:
    call, text = FAULTS[name]
    with pytest.raises(Exception, match=text):
        compiled(call)(array(3, 4), array(4, 5))


def test_a_transform_inside_is_refused_rather_than_wrong() -> None:
    """The operator cannot follow ``torch.func``: compiling a differentiated function is an error."""
    with pytest.raises(Exception, match=r"no derivative under torch\.func"):
        compiled(grad(lambda a, b: fusedops.matmul(a, b).sum()))(array(3, 4), array(4, 5))


# Programs that travel ------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def forward(self, x: Array, w: Array, b: Array) -> Array:
        return fusedops.matmul(x, w, bias=b, activation="gelu_tanh")


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_in_another_process(strict: bool, tmp_path: Path) -> None:
    arrays = tuple(COMPILED[0].arrays)
    rows = {0: torch.export.Dim("rows", max=64)}
    program = torch.export.export(Layer(), arrays, dynamic_shapes=(rows, None, None), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save(arrays, tmp_path / "arrays.pt")
    code = f"""
import torch, fusedops.pytorch
program = torch.export.load({str(tmp_path / "program.pt2")!r}).module()
x, w, b = torch.load({str(tmp_path / "arrays.pt")!r})
for rows in (x, x[:3].repeat(3, 1)):
    torch.testing.assert_close(program(rows, w, b), torch.nn.functional.gelu(rows @ w + b, approximate="tanh"))
print("right")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "right\n", done.stderr


def test_a_traced_graph_holds_the_operator() -> None:
    graph = make_fx(Layer(), tracing_mode="symbolic")(*COMPILED[0].arrays)
    assert "fusedops.product" in graph.code
    torch.testing.assert_close(graph(*COMPILED[0].arrays), Layer()(*COMPILED[0].arrays))


# The operators -------------------------------------------------------------------------------------------------------


def _product(epilog: str, *more: Any, **named: Array) -> tuple[Any, ...]:
    arrays = {"a": array(3, 4), "b": array(4, 5), **named}
    operands = [arrays.get(name) for name in ("a", "b", "bias", "c", "relu_aux", "gelu_aux")]
    moving = [x if x is None or not x.is_floating_point() or more else leaves([x])[0] for x in operands]
    return (*moving, 0, 0, epilog, 1.0, 1.0, None, None, None, *more)


def _samples() -> Iterator[tuple[str, tuple[Any, ...]]]:
    empty = torch.empty(3, 5, dtype=torch.float64)
    yield "product", _product("DEFAULT")
    yield "product", _product("RELU_BIAS", bias=array(5), c=array(3, 5))
    yield "product", _product("GELU")
    yield "product", _product("DGELU", gelu_aux=array(3, 8))
    yield "product_aux", _product("GELU_AUX_BIAS", bias=array(5))
    yield "product_aux", _product("RELU_AUX")
    yield "product_aux", _product("BGRADB")
    yield "product_out", _product("BIAS", empty, bias=array(5))
    yield "product_aux_out", _product("GELU_AUX", empty, torch.empty(3, 8, dtype=torch.float64))
    for activation in (None, "relu", "gelu_tanh"):
        yield "layers", (*leaves(layer_arrays()), activation, False, False, None, None)


@pytest.mark.parametrize(("name", "arguments"), [*_samples()], ids=lambda x: x if isinstance(x, str) else "")
def test_operators_keep_the_rules(name: str, arguments: tuple[Any, ...]) -> None:
    """PyTorch's own check of schema, registration, fake tensors and compiled programs."""
    torch.library.opcheck(getattr(torch.ops.fusedops, name).default, arguments)
