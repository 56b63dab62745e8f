"""Fused matrix products with bias, activation and their gradients, for arrays of any framework.

``import fusedops`` loads no array framework but NumPy, and no GPU library; each is loaded when the first of its arrays
arrives.
"""

from .epilogs import Epilog
from .mlp import MlpGrad, MlpSaved, mlp, mlp_grad
from .ops import epilog_matmul, explain, matmul, plan
from .options import options
from .plans import Plan
from .support import support

__version__ = "0.1.0"

__all__ = [
    "Epilog",
    "MlpGrad",
    "MlpSaved",
    "Plan",
    "epilog_matmul",
    "explain",
    "matmul",
    "mlp",
    "mlp_grad",
    "options",
    "plan",
    "support",
]
