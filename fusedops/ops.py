"""The door: `matmul`, `epilog_matmul`, `plan` and `explain`, with what each takes, gives and raises."""

from __future__ import annotations

from functools import partial
from typing import Any

from .calls import AuxOut, call, new_plan
from .epilogs import Epilog, epilog_named
from .errors import named
from .explanation import Explanation
from .plans import Plan
from .problem import Settings

__all__ = ["epilog_matmul", "explain", "matmul", "plan"]

Array = Any

# `Settings(...)` itself costs every call a Python function more.
_settings = partial(tuple.__new__, Settings)


def matmul(
    a: Array,
    b: Array,
    /,
    *,
    bias: Array | None = None,
    activation: str | None = None,
    c: Array | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: Any = None,
    precision: str | None = None,
    deterministic: bool | None = None,
    out: Array | None = None,
    stream: int | None = None,
) -> Array:
    """Compute ``activation(alpha * a @ b + beta * c + bias)`` as one fused product.

    The product is summed, and everything after it computed, in float32 (float64 for float64 operands); the result is
    rounded once, to ``out_dtype``. On a GPU, "gelu_erf" and "silu" are applied to the rounded pre-activation, as by the
    framework's own two steps.

    Parameters
    ----------
    a : array, (..., m, k) or (k,)
        float16, bfloat16, float32 or float64, of any framework. Rows or columns contiguous; a leading dimension and one
        stride over all batch axes are fine. With ``transpose_a``, ``(..., k, m)``.
    b : array, (..., k, n) or (k,)
        Of the dtype of ``a``. With ``transpose_b``, ``(..., n, k)``.
    bias : array, (n,) or (..., 1, n), optional
        Added to every row; of the result's dtype, contiguous along n.
    activation : {None, "relu", "gelu_tanh", "gelu_erf", "silu"}
        "relu" and "gelu_tanh" are part of the product, the others a second step.
    c : array, (..., m, n), optional
        Added to the product, of the result's dtype, rows contiguous. Not read where ``beta`` is 0.
    alpha, beta : float
        Factors of the product and of ``c``. An ``alpha`` of 0 does not promise that NaN in ``a`` or ``b`` is not read.
    transpose_a, transpose_b : bool
        Read the operand's last two axes in the other order, without a copy.
    out_dtype : dtype or str, optional
        Dtype of the result: that of ``a``, or float32 for 16-bit operands. Any framework's spelling.
    precision : {None, "ieee", "tf32"}
        How float32 operands are multiplied; None is the framework's own setting. No effect on other dtypes, nor on a
        CPU.
    deterministic : bool, optional
        True asks for the same bits from run to run.
    out : array, (..., m, n), optional
        Written and returned; of the lead's framework and the result's dtype, rows contiguous, no memory shared with an
        operand. Refused where a gradient is needed, and in JAX.
    stream : int, optional
        Address of the CUDA stream to launch on. The default is the lead framework's current stream.

    Returns
    -------
    array, (..., m, n)
        In the lead's framework, dense and row-major. The axis of a vector operand is dropped.

    Raises
    ------
    TypeError
        For what is no array, a dtype, or a framework that cannot take part.
    ValueError
        For a shape, layout, device or option that does not fit; the message says what to change.
    ImportError
        For CUDA arrays without nvmath-python.
    RuntimeError
        When the GPU library failed.

    Notes
    -----
    The lead is JAX where an operand is a tracer, else the framework of the first operand that is not NumPy's. Operands
    of other frameworks join it over their own memory. Nothing is cast, transposed or copied silently. The first call of
    a problem plans it; later calls find the plan by the operands' shapes, strides and dtypes.

    relu keeps NaN; its derivative at 0 is 0, as in PyTorch and JAX. erf, for "gelu_erf", is SciPy's for NumPy (without
    SciPy `math.erf`, slowly), `torch.erf`, `jax.scipy.special.erf`, and `cupyx.scipy.special.erf`.

    References
    ----------
    cuBLAS documentation, "cublasLtMatmul()" and "cublasLtEpilogue_t"; nvmath-python, ``nvmath.linalg.advanced.Matmul``.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> x, w, b = np.ones((2, 3), "float32"), np.ones((3, 4), "float32"), np.full(4, -5, "float32")
    >>> fusedops.matmul(x, w, bias=b, activation="relu").shape
    (2, 4)
    """
    settings = _settings((None, activation, transpose_a, transpose_b, out_dtype, precision, deterministic))
    return call("matmul", settings, (a, b, bias, c, None, None), alpha, beta, out, None, stream)


