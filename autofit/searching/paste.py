"""A plan as lines of a training script.

Promises: who follows them in a loop trains what `Report.apply` trains, without autofit.
"""

from __future__ import annotations

from autofit.plan import Plan, ResolvedPlan


def paste_lines(resolved: ResolvedPlan) -> list[str]:
    """Return code for batch geometry, then that of each strategy, which runs as it stands.

    Imports come first. A strategy's last line may open a block (`with ...:`), in which all that
    follows lies, as strategies are applied inside one another; the last block holds a place for the
    training.
    """
    plan = resolved.plan
    code = [f"micro_batch = {plan.micro_batch}  # samples in one forward and backward"]
    if plan.world_size > 1:
        code += _lines_of_ranks(plan)
    elif plan.accumulation_steps > 1:
        code.append(
            f"accumulation_steps = {plan.accumulation_steps}  # micro-batches in one "
            f"optimizer step of {plan.samples_per_step} samples; "
            "weight each loss by its share of the samples"
        )
    imports: dict[str, None] = {}
    indent = ""
    for strategy, settings, payloads in resolved.by_strategy():
        lines = strategy.describe(settings, payloads)
        own = [line for line in lines if line.startswith(("import ", "from "))]
        imports |= dict.fromkeys(own)
        code += [indent + line for line in lines if line not in own]
        if lines and lines[-1].partition("  #")[0].rstrip().endswith(":"):
            indent += "    "
    if indent:
        code.append(f"{indent}...  # your training, as the comments above place it")
    return [*imports, *code]


def _lines_of_ranks(plan: Plan) -> list[str]:
    """Return how ranks split and weight their samples, of which wrappers know nothing.

    Both `DistributedDataParallel` and `fully_shard` divide the sum of gradients by the ranks, so
    each loss takes a weight whose mean over the ranks adds up to one, as in `Training`.
    """
    ranks, samples, steps = plan.world_size, plan.samples_per_step, plan.accumulation_steps
    shares = [sum(plan.micro_batch_sizes_of(rank)) for rank in (0, ranks - 1)]
    share = " or ".join(map(str, dict.fromkeys(shares)))
    return [
        f"accumulation_steps = {steps}  # micro-batches of each rank, the same number on all: "
        f"its {share} of {samples} samples, cut by tensor_split(accumulation_steps)",
        f"loss_factor = {ranks} / {samples}  # multiply each loss by this and by the samples of "
        f"its micro-batch: gradients are averaged over the {ranks} ranks",
        "# a loss that is a mean over something else (valid tokens, see loss_weight): multiply by "
        f"{ranks} * that / its sum over all micro-batches of all ranks",
    ]
