"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .host import host_table


def main() -> int:
    """Run the benchmark that the command line names, print its table, and write its samples where asked."""
    parser = argparse.ArgumentParser(prog="python -m fusedops.bench", description="Measure fusedops beside its peers.")
    parser.add_argument("what", choices=["host"], help="host: time of one call on the CPU, for small arrays on a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write samples, medians and versions")
    parser.add_argument("--rounds", type=int, default=25, help="samples of each row, interleaved (default 25)")
    parser.add_argument("--calls", type=int, default=200, help="calls in a sample (default 200)")
    options = parser.parse_args()
    if options.rounds < 1 or options.calls < 1:
        parser.error("--rounds and --calls must be at least 1")
    try:
        table = host_table(options.rounds, options.calls)
    except ImportError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(table)
    if options.json:
        options.json.write_text(json.dumps(table.as_dict(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
