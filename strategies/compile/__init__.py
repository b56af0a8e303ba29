"""torch.compile as settings: see `autofit.strategies.compile.strategy`."""

from autofit.strategies.compile.strategy import Compile

__all__ = ["Compile"]
