"""The best plan as a plain PyTorch training loop, which runs as it stands.

Its losses are those of `Report.apply`: the same split, weights, precision, clipping and update.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from autofit.errors import InvalidArgument
from autofit.report.parts import Part
from autofit.report.record import Record
from autofit.report.summary import one_line

_INDENT = "    "
_ABOUT = '''
    for loss in train({call}):
        print(loss.item())

A batch has {samples} samples, on any device. The model is on the device that it trains on.
"""
'''
_MAPPED = '''

def mapped(function, batch, place=""):
    """Return the batch with function(place, tensor) applied to each of its tensors."""
    if isinstance(batch, torch.Tensor):
        return function(place or "batch", batch)
    if isinstance(batch, Mapping):
        return {name: mapped(function, each, f"{place}[{name!r}]") for name, each in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        changed = copy.copy(batch)  # the constructor may take other arguments than the fields
        for name, value in mapped(function, fields, place).items():
            object.__setattr__(changed, name, value)
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named one
        fields = ((getattr(batch, name), f"{place}.{name}") for name in batch._fields)
        return type(batch)(*(mapped(function, *each) for each in fields))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(function, each, f"{place}[{i}]") for i, each in enumerate(batch))
    return batch
'''
_SPLIT = '''

def split(batch):
    """Yield each micro-batch with its share of the samples; sizes differ by at most one."""
    sizes = {}

    def size_of(place, tensor):
        if place not in SAMPLES and place not in WHOLE:
            raise ValueError(f"whether {place} holds samples is unknown: search again with it")
        if place in SAMPLES:
            sizes[place] = tuple(tensor.shape[:1])  # () where it has no dimensions

    mapped(size_of, batch)
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise ValueError(f"the tensors that hold samples must have equally many: {sizes}")
    samples = next(iter(sizes.values()))[0]
    steps = -(-samples // MICRO_BATCH)
    start = 0
    for step in range(steps):
        size = samples // steps + (step < samples % steps)

        def cut(place, tensor, start=start, size=size):
            return tensor[start : start + size] if place in SAMPLES else tensor

        yield mapped(cut, batch), size / samples
        start += size
'''
_WEIGHTED = '''

def weighted(pieces, loss_weight):
    """Return (micro-batch, weight) with the weights that loss_weight gives, adding up to one.

    A micro-batch of weight zero is left out: its loss is often 0 / 0.
    """
    weights = [float(loss_weight(piece)) for piece, _ in pieces]
    whole = sum(weights)
    if not whole:
        return [(piece, 1 / len(pieces)) for piece, _ in pieces]
    return [(piece, w / whole) for (piece, _), w in zip(pieces, weights) if w]
'''


def loop(record: Record) -> str:
    """Return Python with a function `train`, which yields the loss of each optimizer step.

    Raises:
        InvalidArgument: the search had a training_step, which only `Report.apply` can run, or the
            report does not say which tensors hold samples.
    """
    given = set(record.functions_given)
    if "training_step" in given:
        raise InvalidArgument(
            "the search had a training_step, which is written against autofit's Training: train by "
            "report.apply(model, optimizer), which a plain loop cannot stand in for"
        )
    parts = record.parts_of_best()
    dtype = next((str(p.terms["autocast"]) for p in parts if "autocast" in p.terms), None)
    around = [part for part in parts if "autocast" not in part.terms]
    splits = record.best.plan.accumulation_steps > 1
    if splits and "batched" not in record.workload:
        raise InvalidArgument(
            "the report does not say which tensors of a batch hold samples, so a loop cannot cut "
            "them into micro-batches: search again"
        )
    helpers = [_MAPPED, _SPLIT] if splits else [_MAPPED]
    if splits and "loss_weight" in given:
        helpers.append(_WEIGHTED)
    body = _Body(record, given, dtype=dtype, splits=splits)
    return "".join(
        [
            _head(record, body.parameters, around),
            *helpers,
            f"\n\ndef train({', '.join(body.parameters)}):\n",
            textwrap.indent("\n".join(body.lines(around)) + "\n", _INDENT),
        ]
    )


def _head(record: Record, parameters: Sequence[str], around: Sequence[Part]) -> str:
    plan = record.best.plan
    about = [*textwrap.wrap(f"Trains by a plan that autofit measured. {one_line(record)}", 100), ""]
    call = ", ".join(parameters)
    own = {line: None for part in around for line in part.lines if _is_import(line)}
    others = [line for line in own if line != "import torch"]
    lines = [
        '"""' + "\n".join(about).replace('"""', "'''").replace("\\", "/"),
        _ABOUT.strip("\n").format(call=call, samples=plan.samples_per_step),
        "",
        "import copy",
        "import dataclasses",
        "from collections.abc import Mapping",
        "",
        "import torch",
        *others,
        "",
        f"MICRO_BATCH = {plan.micro_batch}  # samples in one forward and backward",
    ]
    if plan.accumulation_steps > 1:
        batched = record.workload["batched"]
        whole = [name for name in record.workload["sample_shapes"] if name not in batched]
        lines += [
            f"SAMPLES = {batched!r}  # where a batch's tensors are cut into micro-batches",
            f"WHOLE = {whole!r}  # which every micro-batch gets as they are",
        ]
    return "\n".join(lines) + "\n"


