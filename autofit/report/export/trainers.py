"""The best plan for trainers that make their own micro-batches, all of one size."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from textwrap import wrap
from typing import Any

from autofit.plan import Scalar
from autofit.report.record import Record
from autofit.report.summary import one_line

_HALF = {"bfloat16": "bf16", "float16": "fp16"}


def training_arguments(record: Record) -> str:
    """Return Python that makes `transformers.TrainingArguments`."""
    terms, rest = _divided(record, {"autocast", "tf32"}, fused=True)
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


def lightning_trainer(record: Record) -> str:
    """Return Python that makes a Lightning `Trainer`."""
    terms, rest = _divided(record, {"autocast"})
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


def accelerate_config(record: Record) -> str:
    """Return the YAML of `accelerate launch --config_file`."""
    terms, rest = _divided(record, {"autocast"})
    plan = record.best.plan
    on_cpu = record.environment["device"] == "cpu"
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "'NO'",
        "mixed_precision": _HALF.get(str(terms.get("autocast")), "'no'"),
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": str(on_cpu).lower(),
    }
    rest = [
        *rest,
        f"# Accelerator(gradient_accumulation_steps={plan.accumulation_steps}): this file has no "
        "place for it.",
        f"# The DataLoader has batch_size={plan.micro_batch}.",
        *_clipping_comment(record, "accelerator.clip_grad_norm_(model.parameters(), {clip})"),
        "# autofit.integrations.accelerate.applied(report, accelerator, model, optimizer) does the",
        "# rest.",
    ]
    return _text([*_about(record), *rest, *(f"{name}: {value}" for name, value in values.items())])


def deepspeed_config(record: Record) -> str:
    """Return DeepSpeed's JSON, with what it has no field for under "_comment"."""
    terms, rest = _divided(record, {"autocast"})
    plan = record.best.plan
    comments = [line.removeprefix("# ") for line in (*_about(record), *rest)]
    values: dict[str, Any] = {
        "_comment": comments,
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


def _divided(
    record: Record, known: Collection[str], *, fused: bool = False
) -> tuple[Mapping[str, Scalar], list[str]]:
    """Return the standard terms that a stack has, and comments with the code of all else.

    Args:
        record: of the search.
        known: the terms that it has, whatever their value.
        fused: whether it can ask for torch's fused AdamW.
    """
    terms: dict[str, Scalar] = {}
    rest: list[str] = []
    for part in record.parts_of_best():
        is_fused = fused and part.terms.get("optimizer_implementation") == "fused"
        if part.terms and (set(part.terms) <= set(known) or is_fused):
            terms |= part.terms
            continue
        named = ", ".join(f"{name}={value}" for name, value in part.settings.items())
        rest += [
            f"# {named} has no place here. In code:",
            *(f"#     {line}" for line in part.lines),
        ]
    return terms, rest


def _about(record: Record) -> Iterator[str]:
    words = [line for said in one_line(record).splitlines() for line in wrap(said, 97)]
    yield from (f"# {line}" for line in words)
    sizes = record.best.plan.micro_batch_sizes
    if len(set(sizes)) > 1:
        yield (
            f"# The plan splits {sum(sizes)} samples into {' + '.join(map(str, sizes))}; a trainer "
            f"makes {len(sizes)} times {sizes[0]}, so an optimizer step has {len(sizes) * sizes[0]}"
        )
        yield "# samples. Search with SearchOptions(even_split=True) to avoid that."


def _clipping_comment(record: Record, code: str) -> Iterator[str]:
    if clip := record.workload.get("clip_grad_norm"):
        yield f"# {code.format(clip=clip)} before optimizer.step()"


def _call(name: str, function: str, values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {function}(", *(f"    {key}={v!r}," for key, v in values.items()), ")"]


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
