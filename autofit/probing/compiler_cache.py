"""Whether code that torch compiled was found in its cache, which outlives the process.

torch keeps what its compiler makes in a folder (`TORCHINDUCTOR_CACHE_DIR`), by graph, shapes and
settings. So the first start of a compiled plan is a cold one, and a later start is warm: of another
worker, and of the user's own training on this machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from autofit import torch_private

_FOUND = "fxgraph_cache_hit"
_COMPILED = ("fxgraph_cache_miss", "fxgraph_cache_bypass")


@dataclass(frozen=True)
class CacheUse:
    """What this process has asked of the cache since this was made."""

    _before: tuple[int, int] = field(default_factory=lambda: _counted())

    def is_warm(self) -> bool | None:
        """Return whether all code was found there.

        None if nobody asked, or torch does not say.
        """
        found, compiled = (now - was for now, was in zip(_counted(), self._before, strict=True))
        return compiled == 0 if found or compiled else None


def _counted() -> tuple[int, int]:
    """Return how many graphs were found in the cache, and how many were compiled."""
    if "torch._dynamo.utils" not in sys.modules:  # then nothing was compiled
        return 0, 0
    try:
        counts = torch_private.find("torch._dynamo.utils.counters")["inductor"]
    except (ImportError, AttributeError):
        return 0, 0
    return counts[_FOUND], sum(counts[name] for name in _COMPILED)
