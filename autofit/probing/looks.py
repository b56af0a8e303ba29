"""Looks at a workload on a device, before its first probe, which make its survey.

The facts (size, shapes, fingerprint) come from the model where it lies. Loss, dimensions and
gradients take trainings on the device, one at a time; where one of those fails, the survey notes it
and goes on: the baseline's probe will meet the same fault and report it in full. A strategy that
breaks the contract of plug-ins is refused instead.

On the CPU device, whose budget binds only under accounting, accounting is on for the loss alone: it
would distort the times that strategies take while they profile, and would count twice the gradients
that are compared in host memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from autofit.equivalence.accumulation import compare_split_gradients
from autofit.equivalence.steps import StrategyContext
from autofit.errors import InvalidArgument, release_exception, with_type
from autofit.measurement import ACT
from autofit.plan import Dimension, Scalar, settings_of
from autofit.probing.requests import Workplace
from autofit.probing.serialization import live_objects
from autofit.probing.survey import (
    FIRST_SAMPLES,
    LOOKING,
    NO_TIME,
    SPLIT_GRADIENTS,
    Recomputation,
    StrategyLost,
    Survey,
    stage_of,
)
from autofit.registry import collect_dimensions, names_of_ranks
from autofit.snapshot import process
from autofit.snapshot.snapshot import Snapshot
from autofit.strategy import Phase, Strategy
from autofit.torch_flags import computing
from autofit.torch_private import gone_in
from autofit.training.batch import Batch, describe
from autofit.training.builder import TrainingBuilder
from autofit.training.contradictions import doubtful, uncut
from autofit.training.fingerprint import fingerprint
from autofit.training.lengths import Tokens, tokens_of_mix
from autofit.training.loss import LossSource
from autofit.training.samples import Rows, rows_of
from autofit.training.training import Training
from autofit.training.workload import (
    Workload,
    compiled_part,
)

_IN_EVAL_MODE = (
    f"{ACT}The model was in eval mode, which changes dropout and BatchNorm: call model.train() and "
    "search again, unless you mean it"
)


def take_survey(
    session: Workplace,
    vram_budget_bytes: int,
    left_out: Mapping[str, str] = MappingProxyType({}),
    raised: Mapping[tuple[str, Scalar], str | None] = MappingProxyType({}),
    looks_s: float = math.inf,
    recomputation: Recomputation | None = None,
) -> Survey:
    """Return the facts of a session's workload on its device, which is limited to the budget.

    Args:
        session: holds both, limited to `vram_budget_bytes`.
        left_out: by name, why a strategy is not asked for its dimensions.
        raised: see `autofit.equivalence.ranks.without_unequal`.
        looks_s: seconds after which no further look begins, but of what ranks cannot do without.
        recomputation: whether it may be needed; None: it may.

    Raises:
        StrategyLost: the device died.
        InvalidArgument: the workload's functions make no model, optimizer or batch, or a strategy
            breaks the contract of plug-ins.
        Exception: what the user's code raised in making them.
    """
    looks = _Looks(session, left_out, time.monotonic() + looks_s)
    session.on_stage(LOOKING)
    first: _FirstLook = session.looked_at or _FirstLook.of(session)
    session.looked_at, builder = first, first.builder
    lost = looks.why_left_out(SPLIT_GRADIENTS)
    compared = compare_split_gradients(builder, builder.fresh_workload(), lost=lost)
    keeps_accumulation = compared.why_kept is not None
    if recomputation is not None:
        looks.leave_out(recomputation.why_left_out(keeps_accumulation=keeps_accumulation))
    dimensions, notes = _dimensions(session, builder, looks)
    if builder.world.size > 1:
        dimensions, notes = _that_ranks_share(session, first.one.model, dimensions, notes, raised)
    session.on_stage(LOOKING)  # no look any more: who dies in what follows lost none
    if not looks.may_be_taken_again:
        session.looked_at = None
    return replace(
        first.survey,
        vram_budget_bytes=vram_budget_bytes,
        split_gradients=compared.comparison,
        may_change_accumulation=not keeps_accumulation,
        accumulation_kept=compared.why_kept,
        dimensions=dimensions,
        notes=(*first.survey.notes, *notes, *compared.notes),
    )


def notes_on_samples(workload: Workload) -> Iterator[str]:
    """Yield what the user should know of how samples were counted and cut."""
    if not workload.chose_size and workload.global_batch is None:
        what = "a function n -> batch" if workload.makes_batches else "a data set"
        yield (
            f"The baseline's micro-batch of {workload.sample_batch_size} is autofit's choice, "
            f"since {what} has no size of its own: pass global_batch= to compare with yours"
        )
    if not isinstance(workload.samples, Rows) or workload.makes_batches:
        return
    if names := doubtful(workload.longest_batch):
        shapes = describe(workload.longest_batch)
        yield (
            f"{ACT}{', '.join(f'{name} {shapes[name]}' for name in names[:3])} "
            f"{'is' if len(names) == 1 else 'are'} not cut into micro-batches, since there are not "
            f"{workload.sample_batch_size} rows: if they grow with the samples, pass samples and "
            "Workload(collate_fn=)"
        )
    if kept := uncut(workload.longest_batch):
        yield (
            f"{ACT}{', '.join(kept[:3])} has an entry for each of {workload.sample_batch_size} "
            "samples, but is not a tensor, so every micro-batch gets all of it: pass samples and "
            "Workload(collate_fn=)"
        )


def _tokens(workload: Workload) -> Tokens | None:
    """Return the tokens of a sample, where the batch has a row for each."""
    size = workload.described_size
    mix = workload.mix(size)
    rows = rows_of(workload.samples) or Rows.of_size(mix[-1][1], size)
    tokens = tokens_of_mix(mix, rows.batched)
    if tokens is None or workload.chose_size or workload.makes_batches:
        return tokens
    # Of a data set, whose first samples may be shorter than others
    return tokens_of_mix(workload.whole_mix(workload.sample_batch_size), rows.batched)


@dataclass(frozen=True)
class _FirstLook:
    """What a survey begins with, kept for another one of the same session.

    Attributes:
        one: the model of all looks.
        builder: of trainings of that model.
        survey: what is known before any look.
    """

    one: _OneModel
    builder: TrainingBuilder
    survey: Survey

    @classmethod
    def of(cls, session: Workplace) -> _FirstLook:
        """Look at a session's model and its first samples."""
        given = session.builder
        busy, one = given.device.busy(), _OneModel(given)
        builder = _BuilderOfOne(one.workload, given.device, given.seed, given.world)
        return cls(one, builder, replace(_first_survey(session, builder, one.model), busy=busy))


