"""Compilation on first use: the cache, who may write to it, two processes at once, no compiler."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusedops.native import build
from fusedops.native.build import NoNativeCode, shared_object

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="native code is compiled on Linux alone")

COMPILER = build._compiler()[0] if sys.platform.startswith("linux") else ""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a process that has loaded nothing."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "_loaded", {})
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A C file of one function, which returns 41."""
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 41; }\n")
    return path


def compiler(folder: Path, body: str) -> str:
    """Return the path of a compiler that runs ``body`` in a shell; ``"$@"`` are its arguments."""
    path = folder / "some-cc"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def answer(source: Path, **rest: object) -> int:
    """Compile, load and call."""
    return int(shared_object("answer", (str(source),), **rest).answer())  # type: ignore[arg-type]


def spoil(cache: Path) -> None:
    """Put another file where the object is, which stays loaded."""
    (path,) = cache.glob("*.so")
    path.unlink()
    path.write_bytes(b"\x7fELF, or so it says")


def objects(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix == ".so")


def test_an_object_is_compiled_once_and_kept_private(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process finds it; nobody else may write to the folder, and nothing but whole objects is left in it."""
    log = tmp_path / "log"
    monkeypatch.setenv("CC", compiler(tmp_path, f'echo x >> {log}\nexec {COMPILER} "$@"'))
    assert answer(source) == 41
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert len(objects(cache)) == 1
    assert {path.suffix for path in cache.iterdir()} == {".so", ".lock"}
    monkeypatch.setattr(build, "_loaded", {})
    assert answer(source) == 41
    assert log.read_text() == "x\n"


def test_everything_that_an_object_is_made_from_names_it(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another source, header, flag, salt or compiler is another file."""
    header = source.with_name("answer.h")
    changes = (
        dict,
        lambda: {"salt": "2"},
        lambda: {"flags": ("-DX=1",)},
        lambda: {"include": (str(tmp_path),)},
        lambda: header.write_text("/* new */\n") and {},
        lambda: header.write_text("/* other */\n") and {},
        lambda: source.write_text("int answer(void) { return 42; }\n") and {},
        lambda: monkeypatch.setenv("CC", compiler(tmp_path, f'exec {COMPILER} "$@"')) or {},
    )
    for i, change in enumerate(changes):
        assert answer(source, **change()) in (41, 42)
        assert len(objects(cache)) == i + 1
    assert answer(source) == 42


def test_two_processes_at_once_compile_once(cache: Path, source: Path, tmp_path: Path) -> None:
    """The second waits for the first, and takes its file."""
    log = tmp_path / "log"
    slow = compiler(tmp_path, f'echo x >> {log}\nsleep 0.7\nexec {COMPILER} "$@"')
    code = f"from fusedops.native.build import *; print(shared_object('answer', ({str(source)!r},)).answer())"
    environment = {**os.environ, "CC": slow, "FUSEDOPS_CACHE_DIR": str(cache)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in started] == ["41\n", "41\n"]
    assert log.read_text() == "x\n"


def test_a_lock_that_nobody_gives_back_is_not_waited_for_long(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It spares work and guards nothing: files appear whole."""
    fcntl = pytest.importorskip("fcntl")
    assert answer(source) == 41
    held = [path.open("w") for path in cache.glob("*.lock")]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    for path in cache.glob("*.so"):
        path.unlink()
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_LOCK_SECONDS", 0.1)
    assert answer(source) == 41
    assert len(objects(cache)) == 1
    for file in held:
        file.close()


def test_threads_get_one_object(cache: Path, source: Path) -> None:
    """Whoever comes first compiles, and all get the same."""
    got: list[ctypes.CDLL] = []
    threads = [threading.Thread(target=lambda: got.append(shared_object("x", (str(source),)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(shared) for shared in got}) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_a_folder_that_others_may_write_to_is_not_used(cache: Path, source: Path, mode: int) -> None:
    """What lies there could be anybody's code; the object is made for this process alone, and leaves nothing."""
    cache.mkdir()
    cache.chmod(mode)
    assert answer(source) == 41
    assert list(cache.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_used(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where its mode looks right."""
    assert answer(source) == 41
    spoil(cache)
    monkeypatch.setattr(build, "_loaded", {})
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert answer(source) == 41


def test_a_folder_that_cannot_be_made_is_done_without(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a file in its place, or there is no home."""
    cache.write_text("a file")
    assert answer(source) == 41
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.delenv("FUSEDOPS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert answer(source) == 41


def test_a_broken_file_in_the_cache_is_done_without(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that does not load is made anew for this process."""
    assert answer(source) == 41
    spoil(cache)
    monkeypatch.setattr(build, "_loaded", {})
    assert answer(source) == 41


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package's own variable, then the desktop's, then the home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FUSEDOPS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build._cache_folder() == tmp_path / "home/.cache/fusedops"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "desktop"))
    assert build._cache_folder() == tmp_path / "desktop/fusedops"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert build._cache_folder() == tmp_path / "home/.cache/fusedops"
    monkeypatch.setenv("FUSEDOPS_CACHE_DIR", str(tmp_path / "own"))
    assert build._cache_folder() == tmp_path / "own"


# No native code -------------------------------------------------------------------------------------------------------


def test_no_compiler(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason, and what to do."""
    monkeypatch.setenv("PATH", str(source.parent))
    with pytest.raises(NoNativeCode, match=r"cc, gcc or clang is not on the PATH.*Install a C compiler"):
        answer(source)
    monkeypatch.setenv("CC", "no-such-cc -m64")
    with pytest.raises(NoNativeCode, match=r"\$CC is 'no-such-cc -m64', which is not on the PATH"):
        answer(source)


def test_a_compiler_that_fails_is_quoted(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own words, and nothing is left behind."""
    source.write_text("int answer(void) { return nonsense; }\n")
    with pytest.raises(NoNativeCode, match="nonsense"):
        answer(source)
    monkeypatch.setenv("CC", compiler(tmp_path, "echo it exploded >&2; exit 3"))
    with pytest.raises(NoNativeCode, match="some-cc failed, and said: it exploded"):
        answer(source)
    assert objects(cache) == []
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_a_compiler_that_never_ends_is_stopped(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up the first call for a while, and not for ever."""
    monkeypatch.setenv("CC", compiler(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(build, "_COMPILE_SECONDS", 0.2)
    with pytest.raises(NoNativeCode, match="did not end within"):
        answer(source)


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_other_systems(system: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled there."""
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(NoNativeCode, match=f"Linux alone, and this is {system}"):
        answer(source)
