"""torch.compile within a memory budget: the partitioner keeps less and computes more again.

A budget is a share of the activations that the partitioner would keep where time alone counts:
`torch._functorch.config.activation_memory_budget`, in force while a graph is compiled and at no
other time. The partitioner of torch 2.11 to 2.13 may draw random numbers again in the backward,
other ones than in the forward (pytorch issue 190758). So every operator that draws, or makes a
seed, is marked as one whose result is kept; what follows from a seed may be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

_MARK = "recompute"


def within_budget(
    budget: float, options: Mapping[str, Any] | None = None
) -> Callable[[Any, Sequence[Any]], Any]:
    """Return a backend for `torch.compile`: inductor, within a budget from 0.0 to 1.0.

    Args:
        budget: share of the activations that may be kept for the backward.
        options: of inductor, by name, as `torch.compile` takes them.
    """
    patches = {**(options or {}), "joint_custom_post_pass": _KEPT}

    def inductor(graph: Any, inputs: Sequence[Any]) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs, config_patches=patches)

    return inductor


class _DrawsKept(CustomGraphPass):
    """Marks what draws random numbers as kept for the backward.

    It runs when inductor has put operators of its own in place of torch's, each with a seed.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Mark the nodes of the joint graph; what a checkpoint of the user's marked stays so."""
        for node in graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.meta.setdefault(_MARK, CheckpointPolicy.MUST_SAVE)

    def uuid(self) -> str:
        """Return what inductor's cache tells this pass by."""
        return "autofit: draws kept, 1"


_KEPT = _DrawsKept()
