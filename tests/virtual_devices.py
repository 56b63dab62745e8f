"""Eight devices of JAX's on the CPU, for tests of meshes; asked for before JAX starts."""

from __future__ import annotations

import os

_OPTION = "--xla_force_host_platform_device_count"


def ask_for_virtual_devices(count: int = 8) -> None:
    """Add the option to ``XLA_FLAGS``, unless the user has set it."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _OPTION not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_OPTION}={count}".strip()
