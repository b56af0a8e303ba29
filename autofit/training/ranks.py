"""What the ranks of a training tell one another: plain numbers, over torch's default process group.

Every rank makes the same calls in the same order, and gets the same numbers. So whatever decides
how many steps or micro-batches are run is decided from these, never from what one rank sees alone:
ranks that run different numbers of them wait for one another for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports none

from autofit.strategy import World

# For a collective. The caller, not a timeout of torch, ends a rank that waits in vain.
_LONGEST_WAIT = timedelta(days=1)


def join(world: World, device: torch.device, host: str, port: int, name: str) -> None:
    """Make the default process group of the ranks' processes; one store serves many.

    Args:
        world: the ranks, and which of them this is.
        device: of this rank; on a GPU, tensors of the host have a backend of their own.
        host, port: of the store.
        name: of the group, used for no other.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    client = TCPStore(host, port, None, False, timedelta(seconds=60))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore(name, client),
        rank=world.rank,
        world_size=world.size,
        timeout=_LONGEST_WAIT,
        device_id=device if on_gpu else None,
    )


class Ranks:
    """The ranks that train together, as one of them sees them.

    Args:
        world: how many, and which this is.
        device: where tensors of the default process group lie, if it has no backend for the host.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        has_host = "cpu:" in dist.get_backend_config()
        self._device = torch.device("cpu") if has_host else device

    def gathered(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, by rank; each rank gives equally many."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        all_of_them = [torch.empty_like(own) for _ in range(self.world.size)]
        dist.all_gather(all_of_them, own)
        return [each.tolist() for each in all_of_them]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest of each number over the ranks."""
        return [max(of_ranks) for of_ranks in zip(*self.gathered(numbers), strict=True)]

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks of a tensor on the device, without waiting for it."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.world.size

    def of_first(self, own: Any) -> Any:
        """Return what rank 0 gave, which must be picklable."""
        held = [own]
        dist.broadcast_object_list(held, 0)
        return held[0]

    def objects(self, own: Any) -> list[Any]:
        """Return what every rank gave, by rank; it must be picklable."""
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, own)
        return found