def _first_survey(session: Workplace, builder: TrainingBuilder, model: torch.nn.Module) -> Survey:
    """Return the facts about a model on its device, its loss and its samples.

    Raises:
        InvalidArgument: of several ranks, another has other weights or another GPU.
    """
    parameters, compiled = list(model.parameters()), compiled_part(model)
    own = _fingerprint(builder, model)
    if compiled is not None:
        session.on_stage(f"{LOOKING}: {compiled}")
    loss, workload = _loss_source(session, builder), builder.fresh_workload()
    rows = rows_of(workload.samples)
    return Survey(
        environment=builder.device.environment,
        vram_budget_bytes=0,  # each survey has its own
        fingerprint=own,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        loss=loss,
        sample_batch_size=workload.sample_batch_size,
        sample_shapes=workload.sample_shapes(),
        samples=workload.samples.kind,
        batched=None if rows is None else sorted(rows.batched),
        described_size=workload.described_size,
        global_batch=workload.global_batch,
        split_gradients=None,
        may_change_accumulation=False,
        dimensions={},
        notes=tuple(_notes_on(session, workload, model, compiled)),
        ranks=builder.world.size,
        tokens=_tokens(workload),
        chose_size=workload.chose_size,
    )


class _Looks:
    """Which looks are left out.

    Args:
        session: of the survey.
        left_out: by name, why a look is left out.
        end_at: when no further one begins, by `time.monotonic`.
    """

    def __init__(self, session: Workplace, left_out: Mapping[str, str], end_at: float) -> None:
        self._session, self._left_out, self._end_at = session, dict(left_out), end_at

    def leave_out(self, why: Mapping[str, str]) -> None:
        """Leave these out as well, for these reasons."""
        self._left_out |= why

    @property
    def may_be_taken_again(self) -> bool:
        """Whether looks were skipped, so another survey has to follow."""
        names = [strategy.name for strategy in self._session.strategies]
        return {SPLIT_GRADIENTS, *names} <= self._left_out.keys()

    def why_left_out(self, name: str, *, is_needed: bool = False) -> str | None:
        """Return why a look is left out; None where it begins now, and its stage is told."""
        if (why := self._left_out.get(name)) is not None:
            return why
        if not is_needed and self._is_over():
            return NO_TIME
        self._session.on_stage(stage_of(name))
        return None

    def _is_over(self) -> bool:
        """Return whether the time is over; of several ranks, for the first."""
        is_over, world = time.monotonic() >= self._end_at, self._session.builder.world
        if world.size > 1 and self._end_at < math.inf:
            from autofit.training.ranks import Ranks  # most searches are of one device

            is_over = Ranks(world, self._session.builder.device.torch_device).of_first(is_over)
        return is_over


