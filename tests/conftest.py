"""Shared fixtures: the frameworks that are installed, and what ``--require-gpu`` means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from frameworks import FRAMEWORKS, TestFramework
from virtual_devices import ask_for_virtual_devices

ask_for_virtual_devices()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="a GPU test that cannot run is a failure, not a skip")


@pytest.fixture(params=FRAMEWORKS, ids=lambda framework: framework.name)
def framework(request: pytest.FixtureRequest) -> TestFramework:
    """Every framework whose arrays live on a CPU here."""
    return request.param


@pytest.fixture
def events() -> Iterator[Counter[str]]:
    """Counts what JAX traces and compiles, by the event's name."""
    found: Counter[str] = Counter()

    def count(event: str, duration: float, **_: Any) -> None:
        found[event] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    jax.monitoring.unregister_event_duration_listener(count)
