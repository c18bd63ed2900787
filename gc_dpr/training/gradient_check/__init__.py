"""Are the cached gradients those of the undivided batch, and if not, which module is to blame?"""

from gc_dpr.training.gradient_check.batch_check import BatchCheck, check_gradients
from gc_dpr.training.gradient_check.comparison import (
    GradientCheck,
    GradientError,
    TowerDifference,
    compare_gradients,
)
from gc_dpr.training.gradient_check.inexact_modules import Finding, find_inexact_modules

__all__ = [
    "BatchCheck",
    "Finding",
    "GradientCheck",
    "GradientError",
    "TowerDifference",
    "check_gradients",
    "compare_gradients",
    "find_inexact_modules",
]
