"""The rules of what a product writes: ``out`` and the auxiliary output, given by the caller or to be made."""

from __future__ import annotations

from collections.abc import Mapping

from .arrays import ArraySpec, Device
from .dtypes import DTYPES, name_of
from .epilogs import Aux
from .operands import Ints, Specs, check_dense, check_dtype, drop_vectors, with_vectors
from .residuals import aux_dtype, aux_shape


def chosen_out_dtype(asked: object, dtype: str) -> str:
    allowed = DTYPES[dtype].out
    if asked is None:
        return dtype
    name = name_of(asked)
    if name not in allowed:
        raise TypeError(f"out_dtype is {name}; {dtype} operands give {' or '.join(allowed)}.")
    return name


def full_out_spec(
    out: ArraySpec | None, dtype: str, full_shape: Ints, vector_a: bool, vector_b: bool, device: Device
) -> ArraySpec:
    if out is None:
        return ArraySpec.dense(full_shape, dtype, device)
    check_dtype("out", out, dtype)
    expected = drop_vectors(full_shape, vector_a, vector_b)
    if out.shape != expected:
        raise ValueError(f"out has shape {out.shape}, expected {expected}.")
    if _runs_into_itself(out):
        raise ValueError(f"out has strides {out.strides}: its elements share memory. Pass an array of its own.")
    return with_vectors(out, vector_a, vector_b)


def _runs_into_itself(spec: ArraySpec) -> bool:
    """Return whether some axis does not step over all that the axes of smaller strides reach."""
    reach = 0
    for step, extent in sorted((abs(s), n) for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False


def check_mapping(given: object) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"aux_out is a {type(given).__name__}, expected a dict from the auxiliary output's name to an array."
        )


def check_aux_names(given: Mapping[str, object] | None, name: str | None) -> None:
    names = [] if name is None else [name]
    if given is not None and list(given) != names:
        wanted = f'the one key "{name}"' if name else "nothing: this epilog has no auxiliary output"
        raise ValueError(f"aux_out has keys {list(given)}, expected {wanted}.")


def aux_out_spec(
    given: Specs | None, aux: Aux | None, batch_shape: Ints, m: int, n: int, out_dtype: str, device: Device
) -> ArraySpec | None:
    check_aux_names(given, aux.name if aux else None)
    if aux is None:
        return None
    shape, dtype = aux_shape(aux, batch_shape, m, n), aux_dtype(aux, out_dtype)
    spec = given and given[aux.name]
    if not spec:
        return ArraySpec.dense(shape, dtype, device)
    check_dense(f'aux_out["{aux.name}"]', spec, shape, dtype)
    return spec
