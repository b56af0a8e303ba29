"""The operators whose results are worth keeping where all else is recomputed.

Matrix products, convolutions and attention take most of a forward's time, and what lies between
them (normalization, activation functions, dropout, sums) most of its memory.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2023,
section 5, where the opposite choice within attention is made, before fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "convolution"})
ATTENTION = "_scaled_dot_product_"


def is_product(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator of torch is a product or attention, and draws no numbers.

    One that draws has to be recomputed: what follows it draws the next numbers.
    """
    name = op.overloadpacket.__name__
    if name in PRODUCTS:
        return True
    if not name.startswith(ATTENTION) or name.endswith("_backward"):
        return False
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)
    return not given.get("dropout_p")


def keeping_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a first run, which keeps its products, and of one that finds them."""
    contexts: Any = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]  # torch
    return contexts[0], contexts[1]


def _policy(context: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = is_product(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def around_products(
    run: Callable[[Any, Callable[[], Any]], Any],
) -> AbstractContextManager[Any]:
    """Have `run(operator, call)` in place of each product of a forward, for as long as entered."""
    from torch.utils._python_dispatch import TorchDispatchMode  # a search's caller needs no mode

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            call = partial(op, *args, **(kwargs or {}))
            in_forward = torch._C._current_graph_task_id() == -1
            if in_forward and is_product(op, args, kwargs or {}):
                return run(op, call)
            return call()

    return Watching()  # type: ignore[no-untyped-call]  # torch
