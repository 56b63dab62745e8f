"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .cpu import cpu_table
from .host import host_table
from .replay import replay_table
from .sampling import Table

TABLES = {
    "host": (host_table, "time of one call on the CPU, for small arrays on a GPU"),
    "replay": (replay_table, "GPU time of layers that torch.compile captures, beside their bare kernels"),
    "cpu": (cpu_table, "what a call adds to a framework's own operations, for small arrays on a CPU"),
}


def main(argv: list[str]) -> int:
    """Run what the command line names, print its table, and write its samples where asked."""
    parser = argparse.ArgumentParser(prog="python -m fusedops.bench", description="Measure fusedops beside its peers.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, what) in TABLES.items():
        command = commands.add_parser(name, help=what)
        command.add_argument("--json", type=Path, metavar="FILE", help="write samples, medians and versions")
        command.add_argument("--rounds", type=_positive, default=25, help="samples of a row, interleaved (default 25)")
        command.add_argument("--calls", type=_positive, default=200, help="calls in a sample (default 200)")
    show = commands.add_parser("table", help="print the table of samples that were written, as Markdown")
    show.add_argument("json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        if options.command == "table":
            print(Table.from_dict(json.loads(options.json.read_text())).markdown())
            return 0
        table = TABLES[options.command][0](options.rounds, options.calls)
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(table)
    if options.json:
        options.json.write_text(json.dumps(table.as_dict(), indent=1) + "\n")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
