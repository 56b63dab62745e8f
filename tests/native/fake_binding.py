"""nvmath's binding of cuBLASLt over the stand-in, so that planning and its ways to launch run where there is no GPU.

What it leaves out is nvmath's own ``Matmul``: a descriptor is made by the stand-in instead, and the heuristic proposes
what a test tells it to.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from native.stand_in import stand_in, stand_in_launcher

from fusedops.engines.nvmath import algorithms, descriptors, launches, planning

FOUND = algorithms._FOUND


class RefusedError(Exception):
    """A status other than success."""


class FakeMatmul:
    """What a family's descriptor is taken from."""

    def __init__(self, form: Any) -> None:
        self.mm_desc = stand_in().descriptor(form)

    def free(self) -> None:
        """Free the descriptor."""
        _call("cublasLtMatmulDescDestroy", self.mm_desc)


class FakeBinding(SimpleNamespace):
    """The functions of ``nvmath.bindings.cublasLt`` that the engine calls.

    ``proposed`` are the algorithms of the heuristic, as the words of their 64 bytes: identity, workspace, splits of k.
    """

    def __init__(self) -> None:
        real = algorithms.cublasLt
        super().__init__(
            cuBLASLtError=RefusedError,
            MatmulPreferenceAttribute=real.MatmulPreferenceAttribute,
            matmul_preference_create=lambda: 0,
            matmul_preference_set_attribute=lambda *_: None,
            matmul_desc_create=lambda compute, scale: _created("cublasLtMatmulDescCreate", compute, scale),
            matmul_desc_destroy=lambda pointer: _call("cublasLtMatmulDescDestroy", pointer),
            matmul_desc_set_attribute=lambda *args: _call("cublasLtMatmulDescSetAttribute", *args),
            matmul_desc_get_attribute=lambda *args: _call("cublasLtMatmulDescGetAttribute", *args),
            matrix_layout_create=lambda *args: _created("cublasLtMatrixLayoutCreate", *args),
            matrix_layout_set_attribute=lambda *args: _call("cublasLtMatrixLayoutSetAttribute", *args),
            matrix_layout_destroy=lambda pointer: _call("cublasLtMatrixLayoutDestroy", pointer),
            matmul_algo_check=lambda *args: _call("cublasLtMatmulAlgoCheck", *args),
            matmul_algo_get_heuristic=self._heuristic,
            matmul_algo_config_get_attribute=self._config,
            matmul=lambda *args: _call("cublasLtMatmul", *args),
        )
        self.proposed: list[tuple[int, int, int]] = [(66, 0, 1)]
        self.heuristics = 0

    def _heuristic(self, *args: int) -> None:
        candidates, found, count = args[-3:]
        self.heuristics += 1
        proposed = self.proposed[:candidates]
        rows = np.ctypeslib.as_array((ctypes.c_uint8 * (len(proposed) * FOUND.itemsize)).from_address(found)).view(
            FOUND
        )
        for row, words in zip(rows, proposed, strict=True):
            row["algo"]["data_"][:3] = words
            row["workspace_size"] = words[1]
        ctypes.c_int.from_address(count).value = len(proposed)

    def _config(self, algorithm: int, attribute: int, value: int, size: int, written: int) -> None:
        word = 0 if attribute == algorithms._ALGORITHM_ID else 2
        ctypes.c_int32.from_address(value).value = ctypes.c_uint64.from_address(algorithm + 8 * word).value


def install(monkeypatch: pytest.MonkeyPatch, native: bool) -> FakeBinding:
    """Put the stand-in below the engine, with or without a native launcher."""
    fake = FakeBinding()
    launcher = stand_in_launcher() if native else "no C compiler"
    monkeypatch.setattr(algorithms, "cublasLt", fake)
    monkeypatch.setattr(algorithms, "cuBLASLtError", RefusedError)
    monkeypatch.setattr(algorithms, "_bucket_algorithms", {})
    monkeypatch.setattr(algorithms, "_preference", lambda *_: 0)
    monkeypatch.setattr(descriptors, "cublasLt", fake)
    monkeypatch.setattr(descriptors, "_families", {})
    monkeypatch.setattr(descriptors, "_handle", lambda ordinal: 0x1000)
    monkeypatch.setattr(descriptors, "planned_matmul", lambda form, problem, handle: FakeMatmul(form))
    for name in ("create", "destroy", "get", "set"):
        function = {"get": "get_attribute", "set": "set_attribute"}.get(name, name)
        monkeypatch.setattr(descriptors, f"_{name}", getattr(fake, f"matmul_desc_{function}"))
    monkeypatch.setattr(launches, "_matmul", fake.matmul)
    monkeypatch.setattr(launches, "_set_descriptor", fake.matmul_desc_set_attribute)
    monkeypatch.setattr(launches, "native_launcher", lambda: launcher)
    monkeypatch.setattr(planning, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=contextlib.nullcontext)))
    return fake


def _call(name: str, *args: int) -> None:
    function = getattr(stand_in().shared, name)
    status = function(*(ctypes.c_void_p(arg) for arg in args))
    if status:
        raise RefusedError(f"{name}: {status}")


def _created(name: str, *args: int) -> int:
    made = ctypes.c_void_p()
    _call(name, ctypes.addressof(made), *args)
    return int(made.value or 0)
