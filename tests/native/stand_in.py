"""The stand-in for cuBLASLt, compiled and loaded, and native programs over it: they run where there is no GPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fusedops.column_form import ColumnForm, column_form
from fusedops.epilogs import Epilog
from fusedops.native.build import shared_object
from fusedops.native.launcher import FUNCTIONS, Launcher, NativeDescriptor, NativeProgram, launcher_object
from fusedops.native.layouts import CUDA_TYPES, layout_words
from fusedops.problem import Problem
from fusedops.residuals import mask_bytes, padded_preact

SOURCE = Path(__file__).with_name("cublaslt_stand_in.c")
ALGORITHM = 66
"""The first word of every algorithm; the second is the workspace that it needs."""

_HANDLE = 0x1000
_EPILOGUES = {
    "DEFAULT": 1,
    "RELU": 2,
    "BIAS": 4,
    "RELU_BIAS": 6,
    "GELU": 32,
    "GELU_BIAS": 36,
    "RELU_AUX": 130,
    "RELU_AUX_BIAS": 134,
    "DRELU": 136,
    "DRELU_BGRAD": 152,
    "GELU_AUX": 160,
    "GELU_AUX_BIAS": 164,
    "DGELU": 192,
    "DGELU_BGRAD": 208,
    "BGRADA": 256,
    "BGRADB": 512,
}
"""``cublasLtEpilogue_t`` of each epilog."""

_ATTRIBUTES = {
    "EPILOGUE": (7, np.uint32),
    "TRANSB": (4, np.int32),
    "BIAS_BATCH_STRIDE": (10, np.int64),
    "EPILOGUE_AUX_LD": (12, np.int64),
    "EPILOGUE_AUX_BATCH_STRIDE": (13, np.int64),
}


class StandIn:
    """The loaded stand-in.

    Attributes
    ----------
    functions : dict of str to int
        The addresses of its functions by name, ``cublasLtCreate`` among them.
    """

    def __init__(self) -> None:
        self.shared = shared_object("stand-in", (str(SOURCE),), flags=("-lm",))
        names = (*FUNCTIONS, "cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatmulDescGetAttribute")
        self.functions = {name: _address(getattr(self.shared, name)) for name in names}

    def set(self, name: str, value: int) -> None:
        """Set what a launch or check does: "fail", "fail_check", "fail_layout" or "sleep"."""
        getattr(self.shared, f"stand_in_{name}")(value)

    def count(self, name: str) -> int:
        """Return "calls", "checks", "handles", "live_descriptors", "live_layouts" or one of "last_..."."""
        function = getattr(self.shared, f"stand_in_{name}")
        function.restype = ctypes.c_longlong
        return int(function())

    def reset(self) -> None:
        """Let everything succeed at once."""
        for name, value in (("fail", 0), ("fail_check", 0), ("fail_layout", -1), ("sleep", 0)):
            self.set(name, value)

    def descriptor(self, form: ColumnForm) -> int:
        """Return a new ``cublasLtMatmulDesc_t`` for a form, which the caller owns."""
        made = ctypes.c_void_p()
        self.shared.cublasLtMatmulDescCreate(ctypes.byref(made), 0, CUDA_TYPES[_scale(form)])
        pointer = int(made.value or 0)
        for name, value in _settings(form).items():
            attribute, dtype = _ATTRIBUTES[name]
            field = np.array(value, dtype)
            status = self.shared.cublasLtMatmulDescSetAttribute(
                ctypes.c_void_p(pointer), attribute, ctypes.c_void_p(field.ctypes.data), ctypes.c_size_t(field.nbytes)
            )
            assert status == 0
        return pointer


@cache
def stand_in() -> StandIn:
    """Return the one of this process."""
    return StandIn()


@cache
def stand_in_launcher() -> Launcher:
    """Return the launcher over it, without the handler."""
    return Launcher(launcher_object(), stand_in().functions)


def stand_in_descriptor(problem: Problem, launcher: Launcher | None = None) -> NativeDescriptor:
    """Return a descriptor of a problem's family."""
    return (launcher or stand_in_launcher()).descriptor(stand_in().descriptor(column_form(problem)))


def stand_in_program(
    problem: Problem,
    launcher: Launcher | None = None,
    descriptor: NativeDescriptor | None = None,
    workspace: int = 0,
    check: bool = True,
    limit: int | None = None,
) -> NativeProgram | None:
    """Return a program for a problem of arrays on the CPU, by default with its own descriptor.

    ``workspace`` is what its algorithm needs, ``limit`` what it is told to live with.
    """
    launcher = launcher or stand_in_launcher()
    form = column_form(problem)
    algorithm: Any = np.zeros(8, np.uint64)
    algorithm[:2] = ALGORITHM, workspace
    return launcher.program(
        _HANDLE,
        descriptor or stand_in_descriptor(problem, launcher),
        layout_words(form),
        algorithm.ctypes.data,
        workspace if limit is None else limit,
        _scale(form) == "float64",
        check,
    )


def _scale(form: ColumnForm) -> str:
    return "float64" if form.A.dtype == "float64" else "float32"


def _settings(form: ColumnForm) -> dict[str, int]:
    """Return the attributes of a form's descriptor; those of a mask count bits."""
    values = {"EPILOGUE": _EPILOGUES[form.epilog.name], "TRANSB": int(form.epilog is Epilog.BGRADB)}
    if form.bias is not None:
        values["BIAS_BATCH_STRIDE"] = form.bias.stride
    aux = form.epilog.takes or form.epilog.gives
    if aux is not None and not aux.format.startswith("sum"):
        ld = mask_bytes(form.m) * 8 if aux.format == "relu_mask" else padded_preact(form.m)
        values |= {"EPILOGUE_AUX_LD": ld, "EPILOGUE_AUX_BATCH_STRIDE": ld * form.n}
    return values


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
