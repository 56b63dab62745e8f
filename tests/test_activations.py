"""Activations and their derivatives: right to the last bits, quiet where they must be, and each name its own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import array_api_compat.numpy
import array_api_strict
import numpy as np
import pytest
from frameworks import JAX, NUMPY, TORCH, TestFramework

from fusedops import activations
from fusedops.activations import ACTIVATIONS, FUSED, check_activation
from fusedops.frameworks import kind_of
from fusedops.testing import to_numpy

Array = Any
Scalar = Callable[[float], float]

NAMESPACES = {"numpy": array_api_compat.numpy, "array_api_strict": array_api_strict}
DTYPES = ("float32", "float64")
ROOT_HALF, ROOT_2_PI, CUBIC = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715


# Formulas in float64 that lose nothing to cancellation ----------------------------------------------------------------


def sigmoid(z: float) -> float:
    """Return ``1 / (1 + exp(-z))`` without overflow."""
    return 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z))


def gelu_tanh(z: float) -> float:
    """Return ``z * sigmoid(2u)``, which is ``z / 2 * (1 + tanh(u))``."""
    return z * sigmoid(2 * ROOT_2_PI * (z + CUBIC * z**3))


def gelu_erf(z: float) -> float:
    """Return ``z * Phi(z)``."""
    return 0.5 * z * math.erfc(-z * ROOT_HALF)


def gelu_tanh_derivative(z: float) -> float:
    """Return ``s + z * s'``, with the sigmoid of `gelu_tanh` as ``s``."""
    s = sigmoid(2 * ROOT_2_PI * (z + CUBIC * z**3))
    return s + z * s * (1 - s) * 2 * ROOT_2_PI * (1 + 3 * CUBIC * z * z)


def gelu_erf_derivative(z: float) -> float:
    """Return ``Phi(z) + z * phi(z)``."""
    return 0.5 * math.erfc(-z * ROOT_HALF) + z * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def silu_derivative(z: float) -> float:
    """Return ``s * (1 + z * (1 - s))``."""
    return sigmoid(z) * (1 + z * sigmoid(-z))


VALUES: dict[str, Scalar] = {
    "relu": lambda z: max(z, 0.0),
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "silu": lambda z: z * sigmoid(z),
}
DERIVATIVES: dict[str, Scalar] = {
    "gelu_tanh": gelu_tanh_derivative,
    "gelu_erf": gelu_erf_derivative,
    "silu": silu_derivative,
}


def elementwise(function: Scalar, z: np.ndarray) -> np.ndarray:
    """Apply a formula of one number in float64."""
    return np.asarray([function(float(x)) for x in z.ravel()]).reshape(z.shape)


def erf_of(namespace: str) -> Callable[[Array], Array]:
    """Return an error function for arrays of a namespace, most of which have none."""
    to_theirs = NAMESPACES[namespace].asarray
    return lambda z: to_theirs(elementwise(math.erf, np.asarray(z)).astype(np.asarray(z).dtype))


def value(name: str, z: np.ndarray, namespace: str) -> np.ndarray:
    """Compute an activation by the package's formula over a namespace."""
    xp = NAMESPACES[namespace]
    function = getattr(activations, name)
    return np.asarray(function(xp.asarray(z), erf_of(namespace) if name == "gelu_erf" else xp))


def derivative(name: str, z: np.ndarray, namespace: str) -> np.ndarray:
    """Compute an activation's derivative by the package's formula over a namespace."""
    xp = NAMESPACES[namespace]
    more = (erf_of(namespace),) if name == "gelu_erf" else ()
    return np.asarray(getattr(activations, f"{name}_derivative")(xp.asarray(z), xp, *more))


@pytest.mark.parametrize("name", DERIVATIVES)
def test_the_references_agree_with_differences(name: str) -> None:
    """Each derivative that the tests compare with is that of its activation."""
    z, h = np.linspace(-9, 9, 1001), 1e-5
    function = VALUES[name]
    slope = [(function(x + h) - function(x - h)) / (2 * h) for x in z]
    assert np.allclose(elementwise(DERIVATIVES[name], z), slope, rtol=1e-8, atol=1e-9)