def _that_ranks_share(
    session: Workplace,
    model: torch.nn.Module,
    dimensions: dict[str, Dimension],
    notes: list[str],
    raised: Mapping[tuple[str, Scalar], str | None],
) -> tuple[dict[str, Dimension], list[str]]:
    """Return the dimensions with the gradients of one process on several ranks, and all notes."""
    from autofit.equivalence import ranks  # most searches are of one device

    check_shared(session.builder.world.size, session.strategies, dimensions, notes)
    session.on_stage(stage_of("gradients of several ranks"))
    dimensions, unequal = ranks.without_unequal(
        session.builder, session.strategies, dimensions, raised
    )
    return dimensions, [*notes, *unequal, *ranks.normalizing_apart(model)]


def check_alike(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks that differ in GPU or first weights, by the first that does.

    Raises:
        InvalidArgument: what it has instead.
    """
    first = ranks[0]
    for rank, facts in enumerate(ranks):
        if facts["weights"] != first["weights"]:
            raise InvalidArgument(
                f"rank {rank} starts with other weights than rank 0: the function that builds the "
                "model must take random numbers from torch alone, which autofit seeds on each rank"
            )
        if facts["gpu"] != first["gpu"]:
            raise InvalidArgument(
                f"rank {rank} has gpu {facts['gpu']}, rank 0 {first['gpu']}: use "
                f"{len(ranks)} GPUs of one kind"
            )


def check_shared(
    ranks: int,
    strategies: Iterable[Strategy],
    dimensions: Mapping[str, Dimension],
    notes: Sequence[str],
) -> None:
    """Refuse ranks none of whose strategies shares the training: each would train alone.

    Args:
        ranks: how many there are.
        strategies, dimensions: of the survey.
        notes: of the survey; those that begin with a strategy's name say why it was left out.

    Raises:
        InvalidArgument: no strategy of `Phase.PARALLEL` offers a setting.
    """
    names = [strategy.name for strategy in strategies if strategy.phase is Phase.PARALLEL]
    if any(settings_of(name, dimensions) for name in names):
        return
    alone = f"no strategy shares gradients among the {ranks} ranks, so each would train alone"
    if not names:
        raise InvalidArgument(
            f"{alone}: add an installed one to strategies= "
            f"({', '.join(names_of_ranks()) or 'there is none'}), or start one process"
        )
    why = "; ".join(note for note in notes if note.startswith(tuple(names)))
    raise InvalidArgument(f"{alone}: {why or f'{names[0]} offers no setting for this model'}")


def _notes_on(
    session: Workplace, workload: Workload, model: torch.nn.Module, compiled: str | None
) -> Iterator[str]:
    """Yield what the user should know of the device, the model and the samples."""
    yield from (f"{ACT}{note}" for note in session.notes)
    if not model.training and workload.training_step is None:  # which may call train() itself
        yield _IN_EVAL_MODE
    if compiled:
        yield f"{compiled}: no other way to compile it is tried"
    yield from notes_on_samples(workload)


class _OneModel:
    """A copy of a workload whose model is built once, for a dozen trainings one after the other.

    Like the process, it is put back as it was whenever the workload is asked for, which takes less
    time than building or reading the model again; attributes of objects of the user's own classes
    stay as they are. Probes get a copy of their own.

    Attributes:
        model: as built, or the live one.
    """

    def __init__(self, builder: TrainingBuilder) -> None:
        self._builder = builder
        self._build()

    def _build(self) -> None:
        workload = self._builder.fresh_workload()
        torch.manual_seed(self._builder.seed)
        self.model = workload.build_model()
        if self.model is not workload.model:
            workload = replace(workload, model=self._built)
        self._workload, self._random_states = workload, process.random_states()
        others = live_objects(workload, but=("model", "loader"))
        self._snapshot = Snapshot({"model": self.model, **others})

    def workload(self) -> Workload:
        """Return the workload, as it was at first."""
        try:
            self._snapshot.restore()
        except Exception:  # what lay on a device that died is lost with it
            self._build()
        return self._workload

    def _built(self) -> torch.nn.Module:
        """Return the model, with the random states that building it leaves."""
        process.restore(self._random_states)
        return self.model


class _BuilderOfOne(TrainingBuilder):
    """Builds trainings of a `_OneModel`, whose device memory is free when it is reclaimed."""

    def reclaim(self) -> None:
        """Put the model back where it was first."""
        self.fresh_workload()
        super().reclaim()


def _fingerprint(builder: TrainingBuilder, model: torch.nn.Module) -> str:
    """Return the fingerprint of a workload whose model is the same one on all ranks.

    Raises:
        InvalidArgument: of several ranks, another has other weights or another GPU.
    """
    workload, environment = builder.fresh_workload(), builder.device.environment
    optimizer = workload.build_optimizer(model)
    if builder.world.size > 1:
        from autofit.training.ranks import Ranks  # most searches are of one device

        # NaN and infinity are counted, not added
        real = (p for p in model.parameters() if not p.is_complex())
        finite = (p.detach().nan_to_num(1.0, 1.0, -1.0) for p in real)
        weights = sum(float(values.sum(dtype=torch.float64)) for values in finite)
        ranks = Ranks(builder.world, builder.device.torch_device)
        check_alike(ranks.objects({"gpu": environment.gpu, "weights": weights}))
    return fingerprint(workload, model, optimizer, environment, computing())


def _loss_source(session: Workplace, builder: TrainingBuilder) -> str | None:
    if builder.fresh_workload().training_step is not None:
        return LossSource.TRAINING_STEP
    session.on_stage(FIRST_SAMPLES)
    try:
        samples = min(builder.fresh_workload().sample_batch_size, 2)
        with builder.device.accounting():
            source: LossSource | None = builder.with_training(_source_of_loss, samples)
        return source
    except Exception as error:
        release_exception(error)
        return None
    finally:
        builder.reclaim_or_not()


def _source_of_loss(training: Training, batch: Batch) -> LossSource | None:
    training.loss(batch)
    return training.loss_source


def _dimensions(
    session: Workplace,
    builder: TrainingBuilder,
    looks: _Looks,
) -> tuple[dict[str, Dimension], list[str]]:
    dimensions: dict[str, Dimension] = {}
    notes: list[str] = []
    for strategy in session.strategies:
        name, is_needed = strategy.name, strategy.phase is Phase.PARALLEL
        if (why := looks.why_left_out(name, is_needed=is_needed)) is not None:
            notes.append(f"{name} left out: {why}")
            continue
        context = StrategyContext(builder, [])
        found = _look(session, builder, strategy, context)
        notes += context.notes
        if isinstance(found, str):
            notes.append(f"{name} left out: {found}")
        else:
            dimensions |= found
    return dimensions, notes


def _look(
    session: Workplace, builder: TrainingBuilder, strategy: Strategy, context: StrategyContext
) -> dict[str, Dimension] | str:
    """Return a strategy's dimensions, or in words what it raised instead."""
    try:
        return dict(collect_dimensions([strategy], context))
    except InvalidArgument:  # a broken plug-in, or arguments that fail in any probe
        raise
    except Exception as error:
        if (fault := session.device_fault()) is not None:
            raise StrategyLost(strategy.name, f"the device failed ({fault})") from error
        release_exception(error)
        return gone_in(error) or with_type(error)
    finally:
        context.close()
        builder.reclaim_or_not()
