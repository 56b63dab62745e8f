"""The table of bad arguments: a row for each pair of argument and kind of fault, with what its error must say.

A row changes arguments of a call that is right (`VALID`). It holds for several functions, and on every framework of its
column ``on``; where a framework answers otherwise, ``instead`` says how, and None stands for a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from frameworks import JAX, NUMPY, STRICT, TORCH, TestFramework, np_dtype
from producers import Producer

import fusedops

Array = Any
Arguments = dict[str, Any]
Answer = tuple[type[Exception], str]

TRACED = replace(JAX, name="jax traced")
"""JAX arrays that the call sees as tracers."""

EVERY = (NUMPY, TORCH, JAX, TRACED, STRICT)
STRIDED = (NUMPY, TORCH, STRICT)
FLIPPED = (NUMPY, STRICT, JAX, TRACED)
"""Those that can be given negative strides."""
NARROW = (NUMPY, TORCH, JAX, TRACED)
"""Those with 16-bit types."""

PRODUCTS = "matmul epilog_matmul plan explain"
EPILOGS = "epilog_matmul plan explain"
CALLS = "matmul epilog_matmul Plan"
"""Those that compute; "Plan" is the call of a plan."""
MLPS = "mlp mlp_grad"
WRITES = "matmul epilog_matmul plan"

FIRST = "first layer (a is x, b is w1, bias is b1)"
SECOND = "second layer (a is the hidden layer, b is w2, bias is b2)"
DPREACT = "dpreact (a is dout, b is w2)"


@dataclass(frozen=True)
class Fault:
    """A row.

    Attributes
    ----------
    ops : str
        The functions that it holds for.
    label : str
        The argument and the kind of fault.
    error, text : type, str
        What is raised; its text, where " ... " stands for anything.
    given : dict, or a function of the framework that returns it
        What differs from the valid call.
    on : tuple
        The frameworks that lead.
    instead : dict
        Error and text of the frameworks that answer otherwise; None for a result.
    planned : dict
        What the plan that is called was made with, beside the valid arguments.
    part : str
        The product of an mlp that the message names.
    within : function
        Makes the context of the call.
    """

    ops: str
    label: str
    error: type[Exception]
    text: str
    given: Arguments | Callable[[TestFramework], Arguments]
    on: tuple[TestFramework, ...]
    instead: Mapping[TestFramework, Answer | None]
    planned: Arguments
    part: str
    within: Callable[[], AbstractContextManager[Any]]

    def answer(self, framework: TestFramework) -> Answer | None:
        """Return the error on one framework and its text; None where the call is right there."""
        return self.instead.get(framework, (self.error, self.text))


def row(
    error: type[Exception],
    ops: str,
    label: str,
    text: str,
    on: tuple[TestFramework, ...] = EVERY,
    instead: Mapping[TestFramework, Answer | None] | None = None,
    planned: Arguments | None = None,
    part: str = "",
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    together: Callable[[TestFramework], Arguments] | None = None,
    **given: Any,
) -> Fault:
    """Return a row whose faulty arguments stand as keywords, or are made together."""
    return Fault(ops, label, error, text, together or given, on, instead or {}, planned or {}, part, within)


bad_type = partial(row, TypeError)
bad_value = partial(row, ValueError)


# Arrays ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """An argument that each framework makes for itself."""

    make: Callable[[TestFramework], Any]


def values(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Return small whole numbers, some of them negative."""
    return (np.arange(np.prod(shape, dtype=int)) % 7 - 3).reshape(shape).astype(np_dtype(dtype))


