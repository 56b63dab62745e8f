"""Products as JAX sees them: primitives with their rules, and the custom call that computes them on CUDA.

The way of a product: letters (``product_spec.py``), the primitive and its rules (``product.py``, ``derivatives.py``),
two products as one operation (``layers.py``), the devices of a mesh (``meshes.py``) and what each computes
(``parts.py``), one device's part as a problem (``local.py``), the call's text (``problem_text.py``), the handler that
runs it (``handler.py``). ``unfused.py`` is the same computation by JAX's own operations, ``composite.py`` a primitive
made of such steps.
"""

from jax.export import DisabledSafetyCheck

from . import derivatives
from .handler import counters, ensure_registered
from .layers import LayersSpec, layers
from .problem_text import TARGET
from .product import product
from .product_spec import ProductSpec

__all__ = [
    "EXPORT_CHECKS",
    "LayersSpec",
    "ProductSpec",
    "counters",
    "derivatives",
    "ensure_registered",
    "layers",
    "product",
]

EXPORT_CHECKS = (DisabledSafetyCheck.custom_call(TARGET),)
"""What ``jax.export.export`` takes as ``disabled_checks``: the custom call is known, and its text is kept stable."""
