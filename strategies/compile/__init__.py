"""torch.compile as settings: see `autofit.strategies.compile.strategy`."""

from .strategy import Compile

__all__ = ["Compile"]