class _Body:
    """The lines of `train`."""

    def __init__(self, record: Record, given: set[str], *, dtype: str | None, splits: bool) -> None:
        self._record, self._given, self._dtype, self._splits = record, given, dtype, splits
        loss = "criterion" if "criterion" in given else "loss_fn"
        self._own_loss = not given & {"criterion", "loss_fn"} and not self._record.lacks_loss
        more = [name for name in ("loss_weight", "before_step") if name in given]
        self.parameters = [
            *("model", "optimizer", "batches"),
            *([] if self._own_loss else [loss]),
            *(name for name in more if name != "loss_weight" or splits),
        ]

    def lines(self, around: Sequence[Part]) -> Iterator[str]:
        """Yield them, the settings of the whole training first; one may open a block."""
        yield '"""Yield the mean loss of each optimizer step."""'
        if self._record.lacks_loss:
            yield "# The search had no loss, so give one: (model, batch) -> the mean over samples."
        yield "device = next(model.parameters()).device"
        if self._dtype == "float16":
            yield "scaler = torch.amp.GradScaler(device.type)"
        indent = ""
        for part in around:
            own = [line for line in part.lines if not _is_import(line)]
            yield from (indent + line for line in own)
            if own and own[-1].partition("  #")[0].rstrip().endswith(":"):
                indent += _INDENT
        yield from (indent + line for line in self._step())

    def _step(self) -> Iterator[str]:
        yield "for batch in batches:"
        yield "    optimizer.zero_grad(set_to_none=True)"
        if self._splits:
            pieces = "split(batch)"
            if "loss_weight" in self._given:
                pieces = "weighted(list(split(batch)), loss_weight)"
            yield "    total = 0.0"
            yield f"    for micro_batch, weight in {pieces}:"
            yield "        micro_batch = mapped(lambda _, tensor: tensor.to(device), micro_batch)"
            yield from (f"        {line}" for line in self._loss("micro_batch"))
            yield f"        {self._backward('(loss * weight)')}"
            yield "        total = total + loss.detach() * weight"
            yield "        del loss"
        else:
            yield "    batch = mapped(lambda _, tensor: tensor.to(device), batch)"
            yield from (f"    {line}" for line in self._loss("batch"))
            yield f"    {self._backward('loss')}"
            yield "    total = loss.detach()"
            yield "    del loss"
        yield from (f"    {line}" for line in self._update())
        yield "    yield total"

    def _loss(self, batch: str) -> Iterator[str]:
        indent = ""
        if self._dtype is not None:
            yield f"with torch.autocast(device.type, dtype=torch.{self._dtype}):"
            indent = _INDENT
        shapes = list(self._record.workload["sample_shapes"])
        if "criterion" in self._given:
            inputs, target = f"{batch}[0]", f"{batch}[1]"
            called = _called(
                inputs, [name.removeprefix("[0]") for name in shapes if name[:3] == "[0]"]
            )
            yield f"{indent}loss = criterion({called}, {target})"
        elif self._own_loss:
            yield f"{indent}output = {_called(batch, shapes)}"
            yield f'{indent}loss = output["loss"] if isinstance(output, Mapping) else output'
            yield f'{indent}loss = getattr(loss, "loss", loss)'
        else:
            yield f"{indent}loss = loss_fn(model, {batch})"

    def _backward(self, loss: str) -> str:
        return (
            f"scaler.scale({loss}).backward()" if self._dtype == "float16" else f"{loss}.backward()"
        )

    def _update(self) -> Iterator[str]:
        clip, scales = self._record.workload.get("clip_grad_norm"), self._dtype == "float16"
        if scales and (clip or "before_step" in self._given):
            yield "scaler.unscale_(optimizer)"
        if clip:
            yield 'parameters = [p for group in optimizer.param_groups for p in group["params"]]'
            yield f"torch.nn.utils.clip_grad_norm_(parameters, {clip!r})"
        if "before_step" in self._given:
            yield "before_step(model, optimizer)"
        yield from (
            ("scaler.step(optimizer)", "scaler.update()") if scales else ("optimizer.step()",)
        )


def _called(inputs: str, places: Sequence[str]) -> str:
    """Return the call of a model with what lies at these places of a batch."""
    if any(place.startswith("['") for place in places):
        return f"model(**{inputs})"
    return (
        f"model(*{inputs})"
        if any(place.startswith("[") for place in places)
        else f"model({inputs})"
    )


def _is_import(line: str) -> bool:
    return line.startswith(("import ", "from "))
