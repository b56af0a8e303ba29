"""Print how every value of the built-in strategies trains in every usage of autograd, as a table.

    python -m benchmarks.usage_matrix              # each value alone
    python -m benchmarks.usage_matrix --pairs      # the values of two settings together
    python -m benchmarks.usage_matrix precision    # of some strategies

What differs from plain training, and what is refused, is listed below the table with its reason.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from autofit.strategy import Capabilities
from autofit.testing.matrix import EQUAL, NOT_OFFERED, cells_of, usage_table

STRATEGIES = (
    "attention",
    "checkpointing",
    "convolution",
    "head_loss",
    "memory_format",
    "offload",
    "optimizer",
    "precision",
)
"""Without what compiles for minutes, and what needs several ranks."""
DEVICE = Capabilities("cuda", bfloat16=True, float16=True, tf32=True, compute_capability=(9, 0))
"""What is only offered on an NVIDIA GPU is tried too; it runs on the CPU."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--pairs", action="store_true")
    given = parser.parse_args()
    optimizer: Any = import_module("autofit.strategies.optimizer")  # lies elsewhere in the tree
    optimizer.WORTH = float("-inf")  # every implementation, however little time it saves
    compiled: Any = import_module("autofit.strategies.compile")
    compiled.MIN_SAVED = float("-inf")  # blocks too
    cells = list(cells_of(given.strategies, pairs=given.pairs, capabilities=DEVICE))
    print(usage_table(cells))
    for cell in cells:
        if cell.outcome not in (EQUAL, NOT_OFFERED):
            print(f"- {cell}")


if __name__ == "__main__":
    main()
