"""The space of a search: its variants, and the batch geometries of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod

from autofit.codec import Count
from autofit.errors import InvalidArgument
from autofit.plan import MAX_ACCUMULATION_STEPS, Dimension, Plan, Scalar, Settings, check_count
from autofit.units import shortened

MAX_VARIANTS_TO_PLAN = 50_000
"""Of a space: with 32,768 a decision took 0.8 s and 600 MiB, and all built-in strategies together
offer some thousands."""
FEW_SIZES = 4
"""Even splits of a global batch, 1 and all of it among them, that hardly leave a choice."""
MAX_COMBINATIONS = 2**22
"""Of values, most of which `when` rules out: they are gone through one by one."""

UNBOUNDED_MICRO_BATCH = 2**20
"""Largest micro-batch where nothing else bounds it: an Optuna parameter needs an upper end."""


@dataclass(frozen=True)
class Space:
    """Every plan that a search may choose.

    Attributes:
        dimensions: setting name -> its values, in the order of the strategies.
        sample_batch_size: samples in the user's sample batch, n.
        global_batch: samples per optimizer step to keep; None: free, with one accumulation step.
        may_change_accumulation: whether the accumulation steps may differ from the baseline's;
            without effect where there is no global batch.
        max_micro_batch: largest micro-batch to try; None: bounded by the device alone.
        even_split: whether all micro-batches have one size, a divisor of the global batch.
        fixed: settings with a single value, which a plan may name but need not.
        ranks: devices that train together, each with its own micro-batches.

    Raises:
        InvalidArgument: a count is below one, the global batch cannot be shared by the ranks, or
            the baseline's micro-batch is larger than the largest to try.
    """

    dimensions: Mapping[str, Dimension]
    sample_batch_size: Count
    global_batch: Count | None = None
    may_change_accumulation: bool = True
    max_micro_batch: Count | None = None
    even_split: bool = False
    fixed: Settings = field(default_factory=dict)
    ranks: Count = 1

    def __post_init__(self) -> None:
        for name in ("global_batch", "max_micro_batch", "ranks"):
            if (count := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_count(name, count))
        if self.global_batch is not None and self.ranks > 1:
            self._split(self.global_batch, 1, {})  # refuses what cannot be shared
        largest, baseline = self.max_micro_batch, self._baseline_micro_batch()
        if largest is not None and baseline > largest:
            raise InvalidArgument(
                f"max_micro_batch={largest} rules out the baseline, whose micro-batch of "
                f"{baseline} is the size of the sample batch. Use a sample batch of at "
                f"most {largest} samples, or a larger max_micro_batch"
            )

    @property
    def baseline(self) -> Plan:
        """Every setting at its first value, at the sample batch's own size n.

        With a global batch: the split whose micro-batch is nearest below n.
        """
        return self.plan(self._baseline_micro_batch(), self.default_settings)

    @property
    def default_settings(self) -> Settings:
        """Every setting at its first value."""
        return {name: dimension.values[0] for name, dimension in self.dimensions.items()}

    @property
    def samples_per_rank(self) -> int | None:
        """The most samples of the global batch on one device; None: free."""
        return None if self.global_batch is None else -(-self.global_batch // self.ranks)

    @property
    def largest_micro_batch(self) -> int:
        """The largest micro-batch of any plan."""
        if self.only_micro_batch is not None:
            return self.only_micro_batch
        bounds = [self.samples_per_rank, self.max_micro_batch]
        given = [bound for bound in bounds if bound is not None]
        return min(given, default=max(UNBOUNDED_MICRO_BATCH, self.sample_batch_size))

    @property
    def only_micro_batch(self) -> int | None:
        """The micro-batch of every plan if accumulation may not change; else None."""
        if self.global_batch is None or self.may_change_accumulation:
            return None
        return self._baseline_micro_batch()

    def largest_micro_batch_of(self, settings: Settings) -> int:
        """Return the largest micro-batch of a variant's plans; 0 if it has none of its own."""
        allowed = self.accumulation_of(settings)
        if True not in allowed:
            is_whole = self._plan(self.largest_micro_batch, {}).accumulation_steps == 1
            return self.largest_micro_batch if is_whole or False not in allowed else 0
        if self.global_batch is None or self.samples_per_rank is None or False in allowed:
            return 0
        half = min(self.largest_micro_batch, -(-self.samples_per_rank // 2))
        plan = self._split(self.global_batch, self.only_micro_batch or half, {})
        return plan.micro_batch if plan.accumulation_steps > 1 else 0

    def smallest_micro_batch_of(self, settings: Settings) -> int:
        """Return the smallest micro-batch of a variant's plans: the largest if it may not split."""
        if self.samples_per_rank is None:
            return 1
        if False in self.accumulation_of(settings):
            return self.largest_micro_batch
        return -(-self.samples_per_rank // MAX_ACCUMULATION_STEPS)

    def accumulation_of(self, settings: Settings) -> set[bool]:
        """Return whether the values accumulate, of those that do not go with both."""
        named = [(dimension.accumulation, settings[n]) for n, dimension in self.dimensions.items()]
        return {accumulation[value] for accumulation, value in named if value in accumulation}

    def plan(self, micro_batch: int, settings: Settings) -> Plan:
        """Return the variant's plan with the largest possible micro-batch up to this one.

        Settings that its geometry or its other settings do not allow are at their first values.
        """
        settled = self._settled(settings)
        plan = self._plan(micro_batch, settled)
        accumulates = plan.accumulation_steps > 1
        return replace(plan, settings=self._settled(settled, accumulates=accumulates))

    def _settled(self, settings: Settings, *, accumulates: bool | None = None) -> Settings:
        """Return the settings with those that may not differ from their first values at these."""
        settled, before = dict(settings), None
        while settled != before:  # what is reset may be what others depend on
            before = dict(settled)
            for name, dimension in self.dimensions.items():  # in order: resets decide others
                if name not in settled:
                    continue
                asked = dimension.accumulation.get(settled[name])
                fits = None in (asked, accumulates) or asked is accumulates
                if not fits or not dimension.allowed_with(settled):
                    settled[name] = dimension.values[0]
        return settled

    def _plan(self, micro_batch: int, settings: Settings) -> Plan:
        wanted = max(1, micro_batch)
        if self.max_micro_batch is not None:
            wanted = min(wanted, self.max_micro_batch)
        if self.global_batch is None:
            return Plan(wanted, settings=settings, ranks=self.ranks)
        if self.only_micro_batch is not None:
            wanted = self.only_micro_batch
        return self._split(self.global_batch, wanted, settings)

    def variants(self) -> Iterator[Settings]:
        """Yield each variant once, the plain one first."""
        names = list(self.dimensions)
        for values in product(*(self.dimensions[name].values for name in names)):
            settings = dict(zip(names, values, strict=True))
            if self.allows(settings):
                yield settings

    def check_can_be_planned(self) -> None:
        """Refuse a space that is too large to choose in.

        Raises:
            InvalidArgument: it has more than `MAX_VARIANTS_TO_PLAN` variants; the message has the
                settings with most values.
        """
        counts = {name: len(dimension.values) for name, dimension in self.dimensions.items()}
        combinations = prod(counts.values())
        if combinations <= MAX_VARIANTS_TO_PLAN:
            return
        within = combinations <= MAX_COMBINATIONS
        beyond = islice(self.variants(), MAX_VARIANTS_TO_PLAN, None)
        if within and next(beyond, None) is None:
            return
        largest = sorted((name for name in counts if counts[name] > 1), key=lambda n: -counts[n])
        named = shortened([f"{name} ({counts[name]} values)" for name in largest], 6)
        raise InvalidArgument(
            f"the settings have {combinations:,} combinations of values, and a search can choose "
            f"among {MAX_VARIANTS_TO_PLAN:,} at most: {named}. Pass fewer strategies, or "
            "have them offer fewer values"
        )

    def allows(self, settings: Settings) -> bool:
        """Return whether every setting that is not at its first value may have the other one.

        Its `when` holds, and some plan accumulates as it must, or does not.
        """
        fits = all(dimension.allowed_with(settings) for dimension in self._changed(settings))
        return fits and self.largest_micro_batch_of(settings) > 0

    def notes(self) -> Iterator[str]:
        """Yield what to change for more choices: a global batch that hardly splits evenly."""
        batch = self.global_batch
        if batch is None or not self.even_split or self.only_micro_batch is not None:
            return
        sizes = [size for size in range(1, batch + 1) if batch % size == 0]
        grain = 2 ** max(1, batch.bit_length() - 4)
        better = round(batch / grain) * grain
        if len(sizes) <= FEW_SIZES and better != batch:
            yield (
                f"A global batch of {batch} splits evenly into micro-batches of "
                f"{', '.join(map(str, sizes))} alone: one with more divisors, such as {better}, "
                "gives more choices"
            )

    def complete(self, settings: Mapping[str, Scalar]) -> Settings:
        """Return the settings with every missing one at its first value.

        Raises:
            InvalidArgument: a setting or a value that the space does not have.
        """
        values_of: dict[str, Sequence[Scalar]] = {n: [value] for n, value in self.fixed.items()}
        values_of |= {name: dimension.values for name, dimension in self.dimensions.items()}
        for name, value in settings.items():
            if name not in values_of:
                known = ", ".join(values_of) or "none (this model and device have no settings)"
                raise InvalidArgument(f"unknown setting {name!r}; available: {known}")
            if value not in values_of[name]:
                values = list(values_of[name])
                raise InvalidArgument(
                    f"{name} cannot be {value!r} on this device; choose one of {values}"
                )
        return {**self.default_settings, **settings}

    def trial_cost_s(self, settings: Settings) -> float:
        """Return the extra seconds that a probe of the variant costs."""
        costs = [d.trial_cost_of(settings[name]) for name, d in self.dimensions.items()]
        return max(0.0, sum(costs))

    def is_costly(self, settings: Settings) -> bool:
        """Return whether a value of the variant is marked as costly to try."""
        return self.trial_cost_s(settings) > 0

    def needs_fresh_worker(self, settings: Settings) -> bool:
        """Return whether a value of the variant needs a worker of its own."""
        return any(dimension.fresh_worker for dimension in self._changed(settings))

    def _changed(self, settings: Settings) -> Iterator[Dimension]:
        """Yield the dimensions that are not at their first value."""
        for name, dimension in self.dimensions.items():
            if settings[name] != dimension.values[0]:
                yield dimension

    def _baseline_micro_batch(self) -> int:
        if self.global_batch is None:
            return self.sample_batch_size
        return self._split(self.global_batch, self.sample_batch_size, {}).micro_batch

    def _split(self, global_batch: int, micro_batch: int, settings: Settings) -> Plan:
        size = min(micro_batch, self.samples_per_rank or micro_batch)
        return Plan.split(global_batch, size, settings, even=self.even_split, ranks=self.ranks)
