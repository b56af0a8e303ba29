"""A report's best plan as text that another stack takes, by the stack's name.

What a stack has no argument for stands in the text's comments, with the code that does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from autofit.errors import InvalidArgument
from autofit.plan import Scalar
from autofit.report.record import Part, Record, parts_of
from autofit.report.summary import IN_PYTHON, Place, one_line
from autofit.strategy import Strategy

_HALF = {"bfloat16": "bf16", "float16": "fp16"}


def exported(
    record: Record, stack: str, strategies: Sequence[Strategy] = (), place: Place = IN_PYTHON
) -> str:
    """Return the best plan as a stack's text.

    Args:
        record: of the search.
        stack: its name.
        strategies: of the search; the installed ones are used for other names.
        place: where the report is shown.

    Raises:
        InvalidArgument: another stack, or a strategy of the plan is not installed.
    """
    if stack == "pytorch":
        return _text([*_about(record), *_loop(record, place)])
    if stack not in _TRAINERS:
        known = ", ".join(_TRAINERS)
        raise InvalidArgument(f"there is no export {stack!r}; there are: pytorch, {known}")
    parts = parts_of(record.resolve_best(None, strategies), record.default_settings)
    return _TRAINERS[stack](record, parts)


def _loop(record: Record, place: Place) -> list[str]:
    needed = list(record.functions_given)
    if record.lacks_loss:
        needed = ["loss_fn", *needed]
    report = place.report
    if report == "report":  # of a variable; the script needs a file
        report = 'autofit.load("report.json")  # as report.save wrote it'
    given = ", ".join(("model", "optimizer", *(f"{name}={name}" for name in needed)))
    return [
        "import autofit",
        "",
        f"report = {report}",
        "",
        "",
        f"def train({', '.join(('model', 'optimizer', 'batches', *needed))}):",
        f'    """Yield the loss of each step; a batch has {record.best.plan.samples_per_step} '
        'samples."""',
        f"    with report.apply({given}) as training:",
        "        for batch in batches:",
        "            yield training.step(batch)",
    ]


def _training_arguments(record: Record, parts: Sequence[Part]) -> str:
    """Return Python that makes `transformers.TrainingArguments`."""
    terms, rest = _divided(parts, {"autocast", "tf32"}, fused=True)
    plan = record.best.plan
    values: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "max_grad_norm": record.workload.get("clip_grad_norm") or 0.0,
    }
    if "autocast" in terms:
        values[_HALF[str(terms["autocast"])]] = True
    if "tf32" in terms:
        values["tf32"] = True
    if "optimizer_implementation" in terms:
        values["optim"] = "adamw_torch_fused"
    rest = [*rest, "# autofit.integrations.transformers.apply(report, trainer) does all of it"]
    made = [
        "from transformers import TrainingArguments",
        "",
        *_call("args", "TrainingArguments", values),
    ]
    return _text([*_about(record), *rest, "", *made])


def _lightning_trainer(record: Record, parts: Sequence[Part]) -> str:
    """Return Python that makes a Lightning `Trainer`."""
    terms, rest = _divided(parts, {"autocast"})
    plan = record.best.plan
    values: dict[str, Any] = {
        "accelerator": "cpu" if record.environment["device"] == "cpu" else "gpu",
        "devices": 1,
        "accumulate_grad_batches": plan.accumulation_steps,
    }
    if "autocast" in terms:
        values.update(precision=f"{_HALF[str(terms['autocast'])].removeprefix('fp')}-mixed")
    if clip := record.workload.get("clip_grad_norm"):
        values["gradient_clip_val"] = clip
    rest = [
        *rest,
        f"# The training DataLoader has batch_size={plan.micro_batch}.",
        "# Trainer(**autofit.integrations.lightning.arguments(report)) does all of it",
    ]
    made = ["from lightning.pytorch import Trainer", "", *_call("trainer", "Trainer", values)]
    return _text([*_about(record), *rest, "", *made])


def _accelerate_config(record: Record, parts: Sequence[Part]) -> str:
    """Return the YAML of `accelerate launch --config_file`."""
    terms, rest = _divided(parts, {"autocast"})
    plan = record.best.plan
    clip = record.workload.get("clip_grad_norm")
    clipping = f"# accelerator.clip_grad_norm_(model.parameters(), {clip}) before optimizer.step()"
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "'NO'",
        "mixed_precision": _HALF.get(str(terms.get("autocast")), "'no'"),
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": str(record.environment["device"] == "cpu").lower(),
    }
    rest = [
        *rest,
        f"# Accelerator(gradient_accumulation_steps={plan.accumulation_steps}): this file has no "
        "place for it.",
        f"# The DataLoader has batch_size={plan.micro_batch}.",
        *([clipping] if clip else []),
        "# autofit.integrations.accelerate.applied(report, accelerator, model, optimizer) does the",
        "# rest.",
    ]
    return _text([*_about(record), *rest, *(f"{name}: {value}" for name, value in values.items())])


def _deepspeed_config(record: Record, parts: Sequence[Part]) -> str:
    """Return DeepSpeed's JSON, with what it has no field for under "_comment"."""
    terms, rest = _divided(parts, {"autocast"})
    plan = record.best.plan
    values: dict[str, Any] = {
        "_comment": [line.removeprefix("# ") for line in (*_about(record), *rest)],
        "train_batch_size": plan.micro_batch * plan.accumulation_steps,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "zero_optimization": {"stage": 0},
    }
    if "autocast" in terms:  # as `torch.autocast`: DeepSpeed's own bf16 casts the weights as well
        values["torch_autocast"] = {"enabled": True, "dtype": terms["autocast"]}
    if clip := record.workload.get("clip_grad_norm"):
        values["gradient_clipping"] = clip
    return json.dumps(values, indent=2) + "\n"


_TRAINERS: dict[str, Callable[[Record, Sequence[Part]], str]] = {
    "transformers": _training_arguments,
    "accelerate": _accelerate_config,
    "lightning": _lightning_trainer,
    "deepspeed": _deepspeed_config,
}
"""A trainer, which makes its own micro-batches of one size -> what writes its text."""


def _divided(
    parts: Sequence[Part], known: Collection[str], *, fused: bool = False
) -> tuple[Mapping[str, Scalar], list[str]]:
    """Return the standard terms that a stack has, and comments with the code of all else.

    Args:
        parts: of the plan.
        known: the terms that it has, whatever their value.
        fused: whether it can ask for torch's fused AdamW.
    """
    terms: dict[str, Scalar] = {}
    rest: list[str] = []
    for part in parts:
        is_fused = fused and part.terms.get("optimizer_implementation") == "fused"
        if part.terms and (set(part.terms) <= set(known) or is_fused):
            terms |= part.terms
            continue
        named = ", ".join(f"{name}={value}" for name, value in part.settings.items())
        rest += [f"# {named} has no place here. In code:", *(f"#     {it}" for it in part.lines)]
    return terms, rest


def _about(record: Record) -> Iterator[str]:
    yield from (f"# {line}" for said in one_line(record).splitlines() for line in wrap(said, 97))
    sizes = record.best.plan.micro_batch_sizes
    if len(set(sizes)) > 1:
        yield (
            f"# The plan splits {sum(sizes)} samples into {' + '.join(map(str, sizes))}; a trainer "
            f"makes {len(sizes)} times {sizes[0]}, so an optimizer step has {len(sizes) * sizes[0]}"
        )
        yield "# samples. Search with SearchOptions(even_split=True) to avoid that."


def _call(name: str, function: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {function}(", *(f"    {key}={v!r}," for key, v in values.items()), ")"]


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
