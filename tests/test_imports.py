"""What ``import fusedops`` loads and costs, and that imports inside the package only point down."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusedops

ROOT = Path(fusedops.__file__).parent

# What is loaded, and how long it takes --------------------------------------------------------------------------------

HEAVY = {"torch", "jax", "cupy", "nvmath", "scipy", "ml_dtypes", "sklearn"}

USES = {
    "import": "import fusedops",
    "support": "import fusedops; fusedops.support()",
    "numpy call": "import fusedops, numpy; x = numpy.ones((2, 2), 'float32'); fusedops.matmul(x, x, activation='relu')",
}


def printed_by(code: str) -> str:
    """Return the last line that a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()[-1]


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a new interpreter holds after ``code``."""
    names = json.loads(printed_by(f"import json, sys; {code}; print(json.dumps(list(sys.modules)))"))
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("code", USES.values(), ids=USES)
def test_no_framework_is_loaded_before_its_arrays_arrive(code: str) -> None:
    assert loaded_by(code) & HEAVY == set()


@pytest.mark.parametrize("name", ["torch", "scipy"])
def test_a_loaded_framework_would_be_seen(name: str) -> None:
    assert name in loaded_by(f"import fusedops, {name}")


def median_seconds(setup: str, timed: str, runs: int = 5) -> float:
    """Return the median time of ``timed`` in new interpreters, without that of ``setup``.

    The thread's processor time: the clock's on an idle machine, and not stretched by a busy one.
    """
    code = f"import time; {setup}; start = time.thread_time(); {timed}; print(time.thread_time() - start)"
    return statistics.median(float(printed_by(code)) for _ in range(runs))


def test_import_is_fast() -> None:
    assert median_seconds("import numpy", "import fusedops") < 0.15


def test_import_and_first_call_are_fast() -> None:
    assert median_seconds("pass", USES["numpy call"]) < 1.0


# The layers -----------------------------------------------------------------------------------------------------------

LAYERS = (
    # highest first; a module may import those of lower lines only
    "__main__",
    "doctor.__main__",
    "doctor",
    "doctor.command",
    "doctor.checks doctor.child doctor.text",
    "doctor.checks_machine doctor.checks_native doctor.checks_software doctor.probes doctor.products",
    "doctor.files doctor.driver doctor.processes doctor.remedies doctor.subjects doctor.system",
    "doctor.facts doctor.findings doctor.libraries doctor.stages doctor.variables",
    "bench.__main__",
    "bench.cpu bench.host bench.replay",
    "fusedops",
    "bench bench.sampling mlp ops testing",
    "mlp_steps",
    "calls",
    "pytorch",
    "pytorch.batching pytorch.layers",
    "pytorch.calls",
    "pytorch.autograd",
    "pytorch.sharding pytorch.steps",
    "pytorch.operators",
    "planned pytorch.how",
    "plan_cache",
    "plans",
    "explanation outputs streams",
    "engines support",
    "engines.gpu engines.xla",
    "engines.split xla",
    "engines.fused engines.reference xla.derivatives xla.layers",
    "engines.verify xla.composite",
    "xla.product",
    "xla.handler xla.meshes",
    "xla.local xla.parts",
    "xla.unfused",
    "engines.nvmath lead lifetime",
    "engines.nvmath.choice",
    "engines.nvmath.planning",
    "engines.nvmath.launches",
    "engines.nvmath.algorithms engines.nvmath.execute",
    "engines.nvmath.descriptors engines.nvmath.programs",
    "engines.nvmath.carriers engines.nvmath.peers native.layouts xla.problem_text",
    "engines.cells column_form frameworks",
    "frameworks.dlpack problem",
    "frameworks.array_api frameworks.cupy frameworks.jax frameworks.torch",
    "frameworks.numpy mlp_rules results",
    "frameworks.base operands",
    "activations dlpack native.launcher residuals xla.product_spec",
    "arrays cuda engines.base engines.guard layout options",
    "dtypes epilogs errors native native.build",
)

LAZY = {
    # what `import_module` may load, by the module that calls it
    "__main__": {"bench.__main__", "doctor"},
    "doctor.child": {"doctor.driver", "doctor.files", "doctor.products", "doctor.system"},
    "doctor.files": set(),  # fusedops.records, in a release that has it
    "engines": {"engines.gpu", "engines.reference", "engines.xla"},
    "frameworks.dlpack": {"frameworks.cupy"},
    "frameworks": {f"frameworks.{name}" for name in ("array_api", "cupy", "dlpack", "jax", "numpy", "torch")},
}

OWNERS = {
    # the only importers of a library, by module or package; NumPy, array_api_compat and the standard library are free
    "ctypes": {"dlpack", "doctor.driver", "doctor.libraries", "native.build", "native.launcher", "xla.handler"},
    "torch": {"frameworks.torch", "doctor.subjects", "bench.cpu", "bench.host", "bench.replay", "pytorch"},
    "jax": {"frameworks.jax", "doctor.subjects", "bench.cpu", "bench.host", "engines.xla", "xla"},
    "cupy": {
        "bench.host",
        "cuda",
        "doctor.subjects",
        "engines.nvmath",
        "engines.verify",
        "frameworks.cupy",
    },
    "cupyx": {"frameworks.cupy"},
    "nvmath": {"engines.nvmath"},
    "cuda": {"engines.nvmath"},
    "scipy": {"frameworks.numpy"},
    "ml_dtypes": {"dlpack"},
    "array_api_compat.torch": {"frameworks.torch"},
    "array_api_compat.cupy": {"frameworks.cupy"},
}

FREE = (sys.stdlib_module_names | {"numpy", "array_api_compat"}) - {"ctypes"}


def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Return every module by its name inside the package; "fusedops" is the package itself."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "fusedops"
        found[name] = path, ast.parse(path.read_text())
    return found


SOURCES = sources()
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}


def absolute(name: str, node: ast.ImportFrom) -> str:
    """Return the full dotted name that a ``from`` import reads."""
    if not node.level:
        return str(node.module)
    package = ["fusedops", *name.split(".")] if name != "fusedops" else ["fusedops"]
    if SOURCES[name][0].name != "__init__.py":
        package.pop()
    return ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))


def imports_of(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the full name of everything that a module imports, at its head or in a function, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, node)
            for alias in node.names:
                is_module = f"{base}.{alias.name}".removeprefix("fusedops.") in SOURCES
                yield (f"{base}.{alias.name}" if is_module else base), node.lineno


def calls_import_module(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module" for node in ast.walk(tree)
    )


def within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def violations(name: str, tree: ast.Module) -> list[str]:
    """Return what a module imports and must not."""
    wrong = []
    for imported, line in [*imports_of(name, tree), *((f"fusedops.{target}", 0) for target in LAZY.get(name, ()))]:
        where = f"{name}, line {line}: {imported}"
        if imported.partition(".")[0] == "fusedops":
            if RANK.get(imported.removeprefix("fusedops."), -1) <= RANK.get(name, len(LAYERS)):
                wrong.append(f"{where} is not lower")
            continue
        owned = [library for library in OWNERS if within(imported, library)]
        if owned and not any(within(name, owner) for owner in OWNERS[owned[0]]):
            wrong.append(f"{where} belongs to {', '.join(sorted(OWNERS[owned[0]]))}")
        if not owned and imported.partition(".")[0] not in FREE:
            wrong.append(f"{where} has no owner")
    return wrong


def test_every_module_has_one_layer() -> None:
    assert sorted(" ".join(LAYERS).split()) == sorted(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_down(name: str) -> None:
    assert violations(name, SOURCES[name][1]) == []


@pytest.mark.parametrize("name", SOURCES)
def test_lazy_imports_are_in_the_table(name: str) -> None:
    assert calls_import_module(SOURCES[name][1]) == (name in LAZY)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("problem", "from .plans import Plan"),
        ("frameworks.base", "def f():\n    from .. import ops"),
        ("engines.reference", "from . import prepare"),
        ("layout", "import fusedops"),
        ("plans", "import fusedops.mlp"),
        ("arrays", "import ctypes"),
        ("frameworks.jax", "import torch.nn"),
        ("frameworks.numpy", "import array_api_compat.torch"),
        ("ops", "import pandas"),
    ],
)
def test_a_wrong_import_would_be_seen(name: str, code: str) -> None:
    assert len(violations(name, ast.parse(code))) >= 1
