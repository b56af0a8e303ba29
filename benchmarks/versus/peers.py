"""The tools that are compared: each takes the user's training and returns its answer.

Each is called as its documentation calls it. Where a package cannot be used on a plain module, its
rule is written down here and the row says so ("rule of ...").
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autofit
from benchmarks.versus.place import note
from benchmarks.versus.task import Task

STEPS = 3
"""Optimizer steps of a trial, where the tool leaves that to its user."""
FIRST = 128
"""The first guess, where the user has no global batch: the default of accelerate."""
SEARCH = "VERSUS_SEARCH"
"""The variable with further arguments of autofit.search, as JSON: a test has little time."""


@dataclass(frozen=True)
class Answer:
    """What a tool tells its user to train with.

    Attributes:
        micro_batch: samples.
        precision: as in `Task`.
        accumulation_steps: None: the tool does not say, and one is what it tried.
        report: of autofit, whose plan has more to it.
        settings: of that plan, those that are not plain PyTorch's.
        probes: trials by the tool's own account, for what cannot be told from the sizes it ran.
    """

    micro_batch: int
    precision: str
    accumulation_steps: int | None = None
    report: str | None = None
    settings: Mapping[str, Any] | None = None
    probes: int | None = None


@dataclass(frozen=True)
class Live:
    """What the user has when the search begins."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def accelerate(task: Task, live: Live, folder: Path) -> Answer:
    """Decorate the training, which builds its own model, as accelerate's guide does.

    It begins with the user's batch size, and empties the cache of a card after an OOM.
    """
    memory = task.bounded()
    find = import_module("accelerate.utils").find_executable_batch_size

    @find(starting_batch_size=task.global_batch or FIRST)  # type: ignore[untyped-decorator]
    def training(batch_size: int) -> int:
        memory.release()
        task.train(batch_size, STEPS)
        return batch_size

    return Answer(training(), task.precision)


def lightning(task: Task, live: Live, folder: Path, *, mode: str) -> Answer:
    """Scale the batch size of a LightningModule by the Tuner, with its defaults."""
    pl = import_module("lightning.pytorch")
    memory = task.bounded()
    memory.place_model(live.model)
    if task.device == "cpu":
        torch.cuda.empty_cache = memory.release  # which it calls before each trial

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.inner = live.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return task.loss(self.inner, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return live.optimizer

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Samples(task), batch_size=self.batch_size)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu" if task.device == "cpu" else "gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        precision={"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}[
            task.precision
        ],
    )
    tuner = import_module("lightning.pytorch.tuner").Tuner(trainer)
    return Answer(tuner.scale_batch_size(module, mode=mode), task.precision)


