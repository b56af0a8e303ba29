"""One rank of many, rehearsed alone: its memory in a training of any number of ranks.

Torch's fake process group answers every collective at once and moves nothing, so the same training
that real ranks run needs no sharding arithmetic here: parameters are cut, gathered and freed by
torch itself, on the meta device. What ranks send is not counted, nor what a library of theirs
(NCCL) takes. Ranks may differ, since shards need not be even: the one that needs most stands for
all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from autofit.prediction.cuda.fake_cuda import replaced
from autofit.strategy import World
from autofit.torch_private import TorchDispatchMode, check, find
from autofit.training.optimizers import by_name
from autofit.training.training import Training

_FSDP = "torch.distributed.fsdp._fully_shard"
_WITH_HANDLES = ("_fsdp_collectives", "_fsdp_init", "_fsdp_param_group", "_fsdp_state")
_HANDLE = "_get_device_handle"
_META = torch.device("meta")


@contextmanager
def one_of_ranks(
    world: World,
    device: torch.device = _META,
    note_sent: Callable[[torch.Tensor], object] = lambda tensor: None,
) -> Iterator[None]:
    """Let this process be one rank of a group that moves no data.

    Enter it before what replaces parts of torch: modules of torch are imported here.

    Args:
        world: the rank, and how many there are; one alone is in no group.
        device: what shards are on.
        note_sent: called with each tensor that ranks add up in place.

    Raises:
        PredictionUnavailable: this torch lacks a part that is used.
    """
    if world.size == 1:
        yield
        return
    check("dry run of several ranks")
    hook = sys.excepthook  # which puts the rank before each line from now on
    torch.distributed.init_process_group(
        "fake",
        store=find("torch.testing._internal.distributed.fake_pg.FakeStore")(),
        rank=world.rank,
        world_size=world.size,
    )
    try:
        with ExitStack() as stack:
            for target, name, value in _replacements(device, note_sent):
                stack.enter_context(replaced(target, name, value))
            yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = hook


def ranks_unlike_the_first(training: Training) -> list[int]:
    """Return the ranks that may hold more than the first rank, of which this is the training.

    They are the last one, where shards are uneven, and the one with most of the optimizer's state
    where whole parameters are dealt out.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor

    size = training.world.size
    ranks = []
    parameters = [p for p in training.model.parameters() if isinstance(p, DTensor)]
    if any(p.to_local().numel() * size != p.numel() for p in parameters):
        ranks.append(size - 1)
    for optimizer in by_name(training.optimizer).values():
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            dealt_out: Any = optimizer
            shares = [
                sum(p.nbytes for group in groups for p in group["params"])
                for groups in dealt_out._partition_parameters()
            ]
            ranks += [shares.index(max(shares)), size - 1]
    return [rank for rank in ranks if rank != 0]


def _replacements(
    device: torch.device, note_sent: Callable[[torch.Tensor], object]
) -> Iterator[tuple[Any, str, Any]]:
    for module in _WITH_HANDLES:  # of streams: torch has none for meta; the host's do nothing
        yield sys.modules[f"{_FSDP}.{module}"], _HANDLE, lambda kind: torch.cpu
    shards, init, groups = (
        sys.modules[f"{_FSDP}.{name}"]
        for name in ("_fully_shard", "_fsdp_init", "_fsdp_param_group")
    )
    yield shards, "_get_device_from_mesh", lambda mesh: device
    # Everything is where it belongs: counts of steps and batches stay numbers on the host.
    yield init, "_move_states_to_device", lambda parameters, buffers, device: None
    yield groups.FSDPParamGroup, "_validate_no_meta_params", lambda self: None

    def all_reduce(tensor: Any, *args: Any, async_op: bool = False, **named: Any) -> _Done | None:
        note_sent(tensor)
        return _Done(tensor) if async_op else None

    yield torch.distributed, "all_reduce", all_reduce
    quiet = "set_runtime_stats_and_log"  # it warns that there is no clock for meta
    yield find("torch.distributed.Logger"), quiet, lambda self: None
    replicas = sys.modules["torch.nn.parallel.distributed"]
    allreduce_hook = find(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook"
    )
    yield replicas, "_verify_param_shape_across_processes", lambda *args: True

    forward = replicas.DistributedDataParallel.forward
    own_values_kept: Any = _OwnValuesKept

    def forward_with_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._comm_hooks:  # left to itself, it takes the fake answer for an error
            self.register_comm_hook(None, allreduce_hook)
        if torch.is_grad_enabled():
            with torch.no_grad(), own_values_kept():  # buckets are no activations
                self._has_rebuilt_buckets |= self.reducer._rebuild_buckets()
        return forward(self, *args, **kwargs)

    yield replicas.DistributedDataParallel, "forward", forward_with_hook


class _OwnValuesKept(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Leaves values on the host that were sent to all ranks: they come back as they were."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


class _Done:
    """Work that is done, with the tensor that it was given as its result."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self, *timeout: Any) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future