def epilog_matmul(
    a: Array,
    b: Array,
    /,
    *,
    epilog: str | Epilog,
    bias: Array | None = None,
    relu_aux: Array | None = None,
    gelu_aux: Array | None = None,
    c: Array | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: Any = None,
    precision: str | None = None,
    deterministic: bool | None = None,
    out: Array | None = None,
    aux_out: AuxOut = None,
    stream: int | None = None,
) -> Any:
    """Compute a product with one of nvmath's epilogs: ``z = alpha * a @ b + beta * c``, then what the epilog says.

    =======================  ============================================  ======================================
    epilog                   ``out``                                       auxiliary output
    =======================  ============================================  ======================================
    DEFAULT                  ``z``
    BIAS                     ``z + bias``
    RELU, RELU_BIAS          ``relu(z [+ bias])``
    GELU, GELU_BIAS          ``gelu_tanh(z [+ bias])``
    RELU_AUX, RELU_AUX_BIAS  ``relu(z [+ bias])``                          ``relu_aux``
    GELU_AUX, GELU_AUX_BIAS  ``gelu_tanh(z [+ bias])``                     ``gelu_aux``
    DRELU                    ``z`` where ``relu_aux`` has its bit, else 0
    DGELU                    ``z * gelu_tanh'(gelu_aux)``
    DRELU_BGRAD              as DRELU                                      ``drelu_bgrad``: ``out`` summed over m
    DGELU_BGRAD              as DGELU                                      ``dgelu_bgrad``: ``out`` summed over m
    BGRADA                   ``z``                                         ``bgrada``: ``a`` summed over k
    BGRADB                   ``z``                                         ``bgradb``: ``b`` summed over k
    =======================  ============================================  ======================================

    Parameters
    ----------
    a, b, bias, c, alpha, beta, transpose_a, transpose_b, out_dtype, precision, deterministic, out, stream
        As in `matmul`. ``bias`` is required by the epilogs that name it and refused by the others.
    epilog : str or Epilog
        The epilog, by nvmath's name.
    relu_aux : array, (..., m, round_up(ceil(n / 8), 16)), uint8
        The mask that RELU_AUX gave: a bit an element along n, least significant first. Dense.
    gelu_aux : array, (..., m, round_up(n, 8))
        The pre-activation that GELU_AUX gave, in the result's dtype. Dense.
    aux_out : dict of str to array, optional
        Where to write the auxiliary output, under its name. Dense.

    Returns
    -------
    array, (..., m, n)
        ``out``, for the epilogs without auxiliary output.
    (array, dict of str to array)
        ``out`` and the auxiliary output under its name. The sums have shape ``(n,)`` (``bgrada``: ``(m,)``), in a batch
        ``(..., 1, n)`` (``(..., m, 1)``), and the result's dtype.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `matmul`.

    Notes
    -----
    The bit of ``relu_aux`` is set where the pre-activation is ``>= 0``, as cuBLASLt sets it: the derivative at exactly
    0 is 1 here, and 0 in `matmul`, PyTorch and JAX. At NaN the bit is not set. What stands in the padding of an
    auxiliary array is never read. Stream order and first-call cost are those of `matmul`.

    References
    ----------
    cuBLAS documentation, "cublasLtEpilogue_t".

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> x, w, b = np.ones((2, 3), "float32"), np.ones((3, 4), "float32"), np.ones(4, "float32")
    >>> h, saved = fusedops.epilog_matmul(x, w, epilog="RELU_AUX_BIAS", bias=b)
    >>> saved["relu_aux"].shape
    (2, 16)
    """
    op = "epilog_matmul"
    try:
        member = epilog_named(epilog)
    except ValueError as error:
        raise named(op, error) from None
    settings = Settings(member, None, transpose_a, transpose_b, out_dtype, precision, deterministic)
    operands = (a, b, bias, c, relu_aux, gelu_aux)
    return call(op, settings, operands, alpha, beta, out, aux_out, stream)


def plan(
    a: Array,
    b: Array,
    /,
    *,
    epilog: str | Epilog | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    relu_aux: Array | None = None,
    gelu_aux: Array | None = None,
    c: Array | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: Any = None,
    precision: str | None = None,
    deterministic: bool | None = None,
    out: Array | None = None,
    aux_out: AuxOut = None,
) -> Plan:
    """Plan a product once, to be called many times with arrays like these.

    Parameters
    ----------
    a, b, bias, c, relu_aux, gelu_aux, out, aux_out : array
        Arrays with the shapes, strides, dtypes and device of the later calls; their contents are not read and they are
        not kept.
    epilog : str or Epilog, optional
        Plan `epilog_matmul` with this epilog; without it, `matmul` with ``activation``.
    activation, transpose_a, transpose_b, out_dtype, precision, deterministic
        As in `matmul`.

    Returns
    -------
    Plan
        Call it as ``p(a, b, bias=...)``; a context manager that frees it.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `matmul`.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> x, w = np.ones((2, 3), "float32"), np.ones((3, 4), "float32")
    >>> with fusedops.plan(x, w, activation="relu") as p:
    ...     p(x, w).shape
    (2, 4)
    """
    settings = Settings(epilog, activation, transpose_a, transpose_b, out_dtype, precision, deterministic)
    return new_plan("plan", settings, (a, b, bias, c, relu_aux, gelu_aux), out, aux_out)


def explain(
    a: Array,
    b: Array,
    /,
    *,
    epilog: str | Epilog | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    relu_aux: Array | None = None,
    gelu_aux: Array | None = None,
    c: Array | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: Any = None,
    precision: str | None = None,
    deterministic: bool | None = None,
) -> Explanation:
    """Say what a call would do, without computing: engine, strategy and why, layouts, copies, operations and bytes.

    Parameters
    ----------
    a, b, epilog, bias, activation, relu_aux, gelu_aux, c, transpose_a, transpose_b, out_dtype, precision, deterministic
        As in `plan`.

    Returns
    -------
    Explanation
        A record; ``print`` it for text, ``.as_dict()`` for data.

    Raises
    ------
    TypeError, ValueError, ImportError
        Where the call itself would.
    """
    settings = Settings(epilog, activation, transpose_a, transpose_b, out_dtype, precision, deterministic)
    with new_plan("explain", settings, (a, b, bias, c, relu_aux, gelu_aux), None, None) as made:
        return made.explain()
