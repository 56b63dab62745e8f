"""JAX: immutable arrays and tracers, which are computed by primitives of this package (``fusedops/xla``)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import ArraySpec, ArrayView, Device
from ..dtypes import name_of
from .base import Framework

Array = Any

XLA = Device("xla")
"""Where a JAX program runs: on whatever device XLA was given, which a trace does not know."""

_IEEE = ("highest", "float32", "F32_F32_F32")
"""The values of ``jax_default_matmul_precision`` that keep all bits of float32; the others let TF32 in."""


class Jax(Framework):
    name = "jax"
    xp = jnp
    mutable = False
    joins_layers = True

    def signature(self, x: Array) -> Hashable:
        # A tracer has no memory to lose. The device is left out: XLA checks it, and a tracer has none.
        if not self.is_traced(x) and getattr(x, "is_deleted", _never)():
            raise ValueError("it was deleted or donated; its memory is gone. Pass an array that is still alive.")
        return x.shape, x.dtype

    def spec(self, x: Array) -> ArraySpec:
        # A JAX array has no strides; where XLA stores one otherwise, it converts it before a custom call reads it.
        return ArraySpec.dense(tuple(x.shape), name_of(x.dtype), XLA)

    def device(self, x: Array) -> Device:
        if self.is_traced(x):
            return XLA
        device = min(x.devices(), key=lambda device: device.id)
        return Device("cuda", device.local_hardware_id or 0) if device.platform == "gpu" else Device(device.platform)

    def view(self, x: Array) -> ArrayView:
        return ArrayView(ArraySpec.dense(x.shape, name_of(x.dtype), self.device(x)), x.unsafe_buffer_pointer(), True, x)

    def is_traced(self, x: Array) -> bool:
        return isinstance(x, jax.core.Tracer)

    def from_foreign(self, x: Array, foreign: Framework) -> Array:
        if foreign.name == "numpy":
            return x  # jnp takes NumPy arrays as they are, constants in a trace among them
        spec = foreign.spec(x)
        if not spec.compact:
            raise ValueError(f"its strides {list(spec.strides)} leave gaps or repeat; pass a contiguous copy.")
        imported = jax.dlpack.from_dlpack(x)
        if name_of(imported.dtype) != spec.dtype:
            raise TypeError(f"it is {spec.dtype}, which JAX narrows to {imported.dtype} unless jax_enable_x64 is set.")
        return imported

    def placeholder(self, shape: tuple[int, ...], like: Array) -> Any:
        return jax.ShapeDtypeStruct(shape, like.dtype)

    def settled(self, settings: Any, a: Array) -> Any:
        if settings.precision is not None or a.dtype != "float32":
            return settings
        ieee = str(jax.config.jax_default_matmul_precision) in _IEEE
        return settings._replace(precision="ieee" if ieee else "tf32")

    def wait(self, result: Array) -> None:
        jax.block_until_ready(result)

    def matrix_transpose(self, x: Array) -> Array:
        return jnp.matrix_transpose(x)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        return jnp.zeros(shape, dtype)

    def astype(self, x: Array, dtype: str) -> Array:
        return x if x.dtype == dtype else jnp.asarray(x, dtype)

    def erf(self, x: Array) -> Array:
        return jax.scipy.special.erf(x)

    def relu(self, z: Array) -> Array:
        return jax.nn.relu(z)

    def gelu_tanh(self, z: Array) -> Array:
        return jax.nn.gelu(z, approximate=True)

    def gelu_erf(self, z: Array) -> Array:
        return jax.nn.gelu(z, approximate=False)

    def silu(self, z: Array) -> Array:
        return jax.nn.silu(z)

    def pad_last(self, x: Array, length: int) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])

    def _bit_weights(self, like: Array) -> Array:
        return jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8))


def _never() -> bool:
    return False
