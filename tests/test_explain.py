"""`explain` and `support`: what is said is true of the call and of the machine, as data and as text."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import TestFramework

import fusedops
from fusedops import Epilog
from fusedops.activations import ACTIVATIONS
from fusedops.dtypes import MATRIX_DTYPES

A, B, BIAS = np.ones((4, 6), "float16"), np.ones((6, 8), "float16"), np.ones(8, "float16")


# explain --------------------------------------------------------------------------------------------------------------


def test_a_fused_epilog_as_data() -> None:
    """Every field of a plain call."""
    said = fusedops.explain(A, B, bias=BIAS, activation="relu").as_dict()
    assert {name: said[name] for name in ("framework", "engine", "device", "strategy", "epilog", "second_step")} == {
        "framework": "numpy",
        "engine": "reference",
        "device": "cpu",
        "strategy": "reference",
        "epilog": "RELU_BIAS",
        "second_step": None,
    }
    assert said["shape"] == {"batch_shape": (), "m": 4, "n": 8, "k": 6}
    assert said["dtypes"] == {"operands": "float16", "compute": "float32", "out": "float16"}
    assert said["layouts"] == {name: f"row_major (ld {ld})" for name, ld in (("a", 6), ("b", 8), ("out", 8))}
    assert said["copies"] == ()
    assert said["flops"] == 2 * 4 * 6 * 8
    assert said["bytes"] == 2 * (4 * 6 + 6 * 8 + 4 * 8 + 8)
    assert said["why"]


def test_the_same_as_text() -> None:
    """The text says what the data says, a line a fact."""
    lines = str(
        fusedops.explain(A, B, bias=BIAS.astype("float32"), activation="silu", out_dtype="float32")
    ).splitlines()
    assert lines[0] == "BIAS, then silu on m=4 n=8 k=6"
    facts = dict(line.split(":", 1) for line in lines[1:])
    assert {name: text.strip() for name, text in facts.items() if name in ("dtypes", "layouts", "copies", "work")} == {
        "dtypes": "float16, computed in float32, out float32",
        "layouts": "a row_major (ld 6), b row_major (ld 8), out row_major (ld 8)",
        "copies": "none",
        "work": "384 operations over 304 bytes",
    }
    assert facts["engine"].strip() == "reference (numpy on cpu)"


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "second step": ({"activation": "gelu_erf"}, {"epilog": "DEFAULT", "second_step": "gelu_erf"}),
    "fused step": ({"activation": "gelu_tanh"}, {"epilog": "GELU", "second_step": None}),
    "epilog": ({"epilog": "BGRADB"}, {"epilog": "BGRADB", "second_step": None}),
    "member": ({"epilog": Epilog.GELU_AUX}, {"epilog": "GELU_AUX"}),
}


@pytest.mark.parametrize(("given", "said"), CALLS.values(), ids=CALLS.keys())
def test_epilog_and_second_step(given: dict[str, Any], said: dict[str, Any]) -> None:
    """What is part of the product, and what comes after it."""
    explanation = fusedops.explain(A, B, **given).as_dict()
    assert {name: explanation[name] for name in said} == said


def test_layouts_and_bytes_of_a_batch() -> None:
    """Columns, a leading dimension and a shared operand are read in place, and what is shared is counted once."""
    a = np.ones((3, 6, 9), "float32")[..., :4].transpose(0, 2, 1)
    b = np.broadcast_to(np.ones((6, 8), "float32"), (3, 6, 8))
    said = fusedops.explain(a, b, c=np.ones((4, 8), "float32"), transpose_b=False)
    assert said.layouts == {
        "a": "col_major (ld 9, batch stride 54)",
        "b": "row_major (ld 8, batch stride 0)",
        "c": "row_major (ld 8, batch stride 0)",
        "out": "row_major (ld 8, batch stride 32)",
    }
    assert said.shape["batch_shape"] == (3,)
    assert str(said).startswith("DEFAULT on (3,) x m=4 n=8 k=6\n")
    assert said.bytes == 4 * (3 * 4 * 6 + 6 * 8 + 4 * 8 + 3 * 4 * 8)
    assert said.flops == 2 * 3 * 4 * 8 * 6


def test_bytes_of_residuals() -> None:
    """What is read or written beside the matrices counts too."""
    plain = fusedops.explain(A, B).bytes
    mask, preact = np.zeros((4, 16), "uint8"), np.zeros((4, 8), "float16")
    assert fusedops.explain(A, B, epilog="RELU_AUX").bytes == plain + mask.nbytes
    assert fusedops.explain(A, B, epilog="GELU_AUX_BIAS", bias=BIAS).bytes == plain + preact.nbytes + BIAS.nbytes
    assert fusedops.explain(A, B, epilog="DRELU_BGRAD", relu_aux=mask).bytes == plain + mask.nbytes + BIAS.nbytes


def test_every_framework_is_named(framework: TestFramework) -> None:
    """The lead is named as in messages; JAX runs wherever XLA does."""
    said = fusedops.explain(framework.make(np.ones((2, 2))), framework.make(np.ones((2, 2))))
    assert (said.framework, said.device) == (framework.name, "xla" if framework.name == "jax" else "cpu")
    assert said.engine == ("xla" if framework.name == "jax" else "reference")
    json.dumps(said.as_dict())


def test_explaining_is_planning() -> None:
    """It raises where the call would, computes nothing, and is what a plan says of itself."""
    with pytest.raises(ValueError, match="explain: a and b do not share k"):
        fusedops.explain(A, A)
    with fusedops.plan(A, B, bias=BIAS) as plan:
        assert plan.explain() == fusedops.explain(A, B, bias=BIAS)
    mixed = fusedops.explain(A.astype("float32"), torch.ones(6, 8))
    assert mixed.framework == "torch"
    assert fusedops.explain(torch.ones(4, 6), jnp.ones((6, 8), "float32")).framework == "torch"


# support --------------------------------------------------------------------------------------------------------------


def test_support_as_data() -> None:
    """Versions are the installed ones; each engine has a row for each epilog, with the dtypes it takes."""
    said = fusedops.support()
    assert said.versions["python"] == platform.python_version()
    for name in ("numpy", "torch", "jax", "array-api-compat"):
        assert said.versions[name] == metadata.version(name)
    assert set(said.table) == set(said.engines) >= {"reference"}
    for epilogs in said.table.values():
        assert set(epilogs) == set(Epilog.__members__)
        assert all(dtypes == MATRIX_DTYPES for dtypes in epilogs.values())
    assert said.activations == ACTIVATIONS
    assert json.loads(json.dumps(said.as_dict()))["versions"] == said.versions


def test_support_as_text() -> None:
    """Every fact of the data is in the text."""
    said, text = fusedops.support(), str(fusedops.support())
    for name, version in said.versions.items():
        assert f"{name:18} {version or 'not installed'}" in text.splitlines()
    for name, use in said.engines.items():
        assert f"engine {name}: {use}" in text.splitlines()
    for word in (*Epilog.__members__, *MATRIX_DTYPES, *ACTIVATIONS):
        assert word in text


def test_what_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package has no version, and the text says so."""
    version = metadata.version

    def without_scipy(name: str) -> str:
        if name == "scipy":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_scipy)
    assert fusedops.support().versions["scipy"] is None
    assert "scipy              not installed" in str(fusedops.support())


def test_what_the_table_says_works() -> None:
    """The dtypes of the reference engine's row are those that it computes with."""
    for dtype in set(fusedops.support().table["reference"]["DEFAULT"]) - {"bfloat16"}:
        x = np.eye(3, dtype=dtype)
        assert np.array_equal(fusedops.matmul(x, x), x)


def test_support_loads_no_framework() -> None:
    """A new interpreter that asks holds none of them afterwards."""
    code = (
        "import sys, fusedops; print(fusedops.support()); print({'torch', 'jax', 'cupy', 'nvmath'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
