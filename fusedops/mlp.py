"""`mlp` and `mlp_grad`: two layers as one op, whose backward product carries the activation's derivative.

What is saved between the two: relu keeps its output, whose sign says where the derivative is 1, so that it is 0 at
exactly 0 as in PyTorch and JAX; the other activations keep the pre-activation beside it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .activations import check_activation
from .dtypes import dtype_named, name_of
from .epilogs import Epilog
from .errors import OURS, named
from .frameworks import Framework
from .layout import batch_layout
from .lead import Sources, join_lead, spec_of_argument
from .lifetime import settle
from .mlp_rules import check_cotangent, check_layers
from .operands import check_flag
from .ops import call
from .outputs import check_output_kinds, check_outputs
from .problem import Settings
from .residuals import padded_preact
from .streams import launch_stream

__all__ = ["MlpGrad", "MlpSaved", "mlp", "mlp_grad"]

Array = Any


class MlpSaved(NamedTuple):
    """What `mlp` keeps for `mlp_grad`.

    Attributes
    ----------
    hidden : array, (..., m, hidden)
        The activated hidden layer.
    preact : array, (..., m, round_up(hidden, 8)), or None
        The hidden layer before the activation, padded as ``gelu_aux`` is; None for "relu" and None.
    """

    hidden: Array
    preact: Array | None


class MlpGrad(NamedTuple):
    """The gradients of `mlp`, each with the shape and dtype of its argument; None for a bias that was not given."""

    dx: Array
    dw1: Array
    dw2: Array
    db1: Array | None
    db2: Array | None


class _How(NamedTuple):
    """The options that every product of an mlp shares."""

    activation: str | None
    transpose_w1: bool
    transpose_w2: bool
    precision: str | None
    deterministic: bool | None


_OPERANDS = ("x", "w1", "w2", "b1", "b2")
_GRAD_OPERANDS = ("x", "w1", "w2", "dout", "b1", "b2", "saved.hidden", "saved.preact")


def mlp(
    x: Array,
    w1: Array,
    w2: Array,
    /,
    *,
    activation: str | None,
    b1: Array | None = None,
    b2: Array | None = None,
    transpose_w1: bool = False,
    transpose_w2: bool = False,
    precision: str | None = None,
    deterministic: bool | None = None,
    save: bool = False,
    out: Array | None = None,
    stream: int | None = None,
) -> Any:
    """Compute ``activation(x @ w1 + b1) @ w2 + b2``.

    The hidden layer is rounded to the operands' dtype between the two products; each product is computed as by
    `matmul`.

    Parameters
    ----------
    x : array, (..., m, k)
        float16, bfloat16, float32 or float64, of any framework.
    w1 : array, (k, hidden)
        With ``transpose_w1``, ``(hidden, k)``.
    w2 : array, (hidden, n)
        With ``transpose_w2``, ``(n, hidden)``.
    activation : {None, "relu", "gelu_tanh", "gelu_erf", "silu"}
        Of the hidden layer.
    b1 : array, (hidden,), optional
    b2 : array, (n,), optional
    transpose_w1, transpose_w2 : bool
        Whether a weight is stored transposed; no copy is made.
    precision, deterministic, stream
        As in `matmul`.
    save : bool
        Also return what `mlp_grad` needs, so that it need not compute the hidden layer again.
    out : array, (..., m, n), optional
        As in `matmul`.

    Returns
    -------
    array, (..., m, n)
        In the lead's framework.
    (array, MlpSaved)
        With ``save=True``.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `matmul`; the message names the layer.

    Notes
    -----
    In JAX and PyTorch it is differentiable as it stands; `mlp_grad` is for arrays without autograd.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> x, w1, w2 = np.ones((2, 3), "float32"), np.ones((3, 8), "float32"), np.ones((8, 4), "float32")
    >>> fusedops.mlp(x, w1, w2, activation="gelu_tanh").shape
    (2, 4)
    """
    if stream is not None:
        with launch_stream("mlp", stream, (x, w1, w2, b1, b2), _OPERANDS, 3):
            return mlp(
                x,
                w1,
                w2,
                activation=activation,
                b1=b1,
                b2=b2,
                transpose_w1=transpose_w1,
                transpose_w2=transpose_w2,
                precision=precision,
                deterministic=deterministic,
                save=save,
                out=out,
            )
    how = _How(activation, transpose_w1, transpose_w2, precision, deterministic)
    try:
        check_activation(activation)
        check_flag("save", save)
        framework, (x, w1, w2, b1, b2), sources = _join(_OPERANDS, (x, w1, w2, b1, b2), 3, how)
        if out is not None:
            check_output_kinds(framework, {"out": out})
            check_outputs(framework, (x, w1, w2, b1, b2), {"out": out}, _OPERANDS)
    except OURS as error:
        raise named("mlp", error) from error.__cause__
    saved = _hidden("mlp", framework, x, w1, b1, how, save)
    second = "mlp, second layer (a is the hidden layer, b is w2, bias is b2)"
    result = _product(second, how, saved.hidden, w2, bias=b2, transpose_b=transpose_w2, out=out)
    if sources:
        settle(framework, framework.device(result), (result, *saved), sources)
    return (result, saved) if save else result


def mlp_grad(
    dout: Array,
    x: Array,
    w1: Array,
    w2: Array,
    /,
    *,
    activation: str | None,
    b1: Array | None = None,
    b2: Array | None = None,
    saved: MlpSaved | None = None,
    transpose_w1: bool = False,
    transpose_w2: bool = False,
    precision: str | None = None,
    deterministic: bool | None = None,
    stream: int | None = None,
) -> MlpGrad:
    """Compute the gradients of `mlp` for the cotangent ``dout`` of its result.

    ``dhidden = dout @ w2^T``, ``dpreact = dhidden * activation'``, ``dw2 = hidden^T @ dout``, ``dw1 = x^T @ dpreact``,
    ``dx = dpreact @ w1^T``, ``db2`` and ``db1`` the sums of ``dout`` and ``dpreact`` over all rows.

    Parameters
    ----------
    dout : array, (..., m, n)
        The cotangent, of the dtype of ``x``.
    x, w1, w2, activation, b1, b2, transpose_w1, transpose_w2, precision, deterministic, stream
        As given to `mlp`. A bias is not read; giving it asks for its gradient.
    saved : MlpSaved, optional
        From ``mlp(..., save=True)``; without it the hidden layer is computed again, for which the biases are read.

    Returns
    -------
    MlpGrad
        ``dx, dw1, dw2, db1, db2``, each with the shape and dtype of its argument.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `matmul`; the message names the product.

    Notes
    -----
    All leading axes of ``x`` and ``dout`` must fold into one without a copy. relu's derivative at 0 is 0. Stream order
    is that of `matmul`.
    """
    if stream is not None:
        with launch_stream("mlp_grad", stream, (x, w1, w2, dout, b1, b2), _GRAD_OPERANDS[:6], 4):
            return mlp_grad(
                dout,
                x,
                w1,
                w2,
                activation=activation,
                b1=b1,
                b2=b2,
                saved=saved,
                transpose_w1=transpose_w1,
                transpose_w2=transpose_w2,
                precision=precision,
                deterministic=deterministic,
            )
    how = _How(activation, transpose_w1, transpose_w2, precision, deterministic)
    try:
        check_activation(activation)
        operands = (x, w1, w2, dout, b1, b2, *_saved_arrays(saved, activation))
        framework, operands, sources = _join(_GRAD_OPERANDS, operands, 4, how)
        given = {name: array for name, array in zip(_GRAD_OPERANDS, operands, strict=True) if array is not None}
        specs = {name: spec_of_argument(name, array, framework) for name, array in given.items()}
        check_cotangent(specs, transpose_w1, transpose_w2)
    except OURS as error:
        raise named("mlp_grad", error) from error.__cause__
    x, w1, w2, dout, b1, b2 = operands[:6]
    saved = MlpSaved(*operands[6:]) if saved else _hidden("mlp_grad", framework, x, w1, b1, how, save=True)
    rows = {"dout": dout, "x": x, "saved.hidden": saved.hidden, "saved.preact": saved.preact}
    flat = {name: _folded("mlp_grad", name, array, framework) for name, array in rows.items()}
    flat_saved = MlpSaved(flat["saved.hidden"], flat["saved.preact"])
    dpreact, db1 = _dpreact(framework, flat["dout"], w2, flat_saved, how, b1 is not None)
    left_right = {"saved.hidden": flat_saved.hidden, "dout": flat["dout"]}
    dw2, db2 = _dweight("dw2", left_right, transpose_w2, b2 is not None, how)
    dw1, _ = _dweight("dw1", {"x": flat["x"], "dpreact": dpreact}, transpose_w1, False, how)
    dx = _product("mlp_grad, dx (a is dpreact, b is w1)", how, dpreact, w1, transpose_b=not transpose_w1)
    if tuple(dx.shape) != tuple(x.shape):
        dx = framework.reshape(dx, tuple(x.shape))
    grads = MlpGrad(dx, dw1, dw2, db1, db2)
    if sources:
        settle(framework, framework.device(dx), grads, sources)
    return grads


# The products and what stands between them ---------------------------------------------------------------------------


def _product(
    op: str, how: _How, a: Array, b: Array, *, bias: Any = None, gelu_aux: Any = None, out: Any = None, **settings: Any
) -> Any:
    """Return one product with the options that all of them share."""
    chosen = Settings(precision=how.precision, deterministic=how.deterministic, **settings)
    return call(op, chosen, (a, b, bias, None, None, gelu_aux), 1.0, 1.0, out, None, None)


def _join(
    names: tuple[str, ...], operands: tuple[Array, ...], required: int, how: _How
) -> tuple[Framework, tuple[Array, ...], Sources]:
    """Return the lead, the operands as its arrays, and those whose memory is foreign; check what is cheap."""
    check_flag("transpose_w1", how.transpose_w1)
    check_flag("transpose_w2", how.transpose_w2)
    lead, joined, sources = join_lead(operands, names, required)
    framework = lead.framework
    if not framework.makes_results:
        raise TypeError(
            f"{framework.name} arrays come with no way to make a new one, for the hidden layer. Pass arrays of NumPy, "
            "PyTorch, JAX or CuPy."
        )
    shapes = {name: _shape(x, framework) for name, x in zip(names, joined, strict=True) if x is not None}
    check_layers(shapes, how.transpose_w1, how.transpose_w2)
    return framework, joined, sources


def _shape(x: Array, framework: Framework) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else framework.spec(x).shape


def _saved_arrays(saved: MlpSaved | None, activation: str | None) -> tuple[Array | None, Array | None]:
    """Return what was saved; the pre-activation must be there for the activations whose derivative reads it."""
    if saved is None:
        return None, None
    if not isinstance(saved, MlpSaved):
        raise TypeError(f"saved is a {type(saved).__name__}, expected the MlpSaved of mlp(..., save=True).")
    if saved.hidden is None:
        raise ValueError("saved.hidden is None, expected an array. Pass what mlp(..., save=True) gave.")
    if activation in (None, "relu"):
        return saved.hidden, None
    if saved.preact is None:
        raise ValueError(
            f'saved.preact is None, and activation "{activation}" reads it. Pass what mlp saved with this activation.'
        )
    return saved.hidden, saved.preact


def _hidden(op: str, framework: Framework, x: Array, w1: Array, b1: Array | None, how: _How, save: bool) -> MlpSaved:
    """Return the hidden layer, with the pre-activation where it is to be saved and the activation needs it."""
    op = f"{op}, first layer (a is x, b is w1, bias is b1)"
    activation, transpose = how.activation, how.transpose_w1
    if not save or activation in (None, "relu"):
        return MlpSaved(_product(op, how, x, w1, bias=b1, activation=activation, transpose_b=transpose), None)
    if activation == "gelu_tanh":
        epilog = Epilog.GELU_AUX if b1 is None else Epilog.GELU_AUX_BIAS
        hidden, aux = _product(op, how, x, w1, bias=b1, epilog=epilog, transpose_b=transpose)
        return MlpSaved(hidden, aux["gelu_aux"])
    preact = framework.enter(_product(op, how, x, w1, bias=b1, transpose_b=transpose))
    dtype = name_of(preact.dtype)
    hidden = getattr(framework, str(activation))(framework.astype(preact, str(dtype_named(dtype).compute)))
    padded = framework.pad_last(preact, padded_preact(preact.shape[-1]))
    return MlpSaved(framework.leave(framework.astype(hidden, dtype)), framework.leave(padded))


def _dpreact(
    framework: Framework, dout: Array, w2: Array, saved: MlpSaved, how: _How, with_bias: bool
) -> tuple[Array, Array | None]:
    """Return the gradient of the pre-activation, (m, hidden), and its sum over m, (hidden,)."""
    op, transpose = "mlp_grad, dpreact (a is dout, b is w2)", not how.transpose_w2
    if how.activation == "gelu_tanh":
        epilog = Epilog.DGELU_BGRAD if with_bias else Epilog.DGELU
        result = _product(op, how, dout, w2, gelu_aux=saved.preact, epilog=epilog, transpose_b=transpose)
        return (result[0], result[1]["dgelu_bgrad"]) if with_bias else (result, None)
    dhidden = framework.enter(_product(op, how, dout, w2, transpose_b=transpose))
    dtype = name_of(dhidden.dtype)
    compute = str(dtype_named(dtype).compute)
    value = framework.astype(dhidden, compute)
    if how.activation == "relu":
        value = framework.where_positive(value, framework.enter(saved.hidden))
    elif how.activation is not None:
        preact = framework.enter(saved.preact)[..., : value.shape[-1]]
        value = value * framework.activation_derivative(how.activation, framework.astype(preact, compute))
    dpreact = framework.leave(framework.astype(value, dtype))
    if not with_bias:
        return dpreact, None
    return dpreact, framework.leave(framework.astype(framework.sum(value, axis=-2, keepdims=False), dtype))


def _dweight(
    name: str, left_right: dict[str, Array], transposed: bool, with_bias: bool, how: _How
) -> tuple[Array, Array | None]:
    """Return ``left^T @ right``, or its transpose, and the sum of ``right`` over its rows where it is asked for."""
    (a_name, a), (b_name, b) = reversed(left_right.items()) if transposed else left_right.items()
    op = f"mlp_grad, {name} (a is {a_name}, b is {b_name})"
    if not with_bias:
        return _product(op, how, a, b, transpose_a=True), None
    epilog = Epilog.BGRADA if transposed else Epilog.BGRADB
    dweight, aux = _product(op, how, a, b, epilog=epilog, transpose_a=True)
    return dweight, next(iter(aux.values()))


def _folded(op: str, name: str, x: Array | None, framework: Framework) -> Array | None:
    """Return ``(..., m, k)`` as ``(rows, k)`` over the same memory."""
    if x is None or len(x.shape) == 2:
        return x
    spec = framework.spec(framework.enter(x))
    try:
        batch_layout(name, spec.shape[:-1], spec.strides[:-1], spec.shape[:-1])
        return framework.reshape(x, (math.prod(spec.shape[:-1]), spec.shape[-1]))
    except OURS as error:
        raise named(op, error) from error.__cause__
