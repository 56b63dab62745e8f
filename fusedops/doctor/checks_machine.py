"""Checks of the GPUs, their driver, and the environment."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts
from .findings import Finding, note, problem
from .remedies import torch_command
from .variables import change_of

__all__ = ["devices", "driver_age", "environment"]

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def devices(facts: Facts) -> Iterator[Finding]:
    """Is there a GPU, and may it be used?"""
    driver = facts.stage("driver", "driver")
    for device in facts.devices:
        if device["mode"] == "prohibited":
            ordinal = device["ordinal"]
            yield problem("device-prohibited", f"GPU {ordinal}, {device['name']}", f"sudo nvidia-smi -i {ordinal} -c 0")
    if facts.has_gpu or not driver:
        return
    visible = facts.stage("system", "environment").get("CUDA_VISIBLE_DEVICES")
    if not driver["found"]:
        if driver["nodes"]:
            remedy = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE"
            yield problem("driver-missing", f"{', '.join(driver['nodes'])} without libcuda: {driver['why']}", remedy)
        else:
            yield note("no-device", f"no CUDA driver: {driver['why']}")
    elif driver["status"] not in (0, _NO_DEVICE):
        yield problem("driver-broken", f"it answers {driver['why']}", "nvidia-smi && sudo reboot")
    elif visible is not None:
        yield note("devices-hidden", f"CUDA_VISIBLE_DEVICES is {visible!r}", "unset CUDA_VISIBLE_DEVICES")
    else:
        yield note("no-device", "the driver has no GPU")


def driver_age(facts: Facts) -> Iterator[Finding]:
    """Is a package for a newer CUDA than the driver?"""
    newest = facts.driver_major
    if newest is None or not facts.has_gpu:
        return
    text = facts.stage("driver", "driver")["cuda"]
    for package, major in facts.cuda_majors.items():
        if major > newest:
            what = f"{package} is for CUDA {major}, the driver goes up to CUDA {text}"
            yield problem("driver-too-old", what, _older(package) if newest >= 12 else "sudo ubuntu-drivers install")


def _older(package: str) -> str:
    """Return the command that replaces a package for CUDA 13 by that for CUDA 12."""
    if package == "torch":
        return torch_command(12)
    if package.startswith("jax"):
        return f"pip uninstall -y {package} {package.replace('plugin', 'pjrt')} && pip install 'fusedops[jax-cuda12]'"
    return f"pip uninstall -y {package} && pip install 'fusedops[cuda12]'"


def environment(facts: Facts) -> Iterator[Finding]:
    """Is anything set that changes results, or where they are computed?"""
    for name, value in facts.stage("system", "environment").items():
        if name == "NVIDIA_TF32_OVERRIDE":
            yield note("tf32-override", f"it is {value!r}", f"unset {name}")
        elif name not in _ELSEWHERE:
            yield note("environment", f"{name}={value}: {change_of(name)}", f"unset {name}")


_ELSEWHERE = ("FUSEDOPS_CACHE_DIR", "XDG_CACHE_HOME", "CC", "CUDA_HOME", "CUDA_PATH")
"""Variables that are the user's choice of a place, and shown with what is there."""
