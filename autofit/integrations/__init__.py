"""Trainings that another library runs: make a workload from one, and apply a plan to it.

    report = autofit.integrations.transformers.search(trainer, vram_budget="24GiB")
    autofit.integrations.transformers.apply(report, trainer)

Each module here belongs to one library, and imports it when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["accelerate", "hugging_face", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'autofit.integrations' has no attribute {name!r}")
    return import_module(f"autofit.integrations.{name}")
