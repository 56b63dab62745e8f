"""What a launch on a GPU refuses or keeps, as far as a CPU can tell."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch.autograd import forward_ad

import fusedops
from fusedops import lifetime
from fusedops.arrays import ArraySpec, Device
from fusedops.column_form import unasked_steps
from fusedops.epilogs import Epilog
from fusedops.frameworks import kind_of
from fusedops.problem import Settings, make_problem

Array = Any
CUDA = Device("cuda", 0)


def launched(**changed: Array) -> tuple[tuple[Array, ...], Array, Array]:
    """Return the operands, ``out`` and ``aux_out`` of a launch, all plain but those that are given."""
    plain = dict.fromkeys(("a", "b", "bias", "c", "relu_aux", "gelu_aux", "out", "aux_out"))
    *operands, out, aux_out = {**plain, "a": torch.ones(2, 2), "b": torch.ones(2, 2), **changed}.values()
    return tuple(operands), out, aux_out


@pytest.mark.parametrize("name", ["a", "b", "bias", "c", "gelu_aux", "out", "aux_out"])
def test_a_lazily_negated_tensor_is_never_read_or_written_by_address(name: str) -> None:
    """Its memory holds the other sign, whichever argument it is."""
    framework = kind_of(torch.ones(1)).framework
    framework.check_launch(*launched())
    with pytest.raises(TypeError, match="negated"):
        framework.check_launch(*launched(**{name: torch._neg_view(torch.ones(2, 2))}))


@pytest.mark.parametrize("name", ["a", "b", "bias", "c"])
def test_a_plan_refuses_a_derivative_rather_than_losing_it(name: str) -> None:
    """Forward mode or backward: a plan launches, and records nothing."""
    plain = {"a": torch.ones(2, 2), "b": torch.ones(2, 2), "bias": torch.ones(2), "c": torch.ones(2, 2)}

    def called(**changed: Array) -> Array:
        arrays = {**plain, **changed}
        return planned(arrays.pop("a"), arrays.pop("b"), **arrays)

    planned = fusedops.plan(plain["a"], plain["b"], bias=plain["bias"], c=plain["c"])
    called()
    with pytest.raises(NotImplementedError, match="a derivative is to be recorded"):
        called(**{name: plain[name].clone().requires_grad_()})
    with forward_ad.dual_level():
        called()
        with pytest.raises(NotImplementedError, match="a derivative is to be recorded"):
            called(**{name: forward_ad.make_dual(plain[name], plain[name])})


def test_a_deleted_result_is_not_asked_whether_it_is_ready() -> None:
    """JAX answers that with an error, or with the end of the process."""
    result = jnp.ones(3) + 1
    result.block_until_ready()
    assert lifetime._is_ready(result)
    result.delete()
    assert lifetime._is_ready(result)


@pytest.mark.parametrize(
    ("epilog", "bias_step", "bytes_"),
    [("BIAS", 65, 130), ("BIAS", 0, 0), ("DRELU_BGRAD", 0, 128), ("BGRADA", 0, 64), ("BGRADB", 0, 128), ("RELU", 0, 0)],
)
def test_the_steps_of_bias_and_sums_count_for_the_alignment(epilog: str, bias_step: int, bytes_: int) -> None:
    """The heuristic asks the alignment of matrices alone; an item's bias lies where its step says."""
    member = Epilog[epilog]
    specs: dict[str, ArraySpec | None] = {
        "a": ArraySpec.dense((3, 32, 16), "float16", CUDA),
        "b": ArraySpec.dense((3, 16, 64), "float16", CUDA),
    }
    if member.bias:
        specs["bias"] = ArraySpec((3, 1, 64), (bias_step, 64, 1), "float16", CUDA)
    if member.takes:
        specs["relu_aux"] = ArraySpec.dense((3, 32, 16), "uint8", CUDA)
    assert unasked_steps(make_problem(Settings(member), specs, None, None)) == bytes_
