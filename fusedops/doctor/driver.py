"""The driver and its GPUs, by the driver's own functions: no framework is needed, and no context is made."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from glob import glob
from typing import Any

from .libraries import version_text
from .stages import Stages

__all__ = ["examine"]

_LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
_MAJOR, _MINOR, _MODE = 75, 76, 20  # CUdevice_attribute
_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}


def examine(stages: Stages, _: Mapping[str, Any]) -> None:
    """Find the driver and its GPUs."""
    stages.run("driver", _driver)
    stages.run("release", _release)


def _driver() -> dict[str, Any]:
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        nodes = sorted(glob("/dev/nvidia[0-9]*")) + glob("/dev/dxg")  # the latter under Windows' Linux
        return {"found": False, "why": str(error), "nodes": nodes, "devices": []}
    number = ctypes.c_int()
    said: dict[str, Any] = {"found": True, "cuda": None, "devices": []}
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        said["cuda"] = version_text(number.value, (1000, 10))
    status = cuda.cuInit(0)
    said["status"], said["why"] = status, _name_of(cuda, status) if status else None
    if status == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
        said["devices"] = [_device(cuda, ordinal) for ordinal in range(number.value)]
    return said


def _device(cuda: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device, number, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)

    def attribute(which: int) -> int:
        cuda.cuDeviceGetAttribute(ctypes.byref(number), which, device)
        return number.value

    return {
        "ordinal": ordinal,
        "name": name.value.decode(errors="replace"),
        "capability": f"{attribute(_MAJOR)}.{attribute(_MINOR)}",
        "memory_bytes": size.value,
        "mode": _MODES.get(attribute(_MODE), "unknown"),
    }


def _name_of(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value:
        return text.value.decode(errors="replace")
    return f"CUDA error {status}"


def _release() -> str | None:
    """Return the driver's own version, as "580.65.06", where its management library is."""
    if os.name == "nt":
        return None
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if management.nvmlInit_v2():
        return None
    failed = management.nvmlSystemGetDriverVersion(text, len(text))
    management.nvmlShutdown()
    return None if failed else text.value.decode(errors="replace")
