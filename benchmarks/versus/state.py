"""What of its user's a search could change, and which of it it did."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return digests of what is the user's, by the words a table has for them."""
    buffers, parameters = dict(model.named_buffers()), dict(model.named_parameters())
    modules = list(model.modules())
    return {
        "parameters": _digest(parameters.values()),
        "buffers": _digest(buffers.values()),
        "gradients": _digest(p.grad for p in parameters.values() if p.grad is not None),
        "optimizer": _digest(tree_leaves(optimizer.state_dict())),
        "device": str({str(t.device) for t in (*parameters.values(), *buffers.values())}),
        "training mode": str([module.training for module in modules]),
        "requires_grad": str([p.requires_grad for p in parameters.values()]),
        "hooks": str([(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]),
        "torch's random state": _digest([torch.get_rng_state()]),
        "the card's random state": _digest(
            [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        ),
        "Python's random state": str(hash(random.getstate())),
        "NumPy's random state": str(np.random.get_state()),
        "global flags": str(
            (
                torch.get_default_dtype(),
                torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
                torch.backends.cudnn.benchmark,
                torch.backends.cudnn.allow_tf32,
                torch.get_num_threads(),
            )
        ),
    }


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return what differs."""
    return [name for name, digest in before.items() if digest != after[name]]


def _digest(leaves: Iterable[object]) -> str:
    digest = hashlib.blake2b()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
