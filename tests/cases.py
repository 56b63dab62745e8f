"""The one table of cases: every engine, framework, forward, backward and error test takes its problems from here.

A case says what a call computes and how its arrays lie in memory; `build` makes the arrays and `expect` the float64
answer. A row with a ``trap`` is a fault that users reported of a library that does a similar job.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from frameworks import np_dtype

from fusedops import Epilog
from fusedops.activations import ACTIVATIONS
from fusedops.dtypes import MATRIX_DTYPES
from fusedops.residuals import mask_bytes, padded_preact
from fusedops.testing import Expected, epilog_oracle, k_tail_operands, matmul_oracle

Array = np.ndarray
Arrays = dict[str, Array]

EPILOGS = tuple(epilog.name for epilog in Epilog)
LAYOUTS = ("row", "col", "slice", "offset", "flag")
"""Of a matrix: dense rows, dense columns, rows with a leading dimension, one element into a buffer, transpose flag."""


@dataclass(frozen=True)
class Case:
    """One call of `matmul` (``epilog`` None) or `epilog_matmul`."""

    name: str
    m: int = 5
    n: int = 24
    k: int = 7
    epilog: str | None = None
    activation: str | None = None
    dtype: str = "float32"
    out_dtype: str | None = None
    a: str = "row"
    b: str = "row"
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    bias: str | None = None
    c: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    data: str = "random"
    trap: int | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __str__(self) -> str:
        return self.name

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.batch_a, self.batch_b)

    @property
    def result_dtype(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def traits(self) -> Epilog | None:
        return Epilog[self.epilog] if self.epilog else None

    @property
    def op(self) -> str:
        return "epilog_matmul" if self.epilog else "matmul"

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that are not arrays."""
        chosen: dict[str, Any] = {"alpha": self.alpha, "beta": self.beta, **self.options}
        if self.epilog:
            chosen["epilog"] = self.epilog
        elif self.activation:
            chosen["activation"] = self.activation
        for name in ("a", "b"):
            if getattr(self, name) == "flag":
                chosen[f"transpose_{name}"] = True
        if self.out_dtype:
            chosen["out_dtype"] = self.out_dtype
        return chosen


# How arrays lie in memory --------------------------------------------------------------------------------------------


def laid_out(values: Array, layout: str) -> Array:
    """Return ``(..., rows, cols)`` values in a layout of `LAYOUTS`; "flag" is stored transposed."""
    *batch, rows, cols = values.shape
    if layout in ("col", "flag"):
        stored = np.ascontiguousarray(np.swapaxes(values, -1, -2))
        return stored if layout == "flag" else np.swapaxes(stored, -1, -2)
    if layout == "slice":
        buffer = np.full((*batch, rows, cols + 8), 3, values.dtype)
        buffer[..., :cols] = values
        return buffer[..., :cols]
    if layout == "offset":
        buffer = np.full(values.size + 1, 3, values.dtype)
        buffer[1:] = values.ravel()
        return buffer[1:].reshape(values.shape)
    return np.ascontiguousarray(values)


