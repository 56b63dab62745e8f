"""C sources to a loaded shared object, compiled on first use and kept in a private cache.

A cached file is code that later processes run, so a directory that somebody else owns or may write to is not used: the
object is then compiled for this process alone. A file's name is a hash of everything that it is made from, and it
appears under that name complete or not at all; the lock only spares a second compilation.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None  # type: ignore[assignment]

__all__ = ["NoNativeCode", "shared_object"]

SOURCES = Path(__file__).parent

_FLAGS = ("-O2", "-fPIC", "-shared", "-std=c11", "-pthread", "-Wall", "-Wl,-Bsymbolic")
_COMPILE_SECONDS = 120
_LOCK_SECONDS = 60
_WITHOUT = "Install a C compiler (Debian: apt-get install gcc, conda: conda install gcc). It is needed for speed alone."

_loading = threading.Lock()
_loaded: dict[str, ctypes.CDLL] = {}


class NoNativeCode(RuntimeError):
    """There is no C compiler that makes the native code, or no way to load it."""


def shared_object(
    name: str, sources: tuple[str, ...], include: tuple[str, ...] = (), salt: str = "", flags: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """Return the shared object of some C sources, compiled unless the cache has it, and loaded once a process.

    Parameters
    ----------
    name : str
        The first part of the file's name.
    sources : tuple of str
        C files; a relative path is one in the folder of this module. The headers beside them count as sources.
    include : tuple of str
        Folders of other headers; their contents are not read, so ``salt`` must tell their versions apart.
    salt : str
        Anything else that the object depends on.
    flags : tuple of str
        Further arguments of the compiler, after the sources.

    Raises
    ------
    NoNativeCode
        With the reason, in the compiler's own words where it has any, and what to do.
    """
    if not sys.platform.startswith("linux"):
        raise NoNativeCode(f"native code is compiled on Linux alone, and this is {sys.platform}.")
    compiler = _compiler()
    paths = [SOURCES / source for source in sources]
    command = [*compiler, *_FLAGS, *(f"-I{folder}" for folder in include), *map(str, paths), *flags]
    key = _hash(command, paths, salt)
    with _loading:
        if key not in _loaded:
            _loaded[key] = _load(f"{name}-{key}", command)
        return _loaded[key]


def _compiler() -> list[str]:
    """Return the command of the C compiler, with the full path of its program."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        program = shutil.which(command[0])
        if program:
            return [program, *command[1:]]
    looked_for = f"$CC is {os.environ['CC']!r}, which" if chosen else "cc, gcc or clang"
    raise NoNativeCode(f"{looked_for} is not on the PATH. {_WITHOUT}")


def _hash(command: list[str], paths: list[Path], salt: str) -> str:
    """Return a hash of what the object is made from; the compiler counts by its path, size and date."""
    found = os.stat(command[0])
    said = [platform.machine(), os.path.realpath(command[0]), found.st_size, found.st_mtime_ns, command, salt]
    digest = hashlib.sha256(repr(said).encode())
    headers = {header for path in paths for header in path.parent.glob("*.h")}
    for path in [*paths, *sorted(headers)]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:24]


# The cache -----------------------------------------------------------------------------------------------------------


def _load(file: str, command: list[str]) -> ctypes.CDLL:
    """Return an object from the cache, put there if it is not; or one compiled for this process alone."""
    folder = _cache_folder()
    if folder is not None:
        target = folder / f"{file}.so"
        # Read-only, full, without locks, or a place from which nothing may be executed.
        with suppress(OSError):
            if not target.exists():
                with _locked(folder / f"{file}.lock"):
                    if not target.exists():
                        _compile(command, target)
            return ctypes.CDLL(str(target))
    with tempfile.TemporaryDirectory(prefix="fusedops-") as private:
        target = Path(private) / f"{file}.so"
        try:
            _compile(command, target)
            return ctypes.CDLL(str(target))  # stays loaded when the file goes
        except OSError as error:
            raise NoNativeCode(
                f"the compiled code could not be loaded: {error}. It is needed for speed alone."
            ) from error


def _cache_folder() -> Path | None:
    """Return the user's cache folder, made where it is missing, or None where it is not theirs alone."""
    given, home = os.environ.get("FUSEDOPS_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
        folder = Path(given).absolute() if given else cache / "fusedops"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return folder if found.st_uid == os.getuid() and not found.st_mode & 0o022 else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes, or go on without it after a while; it ends with the process that holds it."""
    with path.open("w") as file:
        give_up = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < give_up:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield


def _compile(command: list[str], target: Path) -> None:
    """Compile to a file of another name, and rename it when it is whole."""
    handle, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", made],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
        )
        if done.returncode:
            raise NoNativeCode(f"{command[0]} failed, and said: {done.stdout.strip()[-2000:]}\n{_WITHOUT}")
        os.replace(made, target)
    except subprocess.TimeoutExpired as error:
        raise NoNativeCode(f"{command[0]} did not end within {_COMPILE_SECONDS} s. {_WITHOUT}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(made)
