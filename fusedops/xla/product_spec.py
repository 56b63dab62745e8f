"""`ProductSpec`: one product with its epilog, written in letters, the source of every rule that JAX needs of it.

Each axis of an array is a letter: ``a = "mk"``, ``b = "kn"``, ``out = "mn"`` is a matrix product. Batching adds a
letter, transposing lets the arrays change roles, sharding goes by the letters; no rule reshapes anything. Every letter
occurs in at least two of the three, and ``n`` is the last letter of ``out`` wherever there is an epilog.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..epilogs import Aux, Epilog

__all__ = ["ProductSpec", "new_letter"]


@dataclass(frozen=True, slots=True)
class ProductSpec:
    """``out = epilog(alpha * sum(a * b) + beta * c)``, summed over the letters that ``out`` lacks.

    Attributes
    ----------
    a, b, out : str
        A letter for each axis.
    bias, c : str or None
        Some of the letters of ``out``, in their order; None where there is no such array.
    epilog : Epilog
        A residual that it takes or gives has the letters of ``out``, the last of them padded; a sum that it gives has
        those of ``out`` that are not summed.
    alpha, beta : float
        Factors.
    out_dtype : str
        Dtype of ``out``.
    precision, deterministic
        As in `fusedops.problem.Problem`.
    """

    a: str
    b: str
    out: str
    bias: str | None = None
    c: str | None = None
    epilog: Epilog = Epilog.DEFAULT
    alpha: float = 1.0
    beta: float = 1.0
    out_dtype: str = "float32"
    precision: str | None = None
    deterministic: bool | None = None

    @property
    def summed(self) -> str:
        """The letters that are summed over, in the order of ``a``."""
        return "".join(letter for letter in self.a if letter not in self.out)

    @property
    def rows(self) -> str:
        """The letters that only ``a`` brings to the result: those of its rows."""
        return "".join(letter for letter in self.out if letter not in self.b)

    @property
    def columns(self) -> str:
        """The letters that only ``b`` brings to the result."""
        return "".join(letter for letter in self.out if letter not in self.a)

    @property
    def shared(self) -> str:
        """The letters that all three have."""
        return "".join(letter for letter in self.out if letter in self.a and letter in self.b)

    @property
    def gives(self) -> Aux | None:
        return self.epilog.gives

    @property
    def aux(self) -> str | None:
        """The letters of the auxiliary output, None where there is none."""
        if self.gives is None:
            return None
        if not self.gives.format.startswith("sum"):
            return self.out
        dropped = self.out[-1] if self.gives.format == "sum_a_over_k" else self.out[-2]
        return self.out.replace(dropped, "")

    @property
    def summed_in_aux(self) -> str:
        """The letters that the auxiliary output is a sum over."""
        if self.gives is None or not self.gives.format.startswith("sum"):
            return ""
        return self.out[-2] if self.gives.format == "sum_over_m" else self.summed

    @property
    def has_mask(self) -> bool:
        """Whether an operand or a result holds a bit for each element of ``out``."""
        return any(aux is not None and aux.format == "relu_mask" for aux in (self.epilog.takes, self.gives))

    @property
    def bilinear(self) -> bool:
        """Whether it is the product alone, linear in ``a`` and in ``b``."""
        return self.epilog is Epilog.DEFAULT and self.c is None

    @property
    def operands(self) -> tuple[str, ...]:
        """The letters of the operands, in order: a, b, then bias, c and the residual where there are such."""
        return tuple(self._operands())

    def _operands(self) -> Iterator[str]:
        yield self.a
        yield self.b
        if self.bias is not None:
            yield self.bias
        if self.c is not None:
            yield self.c
        if self.epilog.takes:
            yield self.out

    @property
    def results(self) -> tuple[str, ...]:
        """The letters of the results: out, then the auxiliary output."""
        return (self.out,) if self.aux is None else (self.out, self.aux)

    def product_alone(self, out_dtype: str) -> ProductSpec:
        """Return the product without factors, bias, ``c`` and epilog, in a dtype."""
        return replace(self, bias=None, c=None, epilog=Epilog.DEFAULT, alpha=1.0, beta=1.0, out_dtype=out_dtype)

    def of(self, a: str, b: str, out: str, out_dtype: str) -> ProductSpec:
        """Return a product of other arrays with the options and the factor of this."""
        return replace(self.product_alone(out_dtype), a=a, b=b, out=out, alpha=self.alpha)

    def batched(self, letter: str, on: tuple[bool, ...]) -> ProductSpec:
        """Return the product over one axis more, which the operands have that ``on`` says."""
        flags = iter(on)
        a, b = (letter * next(flags) + own for own in (self.a, self.b))
        bias = self.bias if self.bias is None else letter * next(flags) + self.bias
        c = self.c if self.c is None else letter * next(flags) + self.c
        return replace(self, a=a, b=b, bias=bias, c=c, out=letter + self.out)


def new_letter(spec: ProductSpec) -> str:
    """Return a letter that a spec does not use yet."""
    return next(
        chr(i) for i in range(ord("A"), 0x110000) if chr(i).isalpha() and chr(i) not in spec.a + spec.b + spec.out
    )
