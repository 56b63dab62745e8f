"""`How`: what a product is beside its arrays, in types that an operator of PyTorch takes.

A dataclass and no tuple, which ``torch.func`` would take apart. The flags come first, as integers: DTensor keeps a
sharding for all calls that agree in their tensors and in what stands from the first integer on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..epilogs import Epilog
from ..problem import Settings

__all__ = ["How"]

_GIVES = {epilog.name: epilog.gives.name if epilog.gives else None for epilog in Epilog}
_SAVING = {"GELU": "GELU_AUX", "GELU_BIAS": "GELU_AUX_BIAS"}


@dataclass(frozen=True, slots=True)
class How:
    """The options of a product; ``out_dtype`` None is the operands'."""

    transpose_a: int = False
    transpose_b: int = False
    epilog: str = "DEFAULT"
    alpha: float = 1.0
    beta: float = 1.0
    out_dtype: str | None = None
    precision: str | None = None
    deterministic: bool | None = None

    @property
    def member(self) -> Epilog:
        """The epilog itself."""
        return Epilog[self.epilog]

    @property
    def gives(self) -> str | None:
        """The name of the auxiliary output; a string, because PyTorch's compiler cannot trace a record of ours."""
        return _GIVES[self.epilog]

    @property
    def settings(self) -> Settings:
        """The settings of the problem."""
        return _settings(self)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of an operator after the operands."""
        return (
            self.transpose_a,
            self.transpose_b,
            self.epilog,
            self.alpha,
            self.beta,
            self.out_dtype,
            self.precision,
            self.deterministic,
        )

    @property
    def saving(self) -> How:
        """The same, where GELU keeps its pre-activation for a derivative."""
        return self.with_epilog(_SAVING.get(self.epilog, self.epilog))

    def with_epilog(self, epilog: str) -> How:
        """Return the same with another epilog."""
        return self if epilog == self.epilog else replace(self, epilog=epilog)

    def of(self, alpha: float, transpose_a: int, transpose_b: int, out_dtype: str | None = None) -> How:
        """Return how other arrays are multiplied, without an epilog, under the same options."""
        return How(transpose_a, transpose_b, "DEFAULT", alpha, 1.0, out_dtype, self.precision, self.deterministic)


@lru_cache(maxsize=4096)
def _settings(how: How) -> Settings:
    flags = bool(how.transpose_a), bool(how.transpose_b)
    return Settings(how.member, None, *flags, how.out_dtype, how.precision, how.deterministic)
