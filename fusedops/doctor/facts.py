"""`Facts`: what the probes found, read without regard to what is missing in it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

__all__ = ["Facts"]

_DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "jax": ("jax",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nvmath": ("nvmath-python",),
}


class Facts:
    """What the probes found.

    Parameters
    ----------
    found : mapping
        As `fusedops.doctor.probes.probe_all` returns it; any part may be missing, or be an error.
    """

    def __init__(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        self.found = found

    def stages(self, probe: str) -> dict[str, Any]:
        """Return all that a probe found."""
        stages: dict[str, Any] = self.found.get(probe, {}).get("stages", {})
        return stages

    def stage(self, probe: str, name: str) -> dict[str, Any]:
        """Return what a stage of a probe found; nothing where it failed or did not run."""
        value = self.stages(probe).get(name)
        return value if isinstance(value, dict) and "error" not in value else {}

    def error(self, probe: str, name: str) -> str | None:
        """Return why a stage failed, None where it did not."""
        value = self.stages(probe).get(name)
        return value.get("error") if isinstance(value, dict) else None

    def libraries(self, probe: str, name: str = "cublasLt") -> list[dict[str, Any]]:
        """Return the libraries of a name that a probe's process had loaded."""
        value = self.stages(probe).get("libraries")
        return [found for found in value if found["name"] == name] if isinstance(value, list) else []

    def version(self, package: str) -> str | None:
        """Return the version of an installed package."""
        found: str | None = self.stage("system", "packages").get(package)
        return found

    @cached_property
    def devices(self) -> list[dict[str, Any]]:
        """The GPUs that the driver has."""
        devices: list[dict[str, Any]] = self.stage("driver", "driver").get("devices", [])
        return devices

    @property
    def has_gpu(self) -> bool:
        """Whether the driver has a GPU."""
        return bool(self.devices)

    @cached_property
    def installed(self) -> list[str]:
        """The frameworks that are installed, by a package or by a module alone."""
        modules = self.stage("system", "modules")
        return [
            name for name, packages in _DISTRIBUTIONS.items() if modules.get(name) or any(map(self.version, packages))
        ]

    @property
    def has_engine(self) -> bool:
        """Whether what the nvmath engine needs is installed."""
        return {"nvmath", "cupy"} <= set(self.installed)

    @property
    def frameworks_on_gpu(self) -> list[str]:
        """The frameworks that are installed for CUDA, whether or not they find a GPU."""
        built = {
            "torch": self.stage("torch", "import").get("cuda") is not None,
            "jax": bool(self.jax_plugins) or self.has_device("jax"),
            "cupy": "cupy" in self.installed,
        }
        return [name for name, is_built in built.items() if is_built]

    def has_device(self, framework: str) -> bool:
        """Return whether a framework found a GPU."""
        return any(name.startswith("cuda") for name in self.stage(framework, "import").get("devices", ()))

    @cached_property
    def jax_plugins(self) -> dict[int, str]:
        """Versions of JAX's CUDA plugins, by the major version of CUDA."""
        found = {major: self.version(f"jax-cuda{major}-plugin") for major in (12, 13)}
        return {major: version for major, version in found.items() if version}

    @cached_property
    def cuda_majors(self) -> dict[str, int]:
        """The major version of CUDA that each installed package is for, by its name."""
        found = {f"jax-cuda{major}-plugin": major for major in self.jax_plugins}
        found |= {f"cupy-cuda{major}x": major for major in (12, 13) if self.version(f"cupy-cuda{major}x")}
        cublas, torch = self.version("nvidia-cublas"), self.stage("torch", "import").get("cuda")
        found |= {"nvidia-cublas": 13} if cublas and cublas.startswith("13.") else {}
        return found | ({"torch": int(torch.partition(".")[0])} if torch else {})

    @property
    def driver_major(self) -> int | None:
        """The major version of CUDA that the driver goes up to."""
        text = self.stage("driver", "driver").get("cuda")
        return int(text.partition(".")[0]) if text else None

    @property
    def cuda_major(self) -> int:
        """The major version of CUDA to install for: what PyTorch or JAX is for, as far as the driver goes."""
        newest = self.driver_major or 12
        wanted = self.cuda_majors.get("torch") or next(iter(self.jax_plugins), None) or newest
        return 13 if min(wanted, newest) >= 13 else 12

    @property
    def install(self) -> str:
        """The command that installs what is needed on this machine's GPU."""
        jax = "jax-" if "jax" in self.installed else ""
        return f"pip install 'fusedops[{jax}cuda{self.cuda_major}]'"
