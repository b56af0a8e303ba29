"""Data-parallel training: every rank trains its own samples, and the ranks share gradients.

Offered where several ranks train together, of which each has torch's default process group.
`parallel.mode` says who holds what: with "ddp" every rank holds the whole model
(`DistributedDataParallel`), "ddp_view" has gradients in the buckets that are sent, "zero1" deals
the optimizer's state out to the ranks, "fsdp2" shards parameters, gradients and state
(`fully_shard`), and "fsdp2_keep" keeps parameters gathered from the forward to the backward.
`parallel.accumulation` says whether gradients are shared "once" in an optimizer step or after
"each" micro-batch, and `parallel.communication` in which type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from autofit.errors import InvalidArgument, Unsupported
from autofit.plan import Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .parallel_wrapping import replicated, sharded, state_dealt_out, units_of

MODE, ACCUMULATION = "parallel.mode", "parallel.accumulation"
COMMUNICATION = "parallel.communication"
MODES = ("ddp", "ddp_view", "zero1", "fsdp2", "fsdp2_keep")
SHARDED = ("fsdp2", "fsdp2_keep")
_MAX_NAMES = 3

# Names of parameters that require gradients -> the ranks on which they get none.
Unused = Mapping[str, frozenset[int]]


class Parallel:
    """How the ranks of a data-parallel training share model, optimizer state and gradients.

    Args:
        numerics: how far its values may change the arithmetic of plain `DistributedDataParallel`.
    """

    name = "parallel"
    phase = Phase.PARALLEL

    def __init__(self, numerics: Numerics = Numerics.REDUCED_PRECISION) -> None:
        self.numerics = numerics

    def within(self, numerics: Numerics) -> Parallel:
        """Return the strategy with only the values that this level of numerics allows."""
        return Parallel(numerics)

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the modes for several ranks; {} where one device trains alone.

        Communication in bfloat16 is left out where the device is no GPU, or has no bfloat16.
        Sharded gradients, and those shared after each micro-batch, are added up in another order.
        Modes that wait for every parameter's gradient are left out where the loss does not use all.

        Raises:
            InvalidArgument: the ranks use different parameters, or none of the modes is left.
        """
        if context.world.size == 1:
            return {}
        modes = self._modes(context)
        if self.numerics < Numerics.ROUNDING:
            return {MODE: Dimension(modes)}
        units = {"modules": units_of(context.model)}
        types = ["default"]
        is_short = context.device.type != "cpu" and context.capabilities.bfloat16
        if is_short and self.numerics >= Numerics.REDUCED_PRECISION:
            types.append("bfloat16")
        return {
            MODE: Dimension(modes, payloads=dict.fromkeys(SHARDED, units)),
            ACCUMULATION: Dimension(["once", "each"], accumulation={"each": True}),
            COMMUNICATION: Dimension(types),
        }

    def _modes(self, context: Context) -> list[str]:
        unused = context.unused_parameters
        check_used_alike(unused, context.world.size)
        allowed = [m for m in MODES if m not in SHARDED or self.numerics >= Numerics.ROUNDING]
        left = [mode for mode in allowed if mode in SHARDED or not unused]
        if not left:
            raise InvalidArgument(
                f"no {MODE} can train this model: {why_not_replicated(unused)}. With "
                'numerics="rounding", modes that shard the model are searched, and '
                "these need no such gradient"
            )
        if left_out := [mode for mode in allowed if mode not in left]:
            why = why_not_replicated(unused)
            context.note(f"{MODE}: {', '.join(left_out)} skipped: {why}")
        return left

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Wrap or shard the model; leaving unwraps it, but a sharded model stays sharded.

        Raises:
            Unsupported: one device trains alone.
        """
        if training.world.size == 1:
            raise Unsupported(f"{MODE} needs at least two ranks: start them with torchrun")
        return _applied(training, settings, payloads)

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """Return the equivalent lines of a training script; they make no optimizer yet."""
        mode, is_short = str(settings.get(MODE, MODES[0])), _is_short(settings)
        if mode in SHARDED:
            lines = _sharding(mode, payloads[MODE]["modules"], is_short=is_short)
            flag = "model.set_requires_gradient_sync(is_last)"
        else:
            view = "gradient_as_bucket_view=True" if mode == "ddp_view" else ""
            lines = [
                "from torch.nn.parallel import DistributedDataParallel",
                f"model = DistributedDataParallel(model{', ' * bool(view)}{view})",
            ]
            if is_short:
                hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
                lines += [
                    f"from {hooks} import bf16_compress_hook",
                    "model.register_comm_hook(None, bf16_compress_hook)",
                ]
            if mode == "zero1":
                lines += [
                    "from torch.distributed.optim import ZeroRedundancyOptimizer",
                    "# make the optimizer as ZeroRedundancyOptimizer(model.parameters(), ...)",
                ]
            flag = "model.require_backward_grad_sync = is_last"
        if settings.get(ACCUMULATION, "once") == "once":
            lines.append(f"# before each micro-batch: {flag}")
        return lines


def _is_short(settings: Mapping[str, Scalar]) -> bool:
    return settings.get(COMMUNICATION, "default") == "bfloat16"


def _sharding(mode: str, modules: list[str], *, is_short: bool) -> list[str]:
    lines = ["from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"]
    whole = arguments = f", reshard_after_forward={mode == 'fsdp2'}"
    if is_short:
        lines.append(
            "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
        whole = (
            f"{arguments}, mp_policy=replace(policy, output_dtype=next(model.parameters()).dtype)"
        )
        lines.insert(0, "from dataclasses import replace")
        arguments += ", mp_policy=policy"
    if modules:
        lines += [
            f"for name in {modules}:",
            f"    fully_shard(model.get_submodule(name){arguments})",
        ]
    return [*lines, f"fully_shard(model{whole})  # the optimizer is made after this"]


@contextmanager
def _applied(
    training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
) -> Iterator[None]:
    mode, is_short = str(settings.get(MODE, MODES[0])), _is_short(settings)
    with ExitStack() as stack:
        if mode in SHARDED:
            modules = payloads[MODE]["modules"]
            synchronise = sharded(
                training, modules, keeps_gathered=mode == "fsdp2_keep", is_short=is_short
            )
        else:
            synchronise = stack.enter_context(
                replicated(training, in_buckets=mode == "ddp_view", is_short=is_short)
            )
        if mode == "zero1":
            stack.callback(training.wrap_optimizer_factory(state_dealt_out))
        if settings.get(ACCUMULATION, "once") == "once":
            stack.callback(training.before_micro_batch(synchronise))
        yield


# Every rank sends the gradients of the same parameters, or waits for ever. Where a parameter gets
# none on any rank, DistributedDataParallel stops with an error unless it looks for such parameters,
# and fully_shard leaves them alone.


def check_used_alike(unused: Unused, ranks: int) -> None:
    """Refuse ranks that do not use the same parameters.

    Raises:
        InvalidArgument: some get no gradient for a parameter for which others get one.
    """
    uneven = {name: lacking for name, lacking in unused.items() if len(lacking) < ranks}
    if not uneven:
        return
    lacking = frozenset[int]().union(*uneven.values())
    raise InvalidArgument(
        f"no parallel.mode can train this model: {_said(lacking)} no gradient for "
        f"{named(uneven)}, but other ranks do, and ranks would wait for each other "
        "forever. Use the parameters in every rank's forward (adding 0 times "
        "their sum to the loss is enough), or freeze them "
        "(requires_grad_(False)); autofit does not set "
        "find_unused_parameters=True"
    )


def why_not_replicated(unused: Unused) -> str:
    """Return why modes of `DistributedDataParallel` are left out where parameters are unused."""
    return (
        "DistributedDataParallel needs a gradient for every parameter, but the "
        f"loss does not use {named(unused)}. Freeze them (requires_grad_(False)) "
        "to have these modes searched; autofit does not set "
        "find_unused_parameters=True"
    )


def named(parameters: Iterable[str]) -> str:
    """Return the first parameters in quotes, and how many more there are."""
    names = list(parameters)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(map(repr, names[:_MAX_NAMES])) + more


def _said(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]} gets"
    return f"ranks {', '.join(map(str, numbers))} get"
