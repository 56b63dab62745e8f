"""What runs in a probe's process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from .stages import Stages

__all__ = ["main"]


def main() -> None:
    """Run the probe that the command line names; what it prints itself goes to the errors."""
    target, argument = sys.argv[1:3]
    descriptor = os.dup(1)
    os.dup2(2, 1)
    module, _, function = target.partition(":")
    stages = Stages(descriptor)
    probe: Callable[[Stages, Mapping[str, Any]], None] | None = stages.run(
        "probe", lambda: getattr(import_module(module), function), lambda _: {}
    )
    if probe is not None:
        stages.run("all", lambda: probe(stages, json.loads(argument)), lambda _: {})
    # A library that fails in its shutdown has done what was asked of it.
    os._exit(0)
