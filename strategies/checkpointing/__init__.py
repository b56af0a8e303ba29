"""Activation checkpointing: which parts of a model recompute their activations in the backward."""

from .patch import checkpointed
from .strategy import Checkpointing

__all__ = ["Checkpointing", "checkpointed"]
