"""Code that trains by a plan: lines to paste into your own loop, or for a trainer.

No line comes out of a report's file, which may be anybody's: what is installed here writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autofit.errors import InvalidArgument
from autofit.measurement import Trial
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import resolve
from autofit.report.record import Record, lines_of
from autofit.space import Space
from autofit.strategy import Strategy

LINES_OF_TRAINER: Mapping[str, Sequence[str]] = {
    "transformers": (
        "from autofit.integrations import transformers as tuning",
        "print(tuning.apply(report, trainer))  # sets its arguments",
        "trainer.train()",
    ),
    "lightning": (
        "from autofit.integrations import lightning as tuning",
        "from lightning.pytorch import Trainer",
        "trainer = Trainer(**tuning.arguments(report))  # and your own arguments",
        "trainer.fit(module, data)",
    ),
}
"""By the name of the integration that searched: code that trains by `report`."""


def lines_of_trainer(record: Record) -> Sequence[str]:
    """Return code that trains by the report in the trainer that was searched.

    () if there is none.
    """
    return LINES_OF_TRAINER.get(record.workload.get("trainer", ""), ())


def lines_by_hand(record: Record) -> Sequence[str]:
    """Return code that trains as the recommended plan does.

    () if it needs what is not installed.
    """
    if not record.was_read:
        return record.paste.get(record.recommended.number, ())
    try:
        resolved = record.resolve_plan()
    except InvalidArgument:
        return ()
    has_loss_weight = "loss_weight" in record.functions_given
    return paste_lines(resolved, has_loss_weight=has_loss_weight)


def lines_of_trials(
    trials: Sequence[Trial], space: Space, strategies: Sequence[Strategy], *, has_loss_weight: bool
) -> dict[int, list[str]]:
    """Return trial number -> code that trains as its plan does."""
    plans = dict.fromkeys(trial.plan for trial in trials)
    lines = {
        plan: paste_lines(resolve(plan, space, strategies), has_loss_weight=has_loss_weight)
        for plan in plans
    }
    return {trial.number: lines[trial.plan] for trial in trials}


def paste_lines(resolved: ResolvedPlan, *, has_loss_weight: bool = False) -> list[str]:
    """Return code for batch geometry, then that of each strategy, which runs as it stands.

    Imports come first. A strategy's last line may open a block (`with ...:`), in which all that
    follows lies, as strategies are applied inside one another; the last block holds a place for the
    training.

    Args:
        resolved: the plan.
        has_loss_weight: whether the workload says what the loss of a micro-batch is a mean over.
    """
    plan = resolved.plan
    code = [f"micro_batch = {plan.micro_batch}  # samples in one forward and backward"]
    if plan.ranks > 1:
        code += _lines_of_ranks(plan, has_loss_weight=has_loss_weight)
    elif plan.accumulation_steps > 1:
        factor = "its share of the samples"
        if has_loss_weight:
            factor = "loss_weight(micro_batch) / the sum of these over the step's micro-batches"
        code.append(
            f"accumulation_steps = {plan.accumulation_steps}  # micro-batches in one "
            f"optimizer step of {plan.samples_per_step} samples; multiply each loss by {factor}"
        )
    imports: dict[str, None] = {}
    indent = ""
    for strategy, settings, payloads in resolved.by_strategy():
        lines = lines_of(strategy.describe(settings, payloads))
        own = [line for line in lines if line.startswith(("import ", "from "))]
        imports |= dict.fromkeys(own)
        code += [indent + line for line in lines if line not in own]
        if lines and lines[-1].partition("  #")[0].rstrip().endswith(":"):
            indent += "    "
    if indent:
        code.append(f"{indent}...  # your training, as the comments above place it")
    return [*imports, *code]


def _lines_of_ranks(plan: Plan, *, has_loss_weight: bool) -> list[str]:
    """Return how ranks split and weight their samples, which wrappers do not know.

    Both `DistributedDataParallel` and `fully_shard` divide the sum of gradients by the ranks, so
    each loss takes a weight whose mean over the ranks adds up to one, as in `Training`.
    """
    ranks, samples, steps = plan.ranks, plan.samples_per_step, plan.accumulation_steps
    shares = [sum(plan.micro_batch_sizes_of(rank)) for rank in (0, ranks - 1)]
    share = " or ".join(map(str, dict.fromkeys(shares)))
    geometry = (
        f"accumulation_steps = {steps}  # micro-batches of each rank, the same number on all: "
        f"its {share} of {samples} samples, cut by tensor_split(accumulation_steps)"
    )
    if has_loss_weight:
        return [
            geometry,
            f"# multiply each loss by {ranks} * loss_weight(micro_batch) / the sum of these over "
            f"all micro-batches of all ranks: gradients are averaged over the {ranks} ranks",
        ]
    return [
        geometry,
        f"loss_factor = {ranks} / {samples}  # multiply each loss by this and by the samples of "
        f"its micro-batch: gradients are averaged over the {ranks} ranks",
        "# a loss that is a mean over something else (valid tokens, see loss_weight): multiply by "
        f"{ranks} * that / its sum over all micro-batches of all ranks",
    ]
