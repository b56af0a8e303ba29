"""The trainings of `benchmarks.emulation_models`: each model with some precisions and optimizers.

Workers import this file, so a case travels by its name and its model is made where it trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from autofit import Workload
from benchmarks.emulated_models import MODELS
from benchmarks.library_models import switch_checkpointing_on

PRECISIONS = ("default", "bfloat16", "float16")
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    """A training: the name of a model, and how it is trained."""

    model: str
    precision: str
    optimizer: str
    checkpointed: bool

    @property
    def name(self) -> str:
        how = f"{self.model}, {self.precision}, {self.optimizer}"
        return f"{how}, checkpointed" if self.checkpointed else how


def cases() -> Iterator[Case]:
    """Yield the cases: first one of each model, then a second and a third with other precisions."""
    optimizers = list(OPTIMIZERS)
    for turn in range(len(PRECISIONS)):
        for at, name in enumerate(MODELS):
            precision = PRECISIONS[(at + turn) % len(PRECISIONS)]
            optimizer = optimizers[(at // len(PRECISIONS) + turn) % len(optimizers)]
            yield Case(name, precision, optimizer, (at + turn) % 2 == 1 and MODELS[name].switchable)


@lru_cache(1)
def _built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[case.model].make().train()
    if case.checkpointed:
        switch_checkpointing_on(model)
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
