"""`Explanation`: what a plan does and why, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .dtypes import dtype_named
from .engines import Launch, engine_name
from .frameworks import Framework
from .operands import Operand
from .problem import Problem

__all__ = ["Explanation", "explain_problem"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call does.

    Attributes
    ----------
    framework, engine, device : str
        The lead; "nvmath" or "reference"; where it runs.
    strategy : str
        "fused": one call of an epilog. "split": a product of ours, then each step of the epilog as the framework's own
        operations. "reference": the product too is the framework's.
    why : str
        The reason for the strategy.
    facts : dict
        On a GPU the ``algorithm``, ``split_k`` and bytes of ``workspace`` for aligned arrays.
    epilog : str
        The epilog of the product.
    second_step : str or None
        The activation that no epilog has.
    shape : dict
        ``batch_shape``, ``m``, ``n``, ``k``.
    dtypes : dict
        ``operands``, ``compute``, ``out``.
    layouts : dict
        How each matrix is read in place.
    copies : tuple of str
        Arrays that are copied before the product: none, since what would need one is refused.
    flops, bytes : int
        Operations of the product; bytes of operands and results, each counted once.
    """

    framework: str
    engine: str
    device: str
    strategy: str
    why: str
    facts: dict[str, Any]
    epilog: str
    second_step: str | None
    shape: dict[str, Any]
    dtypes: dict[str, str]
    layouts: dict[str, str]
    copies: tuple[str, ...]
    flops: int
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        shape = self.shape
        batch = f"{shape['batch_shape']} x " if shape["batch_shape"] else ""
        step = f", then {self.second_step}" if self.second_step else ""
        layouts = ", ".join(f"{name} {layout}" for name, layout in self.layouts.items())
        return "\n".join(
            (
                f"{self.epilog}{step} on {batch}m={shape['m']} n={shape['n']} k={shape['k']}",
                f"dtypes:   {self.dtypes['operands']}, computed in {self.dtypes['compute']}, out {self.dtypes['out']}",
                f"engine:   {self.engine} ({self.framework} on {self.device})",
                f"strategy: {self.strategy}: {self.why}",
                *[f"{name + ':':9} {value}" for name, value in self.facts.items()],
                f"layouts:  {layouts}",
                f"copies:   {', '.join(self.copies) or 'none'}",
                f"work:     {self.flops:,} operations over {self.bytes:,} bytes",
            )
        )


def explain_problem(problem: Problem, framework: Framework, launch: Launch) -> Explanation:
    """Return the explanation of a problem that ``framework`` leads and ``launch`` computes."""
    matrices = {"a": problem.a, "b": problem.b, "c": problem.c, "out": problem.out}
    given = {name: operand for name, operand in matrices.items() if operand is not None}
    return Explanation(
        framework=framework.name,
        engine=engine_name(problem),
        device=str(problem.device),
        strategy=launch.strategy,
        why=launch.why,
        facts=launch.facts(),
        epilog=problem.epilog.name,
        second_step=problem.activation,
        shape={"batch_shape": problem.batch_shape, "m": problem.m, "n": problem.n, "k": problem.k},
        dtypes={"operands": problem.a.dtype, "compute": problem.compute_dtype, "out": problem.out.dtype},
        layouts={name: _layout_text(operand) for name, operand in given.items()},
        copies=(),
        flops=problem.flops,
        bytes=sum(_bytes(operand) for operand in given.values()) + _bias_and_aux_bytes(problem),
    )


def _layout_text(operand: Operand) -> str:
    matrix, batch = operand.matrix, operand.batch
    over = f", batch stride {batch.stride}" if batch.count > 1 else ""
    return f"{matrix.order} (ld {matrix.ld}{over})"


def _bytes(operand: Operand) -> int:
    copies = 1 if operand.batch.stride == 0 else operand.batch.count
    return copies * operand.matrix.rows * operand.matrix.cols * dtype_named(operand.dtype).itemsize


def _bias_and_aux_bytes(problem: Problem) -> int:
    total = 0
    if problem.bias is not None:
        items = problem.bias.count if problem.bias.stride else 1
        total += items * problem.n * dtype_named(problem.out.dtype).itemsize
    for spec in (problem.aux_spec, problem.aux_in_spec):
        if spec is not None:
            total += spec.size * dtype_named(spec.dtype).itemsize
    return total
