"""A plan in another library's loop: part as its arguments, the rest on the model.

A stack is given those settings that have a name in it (`Strategy.in_standard_terms`). All others
are applied to the model and the optimizer by their strategies, exactly as `Report.apply` does, for
as long as the training lasts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MethodType
from typing import Any

import torch

from autofit.devices.base import host_memory
from autofit.devices.cpu import fix_malloc_thresholds
from autofit.errors import InvalidArgument
from autofit.plan import Plan, ResolvedPlan, Scalar, unlike
from autofit.registry import load_strategies
from autofit.report.record import terms_of
from autofit.report.report import Report
from autofit.strategy import ALONE, Strategy, attributes_kept
from autofit.training.batch import batch_size, describe
from autofit.training.samples import Rows, SamplesKind
from autofit.training.training import ForwardContext, ForwardContexts
from autofit.units import counted


@dataclass(frozen=True)
class Division:
    """A plan, divided between a stack's own arguments and the model.

    Attributes:
        plan: the whole plan.
        arguments: standard term -> value, which the stack is given.
        rest: what is applied to model and optimizer.
        defaults: every setting at its first value.
        searched: the standard terms that the search chose values of.
        batched: names of the tensors of a batch that hold samples; empty: the report has none.
        has_rows: whether batches are tensors of rows; else they do not tell how many samples.
    """

    plan: Plan
    arguments: Mapping[str, Scalar]
    rest: ResolvedPlan
    defaults: Mapping[str, Scalar]
    searched: frozenset[str] = frozenset()
    batched: frozenset[str] = frozenset()
    has_rows: bool = True

    @property
    def terms_of_rest(self) -> frozenset[str]:
        """The standard terms of what is applied to model and optimizer."""
        parts = (terms_of(strategy, own) for strategy, own, _ in self.rest.by_strategy())
        return frozenset(term for terms in parts for term in terms)

    def samples_in(self, batch: Any) -> int | None:
        """Return the samples of a batch, by the tensors that hold some, or None if none tells."""
        if self.batched:
            return Rows(self.batched, frozenset(describe(batch)) - self.batched).size(batch)
        return batch_size(batch) if self.has_rows else None

    def misweighed(self, micro_batches: int, last_samples: int) -> str | None:
        """Say how far the gradients of a step are from those of the mean over its samples.

        Args:
            micro_batches: that the step had; fewer than the plan's where a loader ended.
            last_samples: of the last of them.

        Returns:
            Words where a trainer that divides each micro-batch's loss by the plan's accumulation
            has other gradients; None where it has the same.
        """
        plan = self.plan
        if plan.accumulation_steps == 1 or not micro_batches:
            return None
        found = []
        if micro_batches < plan.accumulation_steps:
            found.append(
                "when the loader ends within a step of "
                f"{counted(micro_batches, 'micro-batch')}, its gradients are "
                f"{micro_batches}/{plan.accumulation_steps} of their mean"
            )
        if micro_batches > 1 and 0 < last_samples < plan.micro_batch:
            found.append(
                f"a micro-batch of {last_samples} samples counts as much as one of "
                f"{plan.micro_batch}"
            )
        return f"{', and '.join(found)}: {self.whole_steps}" if found else None

    @property
    def whole_steps(self) -> str:
        """What to do so that each step has all its micro-batches, in words."""
        return (
            "drop samples until their number is a multiple of "
            f"{self.plan.samples_per_step} (drop_last=True leaves a short micro-batch "
            "out), or train with report.apply(model, optimizer), which weights by "
            "samples"
        )

    def lines(self, stack: str) -> list[str]:
        """Say which settings are applied to the model, as this stack has no argument for them."""
        return [
            (
                f"{name}={value} is applied to model and optimizer, because {stack} has no "
                "argument for it"
            )
            for _, settings, _ in self.rest.by_strategy()
            for name, value in unlike(settings, self.defaults).items()
        ]


def divide(
    report: Report,
    expresses: Callable[[str, Scalar], bool],
    strategies: Iterable[str | Strategy] | None = None,
    *,
    weighs_losses: bool = False,
) -> Division:
    """Divide a report's best plan.

    Args:
        report: of a search.
        expresses: (standard term, value) -> whether the stack has an argument for it.
        strategies: as for `Report.apply`.
        weighs_losses: whether the stack weighs a micro-batch by the items that its loss is a mean
            over, and not all of them alike.

    Raises:
        InvalidArgument: a strategy of the plan is not installed; its micro-batches differ in size,
            which no trainer makes; or the search weighed them, and the stack does not.
    """
    record = report.record
    plan, defaults = record.recommended.plan, record.default_settings
    check_even(plan)
    is_weighed = plan.accumulation_steps > 1 and "loss_weight" in record.functions_given
    if is_weighed and not weighs_losses:
        raise InvalidArgument(
            f"the search weighted the {plan.accumulation_steps} micro-batches of a "
            "step by loss_weight, but this trainer averages their losses, which gives "
            "other gradients: train with report.apply(model, optimizer)"
        )
    resolved = record.resolve_plan(strategies, report.strategies)
    arguments: dict[str, Scalar] = {}
    rest: list[Strategy] = []
    for strategy, settings, _ in resolved.by_strategy():
        if not unlike(settings, defaults):
            continue
        terms = terms_of(strategy, settings)
        if terms and all(expresses(*term) for term in terms.items()):
            arguments |= terms
        else:
            rest.append(strategy)
    batched = frozenset(record.workload.get("batched") or ())
    has_rows = record.workload.get("samples", SamplesKind.ROWS) == SamplesKind.ROWS
    return Division(
        plan=plan,
        arguments=arguments,
        rest=replace(resolved, strategies=rest),
        defaults=defaults,
        searched=_searched_terms(report),
        batched=batched,
        has_rows=has_rows,
    )


def _searched_terms(report: Report) -> frozenset[str]:
    """Return the standard terms of which the search chose values."""
    dimensions = report.record.dimensions.items()
    chosen = {name.partition(".")[0] for name, each in dimensions if len(each.values) > 1}
    known = {each.name: each for each in (*load_strategies(), *report.strategies)}
    owners = [known[name] for name in chosen & known.keys()]
    return frozenset(term for each in owners for term in getattr(each, "standard_terms", ()))


def accelerate_compiles(
    report: Report, strategies: Iterable[str | Strategy] | None, *, is_mixed: bool
) -> bool:
    """Return whether accelerate can compile a plan's model and leave its arithmetic as it is.

    Where it compiles for a GPU without mixed precision, it turns TF32 on.

    Args:
        report: of the plan.
        strategies: as for `Report.apply`.
        is_mixed: whether the training has mixed precision of its own.
    """
    if is_mixed or not str(report.record.environment["device"]).startswith("cuda"):
        return True
    resolved = report.record.resolve_plan(strategies, report.strategies)
    terms = [terms_of(strategy, settings) for strategy, settings, _ in resolved.by_strategy()]
    return any({"autocast", "tf32"} & each.keys() for each in terms)


def check_even(plan: Plan) -> None:
    """Refuse a plan whose micro-batches differ in size.

    Raises:
        InvalidArgument: they do.
    """
    if len(set(plan.micro_batch_sizes)) > 1:
        sizes = " + ".join(map(str, plan.micro_batch_sizes))
        raise InvalidArgument(
            f"the plan splits {plan.samples_per_step} samples into {sizes}, but a "
            "trainer makes micro-batches of one size: search again with "
            "SearchOptions(even_split=True), or train with report.apply(model, optimizer)"
        )


@dataclass
class Applied(AbstractContextManager["Applied"]):
    """A plan applied to another library's training; leaving it, or `undo`, takes that back.

    Attributes:
        lines: what was set, and what is applied to the model; `str` joins them.
    """

    lines: tuple[str, ...]
    _undo: ExitStack = field(repr=False)

    def undo(self) -> None:
        """Give arguments, model and optimizer back as they were; safe to call twice."""
        self._undo.close()

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def __str__(self) -> str:
        return "\n".join(self.lines)


@contextmanager
def on_model(
    rest: ResolvedPlan, model: torch.nn.Module, optimizer: Any, entry: str = "forward"
) -> Iterator[None]:
    """Apply these settings to model and optimizer, for as long as this is entered.

    Args:
        rest: the settings, with their strategies.
        model: as the stack trains it, without the wrappers that the stack puts around it.
        optimizer: torch's own, without the stack's wrapper.
        entry: the method of the model that the stack calls for forward or loss.

    Raises:
        InvalidArgument: a strategy needs what only `Report.apply` can give.
    """
    view: Any = _ForeignTraining(model, optimizer)
    fix_malloc_thresholds(view.device)
    with ExitStack() as stack:
        for strategy, settings, payloads in rest.by_strategy():
            view.strategy = strategy.name
            stack.enter_context(strategy.apply(view, settings, payloads))
        if view.contexts:
            stack.enter_context(_entered_around(model, entry, view.contexts))
        yield


class _ForeignTraining:
    """What a strategy sees of a training that another library runs: a part of `TrainingView`.

    Attributes:
        strategy: the name of the one that looks.
        contexts: what strategies enter around each forward.
    """

    world = ALONE

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        tensors = itertools.chain(model.parameters(), model.buffers())
        self.strategy, self.contexts = "", ForwardContexts()
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self.model, self.optimizer, self.scaler = model, optimizer, None

    def place_model(self) -> None:
        """Do nothing: the library has placed it."""

    def wrap_forward(
        self, context: ForwardContext, *, also_recomputation: bool = True
    ) -> Callable[[], None]:
        return self.contexts.add(context, also_recomputation=also_recomputation)

    def recomputation(self) -> AbstractContextManager[None]:
        return self.contexts.recomputation()

    def add_notes(self, notes: Callable[[], Iterable[str]]) -> Callable[[], None]:
        return lambda: None  # there is no probe that would ask for them

    @property
    def host_available_bytes(self) -> int:
        return host_memory()[1]

    def in_host_memory(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        raise self._refused("needs", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "strategy" and vars(self).get(name, value) is not value:
            raise self._refused("replaces", name)
        super().__setattr__(name, value)

    def _refused(self, does: str, name: str) -> InvalidArgument:
        return InvalidArgument(
            f"the plan's strategy {self.strategy!r} {does} training.{name}, which is not possible "
            "inside another library's loop: train with report.apply(model, "
            "optimizer), or search again without that strategy"
        )


@contextmanager
def _entered_around(
    model: torch.nn.Module, entry: str, contexts: ForwardContexts
) -> Iterator[None]:
    """Enter the contexts around every call of that method of this model.

    A copy of the model calls its own method, and a pickled one is without the contexts: the
    replacement is a method too.
    """
    bound = getattr(model, entry)
    is_own = getattr(bound, "__self__", None) is model
    original = bound.__func__ if is_own else bound

    @functools.wraps(original)  # signatures are read to find out which columns a model takes
    def covered(*args: Any, **kwargs: Any) -> Any:
        with contexts.forward():
            return original(*args, **kwargs)

    with replaced(model, entry, MethodType(covered, model) if is_own else covered):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own, for as long as this is entered."""
    with attributes_kept(owner, name):
        vars(owner)[name] = value
        yield


def library(*names: str) -> Any:
    """Import the first of these modules that is installed.

    Raises:
        InvalidArgument: none is.
    """
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise  # it is installed, and lacks something
    extra = names[0].partition(".")[0]
    raise InvalidArgument(
        f"{extra} is not installed: pip install {extra}, or torch-autofit[{extra}]"
    )