def build(case: Case) -> Arrays:
    """Return the arrays of a case by argument name; the same for every run."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    dtype, out_dtype = np_dtype(case.dtype), np_dtype(case.result_dtype)
    m, n, k, batch = case.m, case.n, case.k, case.batch_shape
    shapes = {"a": (*case.batch_a, m, k), "b": (*case.batch_b, k, n)}
    values = {name: rng.standard_normal(shape) * max(k, 1) ** -0.25 for name, shape in shapes.items()}
    if case.bias:
        shape = {"shared": (n,), "per_item": (*batch, 1, n), "offset": (n,)}[case.bias]
        values["bias"] = rng.standard_normal(shape)
    if case.c:
        values["c"] = rng.standard_normal({"shared": (m, n)}.get(case.c, (*batch, m, n)))
    FILL[case.data](case, values, rng)
    arrays = {name: values[name].astype(dtype) for name in ("a", "b")}
    arrays |= {name: values[name].astype(out_dtype) for name in ("bias", "c") if name in values}
    arrays["a"], arrays["b"] = laid_out(arrays["a"], case.a), laid_out(arrays["b"], case.b)
    if case.c == "slice":
        arrays["c"] = laid_out(arrays["c"], "slice")
    if case.bias == "offset":
        arrays["bias"] = laid_out(arrays["bias"][None], "offset")[0]
    if case.traits and case.traits.takes:
        arrays[case.traits.takes.name] = residual(case.traits.takes.format, batch, m, n, out_dtype, rng)
    return arrays


def residual(format: str, batch: tuple[int, ...], m: int, n: int, dtype: np.dtype, rng: np.random.Generator) -> Array:
    """Return a residual as RELU_AUX or GELU_AUX could have given it, with rubbish in the padding."""
    if format == "relu_mask":
        return rng.integers(0, 256, (*batch, m, mask_bytes(n)), dtype=np.uint8)
    values = np.full((*batch, m, padded_preact(n)), np.nan)
    values[..., :n] = rng.standard_normal((*batch, m, n)) * 2
    return values.astype(dtype)


def expect(case: Case, arrays: Arrays) -> Expected:
    """Return the float64 answer of a case."""
    settings = {key: value for key, value in case.settings.items() if key not in ("out_dtype", *case.options)}
    oracle: Callable[..., Expected] = epilog_oracle if case.epilog else matmul_oracle
    with np.errstate(all="ignore"):
        return oracle(arrays["a"], arrays["b"], **{k: v for k, v in arrays.items() if k not in "ab"}, **settings)


# Data that a fault needs ----------------------------------------------------------------------------------------------


def _square_bias(case: Case, values: Arrays, rng: np.random.Generator) -> None:
    values["a"][:], values["b"][:], values["bias"] = 0, 0, np.arange(case.n, dtype=np.float64)


def _large_bias(case: Case, values: Arrays, rng: np.random.Generator) -> None:
    values["a"] *= 0.01
    values["bias"] = values["bias"] * 100


def _zero_rows(case: Case, values: Arrays, rng: np.random.Generator) -> None:
    values["a"][..., ::2, :] = 0
    values["a"][..., 1::4, :] = -0.0
    if "bias" in values:
        values["bias"][:] = 0


def _not_finite(case: Case, values: Arrays, rng: np.random.Generator) -> None:
    values["a"][0, 0], values["a"][1, 0], values["b"][0, 1] = np.nan, np.inf, -np.inf
    if "bias" in values:
        values["bias"][2] = np.nan


def _k_tail(case: Case, values: Arrays, rng: np.random.Generator) -> None:
    values["a"], values["b"] = k_tail_operands(case.m, case.n, case.k)


FILL: dict[str, Callable[[Case, Arrays, np.random.Generator], None]] = {
    "random": lambda case, values, rng: None,
    "square_bias": _square_bias,
    "large_bias": _large_bias,
    "zero_rows": _zero_rows,
    "not_finite": _not_finite,
    "k_tail": _k_tail,
}


# The table ------------------------------------------------------------------------------------------------------------


def _with_needs(case: Case) -> Case:
    """Give a case the bias that its epilog needs."""
    return replace(case, bias=case.bias or "shared") if case.traits and case.traits.bias else case


def _epilog_cases() -> Iterator[Case]:
    for epilog, dtype in product(EPILOGS, MATRIX_DTYPES):
        yield Case(f"{epilog}-{dtype}", epilog=epilog, dtype=dtype)
    for epilog, dtype in product(EPILOGS, ("float16", "bfloat16")):
        yield Case(f"{epilog}-{dtype}-float32", epilog=epilog, dtype=dtype, out_dtype="float32")
    for epilog, a, b in product(EPILOGS, LAYOUTS, LAYOUTS):
        if (a, b) != ("row", "row"):
            yield Case(f"{epilog}-a_{a}-b_{b}", epilog=epilog, a=a, b=b)
    for epilog, c in product(EPILOGS, ("dense", "slice")):
        yield Case(f"{epilog}-c_{c}", epilog=epilog, c=c, alpha=0.5, beta=-2.0)
    for epilog, (m, n, k) in product(EPILOGS, SHAPES):
        yield Case(f"{epilog}-{m}x{n}x{k}", epilog=epilog, m=m, n=n, k=k)
    for epilog, (batch_a, batch_b) in product(EPILOGS, BATCHES):
        name = f"{epilog}-batch_{'x'.join(map(str, batch_a))}_{'x'.join(map(str, batch_b))}"
        yield Case(name, epilog=epilog, batch_a=batch_a, batch_b=batch_b)
        if Epilog[epilog].bias:
            yield Case(f"{name}-bias_per_item", epilog=epilog, batch_a=batch_a, batch_b=batch_b, bias="per_item")


SHAPES = (
    (1, 384, 384),
    (7, 1, 5),
    (9, 33, 1),
    (1, 1, 1),
    (2, 1, 2),
    (1, 2, 2),
    (13, 127, 11),
    (17, 129, 16),
    (3, 8, 9),
    (0, 8, 4),
    (4, 0, 3),
    (4, 8, 0),
    (0, 0, 0),
)
BATCHES = (
    ((3,), (3,)),
    ((3,), ()),
    ((), (3,)),
    ((2, 3), (2, 3)),
    ((2, 3), ()),
    ((1,), (3,)),
    ((0,), ()),
    ((2, 1), (2, 1)),
)


def _matmul_cases() -> Iterator[Case]:
    for activation, dtype, bias in product((None, *ACTIVATIONS), MATRIX_DTYPES, (None, "shared", "offset")):
        name = f"matmul-{activation}-{dtype}-bias_{bias}"
        yield Case(name, activation=activation, dtype=dtype, bias=bias)
    for activation, (m, n, k) in product((None, *ACTIVATIONS), SHAPES):
        yield Case(f"matmul-{activation}-{m}x{n}x{k}", activation=activation, m=m, n=n, k=k, bias="shared", c="dense")
    for activation in (None, *ACTIVATIONS):
        yield Case(
            f"matmul-{activation}-everything",
            activation=activation,
            batch_a=(4,),
            a="flag",
            b="col",
            bias="shared",
            c="dense",
            alpha=-0.5,
            beta=0.25,
        )


def _trap_cases() -> Iterator[Case]:
    for a, b, activation in product(LAYOUTS, LAYOUTS, (None, "relu")):
        name = f"bias-axis-a_{a}-b_{b}-{activation}"
        yield Case(name, 8, 8, 8, activation=activation, a=a, b=b, bias="shared", data="square_bias", trap=2)
    for dtype in MATRIX_DTYPES:
        yield Case(f"alpha-not-on-bias-{dtype}", dtype=dtype, bias="shared", alpha=1 / 64, data="large_bias", trap=3)
        yield Case(f"bias-once-with-c-{dtype}", dtype=dtype, bias="shared", c="dense", trap=4)
        yield Case(f"k-tail-{dtype}", 3, 8, 200, dtype=dtype, data="k_tail", trap=1)
    for activation, data in product((None, *ACTIVATIONS), ("zero_rows", "not_finite")):
        name = f"{data}-{activation}"
        trap = 5 if data == "zero_rows" else 6
        yield Case(name, activation=activation, bias="shared", data=data, trap=trap)
    for n in (1, 7, 8, 9, 15, 16, 17, 100, 127, 128, 129, 130):
        for epilog in ("RELU_AUX_BIAS", "GELU_AUX_BIAS", "DRELU_BGRAD", "DGELU_BGRAD"):
            yield Case(f"{epilog}-last-column-n{n}", n=n, m=6, epilog=epilog, trap=12)


CASES = tuple(_with_needs(case) for case in (*_epilog_cases(), *_matmul_cases(), *_trap_cases()))
