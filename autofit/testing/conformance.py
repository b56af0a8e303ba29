"""The suite that every strategy must pass, run on real training; for third parties too.

    from autofit.testing import check_strategy

    def test_my_strategy():
        check_strategy(MyStrategy())

It holds a strategy to its contract: the first values change nothing, to the bit; leaving
restores model, optimizer and process, also when the training failed; an EXACT strategy trains with
equal losses and gradients, a ROUNDING one within a tolerance, one of a lower precision roughly, all
of them in one micro-batch a step and in two; dimensions and payloads survive JSON; `describe` gives
the lines that a training script needs.

Its small workloads are quick on a CPU and hold what strategies trip over: batch normalization,
dropout, repeated blocks, shared weights, a frozen parameter, keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autofit.dimension import payloads_of
from autofit.equivalence.comparison import (
    MAX_NOISE,
    SAMPLES_OF_A_COMPARISON,
    StepTrace,
    Tolerance,
    compare,
    traced_step,
)
from autofit.equivalence.steps import PlainContext, one_thread
from autofit.errors import InvalidArgument
from autofit.plan import (
    Dimension,
    Plan,
    ResolvedPlan,
    Scalar,
    Settings,
    thinned,
)
from autofit.registry import collect_dimensions, load_strategies, numerics_of
from autofit.snapshot.snapshot import HOOKS
from autofit.space import Space
from autofit.strategy import Capabilities, Numerics, Strategy
from autofit.testing.digest import Digest, differences, digest
from autofit.training.optimizers import Optimizers
from autofit.training.training import Training
from autofit.training.workload import Workload

_STEPS_COMPARED = 3
_SPLIT = 3
"""Samples of the first of two micro-batches. Their sizes differ, so a forgotten weight shows."""
_MAX_VALUES = 5
"""Most values tried of a setting besides the first; of more, evenly spaced ones are tried."""

_ROUNDING_TOLERANCE = 1e-4
"""Largest difference of a ROUNDING strategy's losses and gradients, relative to their size, where a
rounding of the first weights makes none that is larger."""
_REDUCED_TOLERANCE = 0.3
"""Largest relative difference of the first step's loss and gradients under a lower precision. A
micro-batch that is left out is more."""
_SCALE = 2.0**8
_EMPTIED = tuple(f"{name} keys: absent became ()" for name in HOOKS)
"""A tensor keeps the containers of its hooks after the last one is removed."""


def convolutions() -> Workload:
    """Six residual blocks with BatchNorm over 12x12 images, 4 channels to 16."""
    torch.manual_seed(0)
    images, labels = torch.randn(4, 4, 12, 12), torch.randint(0, 5, (4,))
    return Workload(_ConvNet(), (images, labels), criterion=nn.functional.cross_entropy)


def attention() -> Workload:
    """Four attention blocks with dropout over 16 tokens; input and output embeddings are tied."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (4, 16))
    return Workload(_Transformer(), {"tokens": tokens, "targets": tokens.roll(-1, 1)})


class _ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + x)


class _ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(_ConvBlock(16) for _ in range(6)))
        self.head = nn.Linear(16, 5)
        self.stem.bias.requires_grad_(False)  # type: ignore[union-attr]  # it was made with a bias

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(images))
        logits: torch.Tensor = self.head(features.mean((2, 3)))
        return logits


class _AttentionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        inner = self.norm1(x)
        x = x + self.attention(inner, inner, inner, attn_mask=mask, need_weights=False)[0]
        mixed: torch.Tensor = x + self.mlp(self.norm2(x))
        return mixed


