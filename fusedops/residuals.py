"""Formats of the auxiliary arrays: their shapes and dtypes, as cuBLASLt writes them seen from a row-major result.

========================  ======================================================  =========
format                    shape                                                   dtype
========================  ======================================================  =========
relu_mask                 ``(..., m, round_up(ceil(n / 8), 16))``                 uint8
preact                    ``(..., m, round_up(n, 8))``                            of ``out``
sum_over_m, sum_b_over_k  ``(n,)``, or ``(..., 1, n)`` in a batch                 of ``out``
sum_a_over_k              ``(m,)``, or ``(..., m, 1)`` in a batch                 of ``out``
========================  ======================================================  =========

``relu_mask`` holds a bit an element, eight to a byte along n, least significant first, set where the pre-activation is
``>= 0``. Padding holds anything; every consumer masks it. The sums have the shape of a bias for each item of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

from .epilogs import Aux

__all__ = ["aux_dtype", "aux_shape", "mask_bytes", "padded_preact"]

Ints = tuple[int, ...]


def mask_bytes(n: int) -> int:
    """Return the bytes in a row of ``relu_mask``: whole groups of 128 bits."""
    return _round_up(_round_up(n, 8) // 8, 16)


def padded_preact(n: int) -> int:
    """Return the elements in a row of ``preact``: whole groups of 8."""
    return _round_up(n, 8)


_SHAPES: dict[str, Callable[[Ints, int, int], Ints]] = {
    "relu_mask": lambda batch, m, n: (*batch, m, mask_bytes(n)),
    "preact": lambda batch, m, n: (*batch, m, padded_preact(n)),
    "sum_over_m": lambda batch, m, n: (*batch, 1, n) if batch else (n,),
    "sum_b_over_k": lambda batch, m, n: (*batch, 1, n) if batch else (n,),
    "sum_a_over_k": lambda batch, m, n: (*batch, m, 1) if batch else (m,),
}


def aux_shape(aux: Aux, batch_shape: Ints, m: int, n: int) -> Ints:
    """Return the shape of an auxiliary array."""
    return _SHAPES[aux.format](batch_shape, m, n)


def aux_dtype(aux: Aux, out_dtype: str) -> str:
    """Return the dtype of an auxiliary array."""
    return "uint8" if aux.format == "relu_mask" else out_dtype


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