View = Callable[[Any], Any]
same: View = lambda x: x
every_other: View = lambda x: x[..., ::2]
mirrored: View = lambda x: x[..., ::-1]
flipped: View = lambda x: x[::-1]
of_three: View = lambda x: x[:, :3]
left_half: View = lambda x: x[:, : x.shape[1] // 2]


def of(*shape: int, dtype: str = "float32", view: View = same) -> Made:
    """Return an array of the framework, over the memory of a view of a NumPy array."""
    return Made(lambda framework: framework.make(view(values(*shape, dtype=dtype))))


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Made:
    """Return an array with these strides in elements, which may be 0 or overlap."""
    return of(64, view=lambda x: np.lib.stride_tricks.as_strided(x, shape, tuple(4 * step for step in strides)))


def in_numpy(*shape: int, view: View = same) -> Made:
    """Return a NumPy array, whichever framework leads."""
    return Made(lambda _: view(values(*shape)))


def in_torch(*shape: int, view: View = same) -> Made:
    """Return a tensor, whichever framework leads."""
    return Made(lambda _: view(torch.from_numpy(values(*shape))))


def in_jax(*shape: int) -> Made:
    """Return a JAX array, whichever framework leads."""
    return Made(lambda _: jnp.asarray(values(*shape)))


def named(name: str, made: Made) -> Made:
    """Return ``aux_out`` with one array."""
    return Made(lambda framework: {name: made.make(framework)})


def saved(hidden: Any, preact: Any = None) -> Made:
    """Return what `mlp` is said to have saved."""
    return Made(lambda framework: fusedops.MlpSaved(made(hidden, framework), made(preact, framework)))


def made(value: Any, framework: TestFramework) -> Any:
    """Return an argument as the framework makes it; any other value as it is."""
    return value.make(framework) if isinstance(value, Made) else value


def packed_field(x: np.ndarray) -> np.ndarray:
    """Return an array whose elements are 5 bytes apart."""
    return np.zeros(x.shape, [("value", "f4"), ("flag", "i1")])["value"]


def nested(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of tensors."""
    return torch.nested.as_nested_tensor([x, x])


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as PyTorch's fake, distributed and functional ones are."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("dispatched")


def matrix(x: np.ndarray) -> np.matrix:
    """Return a matrix, whose constructor would warn."""
    return x.view(np.matrix)


def read_only(x: np.ndarray) -> np.ndarray:
    """Return the array, protected."""
    x.flags.writeable = False
    return x


def meta(*shape: int) -> Made:
    """Return a tensor without memory, on PyTorch's meta device."""
    return Made(lambda _: torch.empty(shape, device="meta"))


def deleted(*shape: int) -> Made:
    """Return a JAX array whose memory is gone."""

    def make(_: TestFramework) -> Array:
        x = jnp.array(values(*shape))
        x.delete()
        return x

    return Made(make)


def produced(*shape: int, device: tuple[int, int] = (1, 0)) -> Made:
    """Return an array known by DLPack alone."""
    return Made(lambda _: Producer(values(math.prod(shape)), shape, device=device))


class Consumed(Producer):
    """An array whose capsule NumPy has consumed."""

    def __dlpack__(self, **asked: Any) -> Any:
        capsule = super().__dlpack__(**asked)
        np.from_dlpack(SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=self.__dlpack_device__))
        return capsule


def sharing(other: str, framework: TestFramework) -> Arguments:
    """Return an operand and an ``out`` that have one element in common, the operand's last."""
    rows, columns = (1, *SHAPES[other])[-2:]
    buffer = framework.make(values(12, 16))
    operand = buffer[:rows, :columns] if len(SHAPES[other]) == 2 else buffer[0, :columns]
    return {other: operand, "out": buffer[rows - 1 : rows + 3, columns - 1 : columns + 5]}


def sharing_aux(name: str, epilog: str, framework: TestFramework) -> Arguments:
    """Return a ``gelu_aux``, to be read or written, and an ``out`` that have a row in common."""
    buffer = framework.make(values(7, 8))
    aux = {"gelu_aux": buffer[:4, :]}
    return {"epilog": epilog, "out": buffer[3:, :6], **({"aux_out": aux} if name == "aux_out" else aux)}


def aux_over_a(framework: TestFramework) -> Arguments:
    """Return an auxiliary output whose memory is also that of ``a``."""
    buffer = framework.make(values(4, 8))
    return {"epilog": "GELU_AUX", "a": buffer[:, :5], "aux_out": {"gelu_aux": buffer}}


def out_is_a(framework: TestFramework) -> Arguments:
    """Return one array as operand and as result."""
    a = framework.make(values(4, 5))
    return {"a": a, "b": framework.make(values(5, 5)), "out": a}


# What is right --------------------------------------------------------------------------------------------------------

VALID: dict[str, Arguments] = {
    "matmul": {"a": of(4, 5), "b": of(5, 6)},
    "epilog_matmul": {"a": of(4, 5), "b": of(5, 6), "epilog": "DEFAULT"},
    "plan": {"a": of(4, 5), "b": of(5, 6)},
    "explain": {"a": of(4, 5), "b": of(5, 6)},
    "Plan": {"a": of(4, 5), "b": of(5, 6)},
    "mlp": {"x": of(4, 5), "w1": of(5, 8), "w2": of(8, 6), "activation": "relu"},
    "mlp_grad": {"dout": of(4, 6), "x": of(4, 5), "w1": of(5, 8), "w2": of(8, 6), "activation": "relu"},
    "options": {},
    "options.set_default": {},
}
SHAPES = {"a": (4, 5), "b": (5, 6), "bias": (6,), "c": (4, 6), "out": (4, 6), "x": (4, 5), "w1": (5, 8), "w2": (8, 6)}
SHAPES |= {"b1": (8,), "b2": (6,), "dout": (4, 6)}
TAKERS = dict.fromkeys(("a", "b", "bias", "c"), PRODUCTS) | dict.fromkeys(("x", "w1", "w2", "b1", "b2"), MLPS)
TAKERS |= {"out": WRITES, "dout": "mlp_grad"}


_WRITTEN_IN_JAX = TypeError, "is given, but JAX arrays never change. Leave ... out and use the result"
NEVER_CHANGES: dict[TestFramework, Answer | None] = {JAX: _WRITTEN_IN_JAX, TRACED: _WRITTEN_IN_JAX}
NO_STRIDES: dict[TestFramework, Answer | None] = {JAX: None, TRACED: None}
"""A JAX array has no strides that could be wrong."""


def like(name: str, **how: Any) -> Arguments:
    """Return an argument with its right shape."""
    return {name: of(*SHAPES[name], **how)}


# The table ------------------------------------------------------------------------------------------------------------
# fmt: off

AN_ARRAY = "expected an array of NumPy, PyTorch, JAX, CuPy or any library with DLPack"

TYPES = (
    *(bad_type(TAKERS[name], f"{name}: type {kind}", f"{name} is a {kind}, {AN_ARRAY}", **{name: x})
      for name in SHAPES for kind, x in (("list", [[1.0]]), ("str", "abc"), ("float", 2.0), ("object", object()))),
    *(bad_type(TAKERS[name], f"{name}: type None", f"{name} is ... None ... expected an array", **{name: None})
      for name in ("a", "b", "x", "w1", "w2", "dout")),
    *(bad_type("Plan", f"{name}: type list", f"{name} is a list, {AN_ARRAY}", **{name: [1]}) for name in ("a", "out")),
    bad_type(EPILOGS, "relu_aux: type list", "relu_aux is a list", relu_aux=[1], epilog="DRELU"),
    bad_type(EPILOGS, "gelu_aux: type str", "gelu_aux is a str", gelu_aux="abc", epilog="DGELU"),
    *(bad_type("epilog_matmul plan", f"aux_out: type {kind}", f"aux_out is a {kind}, expected a dict", aux_out=x,
               epilog="RELU_AUX") for kind, x in (("list", [1]), ("str", "relu_aux"), ("int", 1))),
    bad_type("Plan", "aux_out: type list", "aux_out is a list, expected a dict", aux_out=[1],
             planned={"epilog": "RELU_AUX"}),
    bad_type("epilog_matmul plan", "aux_out: type of its array", 'aux_out["relu_aux"] is a NoneType, expected an array',
             aux_out={"relu_aux": None}, epilog="RELU_AUX"),
    bad_type("mlp_grad", "saved: type list", "saved is a list, expected the MlpSaved of mlp(..., save=True)",
             saved=[1]),
    bad_type("mlp_grad", "saved: type of hidden", "saved.hidden is a str, expected an array", saved=saved("abc")),
)

FLOATS = "expected one of float16, bfloat16, float32, float64"
CONVERT = "Nothing is cast silently; convert"
SWAPPED = ">f4 is not in this machine's byte order; convert it with .astype"
swap: View = lambda x: x.astype(">f4")

DTYPES = (
    *(bad_type(PRODUCTS, f"{name}: dtype {dtype}", f"{name} is {dtype}, {FLOATS}", **like(name, dtype=dtype))
      for name in ("a", "b") for dtype in ("int32", "uint8", "bool", "complex64")),
    bad_type(PRODUCTS, "a, b: dtype int64", f"a is int64, {FLOATS}", **like("a", dtype="int64"),
             **like("b", dtype="int64")),
    bad_type(PRODUCTS, "b: dtype mixed", f"a is float32 and b is float64. {CONVERT} one of them",
             **like("b", dtype="float64")),
    bad_type(PRODUCTS, "b: dtype mixed, 16 bits", f"a is float16 and b is bfloat16. {CONVERT}", NARROW,
             a=of(4, 5, dtype="float16"), b=of(5, 6, dtype="bfloat16")),
    *(bad_type(PRODUCTS, f"a: dtype {kind}", f"a is {kind}, {FLOATS}", (NUMPY,), a=in_numpy(4, 5, view=view))
      for kind, view in (("object", methodcaller("astype", object)), ("str1024", methodcaller("astype", "U32")),
                         ("datetime64[s]", methodcaller("astype", "M8[s]")),
                         ("void", lambda x: np.empty(x.shape, "V0")),
                         ("float8_e4m3fn", methodcaller("astype", ml_dtypes.float8_e4m3fn)))),
    bad_value(PRODUCTS, "a: dtype of a packed field",
              "a cannot be used: its stride of 25 bytes is no multiple of its 4-byte",
              (NUMPY,), a=in_numpy(4, 5, view=packed_field)),
    *(bad_type(TAKERS[name].replace("mlp ", ""), f"{name}: dtype",
               f"{name} is float64, expected float32. {CONVERT} {name}",
               instead=NEVER_CHANGES if name == "out" else None, **like(name, dtype="float64"))
      for name in ("bias", "c", "out", "dout", "b1", "b2")),
    bad_type(PRODUCTS, "bias: dtype of a, not of out", "bias is float16, expected float32", NARROW, out_dtype="float32",
             a=of(4, 5, dtype="float16"), b=of(5, 6, dtype="float16"), bias=of(6, dtype="float16")),
    *(bad_type(ops, f"{name}: byte order", f"{name} cannot be used: its dtype {SWAPPED}", on,
               **{name: in_numpy(*SHAPES[name], view=swap)})
      for ops, name, on in ((PRODUCTS, "a", NARROW), (PRODUCTS, "b", NARROW), (PRODUCTS, "bias", NARROW),
                            (PRODUCTS, "c", NARROW), (WRITES, "out", (NUMPY,)), ("Plan", "a", (NUMPY,)),
                            ("mlp_grad", "dout", NARROW))),
    bad_type(EPILOGS, "relu_aux: dtype", f"relu_aux is bool, expected uint8. {CONVERT} relu_aux", epilog="DRELU",
             relu_aux=of(4, 16, dtype="bool")),
    bad_type(EPILOGS, "gelu_aux: dtype", f"gelu_aux is float64, expected float32. {CONVERT} gelu_aux", epilog="DGELU",
             gelu_aux=of(4, 8, dtype="float64")),
    bad_type("epilog_matmul plan", "aux_out: dtype", 'aux_out["relu_aux"] is int8, expected uint8', epilog="RELU_AUX",
             aux_out=named("relu_aux", of(4, 16, dtype="int8")), instead=NEVER_CHANGES),
    *(bad_type("mlp", f"{name}: dtype", f"float64 ... {CONVERT}", part=part, **like(name, dtype="float64"))
      for name, part in (("x", FIRST), ("w1", FIRST), ("b1", FIRST), ("w2", SECOND), ("b2", SECOND))),
    bad_type("mlp", "out: dtype", "out is float64, expected float32", STRIDED, part=SECOND,
             **like("out", dtype="float64")),
    bad_type("mlp_grad", "saved: dtype", f"saved.hidden is float64, expected float32. {CONVERT} saved.hidden",
             saved=saved(of(4, 8, dtype="float64"))),
    bad_value("Plan", "a: dtype", "a is float64[4, 5] ... made for float32[4, 5] ... Make a new plan",
              **like("a", dtype="float64")),
)

NO_K = "a and b do not share k: a is (m=4, k=5), b is "
PER_ROW = "A bias per row: matmul(b.mT, a.mT, bias=bias).mT"

SHAPE_FAULTS = (
    bad_value(PRODUCTS, "a: shape 0-d", "a has no axes, expected at least one", a=of()),
    bad_value(PRODUCTS, "b: shape 0-d", "b has no axes, expected at least one", b=of()),
    bad_value(PRODUCTS, "b: shape k", f"{NO_K}(k=7, n=8). Pass operands whose k agree", b=of(7, 8)),
    bad_value(PRODUCTS, "b: shape (n, k)", f"{NO_K}(k=6, n=5). If b is stored as (n, k), pass transpose_b=True",
              b=of(6, 5)),
    bad_value(PRODUCTS, "transpose_b: shape (k, n)",
              f"{NO_K}(k=6, n=5). If b is stored as (k, n), pass transpose_b=False", transpose_b=True),
    bad_value(PRODUCTS, "a: shape (k, m)", "a is (m=5, k=4) ... stored as (k, m), pass transpose_a=True", a=of(5, 4)),
    bad_value(PRODUCTS, "transpose_a: shape (m, k)", "a is (m=5, k=4) ... stored as (m, k), pass transpose_a=False",
              transpose_a=True),
    bad_value(PRODUCTS, "a: shape of a vector", "a is (m=1, k=3), b is (k=5, n=6)", a=of(3)),
    bad_value(PRODUCTS, "transpose_a: shape of a vector", "transpose_a is True, but a is a vector of shape (5,)",
              a=of(5), transpose_a=True),
    bad_value(PRODUCTS, "b: shape batch", "batch axes do not broadcast: a has (2,), b has (3,)", a=of(2, 4, 5),
              b=of(3, 5, 6)),
    *(bad_value(PRODUCTS, f"bias: shape {kind}", f"bias has shape {found}, expected (n,) = (6,){or_}. {PER_ROW}",
                bias=of(*found), a=of(*a))
      for kind, found, a, or_ in (
          ("0-d", (), (4, 5), ""),
          ("(m,)", (4,), (4, 5), ""),
          ("(m, 1), square result", (6, 1), (6, 5), ""),
          ("(m, n)", (4, 6), (4, 5), ""),
          ("(batch, n)", (2, 6), (2, 4, 5), ", or (..., 1, n) = (2, 1, 6) for each item of the batch"))),
    bad_value(PRODUCTS, "bias: shape batch", "bias has batch axes (3,), which do not broadcast to (2,)", a=of(2, 4, 5),
              bias=of(3, 1, 6)),
    *(bad_value(PRODUCTS, f"c: shape {found}", f"c has shape {found}, expected that of the result, (4, 6)",
                c=of(*found))
      for found in ((), (6,), (1, 6), (4, 5), (6, 4))),
    bad_value(PRODUCTS, "c: shape batch", "c has batch axes (3,), which do not broadcast to (2,)", a=of(2, 4, 5),
              c=of(3, 4, 6)),
    *(bad_value(WRITES, f"out: shape {found}", f"out has shape {found}, expected (4, 6)", instead=NEVER_CHANGES,
                out=of(*found)) for found in ((), (24,), (4, 5), (6, 4), (1, 4, 6))),
    bad_value(WRITES, "out: shape of a vector", "out has shape (4, 1), expected (4,)", instead=NEVER_CHANGES, b=of(5),
              out=of(4, 1)),
    bad_value("mlp", "out: shape", "out has shape (6, 4), expected (4, 6)", STRIDED, part=SECOND, out=of(6, 4)),
    *(bad_value(EPILOGS, f"{name}: shape {found}", f"{name} has shape {found}, expected {wanted}", epilog=epilog,
                **{name: of(*found, dtype=dtype)})
      for name, epilog, found, wanted, dtype in (
          ("relu_aux", "DRELU", (4, 1), (4, 16), "uint8"),
          ("relu_aux", "DRELU_BGRAD", (16, 4), (4, 16), "uint8"),
          ("gelu_aux", "DGELU", (4, 6), (4, 8), "float32"),
          ("gelu_aux", "DGELU_BGRAD", (2, 4, 8), (4, 8), "float32"))),
    *(bad_value("epilog_matmul plan", f"aux_out: shape of {name}",
                f'aux_out["{name}"] has shape {found}, expected {wanted}',
                instead=NEVER_CHANGES, aux_out=named(name, of(*found)), epilog=epilog)
      for name, epilog, found, wanted in (
          ("gelu_aux", "GELU_AUX", (4, 6), (4, 8)), ("bgrada", "BGRADA", (6,), (4,)),
          ("bgradb", "BGRADB", (1, 6), (6,)))),
    bad_value("Plan", "a: shape", "a is float32[3, 5] ... made for float32[4, 5] ... Make a new plan", a=of(3, 5)),
    bad_value("Plan", "bias: shape", "bias is float32[1, 6] ... made for float32[6]", bias=of(1, 6),
              planned=like("bias")),
    bad_value("Plan", "out: shape", "out is float32[6, 4] ... made for float32[4, 6]", instead=NEVER_CHANGES,
              out=of(6, 4)),
    bad_value(MLPS, "x: shape of a vector", "x has shape (5,), expected at least two axes, (..., m, k)", x=of(5)),
    bad_value(MLPS, "w1: shape batch", "w1 has shape (2, 5, 8), expected two axes, (k, hidden)", w1=of(2, 5, 8)),
    bad_value(MLPS, "w1: shape k", "w1 is (k=7, hidden=8), expected k = 5, the last extent of x", w1=of(7, 8)),
    bad_value(MLPS, "w1: shape (hidden, k)", "w1 is (k=8, hidden=5) ... stored as (hidden, k), pass transpose_w1=True",
              w1=of(8, 5)),
    bad_value(MLPS, "transpose_w2: shape (hidden, n)",
              "w2 is (hidden=6, n=8), expected hidden = 8, that of w1. If w2 is "
              "stored as (hidden, n), pass transpose_w2=False", transpose_w2=True),
    bad_value(MLPS, "b1: shape", "b1 has shape (6,), expected (hidden,) = (8,)", b1=of(6)),
    bad_value(MLPS, "b2: shape", "b2 has shape (1, 6), expected (n,) = (6,)", b2=of(1, 6)),
    bad_value("mlp_grad", "dout: shape m", "dout has shape (3, 6), expected (..., m, n) = (4, 6)", dout=of(3, 6)),
    bad_value("mlp_grad", "dout: shape n", "dout has shape (4, 8), expected (..., m, n) = (4, 6)", dout=of(4, 8)),
    bad_value("mlp_grad", "saved: shape of hidden", "saved.hidden has shape (4, 6), expected (..., m, hidden) = (4, 8)",
              saved=saved(of(4, 6))),
    bad_value("mlp_grad", "saved: shape of preact", "saved.preact has shape (3, 8), expected ... = (4, 8)",
              saved=saved(of(4, 8), of(3, 8)), activation="silu"),
)

GAPS = "contiguous and must not overlap. Nothing is copied silently; pass a contiguous copy of"
ONE_STRIDE = "one stride must walk over all of them. Pass a contiguous copy of"
SHARES = "its elements share memory. Pass an array of its own"

LAYOUTS = (
    *(bad_value(PRODUCTS, f"{name}: layout {kind}", f"{name} has shape {(rows, columns)} and strides ... {GAPS} {name}",
                on, instead=NO_STRIDES, **{name: x})
      for name, (rows, columns) in (("a", (4, 5)), ("b", (5, 6)), ("c", (4, 6)))
      for kind, x, on in (
          ("[:, ::2]", of(rows, 2 * columns, view=every_other), EVERY),
          ("rows of stride 0", strided((rows, columns), (0, 1)), EVERY),
          ("rows that overlap", strided((rows, columns), (columns - 1, 1)), EVERY),
          ("[:, ::-1]", of(rows, columns, view=mirrored), FLIPPED),
          ("[::-1]", of(rows, columns, view=flipped), FLIPPED))),
    bad_value(PRODUCTS, "a: layout batch [:, :3]", f"a has batch axes (2, 3) with strides (80, 20) ... {ONE_STRIDE} a",
              instead=NO_STRIDES, a=of(2, 4, 4, 5, view=of_three)),
    bad_value(PRODUCTS, "a: layout batch [::-1]",
              "a has a negative stride over its batch axes ... contiguous copy of a",
              FLIPPED, instead=NO_STRIDES, a=of(2, 4, 5, view=flipped)),
    bad_value(PRODUCTS, "b: layout batch broadcast within",
              f"b has batch axes (2, 1) ... {ONE_STRIDE} b, expanded to (2, 3)", a=of(2, 3, 4, 5), b=of(2, 1, 5, 6)),
    *(bad_value(PRODUCTS, f"bias: layout {kind}",
                f"bias has stride {stride} along n, expected 1. Pass a contiguous copy",
                on, instead=NO_STRIDES, bias=bias)
      for kind, bias, stride, on in (
          ("[::2]", of(12, view=every_other), 2, EVERY),
          ("of stride 0", strided((6,), (0,)), 0, EVERY),
          ("[::-1]", of(6, view=flipped), -1, FLIPPED))),
    bad_value(PRODUCTS, "bias: layout batch [:, :3]", f"bias has batch axes (2, 3) ... {ONE_STRIDE} bias",
              instead=NO_STRIDES, a=of(2, 3, 4, 5), bias=of(2, 4, 1, 6, view=of_three)),
    bad_value(PRODUCTS, "c: layout column-major", "c has shape (4, 6) ... stride 1 along n). Pass a row-major c",
              instead=NO_STRIDES, c=of(6, 4, view=np.transpose)),
    *(bad_value(ops, f"out: layout {kind}", text, on, part=part, instead=NEVER_CHANGES, out=out)
      for kind, out, text in (
          ("column-major", of(6, 4, view=np.transpose), "out has shape (4, 6) ... Pass a row-major out"),
          ("[:, ::2]", of(4, 12, view=every_other), f"out has shape (4, 6) and strides (12, 2) ... {GAPS} out"),
          ("rows of stride 0", strided((4, 6), (0, 1)), f"out has strides (0, 1): {SHARES}"),
          ("rows that overlap", strided((4, 6), (5, 1)), f"out has strides (5, 1): {SHARES}"))
      for ops, on, part in ((WRITES, EVERY, ""), ("mlp", STRIDED, SECOND))),
    bad_value(WRITES, "out: layout [::-1]", f"out has shape (4, 6) and strides (-6, 1) ... {GAPS}", (NUMPY, STRICT),
              out=of(4, 6, view=flipped)),
    bad_value(WRITES, "out: layout batch [:, :3]", f"out has batch axes (2, 3) ... {ONE_STRIDE} out", STRIDED,
              a=of(2, 3, 4, 5), out=of(2, 4, 4, 6, view=of_three)),
    *(bad_value(EPILOGS, f"{name}: layout",
                f"{name} has strides {(2 * n, 1)}, expected the dense {(n, 1)}. Pass a ... copy",
                instead=NO_STRIDES, epilog=epilog, **{name: of(4, 2 * n, dtype=dtype, view=left_half)})
      for name, epilog, n, dtype in (("relu_aux", "DRELU", 16, "uint8"), ("gelu_aux", "DGELU", 8, "float32"))),
    bad_value("epilog_matmul plan", "aux_out: layout",
              'aux_out["gelu_aux"] has strides (1, 4), expected the dense (8, 1)',
              instead=NEVER_CHANGES, aux_out=named("gelu_aux", of(8, 4, view=np.transpose)), epilog="GELU_AUX"),
    bad_value("Plan", "a: layout", "a is float32[4, 5] with strides [1, 4] ... with strides [5, 1]", instead=NO_STRIDES,
              a=of(5, 4, view=np.transpose)),
    bad_value("Plan", "out: layout", "out is float32[4, 6] with strides [12, 1] ... with strides [6, 1]", STRIDED,
              out=of(4, 12, view=left_half)),
    *(bad_value("mlp", f"{name}: layout [:, ::2]", f"has shape {(rows, columns)} and strides ... {GAPS}", STRIDED,
                part=part, **{name: of(rows, 2 * columns, view=every_other)})
      for name, part, rows, columns in (("x", FIRST, 4, 5), ("w1", FIRST, 5, 8), ("w2", SECOND, 8, 6))),
    bad_value("mlp_grad", "dout: layout [:, ::2]", f"a has shape (4, 6) ... {GAPS}", STRIDED, part=DPREACT,
              dout=of(4, 12, view=every_other)),
    bad_value("mlp_grad", "dout: layout, rows do not fold", f"dout has batch axes (2, 3) ... {ONE_STRIDE} dout",
              STRIDED, x=of(2, 3, 5), dout=of(2, 4, 6, view=of_three)),
)

OTHER_DEVICE = "Move one of them to the other's device"

DEVICES = (
    *(bad_value(ops, f"{name}: device", f"a is on cpu and {name} is on meta ... {OTHER_DEVICE}", (TORCH,),
                **{name: meta(*SHAPES[name])})
      for ops, name in ((PRODUCTS, "b"), (PRODUCTS, "bias"), (PRODUCTS, "c"), (WRITES, "out"))),
    bad_value("epilog_matmul plan", "aux_out: device", 'a is on cpu and aux_out["gelu_aux"] is on meta', (TORCH,),
              epilog="GELU_AUX", aux_out=named("gelu_aux", meta(4, 8))),
    bad_value(PRODUCTS, "b: device, foreign", f"b is a torch array on meta ... a jax array on cpu. {OTHER_DEVICE}",
              (JAX,), b=meta(5, 6)),
    bad_value(PRODUCTS, "b: device, of the lead",
              f"a is a numpy array on cpu ... a torch array on meta ... {OTHER_DEVICE}", (NUMPY,), b=meta(5, 6)),
    bad_value(PRODUCTS, "a: device, by DLPack",
              f"b is a numpy array on cpu ... Producer array on cuda:0. {OTHER_DEVICE}",
              (NUMPY,), a=produced(4, 5, device=(2, 0))),
    bad_value("mlp", "w1: device", "a is on cpu and b is on meta", (TORCH,), part=FIRST, w1=meta(5, 8)),
    bad_value("Plan", "a: device", "a is float32[4, 5] ... on meta ... on cpu", (TORCH,), a=meta(4, 5)),
)

needs_grad: View = lambda x: x.requires_grad_()
FORBIDDEN = 'options(mixed="error") forbids it; convert them'
ONE_FRAMEWORK = partial(fusedops.options, mixed="error")
X64_OFF = partial(jax.enable_x64, False)
RULES = "has rules of its own; pass a plain array, numpy.asarray(x)"
GONE = "cannot be used: it was deleted or donated; its memory is gone. Pass an array that is still alive"

FRAMEWORKS = (
    bad_type(PRODUCTS, "b: framework, requires grad", "b is a torch array that requires a gradient ... Detach it",
             (JAX, STRICT), b=in_torch(5, 6, view=needs_grad)),
    bad_type(PRODUCTS, "bias: framework, requires grad, under no_grad", "bias is a torch array ... detach",
             (JAX, STRICT), bias=in_torch(6, view=needs_grad), within=torch.no_grad),
    bad_type(PRODUCTS, "b: framework, concrete", "b is a torch array, and JAX is tracing ... jax.dlpack.from_dlpack",
             (TRACED,), b=in_torch(5, 6)),
    bad_type(MLPS, "w1: framework, concrete", "w1 is a torch array, and JAX is tracing ... jax.dlpack.from_dlpack",
             (TRACED,), w1=in_torch(5, 8)),
    *(bad_type(PRODUCTS, f"b: framework, mixed with {other}", f"a is {lead.name}, b is {other}. {FORBIDDEN}", (lead,),
               b=b, within=ONE_FRAMEWORK)
      for lead, other, b in ((NUMPY, "torch", in_torch(5, 6)), (TORCH, "jax", in_jax(5, 6)),
                             (JAX, "numpy", in_numpy(5, 6)), (STRICT, "torch", in_torch(5, 6)))),
    bad_type(MLPS, "w2: framework, mixed", f"x is numpy ... w2 is torch ... {FORBIDDEN}", (NUMPY,), w2=in_torch(8, 6),
             within=ONE_FRAMEWORK),
    bad_type(f"{WRITES} mlp Plan", "out: framework jax", "out is given, but JAX arrays never change", out=in_jax(4, 6)),
    bad_type(f"{WRITES} mlp Plan", "out: framework torch",
             "out is a torch array, and the call is led by ... Pass out as a", (NUMPY, STRICT), out=in_torch(4, 6)),
    bad_type(f"{WRITES} mlp Plan", "out: framework numpy",
             "out is a numpy array, and the call is led by ... Pass out as a", (TORCH, STRICT), out=in_numpy(4, 6)),
    bad_type("epilog_matmul plan", "aux_out: framework", 'aux_out["gelu_aux"] is a torch array, and the call is led by',
             (NUMPY, STRICT), aux_out=named("gelu_aux", in_torch(4, 8)), epilog="GELU_AUX"),
    bad_type("Plan", "a, b: framework", "the plan was made for numpy, and torch leads this call", (NUMPY,),
             a=in_torch(4, 5), b=in_torch(5, 6)),
    bad_type(PRODUCTS, "bias: framework, read-only",
             "bias is a numpy array that torch cannot take over ... writable copy",
             (TORCH,), bias=in_numpy(6, view=read_only)),
    *(bad_type(ops, f"{name}: framework, {kind}", f"{name} cannot be used: a {kind} {RULES}", on,
               **{name: in_numpy(*SHAPES[name], view=view)})
      for kind, view in (("MaskedArray", np.ma.masked_invalid), ("matrix", matrix))
      for ops, name, on in ((PRODUCTS, "a", NARROW), (PRODUCTS, "c", NARROW), (WRITES, "out", (NUMPY,)),
                            ("Plan", "b", (NUMPY,)), ("mlp_grad", "dout", NARROW))),
    bad_type(PRODUCTS, "bias: framework, MaskedArray", f"bias cannot be used: a MaskedArray {RULES}", NARROW,
             bias=in_numpy(6, view=np.ma.masked_invalid)),
    *(bad_type(ops, f"b: framework, {layout}", f"b cannot be used: its layout is torch.{layout}; ... x.to_dense()", on,
               b=in_torch(5, 6, view=view))
      for layout, view in (("sparse_coo", torch.Tensor.to_sparse), ("sparse_csr", torch.Tensor.to_sparse_csr))
      for ops, on in ((PRODUCTS, (NUMPY, TORCH, JAX)), ("Plan", (TORCH,)))),
    bad_type(PRODUCTS, "a: framework, nested", "a cannot be used: it is a nested tensor", (TORCH, JAX),
             a=in_torch(4, 5, view=nested)),
    bad_value(PRODUCTS, "b: framework, strides in JAX",
              "b is a torch array that jax cannot take over: its strides [12, 2]",
              (JAX,), b=in_torch(5, 12, view=every_other)),
    bad_value(PRODUCTS, "bias: framework, negative strides", "bias has negative strides (-1,). Pass a contiguous copy",
              (TORCH, JAX), bias=in_numpy(6, view=flipped)),
    bad_type(PRODUCTS, "b: framework, negated", "b cannot be used: its values are not in its memory", (JAX, STRICT),
             b=in_torch(5, 6, view=torch._neg_view)),
    bad_type(PRODUCTS, "b: framework, wrapper", "b cannot be used: a Wrapper has no memory of its own", (JAX, STRICT),
             b=in_torch(5, 6, view=Wrapper)),
    bad_type(PRODUCTS, "b: framework, narrowed", "jax cannot take over: it is float64 ... jax_enable_x64", (JAX,),
             b=in_torch(5, 6, view=torch.Tensor.double), within=X64_OFF),
    bad_type(CALLS, "a, b: framework, narrowed", "a and b are float64 ... jax_enable_x64", (JAX,),
             planned={**like("a", dtype="float64"), **like("b", dtype="float64")},
             within=X64_OFF, **like("a", dtype="float64"), **like("b", dtype="float64")),
    bad_type("matmul epilog_matmul", "a: framework, no allocator", "Producer arrays come with no way ... pass out=",
             (NUMPY,), a=produced(4, 5)),
    bad_type(MLPS, "x: framework, no allocator", "Producer arrays come with no way ... for the hidden layer", (NUMPY,),
             x=produced(4, 5)),
    bad_type(PRODUCTS, "a: framework, consumed capsule", "a cannot be used: its __dlpack__ gave a capsule named",
             (NUMPY,), a=Made(lambda _: Consumed(values(20), (4, 5)))),
    *(bad_value(ops, f"{name}: deleted", f"{name} {GONE}", on, **{name: deleted(*SHAPES[name])})
      for ops, name, on in ((PRODUCTS, "a", (JAX, TORCH)), (PRODUCTS, "bias", (JAX, TORCH)), ("Plan", "b", (JAX,)),
                            ("mlp_grad", "dout", (JAX, TORCH)))),
    bad_value("matmul Plan", "a: deleted, with a stream", f"a {GONE}", (JAX,), a=deleted(4, 5), stream=1),
)

NAMES = '"relu", "gelu_tanh", "gelu_erf", "silu"'
AMBIGUOUS = """activation "gelu" is ambiguous: "gelu_tanh" is JAX's default ... "gelu_erf" is PyTorch's default"""
ON_CPU = "stream is given, and these arrays live on a CPU. Leave stream out"
IN_XLA = ValueError, "stream is given, and JAX runs on XLA's own stream. Leave stream out"
ON_XLA: dict[TestFramework, Answer | None] = {JAX: IN_XLA, TRACED: IN_XLA}
ACTIVATES = f"matmul plan explain {MLPS}"

VALUES = (
    bad_value(ACTIVATES, "activation: gelu", AMBIGUOUS, activation="gelu"),
    *(bad_value(ACTIVATES, f"activation: {x!r:.12}", f"activation is {x!r}, expected None or one of {NAMES}",
                activation=x)
      for x in ("tanh", "RELU", ["relu"], {"relu": 1}, np.array(["relu", "gelu"]), np.maximum, 7, True)),
    *(bad_value("epilog_matmul", f"epilog: {x!r:.12}", f"epilog is {x!r}, expected one of DEFAULT, RELU, ", epilog=x)
      for x in ("relu", "GELU_ERF", "", None, ["RELU"], 7)),
    bad_value("plan explain", "epilog: unknown", "epilog is 'SILU', expected one of DEFAULT, RELU, ", epilog="SILU"),
    bad_value("plan explain", "epilog: with activation", "epilog and activation are both given", epilog="RELU",
              activation="relu"),
    *(bad_value(PRODUCTS, f"precision: {x!r}", f'precision is {x!r}, expected None, "ieee" or "tf32"', precision=x)
      for x in ("fp16", "", 32, ["ieee"], True)),
    *(bad_type(PRODUCTS, f"out_dtype: {x!r:.15}", f"out_dtype is {text}; float32 operands give float32", out_dtype=x)
      for x, text in (("int8", "int8"), ("float64", "float64"), ("float16", "float16"), (torch.bfloat16, "bfloat16"),
                      (np.dtype(">f4"), ">f4"), (float, "float"), (["float32"], "['float32']"), (32, "32"))),
    bad_type(PRODUCTS, "out_dtype: of other 16 bits", "out_dtype is bfloat16; float16 operands give float16 or float32",
             NARROW, a=of(4, 5, dtype="float16"), b=of(5, 6, dtype="float16"), out_dtype="bfloat16"),
    *(bad_type(CALLS, f"{name}: {kind}", f"{name} is a {kind}, expected a real number", **{name: x})
      for name in ("alpha", "beta")
      for kind, x in (("str", "2"), ("bool", True), ("complex", 2j), ("NoneType", None), ("list", [1.0]),
                      ("ndarray", np.array(2.0)))),
    bad_type(CALLS, "alpha: of JAX", "alpha is a ... expected a real number", (JAX, TRACED), alpha=in_jax()),
    bad_value(CALLS, "alpha: too large", "alpha is too large for a float", alpha=10**400),
    *(bad_type(PRODUCTS, f"{name}: {x!r}", f"{name} is {x!r}, expected True or False", **{name: x})
      for name in ("transpose_a", "transpose_b") for x in (1, 0, "yes", None, [True])),
    *(bad_type(MLPS, f"{name}: {x!r}", f"{name} is {x!r}, expected True or False", **{name: x})
      for name in ("transpose_w1", "transpose_w2") for x in (1, "yes", None)),
    bad_type("mlp", "save: 1", "save is 1, expected True or False", save=1),
    *(bad_type(PRODUCTS, f"deterministic: {x!r}", f"deterministic is {x!r}, expected None, True or False",
               deterministic=x)
      for x in ("yes", 1, 0, [True], np.array([1, 2]))),
    *(bad_value(CALLS, f"stream: {x}, on a CPU", ON_CPU, instead=ON_XLA, stream=x) for x in (0, 1)),
    *(bad_type(CALLS, f"stream: {x!r}", f"stream is {x!r}, expected the address of a CUDA stream as an int", stream=x)
      for x in ("default", 1.5, True)),
    bad_value(MLPS, "stream: 1, on a CPU", ON_CPU, instead=ON_XLA, stream=1),
    bad_type(MLPS, "stream: 1.5", "stream is 1.5, expected the address of a CUDA stream as an int", stream=1.5),
    bad_value(MLPS, "precision: fp16", "precision is 'fp16', expected None", part=FIRST, precision="fp16"),
    bad_type(MLPS, "deterministic: 1", "deterministic is 1, expected None, True or False", part=FIRST, deterministic=1),
    row(NotImplementedError, "matmul", "activation: gelu_erf", 'activation "gelu_erf" needs an error function, and '
        'array_api_strict has none that is known here. Use "gelu_tanh"', (STRICT,), activation="gelu_erf"),
    *(bad_value("options options.set_default", f"mixed: {x!r:.12}", f"mixed is {x!r}, expected one of 'lead', 'error'",
                (NUMPY,), mixed=x) for x in ("warn", None, True, ["lead"], np.array(["lead", "error"]))),
    bad_type("options options.set_default", "unknown option", "there is no option 'mixing'; there is mixed", (NUMPY,),
             mixing="error"),
)

READ_ONLY = "is read-only. Pass an array that may be written"
OWN_ARRAY = "Pass an array of its own"
LOST = "cannot be written while {} requires a gradient, which the write would lose. ... call under torch.no_grad()"

WRITTEN = (
    bad_value(f"{CALLS} mlp", "out: read-only", f"out {READ_ONLY}", (NUMPY,), out=in_numpy(4, 6, view=read_only)),
    bad_value("matmul", "out: a NumPy scalar", f"out {READ_ONLY}", (NUMPY,), a=of(5), b=of(5), out=np.float32(0)),
    bad_value("epilog_matmul", "aux_out: read-only", f'aux_out["gelu_aux"] {READ_ONLY}', (NUMPY,), epilog="GELU_AUX",
              aux_out=named("gelu_aux", of(4, 8, view=read_only))),
    *(bad_value(ops, f"out: overlaps {other}", f"out shares memory with {other}. {OWN_ARRAY}", STRIDED,
                together=partial(sharing, other))
      for ops, other in (("matmul epilog_matmul", "a"), ("matmul epilog_matmul", "b"), ("matmul epilog_matmul", "bias"),
                         ("matmul epilog_matmul", "c"), ("mlp", "x"), ("mlp", "w1"), ("mlp", "w2"), ("mlp", "b1"))),
    bad_value("epilog_matmul", "out: overlaps gelu_aux", f"out shares memory with gelu_aux. {OWN_ARRAY}", STRIDED,
              together=partial(sharing_aux, "gelu_aux", "DGELU")),
    bad_value("epilog_matmul", "out: overlaps aux_out", f'out shares memory with aux_out["gelu_aux"]. {OWN_ARRAY}',
              STRIDED, together=partial(sharing_aux, "aux_out", "GELU_AUX")),
    bad_value("epilog_matmul", "aux_out: overlaps a", f'aux_out["gelu_aux"] shares memory with a. {OWN_ARRAY}', STRIDED,
              together=aux_over_a),
    bad_value("Plan", "out: overlaps a", f"out shares memory with a. {OWN_ARRAY}", STRIDED, together=out_is_a,
              planned={"b": of(5, 5)}),
    *(bad_value(ops, f"out: gradient of {name}", f"out {LOST.format(name)}", (TORCH,), out=of(4, 6),
                **{name: in_torch(*SHAPES[name], view=needs_grad)})
      for ops, name in ((CALLS, "a"), (CALLS, "b"), ("matmul epilog_matmul", "bias"),
                        ("matmul epilog_matmul", "c"), ("mlp", "x"), ("mlp", "w2"), ("mlp", "b1"))),
    bad_value(CALLS, "out: its own gradient", f"out {LOST.format('out')}", (TORCH,),
              out=in_torch(4, 6, view=needs_grad)),
    bad_value("epilog_matmul", "aux_out: gradient of b", f'aux_out["gelu_aux"] {LOST.format("b")}', (TORCH,),
              epilog="GELU_AUX", aux_out=named("gelu_aux", of(4, 8)), b=in_torch(5, 6, view=needs_grad)),
)

RELU_MASK, PREACT = of(4, 16, dtype="uint8"), of(4, 8)
NEEDS_BIAS = "needs bias of shape (n,) = (6,), and bias is None"
ONE_KEY = 'expected the one key "relu_aux"'

EPILOG_FAULTS = (
    *(bad_value(EPILOGS, f"bias: given to {epilog}", f'epilog "{epilog}" takes no bias. Leave bias out, or choose',
                epilog=epilog, bias=of(6), **more)
      for epilog, more in (("DEFAULT", {}), ("GELU_AUX", {}), ("BGRADB", {}), ("DRELU", {"relu_aux": RELU_MASK}))),
    *(bad_value(EPILOGS, f"bias: missing for {epilog}", f'epilog "{epilog}" {NEEDS_BIAS}', epilog=epilog)
      for epilog in ("BIAS", "RELU_BIAS", "GELU_AUX_BIAS")),
    bad_value(EPILOGS, "relu_aux: for DGELU",
              'relu_aux is given, but epilog "DGELU" does not read it; it takes gelu_aux',
              epilog="DGELU", relu_aux=RELU_MASK),
    bad_value(EPILOGS, "gelu_aux: for DRELU",
              'gelu_aux is given, but epilog "DRELU" does not read it; it takes relu_aux',
              epilog="DRELU", gelu_aux=PREACT),
    bad_value(EPILOGS, "gelu_aux: beside relu_aux", "gelu_aux is given, but ... it takes relu_aux",
              epilog="DRELU_BGRAD", relu_aux=RELU_MASK, gelu_aux=PREACT),
    *(bad_value(EPILOGS, f"{name}: for {epilog}", f'{name} is given, but epilog "{epilog}" ... it takes none',
                epilog=epilog, **{name: x})
      for name, x, epilog in (("relu_aux", RELU_MASK, "RELU_AUX"), ("gelu_aux", PREACT, "GELU"))),
    bad_value("plan explain", "relu_aux: without epilog", "relu_aux is given, but ... it takes none",
              relu_aux=RELU_MASK),
    *(bad_value(EPILOGS, f"{name}: missing for {epilog}",
                f'epilog "{epilog}" needs {name}, which "{maker}" or "{maker}_BIAS"', epilog=epilog)
      for name, maker, epilog in (("relu_aux", "RELU_AUX", "DRELU"), ("relu_aux", "RELU_AUX", "DRELU_BGRAD"),
                                  ("gelu_aux", "GELU_AUX", "DGELU"), ("gelu_aux", "GELU_AUX", "DGELU_BGRAD"))),
    *(bad_value("epilog_matmul plan", f"aux_out: keys {kind}", f"aux_out has keys {keys}, {ONE_KEY}", epilog="RELU_AUX",
                aux_out=aux_out, instead=instead)
      for kind, keys, aux_out, instead in (
          ("of another", "['gelu_aux']", named("gelu_aux", PREACT), NEVER_CHANGES),
          ("missing", "[]", {}, {}),
          ("of two types", "['relu_aux', 1]", Made(lambda f: dict.fromkeys(("relu_aux", 1), RELU_MASK.make(f))),
           NEVER_CHANGES))),
    bad_value("epilog_matmul plan", "aux_out: for RELU",
              "aux_out has keys ['relu_aux'], expected nothing: this epilog has no",
              STRIDED, epilog="RELU", aux_out=named("relu_aux", RELU_MASK)),
    bad_value("Plan", "aux_out: keys", f"aux_out has keys ['gelu_aux'], {ONE_KEY}",
              aux_out=named("gelu_aux", RELU_MASK), planned={"epilog": "RELU_AUX"}),
    bad_value("Plan", "aux_out: planned without", "aux_out has keys ['relu_aux'], expected nothing",
              aux_out=named("relu_aux", RELU_MASK)),
    bad_value("Plan", "bias: planned without", "bias is given, and the plan was made without it", bias=of(6)),
    bad_value("Plan", "bias: planned with", "bias is None, and the plan was made with it", bias=None,
              planned=like("bias")),
    bad_value("Plan", "relu_aux: planned with", "relu_aux is None, and the plan was made with it",
              planned={"epilog": "DRELU", "relu_aux": RELU_MASK}, relu_aux=None),
    bad_value("mlp_grad", "saved: without hidden", "saved.hidden is None ... mlp(..., save=True)", saved=saved(None)),
    *(bad_value("mlp_grad", f"saved: without preact, {x}", f'saved.preact is None, and activation "{x}" reads it',
                saved=saved(of(4, 8)), activation=x) for x in ("gelu_tanh", "gelu_erf", "silu")),
)

FAULTS = (*TYPES, *DTYPES, *SHAPE_FAULTS, *LAYOUTS, *DEVICES, *FRAMEWORKS, *VALUES, *WRITTEN, *EPILOG_FAULTS)
