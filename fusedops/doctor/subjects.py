"""The frameworks as the probes use them: what each was built for, its devices, and a product of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from .libraries import version_text

__all__ = ["SUBJECTS", "Subject"]

Array = Any


class Subject:
    """One framework, imported when it is made.

    Attributes
    ----------
    facts : dict
        ``version``; ``cuda``, the version of CUDA that it was built for, None for a build without; ``devices``, names
        such as "cuda:0"; ``why``, the reason that it gives for having no GPU.
    """

    facts: dict[str, Any]

    def array(self, values: np.ndarray[Any, Any], device: str) -> Array:
        """Return values as an array of the framework on a device."""
        raise NotImplementedError

    def own(self, a: Array, b: Array) -> Array:
        """Return the framework's own product."""
        return a @ b


class _NumPy(Subject):
    def __init__(self) -> None:
        self.facts = {"version": np.__version__, "cuda": None, "devices": ["cpu"], "why": None}

    def array(self, values: np.ndarray[Any, Any], device: str) -> Array:
        return values


class _Torch(Subject):
    def __init__(self) -> None:
        import torch

        self._torch = torch
        cuda, why = torch.version.cuda, None
        is_there = cuda is not None and torch.cuda.is_available()
        if cuda is not None and not is_there:
            try:
                torch.cuda.init()
            except Exception as error:  # it says why, in whatever type
                why = str(error)
        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if is_there else 0))]
        self.facts = {"version": torch.__version__, "cuda": cuda, "hip": torch.version.hip}
        self.facts |= {"devices": devices, "why": why}

    def array(self, values: np.ndarray[Any, Any], device: str) -> Array:
        return self._torch.from_numpy(values).to(device)


class _Jax(Subject):
    def __init__(self) -> None:
        import jax

        self._jax = jax
        self._devices: dict[str, Any] = {}
        reasons = {}
        for platform in ("cpu", "cuda"):
            try:
                self._devices |= {f"{platform}:{x.id}": x for x in jax.local_devices(backend=platform)}
            except Exception as error:  # no such platform, or one that fails to start
                reasons[platform] = str(error)
        cpus = [name for name in self._devices if name.startswith("cpu:")]
        devices = [*cpus[:1], *(name for name in self._devices if name.startswith("cuda:"))]
        self.facts = {"version": jax.__version__, "cuda": None, "devices": devices, "why": reasons.get("cuda")}

    def array(self, values: np.ndarray[Any, Any], device: str) -> Array:
        return self._jax.device_put(values, self._devices[device])


class _CuPy(Subject):
    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        runtime = cupy.cuda.runtime
        devices, why = [], None
        try:
            devices = [f"cuda:{i}" for i in range(runtime.getDeviceCount())]
        except Exception as error:  # no driver, or none that it can use
            why = str(error)
        cuda = version_text(runtime.runtimeGetVersion(), (1000, 10))
        self.facts = {"version": cupy.__version__, "cuda": cuda, "devices": devices, "why": why}

    def array(self, values: np.ndarray[Any, Any], device: str) -> Array:
        with self._cupy.cuda.Device(int(device.partition(":")[2])):
            return self._cupy.asarray(values)

    def own(self, a: Array, b: Array) -> Array:
        with a.device:
            return a @ b


SUBJECTS: dict[str, type[Subject]] = {"numpy": _NumPy, "torch": _Torch, "jax": _Jax, "cupy": _CuPy}