class _Transformer(nn.Module):
    mask: torch.Tensor

    def __init__(self, width: int = 32, tokens: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_AttentionBlock(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((tokens, tokens), float("-inf")).triu(1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask=self.mask)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return {"loss": loss}


class NotConformant(AssertionError):
    """A strategy breaks its contract; the message lists every way in which it does."""


def check_strategy(
    strategy: Strategy | str,
    *,
    workloads: Sequence[Callable[[], Workload]] = (convolutions, attention),
    device: str | torch.device = "cpu",
    capabilities: Capabilities | None = None,
) -> int:
    """Run the whole suite over the values that the strategy offers for these workloads.

    Args:
        strategy: an object, or the name of an installed one.
        workloads: functions that build workloads, alike on each call.
        device: where to train.
        capabilities: of the device; None: all of them, so that every value is tried (on a CPU,
            slow types are emulated and TF32 changes nothing).

    Returns:
        The number of variants that were tried.

    Raises:
        NotConformant: the strategy breaks its contract, or offers no value besides the first for
            any of the workloads.
        InvalidArgument: the object is not a strategy.
    """
    (checked,) = load_strategies([strategy])
    torch_device = torch.device(device)
    problems: list[str] = []
    tried = changed = 0
    with one_thread():  # so small workloads only lose by sharing them out
        for build in workloads:
            case = Case(checked, build, torch_device, capabilities)
            for variant in case.variants():
                tried += 1
                changed += not case.is_plain(variant)
                where = f"{build.__name__}, {dict(variant.plan.settings)}"
                problems += [f"{where}: {problem}" for problem in case.problems(variant)]
    if problems:
        raise NotConformant("\n".join([f"strategy {checked.name!r}:", *problems]))
    if not changed:
        raise NotConformant(
            f"strategy {checked.name!r} offers no value besides the plain one for "
            f"{', '.join(build.__name__ for build in workloads)}, so nothing was tried: pass "
            "workloads=[...], functions that build a Workload it is for"
        )
    return tried


class Case:
    """One strategy on one workload: the variants, and breaches of the contract.

    Args:
        strategy: the strategy under test.
        build: builds the workload, alike on each call.
        device: where to train.
        capabilities: of the device; None: all of them.
    """

    def __init__(
        self,
        strategy: Strategy,
        build: Callable[[], Workload],
        device: torch.device,
        capabilities: Capabilities | None,
    ) -> None:
        self._strategy = strategy
        self._build = build
        self._device = device
        context = PlainContext(build, device, capabilities)
        try:
            self._dimensions = collect_dimensions([strategy], context)
        except InvalidArgument as error:
            raise NotConformant(str(error)) from error
        self._samples = build().sample_batch_size
        self._space = Space(self._dimensions, self._samples)
        plans = [Plan(self._samples)]
        if build().training_step is None:  # which divides its batch itself
            plans.append(Plan.split(SAMPLES_OF_A_COMPARISON, _SPLIT))
        self._plain = {plan: self._steps(ResolvedPlan(plan)) for plan in plans}
        self._roundings: dict[Plan, Tolerance] = {}

    def variants(self) -> Iterator[ResolvedPlan]:
        """Yield the first values, then each other value with all others at their first."""
        first = {name: dimension.values[0] for name, dimension in self._dimensions.items()}
        if not first:
            return
        yield self._resolved(first)
        for name, dimension in self._dimensions.items():
            for value in thinned(dimension.values[1:], _MAX_VALUES):
                yield self._resolved(self._with_allowed_others(first | {name: value}, dimension))

    def _resolved(self, settings: Settings) -> ResolvedPlan:
        plan = Plan(self._samples, settings=settings)
        return ResolvedPlan(plan, payloads_of(self._dimensions, settings), (self._strategy,))

    def is_plain(self, variant: ResolvedPlan) -> bool:
        """Return whether every setting is at its first value."""
        return not self._changed(variant)

    def _changed(self, variant: ResolvedPlan) -> list[str]:
        settings = variant.plan.settings
        return [name for name, d in self._dimensions.items() if settings[name] != d.values[0]]

    def problems(self, variant: ResolvedPlan) -> list[str]:
        """Return every way in which the strategy breaks its contract with this variant."""
        return [
            *self._description_problems(variant),
            *self._arithmetic_problems(variant),
            *self._leaving_problems(variant),
        ]

    def _with_allowed_others(
        self, settings: dict[str, Scalar], dimension: Dimension
    ) -> dict[str, Scalar]:
        needed = {name: values[0] for name, values in (dimension.when or {}).items()}
        return settings | {n: v for n, v in needed.items() if n in settings and v is not None}

    def _description_problems(self, variant: ResolvedPlan) -> Iterator[str]:
        lines = self._strategy.describe(variant.plan.settings, variant.payloads)
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            yield f"describe must return a list of lines, got {lines!r}"
        elif bool(lines) is self.is_plain(variant):
            yield f"describe must return lines if and only if a value is not the first, got {lines}"

    def _arithmetic_problems(self, variant: ResolvedPlan) -> Iterator[str]:
        levels = [numerics_of(self._strategy, name) for name in self._changed(variant)]
        settings, numerics = variant.plan.settings, max(levels, default=Numerics.EXACT)
        allowed = self._space.accumulation_of(settings) or {True, False}
        for plan in self._plain:
            accumulates = plan.accumulation_steps > 1
            if accumulates in allowed:
                run = self._steps(replace(variant, plan=replace(plan, settings=settings)))
                if problem := self._difference(plan, run, numerics):
                    yield problem + " with accumulation" * accumulates

    def _difference(self, plan: Plan, run: Sequence[StepTrace], numerics: Numerics) -> str | None:
        """Return how a run of the plan differs from one without the strategy, beyond `numerics`."""
        if not all(torch.as_tensor(trace.loss).isfinite() for trace in run):
            return f"losses are not finite: {[trace.loss for trace in run[:-1]]}"
        if numerics is Numerics.REDUCED_PRECISION:
            found = compare(self._plain[plan][0], run[0])
            is_far = max(found.loss, found.gradient) > _REDUCED_TOLERANCE
            apart = f"the loss by {found.loss:.0%}, the gradients by {found.gradient:.0%}"
            return f"more differs than a lower precision explains: {apart}" if is_far else None
        tolerance = Tolerance() if numerics is Numerics.EXACT else self._rounding(plan)
        for number, (plain, trace) in enumerate(zip(self._plain[plan], run, strict=True), start=1):
            if where := compare(plain, trace, tolerance).differences:
                when = f"in step {number}" if trace.gradients else "after the last step"
                return f"{where[0]} differs {when}"
        return None

    def _rounding(self, plan: Plan) -> Tolerance:
        """What a rounding may do: a gradient that is zero but for it moves Adam by whole steps."""
        if plan not in self._roundings:
            tolerance = Tolerance(_ROUNDING_TOLERANCE, most=MAX_NOISE)
            rounded = self._steps(ResolvedPlan(plan), is_rounded=True)
            for plain, other in zip(self._plain[plan], rounded, strict=True):
                tolerance.learn(plain, other)
            self._roundings[plan] = tolerance
        return self._roundings[plan]

    def _leaving_problems(self, variant: ResolvedPlan) -> Iterator[str]:
        """Yield the traces left by no step at all, by one step, and by one that raised."""
        for line in self._left(variant, lambda training, batch: None):
            yield f"left behind: {line}"
        for body in (_one_step, _a_step_that_raises):
            for line in self._left(variant, body):
                if not _is_training(line):
                    yield f"left behind by {body.__name__.strip('_').replace('_', ' ')}: {line}"

    def _left(self, variant: ResolvedPlan, body: Callable[[Training, Any], None]) -> list[str]:
        workload, model = self._fresh()
        optimizer = workload.build_optimizer(model)
        batch, settings = workload.step_of(self._samples), variant.plan.settings
        plain = ResolvedPlan(Plan(self._samples))
        with Training(model, optimizer, workload.recipe, plain, device=self._device) as training:
            before = _state(model, optimizer)
            with suppress(_Deliberate), self._strategy.apply(training, settings, variant.payloads):
                body(training, batch)
            left = differences(before, _state(model, optimizer))
            if training.optimizer is not optimizer:
                left.append("training.optimizer: another one than before")
            if training.scaler is not None:
                left.append("training.scaler: there was none before")
        return [line for line in left if not line.endswith(_EMPTIED)]

    def _steps(self, variant: ResolvedPlan, *, is_rounded: bool = False) -> list[StepTrace]:
        """Return the traces of some steps, and the parameters and buffers after the last.

        Args:
            variant: what is trained.
            is_rounded: begin with weights that are one rounding larger.
        """
        workload, model = self._fresh()
        for parameter in filter(torch.is_floating_point, model.parameters() if is_rounded else ()):
            parameter.data.mul_(1 + torch.finfo(parameter.dtype).eps)
        make, traces = workload.build_optimizer, list[StepTrace]()
        with Training(model, make, workload.recipe, variant, device=self._device) as training:
            scale = set_scale(training)
            torch.manual_seed(1)
            for _ in range(_STEPS_COMPARED):
                batch = workload.step_of(*variant.plan.micro_batch_sizes)
                trace = traced_step(training, batch, update=True)
                gradients = {name: each / scale for name, each in trace.gradients.items()}
                traces.append(replace(trace, gradients=gradients))
        left = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return [*traces, StepTrace(0.0, {}, state=left)]

    def _fresh(self) -> tuple[Workload, torch.nn.Module]:
        workload = self._build()
        return workload, workload.build_model().to(self._device)


def set_scale(training: Training) -> float:
    """Have float16's losses scaled by a factor, and return it: that of torch may overflow."""
    if training.scaler is None:
        return 1.0
    training.scaler.scale(torch.ones((), device=training.device))
    training.scaler.update(_SCALE)
    return _SCALE


class _Deliberate(Exception):
    """Raised to look at a failing training."""


def _one_step(training: Training, batch: Any) -> None:
    training.step(batch)


def _a_step_that_raises(training: Training, batch: Any) -> None:
    with training.context():
        training.accumulate(batch)
        raise _Deliberate


def _state(model: torch.nn.Module, optimizer: Optimizers) -> Digest:
    model.zero_grad(set_to_none=True)
    return digest({"model": model, "optimizer": optimizer})


def _is_training(difference: str) -> bool:
    """Return whether a training itself changes this: values, optimizer state, random states."""
    place = difference.split(":")[0]
    return place.endswith((" values", " gradient")) or "random" in place or ".state" in place
