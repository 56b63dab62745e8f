"""The sixteen epilogs of nvmath's ``Matmul``: what each takes, computes and gives.

Everything that differs from one epilog to another is a column of this table; no other module branches on a name. Each
row speaks of the row-major result of this package, where bias and its gradient run along ``n``. The column-order
problem that cuBLASLt sees is made in ``column_form.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

__all__ = ["Aux", "Epilog", "epilog_named", "forward_epilog"]

Activation = Literal["relu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Aux:
    """An auxiliary array: its name in arguments and results, and the format that ``residuals.py`` gives it."""

    name: str
    format: Literal["relu_mask", "preact", "sum_over_m", "sum_a_over_k", "sum_b_over_k"]


_RELU_AUX = Aux("relu_aux", "relu_mask")
_GELU_AUX = Aux("gelu_aux", "preact")


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an epilog does to ``z = alpha * a @ b + beta * c``, in the order of application."""

    bias: bool = False
    activation: Activation | None = None
    takes: Aux | None = None
    gives: Aux | None = None


class Epilog(Enum):
    """An epilog of nvmath's ``Matmul``, by nvmath's name.

    Attributes
    ----------
    bias : bool
        Whether it adds ``bias`` (required then, refused otherwise).
    activation : {"relu", "gelu_tanh"} or None
        The activation that it applies, or whose derivative it multiplies by where ``takes`` is set.
    takes : Aux or None
        The residual that a backward epilog reads (``relu_aux`` or ``gelu_aux``).
    gives : Aux or None
        The auxiliary array that it writes beside ``out``.
    """

    DEFAULT = _Traits()
    RELU = _Traits(activation="relu")
    GELU = _Traits(activation="gelu_tanh")
    BIAS = _Traits(bias=True)
    RELU_BIAS = _Traits(bias=True, activation="relu")
    GELU_BIAS = _Traits(bias=True, activation="gelu_tanh")
    RELU_AUX = _Traits(activation="relu", gives=_RELU_AUX)
    GELU_AUX = _Traits(activation="gelu_tanh", gives=_GELU_AUX)
    RELU_AUX_BIAS = _Traits(bias=True, activation="relu", gives=_RELU_AUX)
    GELU_AUX_BIAS = _Traits(bias=True, activation="gelu_tanh", gives=_GELU_AUX)
    DRELU = _Traits(activation="relu", takes=_RELU_AUX)
    DGELU = _Traits(activation="gelu_tanh", takes=_GELU_AUX)
    DRELU_BGRAD = _Traits(activation="relu", takes=_RELU_AUX, gives=Aux("drelu_bgrad", "sum_over_m"))
    DGELU_BGRAD = _Traits(activation="gelu_tanh", takes=_GELU_AUX, gives=Aux("dgelu_bgrad", "sum_over_m"))
    BGRADA = _Traits(gives=Aux("bgrada", "sum_a_over_k"))
    BGRADB = _Traits(gives=Aux("bgradb", "sum_b_over_k"))

    @property
    def bias(self) -> bool:
        return self.value.bias

    @property
    def activation(self) -> Activation | None:
        return self.value.activation

    @property
    def takes(self) -> Aux | None:
        return self.value.takes

    @property
    def gives(self) -> Aux | None:
        return self.value.gives

    def __repr__(self) -> str:
        return f"Epilog.{self.name}"


_FORWARD = {(e.bias, e.activation): e for e in Epilog if e.takes is None and e.gives is None}


def forward_epilog(bias: bool, activation: Activation | None) -> Epilog:
    """Return the epilog that adds a bias or not and applies ``activation``, and saves nothing."""
    return _FORWARD[bias, activation]


def epilog_named(epilog: object) -> Epilog:
    """Return the member for a name, a member, or nvmath's own ``MatmulEpilog`` member."""
    name = epilog if isinstance(epilog, str) else getattr(epilog, "name", None)
    if isinstance(name, str) and name in Epilog.__members__:
        return Epilog[name]
    raise ValueError(f"epilog is {epilog!r}, expected one of {', '.join(Epilog.__members__)}.")
