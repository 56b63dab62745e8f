"""Programs over several devices: exported, cached on disk, lowered without a mesh; products that differ in epilog."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src.sharding_impls import GSPMDSharding  # JAX still gives such shardings, but does not name them
from jax.sharding import AxisType
from jax_cases import ACTIVATIONS, assert_same, compiled, stacked
from mesh_cases import ALL, COLUMNS, assert_both, both, mesh_of
from test_jax_programs import lowering, output_of

import fusedops.xla

__all__ = ["lowering"]

Array = Any

AUTO = mesh_of(AxisType.Auto)
IS_CALL = "xla_on_cpu" in sys.modules
"""Whether products are lowered to the custom call here."""


def test_epilogs_are_not_taken_for_each_other() -> None:
    """In one program and in one process, over the same arrays."""
    arrays = ALL.placed(AUTO)

    def all_of(name: str) -> Any:
        return lambda *xs: [getattr(ALL.product, name)(activation)(*xs) for activation in ACTIVATIONS]

    assert_same(compiled(all_of("ours"), *arrays), compiled(all_of("plain"), *ALL.product.arrays()))
    for activation in ACTIVATIONS:
        got = compiled(ALL.product.ours(activation), *arrays)
        assert_same(got, ALL.product.plain(activation)(*ALL.product.arrays()), what=str(activation))


def test_the_context_need_not_name_the_mesh() -> None:
    """Nor an array: the compiler's own shardings, of which JAX knows no mesh, are taken too."""
    p = ALL.product
    own = [GSPMDSharding(tuple(jax.devices()), x.sharding._to_xla_hlo_sharding(x.ndim)) for x in ALL.placed(AUTO)]
    placed = [jax.device_put(x, sharding) for x, sharding in zip(p.arrays(), own, strict=True)]
    assert_both(p.ours("gelu_tanh"), p.plain("gelu_tanh"), placed, p.arrays())


def test_pmap() -> None:
    a, *rest = COLUMNS.product.arrays()
    axes = (0, None, None, None)
    got = jax.pmap(COLUMNS.product.ours("relu"), in_axes=axes)(stacked(a, 8), *rest)
    assert_same(got, jax.vmap(COLUMNS.product.plain("relu"), axes)(stacked(a, 8), *rest))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_exported_over_several_devices(kind: AxisType) -> None:
    """But for an operation that is partitioned at compile time, which JAX cannot write into a file."""
    arrays, program = ALL.placed(mesh_of(kind)), jax.jit(both(ALL.product.ours("gelu_tanh")))
    exported = jax.export.export(program, disabled_checks=fusedops.xla.EXPORT_CHECKS)
    if IS_CALL and kind is AxisType.Auto:
        with pytest.raises(NotImplementedError, match="serialization of host_callbacks is not yet implemented"):
            exported(*arrays).serialize()
        return
    again = jax.export.deserialize(exported(*arrays).serialize())
    assert again.nr_devices == 8
    assert_same(again.call(*arrays), compiled(both(ALL.product.plain("gelu_tanh")), *ALL.product.arrays()))


CACHED = """
from virtual_devices import ask_for_virtual_devices
ask_for_virtual_devices()
jax.config.update("jax_enable_x64", True)
from mesh_cases import *
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name.rpartition("/")[2]))
for kind in (AxisType.Auto, AxisType.Explicit):
    arrays = ALL.placed(mesh_of(kind))
    for activation in sys.argv[1].split():
        program = jax.jit(ALL.product.ours(activation)).lower(*arrays)
        found.clear()
        program = program.compile()
        print(kind.name, activation, *sorted(set(found) & {"cache_hits"}))
        assert_same(program(*arrays), ALL.product.plain(activation)(*ALL.product.arrays()), what=activation)
"""


def test_a_program_cached_by_another_process(lowering: str, tmp_path: Path) -> None:
    """Found by the process that wants the same epilog, and not by one that wants another of equal arrays."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Without it the key holds an address of this process, and no other process finds a program over Auto axes.
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
    }
    assert output_of(CACHED, lowering, "relu", **settings) == ["Auto relu", "Explicit relu"]
    found = [f"{kind} {x}" for kind in ("Auto", "Explicit") for x in ("gelu_tanh", "relu cache_hits")]
    assert output_of(CACHED, lowering, "gelu_tanh relu", **settings) == found
