"""Data-parallel training: every rank trains its own samples, and the ranks share gradients.

Offered where several ranks train together, of which each has torch's default process group.
`parallel.mode` says who holds what: with "ddp" every rank holds the whole model
(`DistributedDataParallel`), "ddp_view" has gradients in the buckets that are sent, "zero1" deals
the optimizer's state out to the ranks, "fsdp2" shards parameters, gradients and state
(`fully_shard`), and "fsdp2_keep" keeps parameters gathered from the forward to the backward.
`parallel.accumulation` says whether gradients are shared "once" in an optimizer step or after
"each" micro-batch, and `parallel.communication` in which type.
"""

from .strategy import Parallel

__all__ = ["Parallel"]
