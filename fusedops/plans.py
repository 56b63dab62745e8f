"""`Plan`: what is decided once about a problem, and called many times.

What is decided when
--------------------
import
    Tables: dtypes, epilogs, aux formats.
plan
    Every check of shapes, layouts, dtypes and devices; the engine; the shapes of the results. It reads the settings
    and the arrays' specs, never the arrays.
call
    The arrays themselves, ``alpha``, ``beta``, the stream; for ``out=`` also who else uses its memory.

A plan holds no array, address or stream, so it may outlive them all and serve any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from .arrays import ArraySpec
from .engines import Launch, Results, prepare
from .errors import OURS, named
from .explanation import Explanation, explain_problem
from .frameworks import Framework
from .lead import join_lead
from .lifetime import settle
from .outputs import check_output_kinds, check_outputs
from .problem import OPERANDS, Problem, Settings, make_problem

__all__ = ["Plan", "make_plan"]

Array = Any
Operands = tuple[Array, ...]
AuxOut = Mapping[str, Array] | None


class Plan:
    """A product planned once, by `plan`, and called with any arrays like those it was planned for.

    Attributes
    ----------
    framework : Framework
        The lead.
    problem : Problem
        What it computes.

    Notes
    -----
    It holds no array and no stream, and may be called from several threads. As a context manager it frees itself.
    """

    __slots__ = ("_launch", "_signatures", "framework", "problem")

    def __init__(self, framework: Framework, problem: Problem, launch: Launch, signatures: tuple[Any, ...]) -> None:
        self.framework = framework
        self.problem = problem
        self._launch: Launch | None = launch
        self._signatures = signatures

    def __call__(
        self,
        a: Array,
        b: Array,
        /,
        *,
        bias: Array | None = None,
        relu_aux: Array | None = None,
        gelu_aux: Array | None = None,
        c: Array | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        out: Array | None = None,
        aux_out: AuxOut = None,
        stream: int | None = None,
    ) -> Any:
        """Compute the planned product.

        Parameters
        ----------
        a, b, bias, relu_aux, gelu_aux, c, alpha, beta, out, aux_out, stream
            As in `matmul` and `epilog_matmul`; those planned with, and no others. ``out`` and ``aux_out`` may always be
            given, dense unless planned otherwise.

        Returns
        -------
        array, or (array, dict of str to array)
            As the planned function returns it.

        Raises
        ------
        RuntimeError
            After `free`.
        TypeError, ValueError
            For arrays other than planned.
        """
        try:
            lead, operands, foreign = join_lead((a, b, bias, c, relu_aux, gelu_aux))
            if lead.framework is not self.framework:
                raise TypeError(
                    f"the plan was made for {self.framework.name}, and {lead.framework.name} leads this call."
                )
            self._check(operands, out, aux_out)
            results = self.run(operands, alpha, beta, out, aux_out, stream)
        except OURS as error:
            raise named("plan", error) from error.__cause__
        if foreign:
            settle(self.framework, results)
        return self.packed(results)

    def run(
        self, operands: Operands, alpha: float, beta: float, out: Array, aux_out: AuxOut, stream: int | None
    ) -> Results:
        """Compute with operands of the lead, in the order of `OPERANDS`, that have the planned signatures."""
        if self._launch is None:
            raise RuntimeError("the plan was freed. Make a new one.")
        if stream is not None:
            _check_stream(self.framework, stream)
        if type(alpha) is not float or type(beta) is not float:
            alpha, beta = _real("alpha", alpha), _real("beta", beta)
        if out is None and not aux_out:
            return self._launch(operands, alpha, beta, None, None)
        outputs = {f'aux_out["{name}"]': x for name, x in (aux_out or {}).items()}
        aux = next(iter(outputs.values()), None)
        check_outputs(self.framework, operands, outputs if out is None else {"out": out, **outputs})
        return self._launch(operands, alpha, beta, out, aux)

    def packed(self, results: Results) -> Any:
        """Return results as the caller gets them: ``out``, or ``(out, {name: aux})``."""
        gives = self.problem.epilog.gives
        return results[0] if gives is None else (results[0], {gives.name: results[1]})

    def explain(self) -> Explanation:
        """Return what the plan does, as data and as text."""
        return explain_problem(self.problem, self.framework)

    def free(self) -> None:
        """Give back what the plan holds; calling it afterwards is a RuntimeError, freeing it again is not."""
        self._launch = None

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __repr__(self) -> str:
        problem = self.problem
        return f"<Plan {problem.epilog.name} m={problem.m} n={problem.n} k={problem.k} {problem.a.dtype}>"

    def _check(self, operands: Operands, out: Array, aux_out: AuxOut) -> None:
        """Raise unless these arrays have the signatures that the plan was made for."""
        framework = self.framework
        for name, x, planned in zip(OPERANDS, operands, self._signatures, strict=True):
            if (x is None) != (planned is None):
                given, made = ("given", "without") if planned is None else ("None", "with")
                raise ValueError(f"{name} is {given}, and the plan was made {made} it.")
            if x is not None and framework.signature(x) != planned:
                raise ValueError(f"{name} is {framework.spec(x)}, and the plan was made for another. Make a new plan.")
        outputs: dict[str, tuple[Array, ArraySpec | None]] = (
            {} if out is None else {"out": (out, self.problem.out_spec)}
        )
        outputs.update({f'aux_out["{name}"]': (x, self.problem.aux_spec) for name, x in (aux_out or {}).items()})
        check_output_kinds(framework, {name: x for name, (x, _) in outputs.items()})
        for name, (x, planned) in outputs.items():
            if planned is None or framework.spec(x) != planned:
                raise ValueError(
                    f"{name} is {framework.spec(x)}, and the plan was made for {planned}. Make a new plan."
                )


def make_plan(framework: Framework, settings: Settings, operands: Operands, out: Array, aux_out: AuxOut) -> Plan:
    """Check everything and return the plan.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        Naming the argument, without the op's name.
    """
    if aux_out is not None and not isinstance(aux_out, Mapping):
        raise TypeError(
            f"aux_out is a {type(aux_out).__name__}, expected a dict from the auxiliary output's name to an array."
        )
    outputs = {} if out is None else {"out": out}
    outputs.update({f'aux_out["{name}"]': x for name, x in (aux_out or {}).items()})
    check_output_kinds(framework, outputs)
    specs = {name: _spec(name, x, framework) for name, x in zip(OPERANDS, operands, strict=True)}
    out_spec = _spec("out", out, framework)
    aux_specs = None if aux_out is None else {k: _spec(f'aux_out["{k}"]', x, framework) for k, x in aux_out.items()}
    problem = make_problem(settings, specs, out_spec, aux_specs)
    missing = [] if out is not None else ["out="]
    if problem.epilog.gives and not aux_out:
        missing.append("aux_out=")
    if missing and not framework.makes_results:
        raise TypeError(f"{framework.name} arrays come with no way to make a new one; pass {' and '.join(missing)}.")
    signatures = tuple(x if x is None else framework.signature(x) for x in operands)
    return Plan(framework, problem, prepare(problem, framework), signatures)


def _spec(name: str, x: Array, framework: Framework) -> ArraySpec | None:
    if x is None:
        return None
    try:
        framework.signature(x)  # refuses what has no memory of its own
        return framework.spec(x)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} cannot be used: {error}") from None


def _check_stream(framework: Framework, stream: object) -> None:
    if not isinstance(stream, int) or isinstance(stream, bool):
        raise TypeError(f"stream is {stream!r}, expected the address of a CUDA stream as an int.")
    if framework.name == "jax":
        raise ValueError("stream is given, and JAX runs on XLA's own stream. Leave stream out.")
    raise ValueError("stream is given, and these arrays live on a CPU. Leave stream out.")


def _real(name: str, value: object) -> float:
    """Return a factor as a Python float: a NumPy scalar would promote the result."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a real number.")
    return float(value)
