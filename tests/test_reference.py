"""The reference engine against float64: every case of the table on every framework that runs on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, build, expect
from frameworks import FRAMEWORKS, JAX, NUMPY, STRICT, TestFramework
from running import call, check, check_result

import fusedops
from fusedops.testing import assert_within, to_numpy


def applies(case: Case, framework: TestFramework) -> bool:
    """Return whether the framework has what the case is about."""
    if case.dtype not in framework.dtypes:
        return False
    if case.activation == "gelu_erf" and not framework.has_erf:
        return False
    # JAX compiles each case; one in four keeps the suite quick, and the layouts are all the same to it.
    return framework is not JAX or CASES.index(case) % 4 == 0 or case.trap is not None


RUNS = [pytest.param(f, c, id=f"{f.name}-{c.name}") for f in FRAMEWORKS for c in CASES if applies(c, f)]


@pytest.mark.parametrize(("framework", "case"), RUNS)
def test_case(framework: TestFramework, case: Case) -> None:
    """Result and auxiliary output are as near to float64 as their dtypes allow."""
    check(case, framework)


def test_names_are_unique() -> None:
    """Data is drawn by name, so two cases of one name would be one case."""
    assert len({case.name for case in CASES}) == len(CASES)


WRITES = [
    pytest.param(f, c, id=f"{f.name}-{c.name}")
    for f in FRAMEWORKS
    for c in CASES
    if f is not JAX and applies(c, f) and c.dtype == "float32" and (c.m, c.n, c.k) == (5, 24, 7) and c.a == c.b
]


@pytest.mark.parametrize(("framework", "case"), WRITES)
def test_out(framework: TestFramework, case: Case) -> None:
    """``out=`` and ``aux_out=`` are written whole, returned themselves, and nothing around them is touched."""
    arrays = build(case)
    fresh, fresh_aux = call(case, framework, arrays)
    shape = tuple(fresh.shape)
    buffer = np.full((*shape[:-1], shape[-1] + 5), 7, to_numpy(fresh).dtype)
    out = framework.make(buffer)[..., : shape[-1]]
    given: dict[str, Any] = {"out": out}
    if fresh_aux is not None:
        name = case.traits.gives.name
        given["aux_out"] = {name: framework.make(np.full(tuple(fresh_aux.shape), 9, to_numpy(fresh_aux).dtype))}
    result, aux = call(case, framework, arrays, **given)
    assert result is out
    check_result(case, framework, arrays, result, aux)
    if aux is not None:
        assert aux is given["aux_out"][case.traits.gives.name]
    if framework is not STRICT:
        assert np.all(buffer[..., shape[-1] :] == 7)


@pytest.mark.parametrize(("framework", "case"), WRITES)
def test_plan(framework: TestFramework, case: Case) -> None:
    """A plan gives the bits of the call, again for new contents, and nothing after it was freed."""
    arrays = build(case)
    theirs = {name: framework.make(x) for name, x in arrays.items()}
    settings = dict(case.settings)
    factors = {name: settings.pop(name) for name in ("alpha", "beta")}
    a, b = theirs.pop("a"), theirs.pop("b")
    with fusedops.plan(a, b, **theirs, **settings) as plan:
        once, again = plan(a, b, **theirs, **factors), plan(a, b, **theirs, **factors)
    direct = getattr(fusedops, case.op)(a, b, **theirs, **settings, **factors)
    for result in (once, again):
        out = result[0] if isinstance(result, tuple) else result
        want = direct[0] if isinstance(direct, tuple) else direct
        assert np.array_equal(to_numpy(out), to_numpy(want), equal_nan=True)
    with pytest.raises(RuntimeError, match="freed"):
        plan(a, b, **theirs, **factors)


VECTORS = [((7,), (7,)), ((7,), (7, 24)), ((5, 7), (7,)), ((3, 5, 7), (7,)), ((7,), (3, 7, 24))]


@pytest.mark.parametrize(("a_shape", "b_shape"), VECTORS, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_vectors(framework: TestFramework, a_shape: tuple[int, ...], b_shape: tuple[int, ...], activation: str) -> None:
    """A vector operand is a matrix whose axis of 1 the result does not have, as in ``numpy.matmul``."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype("float32") for shape in (a_shape, b_shape))
    want = a.astype("float64") @ b.astype("float64")
    c = rng.standard_normal(want.shape).astype("float32")
    bias = rng.standard_normal(b_shape[-1] if len(b_shape) > 1 else 1).astype("float32")
    got = fusedops.matmul(
        *map(framework.make, (a, b)), bias=framework.make(bias), c=framework.make(c), activation=activation
    )
    z = np.asarray(want + c + (bias if len(b_shape) > 1 else bias[0]))
    want = {None: z, "relu": np.maximum(z, 0), "silu": z / (1 + np.exp(-z))}[activation]
    assert_within(got, want, np.full(want.shape, 10.0), 7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_error_within_twice_the_frameworks_own(framework: TestFramework, dtype: str) -> None:
    """The error is at most twice that of the framework's own product, bias and relu in the same dtype."""
    if dtype not in framework.dtypes or framework.unfused is None:
        pytest.skip("the framework has no such computation of its own")
    case = Case(f"own-{dtype}", 64, 48, 300, activation="relu", dtype=dtype, bias="shared")
    arrays = build(case)
    expected = expect(case, arrays)
    got, _ = call(case, framework, arrays)
    own = framework.unfused(*(framework.make(arrays[name]) for name in ("a", "b", "bias")))
    error, own_error = (np.max(np.abs(to_numpy(x).astype("float64") - expected.out)) for x in (got, own))
    assert error <= 2 * own_error


def test_beta_zero_reads_nothing_of_c() -> None:
    """As in BLAS, ``c`` may be unset memory where ``beta`` is 0."""
    a, c = np.eye(4, dtype="float32"), np.full((4, 4), np.nan, "float32")
    assert np.array_equal(fusedops.matmul(a, a, c=c, beta=0.0), a)


def test_relu_aux_at_zero_is_set_and_padding_is_never_read() -> None:
    """The bit of a pre-activation of 0 or -0.0 is set, as cuBLASLt sets it; DRELU then lets the gradient through."""
    a = np.zeros((2, 3), "float32")
    a[1] = -0.0
    b = np.ones((3, 10), "float32")
    _, aux = fusedops.epilog_matmul(a, b, epilog="RELU_AUX")
    assert np.array_equal(np.unpackbits(aux["relu_aux"], axis=-1, count=10, bitorder="little"), np.ones((2, 10)))
    mask = aux["relu_aux"].copy()
    mask[:, 2:] = 255
    dout = np.ones((2, 3), "float32")
    first = fusedops.epilog_matmul(dout, b, epilog="DRELU", relu_aux=mask)
    second = fusedops.epilog_matmul(dout, b, epilog="DRELU", relu_aux=aux["relu_aux"])
    assert np.array_equal(first, second)
    assert np.array_equal(first, np.full((2, 10), 3))


def test_gelu_forms_differ() -> None:
    """Each name computes its own form; between 2 and 3 they are up to 5e-4 apart."""
    x = np.linspace(2, 3, 101, dtype="float32")[:, None]
    one = np.ones((1, 1), "float32")
    forms = [fusedops.matmul(x, one, activation=name) for name in ("gelu_tanh", "gelu_erf")]
    assert 3e-4 < np.max(np.abs(forms[0] - forms[1])) < 6e-4


def test_numpy_scalars_do_not_promote() -> None:
    """A float64 scalar as alpha leaves a float32 result float32."""
    a = np.eye(3, dtype="float32")
    assert fusedops.matmul(a, a, alpha=np.float64(2), c=a, beta=np.int64(3)).dtype == np.float32


@pytest.mark.parametrize("mask", range(16))
def test_every_operand_misaligned(mask: int) -> None:
    """Operands, bias and out one element into their buffers, in every combination, after the aligned call."""
    rng = np.random.default_rng(mask)
    a, b, bias = rng.standard_normal((16, 8)), rng.standard_normal((8, 24)), rng.standard_normal(24)
    arrays = [x.astype("float32") for x in (a, b, bias, np.zeros((16, 24)))]
    want = fusedops.matmul(*arrays[:2], bias=arrays[2], out=arrays[3].copy())
    moved = []
    for i, x in enumerate(arrays):
        buffer = np.zeros(x.size + 1, x.dtype)
        view = buffer[1:].reshape(x.shape) if mask >> i & 1 else buffer[:-1].reshape(x.shape)
        view[...] = x
        moved.append(view)
    assert_within(fusedops.matmul(*moved[:2], bias=moved[2], out=moved[3]), want, np.full(want.shape, 10.0), 8)


def test_a_size_one_axis_may_have_any_stride() -> None:
    """Strides of extents of 1 say nothing and are not looked at."""
    rng = np.random.default_rng(0)
    for m, n, k, batch in np.ndindex(2, 2, 2, 2):
        m, n, k, batch = m + 1, n + 1, k + 1, batch + 1
        a, b = rng.standard_normal((batch, m, k)), rng.standard_normal((batch, k, n))
        odd = [
            np.lib.stride_tricks.as_strided(
                x, x.shape, [s if extent > 1 else 8 * 77 for s, extent in zip(x.strides, x.shape, strict=True)]
            )
            for x in (a, b)
        ]
        assert np.allclose(fusedops.matmul(*odd), a @ b)
        assert isinstance(fusedops.matmul(*odd), NUMPY.type)
