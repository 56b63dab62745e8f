"""`support`: what this machine can do, without importing a framework."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

from .activations import ACTIVATIONS
from .dtypes import MATRIX_DTYPES
from .engines.base import LAUNCHER, NO_NVMATH
from .engines.cells import SPLIT_CELLS
from .epilogs import Epilog

__all__ = ["Support", "support"]

_PACKAGES = ("numpy", "torch", "jax", "cupy", "nvmath-python", "array-api-compat", "ml_dtypes", "scipy")
_CUPY_WHEELS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


@dataclass(frozen=True, slots=True)
class Support:
    """What this machine can do.

    Attributes
    ----------
    versions : dict
        Installed version of each package that the library knows, None where it is missing.
    engines : dict
        For each engine whether it can be loaded, and what for.
    table : dict
        ``table[engine][epilog]``: the operand dtypes that it takes.
    split : dict
        The problems that the nvmath engine computes as a product and separate steps, and why.
    activations : tuple of str
        The activations of `matmul`.
    launcher : str
        How products are launched on a GPU: "native", by compiled code; "binding" and the reason, right and slower;
        "none" where there is no engine for it.
    """

    versions: dict[str, str | None]
    engines: dict[str, str]
    table: dict[str, dict[str, tuple[str, ...]]]
    split: dict[str, str]
    activations: tuple[str, ...]
    launcher: str

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{name:18} {version or 'not installed'}" for name, version in self.versions.items()]
        lines += [f"engine {name}: {text}" for name, text in self.engines.items()]
        lines.append(f"launcher: {self.launcher}")
        for engine, epilogs in self.table.items():
            lines.append(f"{engine}: {', '.join(epilogs)}")
            lines.append(f"  each with {', '.join(next(iter(epilogs.values())))}")
        lines += [f"computed split: {name}: {why}" for name, why in self.split.items()]
        return "\n".join([*lines, f"activations: {', '.join(self.activations)}"])


def support() -> Support:
    """Return what this machine can do: versions, engines, and the dtypes of every epilog on every engine.

    Returns
    -------
    Support
        A record; ``print`` it for text, ``.as_dict()`` for data.

    Notes
    -----
    Imports no framework and touches no device; compiles the launcher where that has not been done.
    """
    versions = {name: _version(name) for name in ("python", *_PACKAGES)}
    missing = [name for name in ("nvmath-python", "cupy") if versions[name] is None]
    engines = {
        "reference": f"any array on a CPU ({platform.machine()}), and JAX arrays anywhere",
        "nvmath": NO_NVMATH if missing else "CUDA arrays of PyTorch, CuPy and any DLPack producer",
    }
    dtypes = {epilog.name: tuple(MATRIX_DTYPES) for epilog in Epilog}
    split = {cell.name: cell.why for cell in SPLIT_CELLS}
    return Support(
        versions, engines, dict.fromkeys(engines, dtypes), split, ACTIVATIONS, "none" if missing else _launcher()
    )


def _launcher() -> str:
    """Return how products are launched here, or will be, as far as can be told without a device."""
    from .native.launcher import NoNativeCode, launcher_object  # what compiles is loaded for this function alone

    if "nvmath" not in LAUNCHER:
        try:
            launcher_object()
        except NoNativeCode as error:
            return f"binding: {error}"
    return LAUNCHER.get("nvmath", "native")


def _version(name: str) -> str | None:
    from importlib import metadata  # a third of the package's own import time, for this function alone

    if name == "python":
        return platform.python_version()
    for distribution in _CUPY_WHEELS if name == "cupy" else (name,):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
