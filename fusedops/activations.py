"""Activations and their derivatives, as formulas over any array-API namespace.

``relu`` and ``gelu_tanh`` exist as epilogs; ``gelu_erf`` and ``silu`` are a second step after a fused bias. A framework
that has an activation of its own puts it in the place of the formula (``frameworks/``); the derivatives are used by the
``D*`` epilogs and by ``mlp_grad``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["ACTIVATIONS", "FUSED", "check_activation"]

Array = Any
Namespace = Any

ACTIVATIONS = ("relu", "gelu_tanh", "gelu_erf", "silu")
FUSED = ("relu", "gelu_tanh")
"""The activations that nvmath has an epilog for."""

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715  # Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415, section 2


def check_activation(activation: object) -> None:
    """Raise unless ``activation`` is None or one of the names."""
    if activation is None or (isinstance(activation, str) and activation in ACTIVATIONS):
        return
    if isinstance(activation, str) and activation == "gelu":
        raise ValueError(
            'activation "gelu" is ambiguous: "gelu_tanh" is JAX\'s default and runs fused, "gelu_erf" is PyTorch\'s '
            "default and runs as a separate step."
        )
    names = ", ".join(f'"{name}"' for name in ACTIVATIONS)
    raise ValueError(f"activation is {activation!r}, expected None or one of {names}.")


def relu(z: Array, xp: Namespace) -> Array:
    """``max(z, 0)``; NaN stays NaN."""
    return xp.where(z < 0, xp.zeros_like(z), z)


def gelu_tanh(z: Array, xp: Namespace) -> Array:
    """``z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3)))``."""
    bounded = xp.clip(z, -40.0, 40.0)  # where tanh is 1 to the last bit, and the cube cannot overflow
    return 0.5 * z * (1.0 + xp.tanh(_SQRT_2_OVER_PI * (bounded + _CUBIC * bounded * bounded * bounded)))


def silu(z: Array, xp: Namespace) -> Array:
    """``z * sigmoid(z)``."""
    return z * sigmoid(z, xp)


def sigmoid(z: Array, xp: Namespace) -> Array:
    """``1 / (1 + exp(-z))``, with an exponential that cannot overflow and no cancellation at negative ``z``."""
    e = xp.exp(-xp.abs(z))
    return xp.where(z < 0, e, xp.ones_like(z)) / (1.0 + e)


def gelu_erf(z: Array, erf: Callable[[Array], Array]) -> Array:
    """``z / 2 * (1 + erf(z / sqrt(2)))``."""
    return 0.5 * z * (1.0 + erf(z * math.sqrt(0.5)))


# The derivatives are constant to the last bit beyond these bounds; clipping keeps infinity times zero out and NaN in.


def gelu_tanh_derivative(z: Array, xp: Namespace) -> Array:
    """The derivative of `gelu_tanh` at the pre-activation ``z``."""
    z = xp.clip(z, -40.0, 40.0)
    t = xp.tanh(_SQRT_2_OVER_PI * (z + _CUBIC * z * z * z))
    inner = _SQRT_2_OVER_PI * (1.0 + 3 * _CUBIC * z * z)
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * inner


def gelu_erf_derivative(z: Array, xp: Namespace, erf: Callable[[Array], Array]) -> Array:
    """The derivative of `gelu_erf` at the pre-activation ``z``: ``Phi(z) + z * phi(z)``."""
    z = xp.clip(z, -40.0, 40.0)
    density = xp.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 0.5 * (1.0 + erf(z * math.sqrt(0.5))) + z * density


def silu_derivative(z: Array, xp: Namespace) -> Array:
    """The derivative of `silu` at the pre-activation ``z``."""
    z = xp.clip(z, -800.0, 800.0)
    s = sigmoid(z, xp)
    return s * (1.0 + z * (1.0 - s))
