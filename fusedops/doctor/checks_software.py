"""Checks of the packages: is what is needed there, does it fit, does it find the GPU?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .facts import Facts
from .findings import Finding, note, problem
from .remedies import torch_command

__all__ = ["LIMITS", "cublaslt", "frameworks", "packages"]

LIMITS = {
    # the versions that fusedops is made for: from the first, below the second
    "numpy": ((2, 0), None),
    "array-api-compat": ((1, 11), None),
    "torch": ((2, 9), (2, 14)),
    "jax": ((0, 10), None),
    "nvmath-python": ((1, 0), (2,)),
    "cupy-cuda12x": ((14,), None),
    "cupy-cuda13x": ((14,), None),
    "ml_dtypes": ((0, 5), None),
}
_NAMES = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX", "cupy": "CuPy", "nvmath": "nvmath-python"}


def packages(facts: Facts) -> Iterator[Finding]:
    """Is what is needed installed, once, and in a version that fits?"""
    for package, (first, limit) in LIMITS.items():
        version = facts.version(package)
        if version and not _is_within(version, first, limit):
            bounds = f">={_dotted(first)}" + (f",<{_dotted(limit)}" if limit else "")
            yield note(
                "version-untested", f"{package} is {version}, made for {bounds}", f"pip install '{package}{bounds}'"
            )
    cupys = [name for name in ("cupy", "cupy-cuda12x", "cupy-cuda13x") if facts.version(name)]
    if len(cupys) > 1:
        kept = f"cupy-cuda{facts.cuda_major}x"
        remedy = f"pip uninstall -y {' '.join(cupys)} && pip install '{kept}>=14'"
        yield problem("cupy-duplicate", " and ".join(cupys), remedy)
    if facts.has_gpu:
        for name, package in (("nvmath", "nvmath-python"), ("cupy", "CuPy")):
            if name not in facts.installed:
                level = problem if facts.frameworks_on_gpu else note
                yield level(f"{name}-missing", f"{package} is not installed", facts.install)
        majors = facts.cuda_majors
        if len(set(majors.values())) > 1:
            listed = ", ".join(f"{name} for CUDA {major}" for name, major in majors.items())
            yield note("cuda-majors-differ", listed, _one_major(facts))


def _one_major(facts: Facts) -> str:
    """Return the command that leaves packages of one major version of CUDA."""
    others = [name for name, major in facts.cuda_majors.items() if major != facts.cuda_major and name != "torch"]
    others += [name.replace("plugin", "pjrt") for name in others if name.endswith("plugin")]
    removed = f"pip uninstall -y {' '.join(others)} && " if others else ""
    return removed + facts.install


def frameworks(facts: Facts) -> Iterator[Finding]:
    """Can each framework be imported, and does it find the GPU?"""
    for name, shown in _NAMES.items():
        error = facts.error(name, "engine" if name == "nvmath" else "import")
        if error and name != "nvmath":
            package = _package(facts, name)
            remedy = f"pip install --force-reinstall {package}"
            yield problem("import-failed", f"{shown} {facts.version(package) or ''}: {error}", remedy)
    jaxlib = facts.version("jaxlib")
    for major, version in facts.jax_plugins.items():
        if jaxlib and version != jaxlib:
            what = f"jax-cuda{major}-plugin is {version}, jaxlib {jaxlib}"
            yield problem("jax-plugin-mismatch", what, f"pip install --upgrade 'jax[cuda{major}]'")
    if not facts.has_gpu:
        return
    torch, jax = facts.stage("torch", "import"), facts.stage("jax", "import")
    if torch and torch.get("cuda") is None:
        yield note("torch-cpu-build", f"PyTorch {torch['version']}", torch_command(facts.cuda_major))
    if jax and "jax" not in facts.frameworks_on_gpu:
        yield note("jax-no-plugin", f"JAX {jax['version']}", f"pip install 'fusedops[jax-cuda{facts.cuda_major}]'")
    for name in facts.frameworks_on_gpu:
        if facts.stage(name, "import") and not facts.has_device(name):
            yield _without_gpu(facts, name)


def _without_gpu(facts: Facts, name: str) -> Finding:
    platforms = facts.stage("system", "environment").get("JAX_PLATFORMS")
    if name == "jax" and platforms and not {"cuda", "gpu"} & set(platforms.lower().split(",")):
        return note("framework-no-gpu", f"JAX: JAX_PLATFORMS is {platforms!r}", "unset JAX_PLATFORMS")
    why = facts.stage(name, "import").get("why") or "it does not say why"
    if name == "torch":
        return problem("framework-no-gpu", f"PyTorch: {why}", torch_command(facts.cuda_major))
    extra = f"fusedops[{'jax-' if name == 'jax' else ''}cuda{facts.cuda_major}]"
    return problem("framework-no-gpu", f"{_NAMES[name]}: {why}", f"pip install --upgrade '{extra}'")


def cublaslt(facts: Facts) -> Iterator[Finding]:
    """Does the engine load its cuBLASLt, and is it the one that the frameworks bring?"""
    if not facts.has_gpu:
        return
    for probe in ("nvmath", "together"):
        error = facts.error(probe, "engine")
        # Without a native launcher nvmath need not tell the addresses; products decide then.
        if error and facts.has_engine and not error.startswith("NoNativeCode"):
            yield problem("cublaslt-failed", error, facts.install)
            break
    brought = {_NAMES[name]: facts.libraries(name) for name in ("torch", "jax", "cupy", "nvmath")}
    found = {
        name: [library["version"] or library["path"] for library in libraries] for name, libraries in brought.items()
    }
    versions = {version for listed in found.values() for version in listed}
    versions |= {library["version"] or library["path"] for library in facts.libraries("together")}
    if len(versions) > 1:
        listed = "; ".join(f"{name}: {', '.join(versions)}" for name, versions in found.items() if versions)
        yield note("cublaslt-versions", listed or ", ".join(sorted(versions)), _same_library(facts))


def _same_library(facts: Facts) -> str | None:
    """Return the command after which frameworks share a cuBLASLt, where there is one."""
    if len(set(facts.cuda_majors.values())) > 1:
        return _one_major(facts)
    return "unset LD_LIBRARY_PATH" if "LD_LIBRARY_PATH" in facts.stage("system", "environment") else None


def _package(facts: Facts, name: str) -> str:
    candidates = {"cupy": ("cupy-cuda13x", "cupy-cuda12x"), "nvmath": ("nvmath-python",)}.get(name, (name,))
    return next((package for package in candidates if facts.version(package)), candidates[-1])


def _is_within(version: str, first: tuple[int, ...], limit: tuple[int, ...] | None) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    return numbers >= first and (limit is None or numbers < limit)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
