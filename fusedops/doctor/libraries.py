"""Which shared libraries this process has loaded, from where, and of which version."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

__all__ = ["cuda_libraries", "file_at", "libraries_in", "mapped_files", "version_text"]

_NAME = re.compile(r"lib(cublasLt|cublas|cudart|nvrtc|nvJitLink|cuda)(?:-[0-9a-f]+)?\.so[.\d]*$")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ +(/.*)$")
_MAPS = Path("/proc/self/maps")


def mapped_files(text: str | None = None) -> list[str]:
    """Return the files that are mapped into this process, each once; none where the system does not tell."""
    lines = (_LINE.match(line) for line in _maps(text).splitlines())
    return list(dict.fromkeys(line[4] for line in lines if line))


def libraries_in(files: list[str]) -> list[tuple[str, str]]:
    """Return name and path of those files that are libraries of CUDA."""
    found = ((_NAME.search(os.path.basename(path)), path) for path in files)
    return [(match[1], path) for match, path in found if match]


def cuda_libraries() -> list[dict[str, Any]]:
    """Return the loaded libraries of CUDA: ``name``, ``path``, and the ``version`` that the library itself gives."""
    return [
        {"name": name, "path": path, "version": _version(name, path)} for name, path in libraries_in(mapped_files())
    ]


def file_at(address: int, text: str | None = None) -> str | None:
    """Return the file whose code lies at an address."""
    for line in map(_LINE.match, _maps(text).splitlines()):
        if line and int(line[1], 16) <= address < int(line[2], 16):
            return line[4]
    return None


def version_text(number: int, places: tuple[int, int]) -> str:
    """Return "13.1.0" for 130100 with ``places`` (10000, 100), "12.9" for 12090 with (1000, 10)."""
    major, minor = places
    parts = [number // major, number % major // minor]
    if minor == 100:
        parts.append(number % 100)
    return ".".join(map(str, parts))


def _maps(text: str | None) -> str:
    if text is not None:
        return text
    try:
        return _MAPS.read_text(errors="replace")
    except OSError:
        return ""


def _version(name: str, path: str) -> str | None:
    """Ask a library that is loaded already for its version; opening it again gives the same one."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        if name == "cublasLt":
            library.cublasLtGetVersion.restype = ctypes.c_size_t
            return version_text(library.cublasLtGetVersion(), (10000, 100))
        if name == "cudart":
            number = ctypes.c_int()
            failed = library.cudaRuntimeGetVersion(ctypes.byref(number))
            return None if failed else version_text(number.value, (1000, 10))
    except (AttributeError, OSError):
        return None
    return None
