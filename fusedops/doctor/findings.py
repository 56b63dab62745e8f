"""`Finding`: one thing that was found, and what each of them means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["MEANINGS", "Finding", "note", "ok", "problem"]

MEANINGS = {
    # What works
    "product-right": "Small products were right, compared with float64.",
    "handler-ready": "JAX programs on a GPU run fused, as one custom call for each product.",
    "native-ready": "Products on a GPU are launched by compiled code.",
    # GPUs and their driver
    "no-device": "No CUDA device: arrays on the CPU take the reference engine. On a machine without a GPU all is well.",
    "devices-hidden": "CUDA_VISIBLE_DEVICES hides every GPU, so arrays live on the CPU and take the reference engine.",
    "driver-missing": "There is a GPU, but not the driver's library: in a container, it was started without its GPUs.",
    "driver-broken": "The driver is there and does not start, so no library can use a GPU.",
    "driver-too-old": "A package is for a newer CUDA than the driver: it finds no GPU, or fails when it first uses it.",
    "device-prohibited": "The GPU is in a mode in which no process may compute on it.",
    # Packages
    "nvmath-missing": "CUDA arrays of PyTorch and CuPy are an ImportError, and JAX computes unfused on a GPU.",
    "cupy-missing": "The nvmath engine plans with CuPy: without it, it is as if nvmath-python were missing.",
    "cupy-duplicate": "Several packages of CuPy overwrite one another's files.",
    "import-failed": "The package is installed and cannot be imported, so its arrays cannot be used.",
    "version-untested": "The package is of a version that fusedops is not made for.",
    "torch-cpu-build": "This PyTorch knows no GPU: its tensors live on the CPU.",
    "jax-no-plugin": "JAX has no CUDA plugin: its arrays live on the CPU.",
    "jax-plugin-mismatch": "JAX ignores a CUDA plugin that is not of its own version, or fails with it.",
    "framework-no-gpu": "The framework is built for CUDA and finds no GPU, though the driver has one.",
    "cuda-majors-differ": "Packages for CUDA 12 and for CUDA 13 are side by side: each brings libraries of its own.",
    # cuBLASLt
    "cublaslt-versions": "Frameworks bring different cuBLASLt libraries. fusedops calls by address the one that nvmath "
    "loads, so they do not mix; results of one product may differ between frameworks in the last bits.",
    "cublaslt-failed": "The nvmath engine cannot load cuBLASLt, so CUDA arrays cannot be computed with.",
    # Compiled code
    "no-compiler": "Without a C compiler products are launched through nvmath's binding, right and a little slower, "
    "and JAX computes unfused on a GPU.",
    "native-failed": "The launcher does not compile or load: launches go through nvmath's binding, right and slower.",
    "launcher-slow": "Products are launched in a slower way than by compiled code. Results are the same.",
    "handler-failed": "JAX's custom call does not compile, load or register: JAX computes unfused on a GPU.",
    "handler-unused": "The handler is registered, and XLA computed a product without it.",
    "cache-unusable": "The folder of compiled code cannot be made, or is somebody else's: each process compiles anew.",
    "cache-read-only": "Nothing can be written to the folder of compiled code: each process compiles anew.",
    "cache-not-private": "Others may write to the folder of compiled code, so it is not used: processes compile anew.",
    "cache-not-executable": "Compiled code cannot be loaded from its folder: each process compiles anew.",
    # Records
    "records-unreadable": "The file of tuning records cannot be read: what was tuned is not used.",
    "records-read-only": "The file of tuning records cannot be written: what is tuned is not kept.",
    # Environment
    "tf32-override": "NVIDIA_TF32_OVERRIDE decides about float32 in every cuBLAS, whatever precision= asks for.",
    "environment": "A variable changes what is computed, where, or with which library.",
    # Products
    "product-wrong": "A product is wrong by more than rounding. Do not trust results of this framework on this device.",
    "product-failed": "A small product raised an error.",
    "own-product-failed": "The framework's own product fails too: mend its installation first.",
    "own-product-wrong": "The framework's own product leaves out the last terms of k in a case of float16, by a known "
    "fault of cuBLASLt. Those of fusedops do not.",
    # The doctor itself
    "probe-failed": "A probe raised an error that nobody foresaw; what it looks for is unknown.",
    "probe-died": "A probe's process was taken down: what it loads would take a program down too.",
    "probe-slow": "A probe did not end in its time: a program would wait as long.",
}
"""What each finding means, by its id."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    Attributes
    ----------
    id : str
        A key of `MEANINGS`.
    level : {"ok", "note", "problem"}
        Whether all is well; whether it is as it may be, and better known; whether it is to be mended.
    what : str
        What was found, with its values.
    remedy : str or None
        The command that mends it, ready to be pasted into a shell.
    """

    id: str
    level: str
    what: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        if self.id not in MEANINGS:
            raise KeyError(f"no finding is called {self.id!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return the finding and its meaning as plain data."""
        meaning = MEANINGS[self.id]
        return {"id": self.id, "level": self.level, "what": self.what, "means": meaning, "remedy": self.remedy}


def ok(name: str, what: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(name, "ok", what)


def note(name: str, what: str, remedy: str | None = None) -> Finding:
    """Return a finding that is better known."""
    return Finding(name, "note", what, remedy)


def problem(name: str, what: str, remedy: str | None = None) -> Finding:
    """Return a finding that is to be mended."""
    return Finding(name, "problem", what, remedy)
