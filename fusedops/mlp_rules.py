"""The rules of what `mlp` and `mlp_grad` take: extents, dtypes and flags, in the caller's words.

The products underneath would refuse most of it too, but as ``a``, ``b`` and ``transpose_b`` of a product that the
caller did not write, and some only after others have been computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from .arrays import ArraySpec
from .operands import Ints, check_dtype
from .residuals import padded_preact

__all__ = ["check_cotangent", "check_layers"]


def check_layers(shapes: Mapping[str, Ints], transpose_w1: bool, transpose_w2: bool) -> None:
    """Raise unless ``x`` is (..., m, k), ``w1`` (k, hidden), ``w2`` (hidden, n), ``b1`` (hidden,) and ``b2`` (n,)."""
    x, w1, w2 = shapes["x"], shapes["w1"], shapes["w2"]
    if len(x) < 2:
        raise ValueError(f"x has shape {x}, expected at least two axes, (..., m, k).")
    hidden = _columns("w1", w1, transpose_w1, ("k", "hidden"), x[-1], "the last extent of x")
    n = _columns("w2", w2, transpose_w2, ("hidden", "n"), hidden, "that of w1")
    for name, letter, extent in (("b1", "hidden", hidden), ("b2", "n", n)):
        if name in shapes and shapes[name] != (extent,):
            raise ValueError(f"{name} has shape {shapes[name]}, expected ({letter},) = ({extent},).")


def check_cotangent(specs: Mapping[str, ArraySpec], transpose_w1: bool, transpose_w2: bool) -> None:
    """Raise unless ``dout`` and what was saved are those of an mlp with the given ``x``, ``w1`` and ``w2``.

    The dtypes of the biases are compared too: they are not read where the hidden layer was saved.
    """
    rows, dtype = specs["x"].shape[:-1], specs["x"].dtype
    hidden = specs["w1"].shape[0 if transpose_w1 else 1]
    n = specs["w2"].shape[0 if transpose_w2 else 1]
    expected = {
        "dout": ("(..., m, n)", (*rows, n)),
        "saved.hidden": ("(..., m, hidden)", (*rows, hidden)),
        "saved.preact": ("(..., m, round_up(hidden, 8))", (*rows, padded_preact(hidden))),
    }
    for name, (letters, shape) in expected.items():
        if name in specs and specs[name].shape != shape:
            raise ValueError(f"{name} has shape {specs[name].shape}, expected {letters} = {shape} for these x, w1, w2.")
    for name in (*expected, "b1", "b2"):
        if name in specs:
            check_dtype(name, specs[name], dtype)


def _columns(name: str, shape: Ints, transposed: bool, letters: tuple[str, str], wanted: int, whose: str) -> int:
    """Return a weight's second extent; its first must be ``wanted``."""
    rows_letter, columns_letter = letters
    if len(shape) != 2:
        raise ValueError(f"{name} has shape {shape}, expected two axes, ({rows_letter}, {columns_letter}).")
    rows, columns = reversed(shape) if transposed else shape
    if rows == wanted:
        return columns
    text = f"{name} is ({rows_letter}={rows}, {columns_letter}={columns}), expected {rows_letter} = {wanted}, {whose}."
    if columns != wanted:
        raise ValueError(text)
    stored = letters if transposed else letters[::-1]
    raise ValueError(f"{text} If {name} is stored as ({', '.join(stored)}), pass transpose_{name}={not transposed}.")
