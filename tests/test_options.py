"""`options`: for a block, nested, for the process; seen by no other thread or task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import fusedops
from fusedops import options

A = np.eye(3, dtype="float32")
T = torch.eye(3)


@pytest.fixture(autouse=True)
def process_default() -> Iterator[None]:
    """Whatever a test sets for the process is taken back."""
    before = options.current()
    yield
    options.set_default(mixed=before.mixed)


def mixed() -> str:
    """Return the option in force."""
    return options.current().mixed


def test_the_default() -> None:
    """Frameworks may meet unless somebody says otherwise."""
    assert mixed() == "lead"


def test_a_block() -> None:
    """Changed inside, given by ``as``, as before afterwards."""
    with options(mixed="error") as inside:
        assert inside == options.current()
        assert mixed() == "error"
    assert mixed() == "lead"


def test_a_block_that_raises() -> None:
    """An exception leaves the options as they were."""
    with pytest.raises(KeyError), options(mixed="error"):
        raise KeyError
    assert mixed() == "lead"


def test_nested_blocks() -> None:
    """The innermost block decides, and an option it does not name is the outer block's."""
    with options(mixed="error"):
        with options(mixed="lead"):
            assert mixed() == "lead"
            with options():
                assert mixed() == "lead"
        assert mixed() == "error"
        with options():
            assert mixed() == "error"
    assert mixed() == "lead"


def test_one_object_many_times() -> None:
    """The same block can be entered again, also within itself."""
    block = options(mixed="error")
    for _ in range(2):
        with block:
            with block:
                assert mixed() == "error"
            assert mixed() == "error"
        assert mixed() == "lead"


def test_the_default_of_the_process() -> None:
    """It holds outside of blocks and in every thread; a block goes before it."""
    options.set_default(mixed="error")
    assert mixed() == "error"
    assert in_a_thread() == "error"
    with options(mixed="lead"):
        assert mixed() == "lead"
        options.set_default(mixed="error")
        assert mixed() == "lead"
    assert mixed() == "error"


def in_a_thread() -> str:
    """Return what another thread sees now."""
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(mixed()))
    thread.start()
    thread.join()
    return seen[0]


def test_other_threads_do_not_see_a_block() -> None:
    """Neither a thread started inside a block, nor one with a block of its own, meets another's."""
    with options(mixed="error"):
        assert in_a_thread() == "lead"
    barrier = threading.Barrier(2)
    seen = {}

    def work(value: str) -> None:
        with options(mixed=value):
            barrier.wait()
            seen[value] = mixed()
            barrier.wait()

    threads = [threading.Thread(target=work, args=(value,)) for value in ("lead", "error")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"lead": "lead", "error": "error"}


def test_other_tasks_do_not_see_a_block() -> None:
    """Two tasks interleaved inside their blocks each see their own."""

    async def work(value: str) -> str:
        with options(mixed=value):
            await asyncio.sleep(0)
            return mixed()

    async def both() -> list[str]:
        return await asyncio.gather(work("error"), work("lead"), work("error"))

    assert asyncio.run(both()) == ["error", "lead", "error"]
    assert mixed() == "lead"


@pytest.mark.parametrize("name", ["mixd", "tuning", "MIXED"])
def test_unknown_options(name: str) -> None:
    """They are a TypeError that lists those that there are, before the block is entered."""
    for change in (options, options.set_default):
        with pytest.raises(TypeError, match=f"there is no option '{name}'; there is mixed"):
            change(**{name: "lead"})
    assert mixed() == "lead"


@pytest.mark.parametrize("value", ["Lead", "", None, True, ["lead"]])
def test_unknown_values(value: object) -> None:
    """They are a ValueError that lists those that there are, and nothing is changed."""
    for change in (options, options.set_default):
        with pytest.raises(ValueError, match=r"mixed is .*, expected one of 'lead', 'error'"):
            change(mixed=value)
    assert mixed() == "lead"


def test_what_mixed_does() -> None:
    """Arrays of one framework pass; two frameworks, NumPy counted, are an error also after the call was planned."""
    for _ in range(2):
        assert torch.equal(fusedops.matmul(A, T), T)
        with options(mixed="error"):
            assert np.array_equal(fusedops.matmul(A, A), A)
            assert torch.equal(fusedops.matmul(T, T), T)
            with pytest.raises(TypeError, match=r'a is numpy, b is torch. options\(mixed="error"\) forbids it'):
                fusedops.matmul(A, T)