class Samples(torch.utils.data.Dataset[Any]):
    """A data set of as many samples as a finder may ask for: one sample, again and again."""

    def __init__(self, task: Task, length: int = 2**17) -> None:
        self.length, self.sample = length, task.batch(1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> Any:
        if isinstance(self.sample, Mapping):
            return {name: tensor[0] for name, tensor in self.sample.items()}
        return tuple(tensor[0] for tensor in self.sample)


class Wrapped(nn.Module):
    """The model with its precision and its loss, for tools that call it with inputs alone."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.inner = task, task.build_on_device()

    def forward(self, ids: Tensor | None = None, x: Tensor | None = None) -> dict[str, Tensor]:
        given = ids if x is None else x
        assert given is not None
        batch = self.task.batch(len(given))
        rest = batch if isinstance(batch, Mapping) else batch[1].to(given.device)
        with self.task.autocast():
            whole = {"ids": given} if isinstance(batch, Mapping) else (given, rest)
            return {"loss": self.task.loss(self.inner, whole)}


def wrapped(task: Task) -> nn.Module:
    """Return the wrapped model in whichever process asks, under the budget, on the device."""
    task.bounded()
    return Wrapped(task)


def batch_finder(task: Task, live: Live, folder: Path) -> Answer:
    """Let batch-finder build the model in a process of its own for each attempt."""
    batch = task.batch(2)
    first = batch["ids"] if isinstance(batch, Mapping) else batch[0]
    name = "x" if first.is_floating_point() else "ids"
    sizes = ", ".join(map(str, first.shape[1:]))
    kind = "float" if first.is_floating_point() else "int"
    found = import_module("batch_finder").find_max_minibatch(
        partial(wrapped, task),
        input_shapes={name: f"(b, {sizes}), {kind}", "#constraints": "b=-1"},
        device=torch.device(task.device),
    )
    if found is None:
        raise RuntimeError("batch-finder found nothing that runs")
    return Answer(int(found), task.precision)


def autovram(task: Task, live: Live, folder: Path) -> Answer:
    """Tune a script by the command line, which tries its three precisions."""
    sizes = f"{task.workload} {task.place} {task.budget_bytes} {task.seed}"
    script = f"{sys.executable} -m benchmarks.versus.script {sizes}"
    command = [str(Path(sys.executable).with_name("autovram")), "tune", "--timeout", "120"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*command, "--cmd", script], cwd=folder, env=variables, check=True)
    told = json.loads((folder / ".autovram/config.json").read_text())
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return Answer(int(told["batch_size"]), names[told["precision"]], int(told["grad_accum"]))


def batchtune(task: Task, live: Live, folder: Path) -> Answer:
    """Call find_max_batch_size with the live model; it has no precision but the model's own."""
    task.bounded().place_model(live.model)
    batch = task.batch(1)
    paired = not isinstance(batch, Mapping) and task.definition.criterion

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = live.model

        def forward(self, x: Tensor) -> Any:
            note("forward", samples=len(x), model=0)
            with task.autocast():
                return self.inner(x)

    if not (paired or (isinstance(batch, Mapping) and len(batch) == 1)):
        raise TypeError("the model wants two inputs, and batchtune passes one")
    criterion = task.definition.criterion
    find = import_module("batchtune").find_max_batch_size
    found = find(
        Adapted(),
        live.optimizer,
        criterion if criterion else lambda output, target: output["loss"],
        Pairs(task),
        device=torch.device(task.device),
    )
    return Answer(int(found), task.precision)


class Pairs(Samples):
    """The same as pairs of input and target; ids are their own targets."""

    def __getitem__(self, at: int) -> Any:
        sample = super().__getitem__(at)
        return (*sample.values(), *sample.values()) if isinstance(sample, dict) else sample


def composer_rule(task: Task, live: Live, folder: Path) -> Answer:
    """Halve the micro-batch of the whole batch until a step fits: device_train_microbatch_size
    "auto". The accumulation makes up for it.
    """
    whole = size = task.global_batch or FIRST
    memory = task.bounded()
    while size >= 1:
        if ran(task, size):
            return Answer(size, task.precision, math.ceil(whole / size))
        gc.collect()
        memory.release()
        size //= 2
    raise RuntimeError("a micro-batch of 1 does not fit")


def ran(task: Task, size: int) -> bool:
    """Train at a size; return whether it fits."""
    try:
        task.train(size, STEPS)
    except torch.OutOfMemoryError:
        return False
    return True


def ultralytics_rule(task: Task, live: Live, folder: Path) -> Answer:
    """AutoBatch: forward and backward of raw outputs at small sizes, a line through what was
    reserved, solved for 60 % of what is free. Its answer is not run.
    """
    memory = task.bounded()
    model = task.build_on_device()
    free = memory.budget_bytes - memory.reserved_bytes
    sizes = [1, 2, 4, 8, 16] if memory.budget_bytes < 16 * 2**30 else [1, 2, 4, 8, 16, 32, 64]
    points = []
    for size in sizes:
        try:
            stepped_without_update(task, model, size)
            points.append((math.log(size), math.log(memory.reserved_bytes)))
        except (RuntimeError, ValueError):  # any failure is none of the points
            pass
        model.zero_grad(set_to_none=True)
        gc.collect()
        memory.release()
    if len(points) < 2:
        return Answer(16, task.precision)
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    size = int(math.exp((math.log(0.6 * free) - intercept) / slope)) if slope > 0 else 0
    return Answer(size if 1 <= size <= 1024 else 16, task.precision)


def stepped_without_update(task: Task, model: nn.Module, size: int) -> None:
    """Run forward and backward, as AutoBatch does."""
    with task.autocast():
        loss = task.loss(model, task.on_device(task.batch(size)))
    loss.backward()  # type: ignore[no-untyped-call]  # torch left it so


def optuna_search(task: Task, live: Live, folder: Path, *, sampler: str) -> Answer:
    """Maximize the speed of a short training over micro-batch and precision.

    An OOM has a speed of 0: neither sampler learns from a trial that failed.
    """
    optuna = import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    memory = task.bounded()
    precisions = ["float32", "bfloat16", *(["float16"] if task.device == "cuda" else [])]

    def objective(trial: Any) -> float:
        memory.release()
        size = trial.suggest_int("micro_batch", 1, 1024, log=True)
        precision = trial.suggest_categorical("precision", precisions)
        try:
            return task.with_precision(precision).speed(size, STEPS)
        except torch.OutOfMemoryError:
            return 0.0

    study = optuna.create_study(
        direction="maximize", sampler=getattr(optuna.samplers, sampler)(seed=task.seed)
    )
    study.optimize(objective, timeout=task.seconds, gc_after_trial=True)
    best = study.best_params
    return Answer(best["micro_batch"], best["precision"], probes=len(study.trials))


def autofit_batch_size(task: Task, live: Live, folder: Path) -> Answer:
    """Find the micro-batch of the kept global batch, with the user's live model and optimizer."""
    sample_batch = task.batch(task.global_batch or FIRST)
    found = autofit.find_batch_size(
        live.model,
        sample_batch,
        loss_fn=task.loss,
        optimizer=live.optimizer,
        global_batch=task.global_batch,
        device=task.device,
        vram_budget=task.budget_bytes,
        progress=False,
        **json.loads(os.environ.get(SEARCH, "{}")),
    )
    probes = found.report.record.search.probes
    return Answer(found.micro_batch, task.precision, found.accumulation_steps, probes=probes)


def autofit_search(task: Task, live: Live, folder: Path, **options: Any) -> Answer:
    """Search with the user's live model and optimizer."""
    workload = replace(
        task.definition,
        model=live.model,
        optimizer=live.optimizer,
        loss_fn=task.loss,
        criterion=None,
    )
    options |= {"seed": task.seed, **json.loads(os.environ.get(SEARCH, "{}"))}
    report = autofit.search(
        workload, device=task.device, vram_budget=task.budget_bytes, progress=False, **options
    )
    report.save(folder / "report.json")
    plan = report.plan
    return Answer(
        plan.micro_batch,
        str(plan.settings.get("precision.dtype", "default")).replace("default", "float32"),
        plan.accumulation_steps,
        str(folder / "report.json"),
        dict(plan.without(report.baseline.plan.settings).settings),
        report.record.search.probes,
    )