# Values ---------------------------------------------------------------------------------------------------------------


def grid(dtype: str) -> np.ndarray:
    """Return points that are dense where the functions bend, and sparse to where they are straight."""
    near, far = np.linspace(-12, 12, 2001), np.linspace(-100, 100, 101)
    tiny = [s * 10.0**-e for s in (1, -1) for e in range(0, 36, 3)]
    return np.concatenate([near, far, tiny]).astype(dtype)


def check_near(got: np.ndarray, want: np.ndarray, dtype: str, size: np.ndarray) -> None:
    """Raise unless the error is a few roundings of terms of the given size."""
    assert got.dtype == np.dtype(dtype)
    error = np.abs(got.astype("float64") - want)
    assert np.all(error <= 8 * np.finfo(dtype).eps * size), float(np.max(error / size)) / np.finfo(dtype).eps


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values(name: str, dtype: str, namespace: str) -> None:
    """A few roundings of ``z`` away from the exact value."""
    z = grid(dtype)
    check_near(value(name, z, namespace), elementwise(VALUES[name], z), dtype, np.abs(z.astype("float64")))


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name: str, dtype: str, namespace: str) -> None:
    """A few roundings away; the tail of ``1 - tanh^2`` is a rounding of 1 times its slope."""
    z = grid(dtype)
    size = 1 + np.minimum(np.abs(z.astype("float64")), 6) ** 3 / 8
    check_near(derivative(name, z, namespace), elementwise(DERIVATIVES[name], z), dtype, size)


# Corners --------------------------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan
CORNERS = [
    # z, value of relu, of gelu and silu, derivative of gelu and silu
    (0.0, 0.0, 0.0, 0.5),
    (-0.0, 0.0, 0.0, 0.5),
    (INF, INF, INF, 1.0),
    (NAN, NAN, NAN, NAN),
    (1e9, 1e9, 1e9, 1.0),
    (-1e9, 0.0, 0.0, 0.0),
    (1e30, 1e30, 1e30, 1.0),
    (-1e30, 0.0, 0.0, 0.0),
    (3e38, 3e38, 3e38, 1.0),
    (-3e38, 0.0, 0.0, 0.0),
]


@pytest.fixture
def strictly() -> Iterator[None]:
    """Overflow, division by zero and invalid operations raise, instead of a warning."""
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        yield


@pytest.mark.parametrize("corner", CORNERS, ids=lambda corner: str(corner[0]))
@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_corners(dtype: str, namespace: str, corner: tuple[float, ...], strictly: None) -> None:
    """Zeros, infinities, NaN and the largest numbers: the limit, and not a floating-point flag on the way."""
    x, relu, smooth, slope = (np.asarray([number], dtype) for number in corner)
    for name in ACTIVATIONS:
        want = relu if name == "relu" else smooth
        assert np.array_equal(value(name, x, namespace), want, equal_nan=True), name
    for name in DERIVATIVES:
        assert np.array_equal(derivative(name, x, namespace), slope, equal_nan=True), name


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_infinity(dtype: str, namespace: str, strictly: None) -> None:
    """Relu and every derivative have their limit; gelu and silu are NaN, minus infinity times 0, as PyTorch's are."""
    x = np.asarray([-INF], dtype)
    assert value("relu", x, namespace) == 0
    assert [float(derivative(name, x, namespace)[0]) for name in DERIVATIVES] == [0, 0, 0]
    with np.errstate(invalid="ignore"):
        assert all(np.isnan(value(name, x, namespace)) for name in ACTIVATIONS if name != "relu")


# Frameworks -----------------------------------------------------------------------------------------------------------


def names_of(framework: TestFramework) -> list[str]:
    """Return the activations that a framework has."""
    return [name for name in ACTIVATIONS if name != "gelu_erf" or framework.has_erf]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_framework_computes_them(framework: TestFramework, dtype: str) -> None:
    """Whether a framework has an activation of its own or takes the formula, the value is the same."""
    z = grid(dtype)
    theirs = framework.make(z)
    for name in names_of(framework):
        got = to_numpy(getattr(kind_of(theirs).framework, name)(theirs))
        check_near(got, elementwise(VALUES[name], z), dtype, np.abs(z.astype("float64")))


