"""The launch of a fused product: addresses of the operands, memory from the lead's allocator, one call of a program."""

from __future__ import annotations

from typing import Any

from ..column_form import unasked_steps
from ..cuda import device_getter, is_capturing, on_device
from ..frameworks import Framework
from ..options import current_options
from ..problem import Problem
from .base import Results
from .nvmath import Program, cuBLASLtError, plan_program
from .verify import verify

__all__ = ["Fused"]

Array = Any

_MAX_ALIGNMENT = 16
NO_PLAN_WHILE_CAPTURING = (
    "no plan for this problem yet, or none for arrays aligned like these, and a stream capture is running. Call the "
    "function once with these arrays before capturing."
)


class Fused:
    """A problem that one epilog computes, with a program for each alignment class that calls have had."""

    strategy = "fused"
    why = "an epilog takes it"

    def __init__(self, problem: Problem, framework: Framework) -> None:
        self.problem = problem
        self.framework = framework
        self._programs: dict[int, Program] = {}
        self._second = problem.activation
        # A sum goes where a bias would be read; a mask or pre-activation has a place of its own.
        gives = problem.epilog.gives
        self._sums = gives is not None and gives.format.startswith("sum")
        self._steps = _MAX_ALIGNMENT | unasked_steps(problem)
        # What every call asks for, looked up once.
        self._ordinal = problem.device.ordinal
        self._current_device = device_getter()
        self._current_stream = framework.stream_getter(problem.device)
        self._pointer = framework.pointer
        self._check_launch = framework.check_launch
        self._empty_out = framework.allocator(problem.out_spec)
        self._empty_aux = framework.allocator(problem.aux_spec) if problem.aux_spec else None

    def program(self, alignment: int) -> Program:
        """Return the program for an alignment class in bytes, planning it if it is the first of its class."""
        program = self._programs.get(alignment)
        if program is None:
            if is_capturing(self._current_stream()):
                raise RuntimeError(NO_PLAN_WHILE_CAPTURING)
            program = plan_program(self.problem, alignment)
            if current_options().verify:
                verify(self.problem, program)
            program = self._programs.setdefault(alignment, program)
        return program

    def facts(self) -> dict[str, Any]:
        """Return the algorithm and workspace for aligned arrays."""
        program = self.program(_MAX_ALIGNMENT)
        return {"algorithm": program.algorithm_id, "split_k": program.split_k, "workspace": program.workspace}

    def __call__(
        self, operands: tuple[Array, ...], alpha: float, beta: float, out: Array | None, aux_out: Array | None
    ) -> Results:
        if self._current_device() != self._ordinal:
            with on_device(self._ordinal):
                return self(operands, alpha, beta, out, aux_out)
        self._check_launch(operands, out, aux_out)
        a, b, bias, c, relu_aux, gelu_aux = operands
        pointer = self._pointer
        at_a, at_b = pointer(a), pointer(b)
        at_bias = 0 if bias is None else pointer(bias)
        if out is None:
            out = self._empty_out(a)
        at_out = pointer(out)
        if c is None or beta == 0.0:
            at_c, beta = at_out, 0.0  # a factor of 0 leaves it unread
        else:
            at_c = pointer(c)
        at_aux = 0
        if relu_aux is not None:
            at_aux = pointer(relu_aux)
        elif gelu_aux is not None:
            at_aux = pointer(gelu_aux)
        if self._empty_aux is not None:
            if aux_out is None:
                aux_out = self._empty_aux(a)
            if self._sums:
                at_bias = pointer(aux_out)
            else:
                at_aux = pointer(aux_out)
        if not (at_a and at_b and at_out):
            # A fake tensor, a distributed one, a zero that was never materialised.
            raise TypeError("an operand or out has no memory of its own; pass plain arrays.")
        joined = at_a | at_b | at_out | at_bias | at_aux | at_c | self._steps
        program = self._programs.get(joined & -joined) or self.program(joined & -joined)
        at_workspace = 0
        if program.workspace:
            workspace = self.framework.scratch(program.workspace, a)
            at_workspace = pointer(workspace)
        try:
            program.launch(at_a, at_b, at_c, at_out, at_bias, at_aux, at_workspace, alpha, beta, self._current_stream())
        except cuBLASLtError as error:
            raise RuntimeError(f"cuBLASLt failed on {self.problem}: {error}") from error
        if self._second is not None:
            self.framework.apply_in_place(self._second, out)
        return out, aux_out
