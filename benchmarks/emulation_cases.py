"""The trainings of `benchmarks.emulation_models`: model x optimizer x precision x batch.

Workers import this file, so a case travels by its name and its model is made where it trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import product
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
    """Yield three trainings of each model, one after the other, then those of `mixed_cases`."""
    optimizers = list(OPTIMIZERS)
    for turn in range(len(PRECISIONS)):
        for at, name in enumerate(MODELS):
            precision = PRECISIONS[(at + turn) % len(PRECISIONS)]
            optimizer = optimizers[(at // len(PRECISIONS) + turn) % 3]
            checkpointed = (at + turn) % 2 == 1 and MODELS[name].switchable
            yield Case(name, precision, optimizer, checkpointed)
    yield from mixed_cases()


def mixed_cases() -> Iterator[Case]:
    """Yield every model x precision x optimizer x batch in the order of a hash.

    So any first ones are a fair sample. The hash also tells which use the checkpointing of their
    library, half of those that can.
    """
    hashed = {}
    for name, precision, optimizer, factor in product(
        MODELS, PRECISIONS, ("sgd", "adamw", "adafactor"), BATCH_FACTORS
    ):
        digest = sha256(f"{name}/{precision}/{optimizer}/{factor}".encode()).digest()
        checkpointed = digest[0] % 2 == 1 and MODELS[name].switchable
        hashed[digest[1:]] = Case(name, precision, optimizer, checkpointed, factor)
    yield from (hashed[digest] for digest in sorted(hashed))


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
