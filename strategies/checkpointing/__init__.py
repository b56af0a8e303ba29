"""Activation checkpointing: which parts of a model recompute their activations in the backward."""

from .checkpointed import checkpointed
from .strategy import Checkpointing

__all__ = ["Checkpointing", "checkpointed"]
