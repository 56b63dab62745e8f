"""The array libraries that the package knows: one file each, loaded when the first of its arrays arrives."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from array_api_compat import is_cupy_array, is_jax_array, is_numpy_array, is_torch_array

from .base import Framework

__all__ = ["Framework", "Kind", "kind_by_type", "kind_of"]

Array = Any

_KNOWN = (
    # recognises an array without importing its library, file, class
    (is_numpy_array, "numpy", "NumPy"),
    (is_torch_array, "torch", "Torch"),
    (is_jax_array, "jax", "Jax"),
    (is_cupy_array, "cupy", "CuPy"),
)


class Kind(NamedTuple):
    """What the type of an array tells; types that tell the same share one record.

    Attributes
    ----------
    framework : Framework
        The library.
    traced : bool
        Whether it stands for a value that is not there yet.
    plain : bool
        Whether it is the library's own type and no subclass, which may hold its values anywhere.
    """

    framework: Framework
    traced: bool
    plain: bool


_kinds: dict[type, Kind] = {}
_shared: dict[Kind, Kind] = {}
_frameworks: dict[str, Framework] = {}


kind_by_type: Callable[[type], Kind | None] = _kinds.get
"""Return the kind of a type whose arrays have been seen."""


def kind_of(x: Array) -> Kind:
    """Return the kind of an array; TypeError for what is none.

    The answer is kept by type, so a second array of a type costs one look-up.
    """
    kind = _kinds.get(type(x))
    if kind is None:
        framework = _recognise(x)
        kind = Kind(framework, framework.is_traced(x), framework.is_plain(x))
        kind = _kinds[type(x)] = _shared.setdefault(kind, kind)
    return kind


def _recognise(x: Array) -> Framework:
    for recognises, module, name in _KNOWN:
        if recognises(x):
            if module not in _frameworks:
                _frameworks[module] = getattr(import_module(f".{module}", __name__), name)()
            return _frameworks[module]
    if hasattr(x, "__array_namespace__") and hasattr(x, "__dlpack__"):
        namespace = x.__array_namespace__()
        if namespace.__name__ not in _frameworks:
            _frameworks[namespace.__name__] = import_module(".array_api", __name__).ArrayApi(namespace)
        return _frameworks[namespace.__name__]
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        producer: Framework = import_module(".dlpack", __name__).DLPackProducer(type(x))
        return producer
    raise TypeError(
        f"is a {type(x).__name__}, expected an array of NumPy, PyTorch, JAX, CuPy or any library with DLPack."
    )
