"""`mlp` and `mlp_grad`: two layers as one op, whose backward product carries the activation's derivative.

What is saved between the two: relu keeps its output, whose sign says where the derivative is 1, so that it is 0 at
exactly 0 as in PyTorch and JAX; the other activations keep the pre-activation beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .activations import check_activation
from .calls import is_compiled_by_torch
from .errors import OURS, named
from .lead import spec_of_argument
from .lifetime import settle
from .mlp_rules import check_cotangent
from .mlp_steps import (
    GRAD_OPERANDS,
    OPERANDS,
    SECOND,
    How,
    MlpSaved,
    dpreact_and_dbias,
    dweight_and_dbias,
    folded,
    hidden_layer,
    join,
    joined_layers,
    product,
    saved_arrays,
)
from .operands import check_flag
from .outputs import check_output_kinds, check_outputs
from .streams import launch_stream

__all__ = ["MlpGrad", "MlpSaved", "mlp", "mlp_grad"]

Array = Any


class MlpGrad(NamedTuple):
    """The gradients of `mlp`, each with the shape and dtype of its argument; None for a bias that was not given."""

    dx: Array
    dw1: Array
    dw2: Array
    db1: Array | None
    db2: Array | None


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
    with launch_stream("mlp", stream, (x, w1, w2, b1, b2), OPERANDS, 3):
        how = How(activation, transpose_w1, transpose_w2, precision, deterministic)
        try:
            check_activation(activation)
            check_flag("save", save)
            framework, (x, w1, w2, b1, b2), sources = join(OPERANDS, (x, w1, w2, b1, b2), 3, how)
            if out is not None and not is_compiled_by_torch():  # whose operator checks when it runs
                check_output_kinds(framework, {"out": out})
                check_outputs(framework, (x, w1, w2, b1, b2), {"out": out}, OPERANDS)
        except OURS as error:
            raise named("mlp", error) from error.__cause__
        joined = None if save or out is not None else joined_layers(framework, (x, w1, w2, b1, b2), how, sources)
        if joined is not None:
            result, saved = joined, MlpSaved(joined, None)
        else:
            saved = hidden_layer("mlp", framework, x, w1, b1, how, save)
            result = product(SECOND, how, saved.hidden, w2, bias=b2, transpose_b=transpose_w2, out=out)
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
    with launch_stream("mlp_grad", stream, (x, w1, w2, dout, b1, b2), GRAD_OPERANDS[:6], 4):
        how = How(activation, transpose_w1, transpose_w2, precision, deterministic)
        try:
            check_activation(activation)
            operands = (x, w1, w2, dout, b1, b2, *saved_arrays(saved, activation))
            framework, operands, sources = join(GRAD_OPERANDS, operands, 4, how)
            given = {name: array for name, array in zip(GRAD_OPERANDS, operands, strict=True) if array is not None}
            specs = {name: spec_of_argument(name, array, framework) for name, array in given.items()}
            check_cotangent(specs, transpose_w1, transpose_w2)
        except OURS as error:
            raise named("mlp_grad", error) from error.__cause__
        x, w1, w2, dout, b1, b2 = operands[:6]
        saved = MlpSaved(*operands[6:]) if saved else hidden_layer("mlp_grad", framework, x, w1, b1, how, save=True)
        rows = {"dout": dout, "x": x, "saved.hidden": saved.hidden, "saved.preact": saved.preact}
        flat = {name: folded("mlp_grad", name, array, framework) for name, array in rows.items()}
        flat_saved = MlpSaved(flat["saved.hidden"], flat["saved.preact"])
        dpreact, db1 = dpreact_and_dbias(framework, flat["dout"], w2, flat_saved, how, b1 is not None)
        left_right = {"saved.hidden": flat_saved.hidden, "dout": flat["dout"]}
        dw2, db2 = dweight_and_dbias("dw2", left_right, transpose_w2, b2 is not None, how)
        dw1, _ = dweight_and_dbias("dw1", {"x": flat["x"], "dpreact": dpreact}, transpose_w1, False, how)
        dx = product("mlp_grad, dx (a is dpreact, b is w1)", how, dpreact, w1, transpose_b=not transpose_w1)
        if tuple(dx.shape) != tuple(x.shape):
            dx = framework.reshape(dx, tuple(x.shape))
        grads = MlpGrad(dx, dw1, dw2, db1, db2)
        if sources:
            settle(framework, framework.device(dx), grads, sources)
        return grads
