"""The folder of compiled code, the records of tuning, and the code itself: is it found, compiled, loaded and kept?"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from ..native import build
from ..native.launcher import launcher_object
from .libraries import mapped_files
from .stages import Stages

__all__ = ["cache_path", "examine", "kept_object", "native", "read_records"]


def examine(stages: Stages, _: Mapping[str, Any]) -> None:
    """Find the folder of compiled code, and the records."""
    stages.run("cache", _cache)
    stages.run("records", _records)


def cache_path(environment: Mapping[str, str], home: Path) -> Path:
    """Return the folder that `fusedops.native.build` wants, whether or not it may be used."""
    given, cache = environment.get("FUSEDOPS_CACHE_DIR"), environment.get("XDG_CACHE_HOME", "")
    if given:
        return Path(given).absolute()
    return (Path(cache) if os.path.isabs(cache) else home / ".cache") / "fusedops"


def _cache() -> dict[str, Any]:
    path = cache_path(os.environ, Path(os.path.expanduser("~")))
    used = build._cache_folder()  # makes it where it is missing, as the first call of any program would
    said: dict[str, Any] = {"path": str(path), "used": used is not None, "why": None}
    try:
        found = path.stat()
        said["mode"] = f"{found.st_mode & 0o7777:04o}"
        said["yours"] = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        said["objects"] = len(list(path.glob("*.so")))
        with tempfile.TemporaryFile(dir=path):  # the superuser may write everywhere but to a read-only disk
            said["writable"] = True
    except OSError as error:
        said["writable"], said["why"] = False, str(error)
    return said


# Records -------------------------------------------------------------------------------------------------------------


def _records() -> dict[str, Any]:
    """Return what the module of records says of its file; there is none in a release that keeps no records."""
    try:
        module = import_module("fusedops.records")
    except ModuleNotFoundError as error:
        if error.name != "fusedops.records":
            raise
        return {"path": None}
    for name in ("records_path", "default_path", "path"):
        if hasattr(module, name):
            value = getattr(module, name)
            path = value() if callable(value) else value
            return {"path": None} if path is None else read_records(Path(path))
    return {"path": None}


def read_records(path: Path) -> dict[str, Any]:
    """Return how many rows a file of records has, and whether it may be read and written."""
    if not path.exists():
        return {"path": str(path), "exists": False}
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    said = {"path": str(path), "exists": True, "writable": writable, "rows": None, "why": None}
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)) as file:
            tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            names = [name.replace('"', '""') for name in tables if not name.startswith("sqlite_")]
            said["rows"] = sum(file.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in names)
    except (OSError, sqlite3.Error) as error:
        said["why"] = str(error)
    return said


# Compiled code -------------------------------------------------------------------------------------------------------


def native(stages: Stages, _: Mapping[str, Any]) -> None:
    """Find the compiler, then compile and load the launcher."""
    stages.run("compiler", _compiler)
    stages.run("launcher", _launcher)


def _compiler() -> dict[str, Any]:
    try:
        command = build._compiler()
    except build.NoNativeCode as error:
        return {"program": None, "why": str(error)}
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=30)
    lines = (done.stdout or done.stderr).splitlines()
    return {"program": shutil.which(command[0]) or command[0], "version": lines[0] if lines else None}


def _launcher() -> dict[str, Any]:
    start = time.perf_counter()
    launcher_object()
    return {**kept_object("launcher"), "seconds": round(time.perf_counter() - start, 3)}


def kept_object(name: str) -> dict[str, Any]:
    """Return where this process has loaded compiled code from, and whether the next one will find it there."""
    for path in mapped_files():
        file = Path(path.removesuffix(" (deleted)"))
        if file.name.startswith(f"{name}-") and file.suffix == ".so":
            return {"path": str(file), "kept": file.exists()}
    return {"path": None, "kept": None}
