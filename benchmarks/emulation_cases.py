"""The trainings of `benchmarks.emulation_models`: model x optimizer x precision x batch.

Workers import this file, so a case travels by its name and its model is made where it trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import nn

from autofit import Workload
from benchmarks.emulated_models import MODELS

PRECISIONS = ("default", "bfloat16", "float16")
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 1e-2),
}
BATCH_FACTORS = (1, 16, 128, 1024)
"""Times the model's own batch: needs from some MiB to the memory of the largest GPUs."""


@dataclass(frozen=True)
class Case:
    """A training: the name of a model, and how it is trained."""

    model: str
    precision: str
    optimizer: str
    checkpointed: bool
    batch_factor: int = 1

    @property
    def name(self) -> str:
        how = f"{self.model}, {self.precision}, {self.optimizer}, batch x {self.batch_factor}"
        return f"{how}, checkpointed" if self.checkpointed else how


def cases() -> Iterator[Case]:
    """Yield trainings of every model, one after the other, first with its own batch.

    Settings go round with the place of a model, so that any first cases are a mixture; the first
    place is the one with which `PROMISES` were set.
    """
    optimizers = list(OPTIMIZERS)
    for factor, turn in product(BATCH_FACTORS, range(len(PRECISIONS))):
        for at, name in enumerate(MODELS, 5):
            precision = PRECISIONS[(at + turn) % len(PRECISIONS)]
            optimizer = optimizers[(at // len(PRECISIONS) + turn) % 3]
            checkpointed = (at + turn) % 2 == 1 and MODELS[name].switchable
            yield Case(name, precision, optimizer, checkpointed, factor)


@lru_cache(1)
def _built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[case.model].make().train()
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # of transformers
    return model


def build(case: Case) -> nn.Module:
    """Return a copy of the model of a case, which each process makes once."""
    return copy.deepcopy(_built(case))


def workload_of(case: Case) -> Workload:
    """Return the training of a case."""
    model = MODELS[case.model]
    torch.manual_seed(0)
    return Workload(
        partial(build, case),
        model.batch(),
        loss_fn=model.loss_fn,
        optimizer=OPTIMIZERS[case.optimizer],
    )
