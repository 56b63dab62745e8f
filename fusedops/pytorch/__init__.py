"""What a call must be to PyTorch: an operator with derivatives, transforms, autocast and sharding of its own.

Loaded when a call needs it. Import it to load a program that `torch.export` saved in another process.
"""

from __future__ import annotations

from . import batching
from .calls import product, traced
from .layers import layers
from .operators import TORCH

__all__ = ["TORCH", "batching", "layers", "product", "traced"]
