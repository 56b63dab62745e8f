"""Probes in processes of their own: started a few at a time, stopped when their time is over, read whatever happened.

A probe writes a line when it begins a stage and another with what the stage found. So when a library takes the process
down, what was found before is there, and the stage that it died in has a name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import IO, Any

__all__ = ["run_processes"]

_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from fusedops.doctor.child import main; main()"
_SAID = 1200
"""Characters of a dead process's last words that are kept."""

_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}
"""A probe says where it was when it dies."""


class _Process:
    """One probe that runs."""

    def __init__(self, target: str, argument: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        # The same modules as here, wherever this process found them.
        command = [sys.executable, "-c", _CODE, json.dumps(sys.path), target, json.dumps(argument)]
        with ExitStack() as opened:
            # Files, because a pipe would wait for grandchildren too.
            self._out: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
            self._err: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                env={**os.environ, **_ENVIRONMENT, **environment},
                start_new_session=True,
            )
            self._files = opened.pop_all()

    def outcome(self, limit: float) -> dict[str, Any] | None:
        """Return what the probe found once it has ended or used its time up, None before."""
        status, seconds = self._process.poll(), time.monotonic() - self._started
        if status is None and seconds < limit:
            return None
        if status is None:
            self.stop()
        stages, open_stage = _read(self._out)
        failure = None
        if status is None:
            failure = {"kind": "slow", "stage": open_stage, "text": f"it had not ended after {limit:g} s"}
        elif status:
            text = f"{_ending(status)}. {_tail(self._err)}".strip()
            failure = {"kind": "died", "stage": open_stage, "text": text}
        self._files.close()
        return {"stages": stages, "seconds": round(seconds, 2), "failure": failure}

    def stop(self) -> None:
        """End the process, and those that it started."""
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.wait(5)  # one that waits for a broken driver cannot be ended at all


def run_processes(
    targets: Mapping[str, str],
    argument: Mapping[str, Any],
    limit: float,
    at_once: int,
    environment: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return what each probe found, and how it ended.

    Parameters
    ----------
    targets : mapping of str to str
        ``"module:function"`` of each probe, by its name; the function is called with a
        `fusedops.doctor.stages.Stages` and ``argument``.
    argument : mapping
        What a probe may read, as JSON has it.
    limit : float
        Seconds that each may take.
    at_once : int
        How many may run beside one another.
    environment : mapping of str to str, optional
        Variables that probes have beside those of this process.

    Returns
    -------
    dict
        By name ``stages`` (what each gave, or its ``error``), ``seconds``, and a ``failure`` with ``kind``, ``stage``
        and ``text``, None where the process ended as it should.
    """
    waiting, running, done = list(targets), dict[str, _Process](), dict[str, dict[str, Any]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                try:
                    running[name] = _Process(targets[name], argument, environment or {})
                except (OSError, ValueError, TypeError) as error:
                    failure = {"kind": "died", "stage": None, "text": f"it could not be started: {error}"}
                    done[name] = {"stages": {}, "seconds": 0.0, "failure": failure}
            for name, process in list(running.items()):
                outcome = process.outcome(limit)
                if outcome is not None:
                    done[name] = outcome
                    del running[name]
            time.sleep(0.02)
    finally:
        for process in running.values():
            process.stop()
    return {name: done[name] for name in targets}


def _read(file: IO[bytes]) -> tuple[dict[str, Any], str | None]:
    """Return the stages that a probe reported, and the one that it was in at its end."""
    file.seek(0)
    stages: dict[str, Any] = {}
    begun: str | None = None
    for line in file.read().decode(errors="replace").splitlines():
        try:
            kind, name, value = json.loads(line)
        except ValueError:  # cut short, or not ours
            continue
        if kind == "begin":
            begun = name
        else:
            stages[name], begun = value, None
    return stages, begun


def _ending(status: int) -> str:
    if status > 0:
        return f"it ended with status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"


def _tail(file: IO[bytes]) -> str:
    """Return the last that a process wrote as an error, from the interpreter's report of a crash on."""
    file.seek(0)
    text = file.read().decode(errors="replace").strip()
    crash = text.rfind("Fatal Python error")
    return text[crash : crash + _SAID] if crash >= 0 else text[-_SAID:]
