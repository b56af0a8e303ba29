"""Wrap or shard a training's model, or share its optimizer state, with torch's own means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from autofit.errors import Unsupported
from autofit.strategy import TrainingView

_LISTS = (nn.ModuleList, nn.Sequential)
# Containers without a forward: torch shards none of them.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
# Says whether the next backward shares its gradients with the other ranks.
Synchronise = Callable[[bool], None]


@contextmanager
def replicated(
    training: TrainingView, *, in_buckets: bool, is_short: bool
) -> Iterator[Synchronise]:
    """Train a copy of the model on each rank, until this is left.

    Args:
        training: its model is placed first, since gradients of parameters that are moved later are
            not shared.
        in_buckets: gradients are views of the buckets that are sent.
        is_short: gradients are sent in bfloat16.
    """
    from torch.nn.parallel import DistributedDataParallel

    training.place_model()
    unwrapped = training.model
    wrapped = DistributedDataParallel(unwrapped, gradient_as_bucket_view=in_buckets)
    if is_short:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # By its own name torch refuses it where it was built without CUDA.
        wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))

    def synchronise(is_last: bool) -> None:
        wrapped.require_backward_grad_sync = is_last

    training.model = wrapped
    try:
        yield synchronise
    finally:
        training.model = unwrapped


def sharded(
    training: TrainingView, modules: list[str], *, keeps_gathered: bool, is_short: bool
) -> Synchronise:
    """Shard the model in place, module by module, before it is placed: it need not fit whole.

    Args:
        training: what is left of its model is placed then.
        modules: names of those that are gathered and freed on their own.
        keeps_gathered: parameters stay gathered from the forward to the backward.
        is_short: parameters are gathered, and computed with, in bfloat16; gradients are added up
            in float32, and the model's outputs have the type of its parameters, so that the loss
            is taken in it.

    Raises:
        Unsupported: parameters that are gathered together are of several types, one cannot be cut
            along its first dimension, or an embedding has sparse gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    types: dict[str, Any] = {}
    if is_short:
        types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    # Ranks of the meta device are counted on the host's mesh: torch has none of its own for it.
    kind = "cpu" if training.device.type == "meta" else training.device.type
    mesh = init_device_mesh(kind, (training.world.size,))
    model: Any = training.model
    _check_can_be_sharded(model, modules)
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=not keeps_gathered)
    whole = {**types, "output_dtype": _type_of(model)} if is_short else types
    with training.in_host_memory():
        for part in map(model.get_submodule, modules):
            shard(part, mp_policy=MixedPrecisionPolicy(**types))
        shard(model, mp_policy=MixedPrecisionPolicy(**whole))
    training.place_model()
    synchronise: Synchronise = model.set_requires_gradient_sync
    return synchronise


def _type_of(model: nn.Module) -> torch.dtype:
    """Return the type of the model's outputs without mixed precision: that of its parameters."""
    types = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(types, torch.get_default_dtype())


def _check_can_be_sharded(model: nn.Module, modules: list[str]) -> None:
    """Refuse sparse gradients before a backward fails on them, and what torch cannot cut."""
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.sparse and module.weight.requires_grad:
            raise Unsupported(
                "fully_shard needs dense gradients, but those of "
                f"{repr(name) if name else 'the model'} are sparse: create it with sparse=False"
            )

    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise Unsupported(
                f"fully_shard splits parameters along their first dimension, but {name!r} is "
                "a scalar: give it one dimension, as in nn.Parameter(torch.ones(1))"
            )
        if not parameter.is_contiguous():
            raise Unsupported(
                f"fully_shard needs contiguous parameters, but {name!r} is not contiguous "
                "(as in channels_last)"
            )

    left = {id(p): p for p in model.parameters() if p.requires_grad}
    for name in (*modules, ""):
        part = model.get_submodule(name).parameters()
        together = [left.pop(id(p)) for p in part if id(p) in left]
        if len(types := {str(p.dtype) for p in together}) > 1:
            raise Unsupported(
                "fully_shard needs parameters of one dtype, but "
                f"{repr(name) if name else 'the model'} has {', '.join(sorted(types))}"
            )


def state_dealt_out(
    factory: Callable[[Any], torch.optim.Optimizer],
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function of parameters that makes an optimizer with the state of a share of them.

    Raises (the function; on every rank alike, since one alone would leave the others waiting):
        Unsupported: the optimizer has several groups of parameters, fewer parameters than there
            are ranks, or parameters of several types.
    """
    from torch.distributed import get_world_size
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def of_share(groups: list[dict[str, Any]], **defaults: Any) -> torch.optim.Optimizer:
        return factory([parameter for group in groups for parameter in group["params"]])

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = factory(parameters).param_groups  # it has no state yet
        if len(groups) > 1:
            raise Unsupported(
                "parallel.mode=zero1 needs a single parameter group, but the optimizer "
                f"has {len(groups)}"
            )
        # No others: a rank whose share is frozen would have nothing to make an optimizer of.
        members = groups[0]["params"]
        if len(members) < (ranks := get_world_size()):
            raise Unsupported(
                f"parallel.mode=zero1 gives each rank whole parameters, and {len(members)} "
                f"are too few for {ranks}"
            )
        if len(types := {str(parameter.dtype) for parameter in members}) > 1:
            raise Unsupported(
                f"parallel.mode=zero1 needs parameters of one dtype, got {', '.join(sorted(types))}"
            )
        return ZeroRedundancyOptimizer(members, of_share)  # type: ignore[arg-type]  # any callable is called

    return make


def units_of(model: nn.Module) -> list[str]:
    """Return the names of the modules to shard beside the model itself.

    They are the children of lists and sequences that hold two or more of one class. A module that
    shares a parameter with others is left to the model: sharded in two places, the parameter would
    be two.
    """
    return [*_units(model, "", _uses(model))]


def _units(module: nn.Module, name: str, uses: Counter[int]) -> Iterator[str]:
    classes = Counter(type(child) for child in module.children())
    for key, child in module.named_children():
        path = f"{name}.{key}".lstrip(".")
        repeats = isinstance(module, _LISTS) and classes[type(child)] > 1
        if repeats and not isinstance(child, _NEVER_CALLED) and _is_whole(child, uses):
            yield path
        else:
            yield from _units(child, path, uses)


def _is_whole(module: nn.Module, uses: Counter[int]) -> bool:
    """Return whether a module has parameters, and shares none with modules beside it."""
    uses_within = _uses(module)
    return bool(uses_within) and all(count == uses[each] for each, count in uses_within.items())


def _uses(module: nn.Module) -> Counter[int]:
    """Return how often parameters are used within a module, by their ids."""
    parts = (part._parameters.values() for part in module.modules())
    return Counter(id(each) for each in chain.from_iterable(parts) if each is not None)
