"""The commands: ``python -m fusedops NAME``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

COMMANDS = {
    "bench": ("fusedops.bench.__main__", "measure fusedops beside its peers"),
    "doctor": ("fusedops.doctor", "say what is installed, what works, and what mends the rest"),
}
"""The module of each command, loaded when it is asked for, whose ``main`` takes the arguments after the name."""


def main(argv: list[str]) -> int:
    """Run the command that ``argv`` names, and return its exit status; 2 for a wrong name."""
    name = argv[0] if argv else None
    if name in COMMANDS:
        command: Callable[[list[str]], int] = import_module(COMMANDS[name][0]).main
        return command(argv[1:])
    asked = name in ("-h", "--help")
    lines = [f"  {command:8}{what}" for command, (_, what) in COMMANDS.items()]
    said = [] if asked or name is None else [f"python -m fusedops: there is no command {name!r}."]
    print("\n".join([*said, "usage: python -m fusedops COMMAND ...", *lines]), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
