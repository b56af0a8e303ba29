"""Those that are compared: each takes the user's training and returns its answer.

Each tool is called as its documentation calls it. A person is given the largest size that fits.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autofit
from benchmarks.versus.task import Task

STEPS = 3
"""Optimizer steps of a trial, where the tool leaves that to its user."""
FIRST = 128
"""The first guess, where the user has no global batch: the default of accelerate."""
MOST = 2**14
"""No micro-batch is looked for beyond this."""
FINENESS = 64
"""The largest is bisected to this share of itself."""
GRAIN = 8
"""A person writes multiples of this: nobody writes a micro-batch of 43."""
SEARCH = "VERSUS_SEARCH"
"""The variable with further arguments of autofit.search, as JSON: a test has little time."""


@dataclass(frozen=True)
class Answer:
    """What somebody is told to train with.

    Attributes:
        micro_batch: samples.
        precision: as in `Task`.
        accumulation_steps: micro-batches of a step.
        levers: of a `Task`, that a person turns on.
        report: of autofit, whose plan has more to it.
        settings: of that plan, those that are not plain PyTorch's.
    """

    micro_batch: int
    precision: str
    accumulation_steps: int = 1
    levers: Sequence[str] = ()
    report: str | None = None
    settings: Mapping[str, Any] | None = None

    def keeping(self, global_batch: int | None) -> Answer:
        """Return the answer brought to the user's global batch, if there is one."""
        if global_batch is None or self.report is not None or self.micro_batch < 1:
            return self
        steps = math.ceil(global_batch / self.micro_batch)
        size = math.ceil(global_batch / steps)
        return replace(self, micro_batch=size, accumulation_steps=steps)


@dataclass(frozen=True)
class Live:
    """What the user has when the search begins."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def accelerate(task: Task, live: Live, folder: Path, *, precision: str) -> Answer:
    """Decorate the training, which builds its own model, as accelerate's guide does.

    It begins with the user's batch size, and empties the cache of a card after an OOM.
    """
    own = replace(task, precision=precision)
    memory = own.bounded()
    find = import_module("accelerate.utils").find_executable_batch_size

    @find(starting_batch_size=own.global_batch or FIRST)  # type: ignore[untyped-decorator]
    def training(batch_size: int) -> int:
        memory.release()
        own.train(batch_size, STEPS)
        return batch_size

    return Answer(training(), precision)


def lightning(task: Task, live: Live, folder: Path, *, precision: str, mode: str) -> Answer:
    """Scale the batch size of a LightningModule by the Tuner, with its defaults."""
    pl = import_module("lightning.pytorch")
    memory = task.bounded()
    memory.place_model(live.model)
    if task.place == "cpu":
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
        accelerator="cpu" if task.place == "cpu" else "gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        precision={"float32": "32-true", "bfloat16": "bf16-mixed"}[precision],
    )
    tuner = import_module("lightning.pytorch.tuner").Tuner(trainer)
    return Answer(tuner.scale_batch_size(module, mode=mode), precision)


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


def by_hand(
    task: Task,
    live: Live,
    folder: Path,
    *,
    precision: str,
    levers: Sequence[str] = (),
    halved: bool = False,
) -> Answer:
    """Turn levers on, and take the largest micro-batch that fits before anything is compiled, or
    half of it; where the compiled step does not fit, a tenth less, and so on.
    """
    eager = replace(task, precision=precision, levers=[n for n in levers if n != "compiled"])
    size = rounded(largest(eager) // (2 if halved else 1))
    if "compiled" in levers:
        chosen = replace(eager, levers=levers)
        while size > 1 and not ran(chosen, size):
            size = rounded(9 * size // 10)
    return Answer(size, precision, levers=levers)


def rounded(size: int) -> int:
    """Return a size as a person writes it."""
    return size // GRAIN * GRAIN or size


def largest(task: Task) -> int:
    """Return the largest micro-batch that trains for some steps; 0: none does."""
    low, high = 0, 1
    while high <= MOST and ran(task, high):
        low, high = high, 2 * high
    while high - low > max(1, low // FINENESS):
        middle = (low + high) // 2
        low, high = (middle, high) if ran(task, middle) else (low, middle)
    return low


def ran(task: Task, size: int) -> bool:
    """Train at a size under the budget; return whether it fits."""
    memory = task.bounded()
    try:
        task.train(size, STEPS)
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        memory.release()
    return True


def autovram(task: Task, live: Live, folder: Path) -> Answer:
    """Tune a script by the command line, which tries its three precisions."""
    sizes = f"{task.workload} {task.place} {task.budget_bytes} {task.seed}"
    script = f"{sys.executable} -m benchmarks.versus.script {sizes}"
    program = "from autovram.cli.app import app; app()"  # what its console script runs
    command = [sys.executable, "-c", program, "tune", "--timeout", "120"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*command, "--cmd", script], cwd=folder, env=variables, check=True)
    told = json.loads((folder / ".autovram/config.json").read_text())
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return Answer(int(told["batch_size"]), names[told["precision"]], int(told["grad_accum"]))


def optuna_search(task: Task, live: Live, folder: Path) -> Answer:
    """Maximize the speed of a short training over micro-batch and precision.

    An OOM has a speed of 0: the sampler does not learn from a trial that failed.
    """
    optuna = import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    memory = task.bounded()
    precisions = ["float32", "bfloat16", *(["float16"] if task.place == "cuda" else [])]

    def objective(trial: Any) -> float:
        memory.release()
        size = trial.suggest_int("micro_batch", 1, task.global_batch or 1024, log=True)
        precision = trial.suggest_categorical("precision", precisions)
        try:
            return replace(task, precision=precision).speed(size, STEPS)
        except torch.OutOfMemoryError:
            return 0.0

    sampler = optuna.samplers.TPESampler(seed=task.seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, timeout=task.seconds, gc_after_trial=True)
    return Answer(study.best_params["micro_batch"], study.best_params["precision"])


def autofit_search(task: Task, live: Live, folder: Path) -> Answer:
    """Search with the user's live model and optimizer, and the defaults."""
    workload = replace(
        task.definition,
        model=live.model,
        optimizer=live.optimizer,
        loss_fn=task.loss,
        criterion=None,
    )
    options = {"seed": task.seed, **json.loads(os.environ.get(SEARCH, "{}"))}
    report = autofit.search(
        workload, device=task.place, vram_budget=task.budget_bytes, progress=False, **options
    )
    report.save(folder / "report.json")
    plan = report.plan
    return Answer(
        plan.micro_batch,
        str(plan.settings.get("precision.dtype", "default")).replace("default", "float32"),
        plan.accumulation_steps,
        report=str(folder / "report.json"),
        settings=dict(plan.without(report.baseline.plan.settings).settings),
    )
