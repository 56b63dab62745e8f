"""The README and docs/: their Python runs, their links lead somewhere, and they name every public thing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

import fusedops

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = ("pip install -e '.[examples]' && python examples/quickstart.py", "pip install -e '.[test]' && pytest")

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: where its code starts, what its fence says, and the code."""

    path: Path
    line: int
    info: str
    code: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"

    def compiled(self) -> object:
        """Return the code with the page's own line numbers, so that a traceback shows the page."""
        return compile("\n" * (self.line - 1) + self.code, str(self.path), "exec", dont_inherit=True)


def blocks(path: Path, text: str) -> Iterator[Block]:
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(path, line, match["info"].strip(), match["code"])


def anchors(text: str) -> set[str]:
    """Return the anchors that a page's headings make."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


BLOCKS = [block for path in PAGES for block in blocks(path, path.read_text())]


@pytest.fixture
def default_jax() -> Iterator[None]:
    """JAX as a user finds it, without the 64-bit types that other tests turn on."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.info == "python"], ids=str)
@pytest.mark.usefixtures("default_jax")
def test_python_block_runs(block: Block) -> None:
    exec(block.compiled(), {"__name__": "__main__"})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.info == "python gpu"], ids=str)
def test_gpu_block_compiles_and_runs_on_a_gpu(block: Block) -> None:
    code = block.compiled()
    if find_spec("cupy") and find_spec("nvmath") and import_module("cupy").is_available():
        exec(code, {"__name__": "__main__"})


def test_every_block_is_of_a_known_kind() -> None:
    assert {block.info for block in BLOCKS} <= {"python", "python gpu", "bash", ""}


def test_a_wrong_block_would_fail_on_its_own_line() -> None:
    (block,) = blocks(README, "# Title\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        exec(block.compiled(), {})
    assert caught.traceback[-1].lineno + 1 == 5


def test_readme_is_short_and_has_the_commands() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    for command in COMMANDS:
        assert lines.count(command) == 1


def test_readme_examples_are_short() -> None:
    assert all(len(block.code.splitlines()) <= 10 for block in BLOCKS if block.path == README)


@pytest.mark.parametrize("name", fusedops.__all__)
def test_public_name_is_documented(name: str) -> None:
    text = "\n".join(path.read_text() for path in PAGES)
    assert re.search(rf"\b{name}\b", text)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", path.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        assert page.is_file(), target
        assert not anchor or anchor in anchors(page.read_text()), target
