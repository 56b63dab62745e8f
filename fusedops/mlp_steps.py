"""What `mlp` and `mlp_grad` are made of: their products, and the activation and its derivative between them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .activations import FUSED
from .calls import call, is_compiled_by_torch
from .dtypes import dtype_named, name_of
from .engines import two_layers
from .epilogs import Epilog
from .errors import OURS, named
from .frameworks import Framework
from .layout import batch_layout
from .lead import Sources, join_lead
from .mlp_rules import check_layers
from .operands import check_flag
from .planned import plan_of
from .problem import Settings
from .residuals import padded_preact

__all__ = [
    "GRAD_OPERANDS",
    "OPERANDS",
    "SECOND",
    "How",
    "MlpSaved",
    "dpreact_and_dbias",
    "dweight_and_dbias",
    "folded",
    "hidden_layer",
    "join",
    "joined_layers",
    "product",
    "saved_arrays",
]

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


class How(NamedTuple):
    """The options that every product of an mlp shares."""

    activation: str | None
    transpose_w1: bool
    transpose_w2: bool
    precision: str | None
    deterministic: bool | None


OPERANDS = ("x", "w1", "w2", "b1", "b2")
GRAD_OPERANDS = ("x", "w1", "w2", "dout", "b1", "b2", "saved.hidden", "saved.preact")


def product(
    op: str, how: How, a: Array, b: Array, *, bias: Any = None, gelu_aux: Any = None, out: Any = None, **settings: Any
) -> Any:
    """Return one product with the options that all of them share."""
    chosen = Settings(precision=how.precision, deterministic=how.deterministic, **settings)
    return call(op, chosen, (a, b, bias, None, None, gelu_aux), 1.0, 1.0, out, None, None)


def join(
    names: tuple[str, ...], operands: tuple[Array, ...], required: int, how: How
) -> tuple[Framework, tuple[Array, ...], Sources]:
    """Return the lead, the operands as its arrays, and those whose memory is foreign; check what is cheap."""
    check_flag("transpose_w1", how.transpose_w1)
    check_flag("transpose_w2", how.transpose_w2)
    if is_compiled_by_torch():
        from . import pytorch

        return pytorch.TORCH, operands, []
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


def saved_arrays(saved: MlpSaved | None, activation: str | None) -> tuple[Array | None, Array | None]:
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


FIRST = "mlp, first layer (a is x, b is w1, bias is b1)"
SECOND = "mlp, second layer (a is the hidden layer, b is w2, bias is b2)"


def joined_layers(framework: Framework, operands: tuple[Array, ...], how: How, sources: Sources) -> Array | None:
    """Return both layers as one operation, None where the lead has none for them."""
    if how.activation not in (None, *FUSED):
        return None
    if framework.has_rules and (is_compiled_by_torch() or framework.needs_rules(operands)):
        from . import pytorch

        return pytorch.layers(operands, *how, sources)
    if not framework.joins_layers:
        return None
    x, w1, w2, b1, b2 = operands
    to_hidden = Settings(
        activation=how.activation,
        transpose_b=how.transpose_w1,
        precision=how.precision,
        deterministic=how.deterministic,
    )
    first = plan_of(FIRST, framework, to_hidden, (x, w1, b1, None, None, None))
    hidden = framework.placeholder(first.problem.out_spec.shape, x)
    to_out = to_hidden._replace(activation=None, transpose_b=how.transpose_w2)
    second = plan_of(SECOND, framework, to_out, (hidden, w2, b2, None, None, None))
    return two_layers(first.launch, second.launch, *operands)


def hidden_layer(
    op: str, framework: Framework, x: Array, w1: Array, b1: Array | None, how: How, save: bool
) -> MlpSaved:
    """Return the hidden layer, with the pre-activation where it is to be saved and the activation needs it."""
    op = f"{op}, first layer (a is x, b is w1, bias is b1)"
    activation, transpose = how.activation, how.transpose_w1
    if not save or activation in (None, "relu"):
        return MlpSaved(product(op, how, x, w1, bias=b1, activation=activation, transpose_b=transpose), None)
    if activation == "gelu_tanh":
        epilog = Epilog.GELU_AUX if b1 is None else Epilog.GELU_AUX_BIAS
        hidden, aux = product(op, how, x, w1, bias=b1, epilog=epilog, transpose_b=transpose)
        return MlpSaved(hidden, aux["gelu_aux"])
    preact = framework.enter(product(op, how, x, w1, bias=b1, transpose_b=transpose))
    dtype = name_of(preact.dtype)
    hidden = getattr(framework, str(activation))(framework.astype(preact, str(dtype_named(dtype).compute)))
    padded = framework.pad_last(preact, padded_preact(preact.shape[-1]))
    return MlpSaved(framework.leave(framework.astype(hidden, dtype)), framework.leave(padded))


def dpreact_and_dbias(
    framework: Framework, dout: Array, w2: Array, saved: MlpSaved, how: How, with_bias: bool
) -> tuple[Array, Array | None]:
    """Return the gradient of the pre-activation, (m, hidden), and its sum over m, (hidden,)."""
    op, transpose = "mlp_grad, dpreact (a is dout, b is w2)", not how.transpose_w2
    if how.activation == "gelu_tanh":
        epilog = Epilog.DGELU_BGRAD if with_bias else Epilog.DGELU
        result = product(op, how, dout, w2, gelu_aux=saved.preact, epilog=epilog, transpose_b=transpose)
        return (result[0], result[1]["dgelu_bgrad"]) if with_bias else (result, None)
    dhidden = framework.enter(product(op, how, dout, w2, transpose_b=transpose))
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


def dweight_and_dbias(
    name: str, left_right: dict[str, Array], transposed: bool, with_bias: bool, how: How
) -> tuple[Array, Array | None]:
    """Return ``left^T @ right``, or its transpose, and the sum of ``right`` over its rows where it is asked for."""
    (a_name, a), (b_name, b) = reversed(left_right.items()) if transposed else left_right.items()
    op = f"mlp_grad, {name} (a is {a_name}, b is {b_name})"
    if not with_bias:
        return product(op, how, a, b, transpose_a=True), None
    epilog = Epilog.BGRADA if transposed else Epilog.BGRADB
    dweight, aux = product(op, how, a, b, epilog=epilog, transpose_a=True)
    return dweight, next(iter(aux.values()))


def folded(op: str, name: str, x: Array | None, framework: Framework) -> Array | None:
    """Return ``(..., m, k)`` as ``(rows, k)`` over the same memory."""
    if x is None or len(x.shape) == 2:
        return x
    spec = framework.spec(framework.enter(x))
    try:
        batch_layout(name, spec.shape[:-1], spec.strides[:-1], spec.shape[:-1])
        return framework.reshape(x, (math.prod(spec.shape[:-1]), spec.shape[-1]))
    except OURS as error:
        raise named(op, error) from error.__cause__
