"""How the optimizer updates the parameters: by which kernels, and when."""

from .strategy import OptimizerImplementation as OptimizerImplementation
