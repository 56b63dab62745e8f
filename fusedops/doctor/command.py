"""The command line of the doctor."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .. import __version__
from .checks import findings_of
from .probes import PROBES, probe_all
from .text import report

__all__ = ["SCHEMA", "main"]

SCHEMA = 1
"""Version of what ``--json`` prints; a key that goes or changes its meaning makes it one more."""

_EPILOG = "exit status: 0 all is well for what is installed, 1 a problem was found, 2 a wrong argument"


def main(argv: list[str]) -> int:
    """Examine this machine, and print what was found.

    Parameters
    ----------
    argv : list of str
        Arguments of the command, without its name.

    Returns
    -------
    int
        The exit status: 0 all is well for what is installed, 1 a problem was found, 2 a wrong argument.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fusedops doctor",
        description="Say what is installed, what works, and the command that mends what does not.",
        epilog=_EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="SECONDS", help="the most that one probe may take (120)"
    )
    try:
        options = parser.parse_args(argv)
    except SystemExit as error:
        return int(error.code or 0)
    facts = probe_all(PROBES, options.timeout)
    findings = findings_of(facts)
    is_bad = any(finding.level == "problem" for finding in findings)
    if options.json:
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "fusedops": __version__,
            "status": "problem" if is_bad else "ok",
            "probes": facts,
            "findings": [finding.as_dict() for finding in findings],
        }
        _print(json.dumps(found, indent=1, default=str))
    else:
        _print(report(__version__, facts, findings))
    return int(is_bad)


def _print(text: str) -> None:
    """Print a text whatever the terminal can show: a path may be in any encoding."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value
