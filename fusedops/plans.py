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
from .lead import common_kind, join_lead, spec_of_argument
from .lifetime import settle
from .outputs import check_no_gradient, check_output_kinds, check_outputs, named_outputs
from .problem import OPERANDS, Problem, Settings, make_problem
from .results import check_aux_names, check_mapping
from .streams import launch_stream

__all__ = ["Plan", "make_plan", "real"]

Array = Any
Operands = tuple[Array, ...]
AuxOut = Mapping[str, Array] | None

NO_SUBCLASS = (
    "an operand is of a subclass of its framework's arrays, whose memory a plan does not know. Pass plain arrays, or "
    "call matmul or epilog_matmul."
)
NO_DERIVATIVE = (
    "a derivative is to be recorded through an operand, and a plan records none. Call matmul or epilog_matmul, or the "
    "plan under torch.no_grad()."
)


class Plan:
    """A product planned once, by `plan`, and called with any arrays like those it was planned for.

    Attributes
    ----------
    framework : Framework
        The lead.
    problem : Problem
        What it computes.
    launch : Launch or None
        How; None after `free`.
    gives : str or None
        Name of the auxiliary output.

    Notes
    -----
    It holds no array and no stream, and may be called from several threads. As a context manager it frees itself.
    """

    __slots__ = (
        "_room",
        "_signatures",
        "_specs",
        "_taken",
        "framework",
        "gives",
        "launch",
        "problem",
    )

    def __init__(
        self,
        framework: Framework,
        problem: Problem,
        launch: Launch,
        signatures: tuple[Any, ...],
        specs: tuple[ArraySpec | None, ...],
    ) -> None:
        self.framework = framework
        self.problem = problem
        self.gives = problem.epilog.gives.name if problem.epilog.gives else None
        self.launch: Launch | None = launch
        self._signatures = signatures
        self._specs = specs
        self._taken: tuple[tuple[int, int], ...] | None = None

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
        operands = (a, b, bias, c, relu_aux, gelu_aux)
        if stream is None:
            return self._called(operands, alpha, beta, out, aux_out)
        with launch_stream("plan", stream, operands):
            return self._called(operands, alpha, beta, out, aux_out)

    def _called(self, operands: Operands, alpha: float, beta: float, out: Array | None, aux_out: AuxOut) -> Any:
        """Compute with the caller's own operands, of whatever framework."""
        try:
            kind, sources = common_kind(operands), None
            if kind is None:
                kind, operands, sources = join_lead(operands)
            framework = kind.framework
            if framework is not self.framework:
                raise TypeError(f"the plan was made for {self.framework.name}, and {framework.name} leads this call.")
            if not kind.plain:
                raise TypeError(NO_SUBCLASS)
            if framework.has_rules and framework.records(operands):
                if out is not None or aux_out:
                    check_no_gradient(framework, operands, named_outputs(out, aux_out))
                raise NotImplementedError(NO_DERIVATIVE)
            self._check(operands, out, aux_out)
            results = self.run(operands, alpha, beta, out, aux_out)
        except OURS as error:
            raise named("plan", error) from error.__cause__
        if sources:
            settle(self.framework, self.problem.device, results, sources)
        return self.packed(results)

    def run(self, operands: Operands, alpha: float, beta: float, out: Array, aux_out: AuxOut) -> Results:
        """Compute with operands of the lead, in the order of `OPERANDS`, that have the planned signatures."""
        launch = self.launch  # once: another thread may free the plan
        if launch is None:
            raise RuntimeError("the plan was freed. Make a new one.")
        if type(alpha) is not float or type(beta) is not float:
            alpha, beta = real("alpha", alpha), real("beta", beta)
        if out is None and not aux_out:
            return launch(operands, alpha, beta, None, None)
        aux = next(iter(aux_out.values())) if aux_out else None
        if not self._apart(operands, out, aux):
            check_outputs(self.framework, operands, named_outputs(out, aux_out))
        results = launch(operands, alpha, beta, out, aux)
        self.framework.mark_written(out, aux)
        return results

    def _apart(self, operands: Operands, out: Array | None, aux: Array | None) -> bool:
        """Return whether the outputs may surely be written: a quick look, before the slow one of `check_outputs`."""
        framework = self.framework
        if framework.any_requires_grad((*operands, out, aux)):
            return False
        if self._taken is None:
            self._room = self.problem.out_spec.extent, self.problem.aux_spec.extent if self.problem.aux_spec else 0
            self._taken = tuple((i, spec.extent) for i, spec in enumerate(self._specs) if spec is not None)
        taken = [(operands[i], extent) for i, extent in self._taken]
        if out is not None:
            if framework.is_readonly(out) or not framework.is_apart(out, self._room[0], taken):
                return False
            taken.append((out, self._room[0]))
        return aux is None or (not framework.is_readonly(aux) and framework.is_apart(aux, self._room[1], taken))

    def packed(self, results: Results) -> Any:
        """Return results as the caller gets them: ``out``, or ``(out, {name: aux})``."""
        return results[0] if self.gives is None else (results[0], {self.gives: results[1]})

    def explain(self) -> Explanation:
        """Return what the plan does, as data and as text."""
        if self.launch is None:
            raise RuntimeError("plan: the plan was freed. Make a new one.")
        return explain_problem(self.problem, self.framework, self.launch)

    def free(self) -> None:
        """Give back what the plan holds; calling it afterwards is a RuntimeError, freeing it again is not."""
        self.launch = None

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
        if out is None and aux_out is None and _have_signatures(operands, self._signatures, framework):
            return
        for name, x, planned, spec in zip(OPERANDS, operands, self._signatures, self._specs, strict=True):
            if (x is None) != (planned is None):
                given, made = ("given", "without") if planned is None else ("None", "with")
                raise ValueError(f"{name} is {given}, and the plan was made {made} it.")
            if x is not None and not _has_signature(x, planned, framework):
                actual = spec_of_argument(name, x, framework)
                raise ValueError(f"{name} is {actual}, and the plan was made for {spec}. Make a new plan.")
        check_mapping(aux_out)
        check_aux_names(aux_out, self.gives)
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
    check_mapping(aux_out)
    check_output_kinds(framework, named_outputs(out, aux_out))
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
    return Plan(framework, problem, prepare(problem, framework), signatures, tuple(specs.values()))


def _have_signatures(operands: Operands, planned: tuple[Any, ...], framework: Framework) -> bool:
    try:
        return bool(framework.signatures(operands) == planned)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False


def _has_signature(x: Array, planned: Any, framework: Framework) -> bool:
    try:
        return bool(framework.signature(x) == planned)
    except (TypeError, ValueError, RuntimeError):
        return False


def _spec(name: str, x: Array, framework: Framework) -> ArraySpec | None:
    return None if x is None else spec_of_argument(name, x, framework)


def real(name: str, value: object) -> float:
    """Return a factor as a Python float: a NumPy scalar would promote the result."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a real number.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float.") from None
