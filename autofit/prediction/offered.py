"""What a strategy offers where there is no GPU: its dimensions on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autofit.devices.gpus import Gpu
from autofit.equivalence.strategy_context import StrategyContext
from autofit.errors import InvalidArgument, PredictionUnavailable
from autofit.plan import Dimension, Settings
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import MetaDevice, meta_copy, not_copied, stage
from autofit.registry import collect_dimensions
from autofit.space import Space
from autofit.strategy import Strategy, World
from autofit.torch_private import gone_in
from autofit.training.builder import TrainingBuilder
from autofit.training.workload import Workload


@dataclass(frozen=True)
class Offered:
    """The dimensions of a strategy on the meta device.

    Values that can only be found by running the model (levels of checkpointing, say) are missing.

    Attributes:
        dimensions: by setting.
        notes: of the strategy, for the reader of a result.
        answers: what the GPU was asked, and its answers; another that answers alike has the same.
    """

    dimensions: Mapping[str, Dimension]
    notes: tuple[str, ...] = ()
    answers: Mapping[str, object] = field(default_factory=dict)

    def check(self, settings: Settings) -> None:
        """Refuse settings that are not among the dimensions.

        Raises:
            InvalidArgument: the strategy has no such setting or value on that GPU.
            PredictionUnavailable: the value can only be found by running the model.
        """
        try:
            Space(self.dimensions, sample_batch_size=1).complete(settings)
        except InvalidArgument as error:
            if self.notes:
                raise _takes_a_run(f"{error}; {'; '.join(self.notes)}") from error
            raise


def offered(strategy: Strategy, workload: Workload, gpu: Gpu, world_size: int = 1) -> Offered:
    """Return what a strategy offers for a workload on that many GPUs.

    Raises:
        PredictionUnavailable: the dimensions can only be found by running the model.
    """
    tracer = CudaTracer(gpu)
    world, device = World(size=world_size), MetaDevice(tracer)
    builder = TrainingBuilder(lambda: meta_copy(workload, tracer), device, seed=0, world=world)
    context = StrategyContext(builder, [])
    try:
        with stage(tracer, not_copied(workload)):
            dimensions = collect_dimensions([strategy], context)
    except Exception as error:
        own = str(error) if isinstance(error, PredictionUnavailable) else gone_in(error)
        why = own or f"{type(error).__name__}: {error}"
        raise _takes_a_run(
            f"the meaning of a setting of {strategy.name!r} is unknown: {why}"
        ) from error
    return Offered(dimensions, tuple(context.notes), tracer.answers)


def meta_dimensions(
    strategy: Strategy, settings: Settings, workload: Workload, gpu: Gpu, world_size: int = 1
) -> Mapping[str, Dimension]:
    """Return the dimensions that a strategy offers on that many GPUs, among them these settings.

    Raises:
        InvalidArgument: the strategy has no such setting or value on that GPU.
        PredictionUnavailable: the setting or the value can only be found by running the model.
    """
    found = offered(strategy, workload, gpu, world_size)
    found.check(settings)
    return found.dimensions


def _takes_a_run(why: str) -> PredictionUnavailable:
    return PredictionUnavailable(f"{why}. Pass the report that found them as plan=, or probe")