def test_each_framework_computes_their_derivatives(framework: TestFramework) -> None:
    """`Framework.activation_derivative` gives the derivative by name."""
    z = grid("float64")
    theirs = framework.make(z)
    size = 1 + np.minimum(np.abs(z), 6) ** 3 / 8
    for name in set(names_of(framework)) - {"relu"}:
        got = to_numpy(kind_of(theirs).framework.activation_derivative(name, theirs))
        check_near(got, elementwise(DERIVATIVES[name], z), "float64", size)


def test_relu_derivative_at_zero_is_zero(framework: TestFramework) -> None:
    """Applied to a gradient, relu's derivative is 0 at 0 and at -0.0, as in PyTorch and JAX."""
    z, ones = np.asarray([-1.0, -0.0, 0.0, 1e-30, 2.0, INF]), np.full(6, 3.0)
    theirs = framework.make(z)
    assert to_numpy(kind_of(theirs).framework.where_positive(framework.make(ones), theirs)).tolist() == [
        0,
        0,
        0,
        3,
        3,
        3,
    ]


@pytest.mark.parametrize("own", [NUMPY, TORCH, JAX], ids=str)
def test_the_two_gelus_differ(own: TestFramework) -> None:
    """Between 2 and 3 in magnitude they are about 5e-4 apart: each name computes its own."""
    for sign in (1, -1):
        theirs = own.make(np.linspace(sign * 2, sign * 3, 201).astype("float32"))
        tanh, erf = (to_numpy(getattr(kind_of(theirs).framework, name)(theirs)) for name in ("gelu_tanh", "gelu_erf"))
        assert 4e-4 < np.max(np.abs(tanh - erf)) < 6e-4


def test_a_namespace_without_erf_says_so() -> None:
    """The message says which activation needs it, and what to do."""
    z = array_api_strict.asarray([1.0])
    with pytest.raises(NotImplementedError, match=r"gelu_erf.*array_api_strict has none.*Use .gelu_tanh."):
        kind_of(z).framework.gelu_erf(z)


# Names ----------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    """None and the four names pass; bare gelu says which two it could be; all else lists the names."""
    for name in (None, *ACTIVATIONS):
        check_activation(name)
    assert set(FUSED) < set(ACTIVATIONS)
    with pytest.raises(ValueError, match=r'"gelu" is ambiguous: "gelu_tanh" is JAX\'s default.*"gelu_erf" is PyTorch'):
        check_activation("gelu")
    for other in ("RELU", "", 1, ["relu"], np.ones(2)):
        with pytest.raises(ValueError, match=r'expected None or one of "relu", "gelu_tanh", "gelu_erf", "silu"'):
            check_activation(other)


# The error function without SciPy -------------------------------------------------------------------------------------

WITHOUT_SCIPY = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "scipy" else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import numpy as np
from fusedops.frameworks.numpy import NumPy

z = np.load(sys.argv[1])
for dtype in ("float32", "float64"):
    np.save(sys.argv[2] + dtype + ".npy", NumPy().erf(z.astype(dtype)))
assert NumPy().erf(np.float64(0.5).reshape(())).shape == ()
try:
    import scipy
except ImportError:
    print("no scipy")
"""


def test_erf_without_scipy(tmp_path: Path) -> None:
    """Where SciPy is not installed, NumPy arrays take `math.erf`, with the same values, shape and dtype."""
    scipy_special = pytest.importorskip("scipy.special")
    z = np.concatenate([np.linspace(-7, 7, 1199), [0.0, -0.0, INF, -INF, NAN]]).reshape(4, 301)
    np.save(tmp_path / "z.npy", z)
    arguments = [sys.executable, "-W", "error", "-c", WITHOUT_SCIPY, str(tmp_path / "z.npy"), str(tmp_path / "erf_")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "no scipy\n"), done.stderr
    for dtype in DTYPES:
        got, want = np.load(tmp_path / f"erf_{dtype}.npy"), scipy_special.erf(z.astype(dtype))
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2 * np.finfo(dtype).eps, atol=0, equal_nan=True)
