"""A report's recommended plan as text that another stack takes, by the stack's name.

What a stack has no argument for stands in the text's comments, with the code that does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import Any

from autofit.errors import InvalidArgument
from autofit.report.place import IN_PYTHON, Place
from autofit.report.record import Part, Record, parts_of
from autofit.report.summary import one_line
from autofit.strategy import Strategy

_HALF = {"bfloat16": "bf16", "float16": "fp16"}


def exported(
    record: Record, stack: str, strategies: Sequence[Strategy] = (), place: Place = IN_PYTHON
) -> str:
    """Return the recommended plan as a stack's text.

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
    parts = parts_of(record.resolve_plan(None, strategies), record.default_settings)
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
        '    """Yield the loss of each step; a batch has '
        f'{record.recommended.plan.samples_per_step} samples."""',
        f"    with report.apply({given}) as training:",
        "        for batch in batches:",
        "            yield training.step(batch)",
    ]


def _accelerate_config(record: Record, parts: Sequence[Part]) -> str:
    """Return the YAML of `accelerate launch --config_file`."""
    dtype, rest = _divided(parts)
    plan = record.recommended.plan
    clip = record.workload.get("clip_grad_norm")
    clipping = f"# accelerator.clip_grad_norm_(model.parameters(), {clip}) before optimizer.step()"
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "'NO'",
        "mixed_precision": _HALF.get(dtype or "", "'no'"),
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
    dtype, rest = _divided(parts)
    plan = record.recommended.plan
    values: dict[str, Any] = {
        "_comment": [line.removeprefix("# ") for line in (*_about(record), *rest)],
        "train_batch_size": plan.micro_batch * plan.accumulation_steps,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "zero_optimization": {"stage": 0},
    }
    if dtype is not None:  # as `torch.autocast`: DeepSpeed's own bf16 casts the weights as well
        values["torch_autocast"] = {"enabled": True, "dtype": dtype}
    if clip := record.workload.get("clip_grad_norm"):
        values["gradient_clipping"] = clip
    return json.dumps(values, indent=2) + "\n"


_TRAINERS: dict[str, Callable[[Record, Sequence[Part]], str]] = {
    "accelerate": _accelerate_config,
    "deepspeed": _deepspeed_config,
}
"""A trainer, which makes its own micro-batches of one size -> what writes its text."""


def _divided(parts: Sequence[Part]) -> tuple[str | None, list[str]]:
    """Return the type of autocast, which each stack has, and comments with the code of all else."""
    dtype: str | None = None
    rest: list[str] = []
    for part in parts:
        if set(part.terms) == {"autocast"}:
            dtype = str(part.terms["autocast"])
            continue
        named = ", ".join(f"{name}={value}" for name, value in part.settings.items())
        rest += [f"# {named} has no place here. In code:", *(f"#     {it}" for it in part.lines)]
    return dtype, rest


def _about(record: Record) -> Iterator[str]:
    yield from (f"# {line}" for said in one_line(record).splitlines() for line in wrap(said, 97))
    sizes = record.recommended.plan.micro_batch_sizes
    if len(set(sizes)) > 1:
        yield (
            f"# The plan splits {sum(sizes)} samples into {' + '.join(map(str, sizes))}; a trainer "
            f"makes {len(sizes)} times {sizes[0]}, so an optimizer step has {len(sizes) * sizes[0]}"
        )
        yield "# samples. Search with SearchOptions(even_split=True) to avoid that."


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
