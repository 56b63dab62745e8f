"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .host import host_table
from .sampling import Table


def main() -> int:
    """Run what the command line names, print its table, and write its samples where asked."""
    parser = argparse.ArgumentParser(prog="python -m fusedops.bench", description="Measure fusedops beside its peers.")
    commands = parser.add_subparsers(dest="command", required=True)
    host = commands.add_parser("host", help="time of one call on the CPU, for small arrays on a GPU")
    host.add_argument("--json", type=Path, metavar="FILE", help="write samples, medians and versions")
    host.add_argument("--rounds", type=_positive, default=25, help="samples of each row, interleaved (default 25)")
    host.add_argument("--calls", type=_positive, default=200, help="calls in a sample (default 200)")
    show = commands.add_parser("table", help="print the table of samples that were written, as Markdown")
    show.add_argument("json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        if options.command == "table":
            print(Table.from_dict(json.loads(options.json.read_text())).markdown())
            return 0
        table = host_table(options.rounds, options.calls)
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
    raise SystemExit(main())
