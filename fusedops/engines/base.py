"""`Launch`: what every engine's ``prepare(problem, framework)`` returns, and what it gives back."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["LAUNCHER", "NO_NVMATH", "Launch", "Results"]

Array = Any
Results = tuple[Array, Array | None]
"""The result and the auxiliary array, None where the epilog gives none."""

NO_NVMATH = "CUDA arrays need nvmath-python and CuPy: pip install 'fusedops[cuda12]' (on CUDA 13: 'fusedops[cuda13]')."

LAUNCHER: dict[str, str] = {}
"""How each engine launches in this process, once it has: "native", or another way and the reason."""


class Launch(Protocol):
    """A problem that an engine has made ready: operands in, result and auxiliary array out."""

    strategy: str

    @property
    def why(self) -> str:
        """The reason for the strategy."""

    def facts(self) -> dict[str, Any]:
        """Return what only the engine knows: the algorithm and its workspace."""

    def __call__(
        self, operands: tuple[Array, ...], alpha: float, beta: float, out: Array | None, aux_out: Array | None
    ) -> Results: ...
