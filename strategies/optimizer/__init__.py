"""How the optimizer updates the parameters: by which kernels, when, and from what state."""

from .state import state_in_bfloat16 as state_in_bfloat16
from .strategy import OptimizerImplementation as OptimizerImplementation
