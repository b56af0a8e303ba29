"""What cannot work is refused in words: what it was, which value, and what to do about it."""

from __future__ import annotations

import functools
import os
import re
import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.searching.events import Event, ProbeFinished
from autofit.units import format_bytes

HERE: dict[str, Any] = {"device": "cpu", "vram_budget": "32MiB"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batch() -> torch.Tensor:
    return torch.randn(4, 8)


WRAPPED = nn.DataParallel(nn.Linear(8, 2))
WORKLOAD = autofit.Workload(model, batch())


def _holding_itself() -> list[Any]:
    held: list[Any] = [batch()]
    held.append(held)
    return held


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"global_batch": 0}, r"global_batch.*\b0"),
        ({"global_batch": -8}, r"global_batch.*-8"),
        ({"global_batch": "8"}, r"global_batch.*'8'"),
        ({"global_batch": 8.0}, r"global_batch.*8\.0"),
        ({"loss_fn": "mse"}, r"loss_fn.*'mse'"),
        ({"global_batch": 10**9}, r"65536.*250000000\b"),
        ({"optimizer": "adam"}, r"optimizer.*'adam'"),
        ({"optimizer": None}, r"optimizer.*None"),
        (
            {"model": model(), "optimizer": torch.optim.SGD(model().parameters(), lr=0.1)},
            r"SGD.*parameters",
        ),
        (
            {"model": nn.Sequential(nn.LazyLinear(4))},
            r"0\.weight, 0\.bias.*run one batch",
        ),
        (
            {"model": lambda: nn.Sequential(nn.LazyLinear(4))},
            r"0\.weight.*function",
        ),
        (
            {"model": model().requires_grad_(False)},
            r"parameter.*frozen",
        ),
        ({"loss_fn": lambda m, b: m(b).mean().detach()}, r"parameter.*detached"),
        (
            {"options": autofit.SearchOptions(max_micro_batch=1)},
            r"max_micro_batch=1 .* baseline",
        ),
        ({"options": {"effort": "quick"}}, r"SearchOptions.*effort"),
        ({"max_probes": 0}, r"max_probes.*\b0"),
        ({"timeout": 0}, r"timeout.*\b0"),
        ({"vram_budget": "plenty"}, r"'plenty'.*24GiB"),
        ({"vram_budget": "24X"}, r"'24X'.*24GiB"),
        ({"vram_budget": 0}, r"bytes.*\b0"),
        ({"vram_budget": 1.5}, r"\(0, 1\].*1\.5"),
        ({"vram_budget": "4000TiB"}, r"4000 TiB.*\d GiB"),
        ({"vram_budget": "9" * 400 + "GiB"}, r"no device .* '9999"),
        ({"strategies": ["precison"]}, r"'precison'.*checkpointing, .*precision"),
        ({"strategies": 3}, r"strategies.*3"),
        ({"progress": 3}, r"progress.*True.*3"),
        ({"numerics": "sloppy"}, r"numerics.*exact, .*'sloppy'"),
        (
            {"numerics": "exact", "strategies": ["precision"]},
            r"'precision'.*'reduced_precision'.*'exact'",
        ),
        ({"device": "tpu"}, r"device.*\"cuda:N\".*'tpu'"),
        (
            {"loss_fn": lambda m, b: m(b).mean(), "criterion": nn.MSELoss()},
            r"loss_fn.*criterion",
        ),
        (
            {"optimizer": {"": torch.optim.SGD}},
            r"optimizer.*training_step=",
        ),
        ({"sample_batch": None}, "give a sample batch"),
        ({"model": WORKLOAD, "criterion": nn.MSELoss()}, r"sample_batch, criterion"),
        ({"sample_batch": {"text": "a"}}, r"dict.*n -> batch"),
        ({"sample_batch": torch.tensor(1.0)}, r"tensor.*n -> batch"),
        ({"sample_batch": torch.zeros(0, 8)}, r"\b0 samples"),
        (
            {"sample_batch": torch.zeros(4, 8, device="meta")},
            r"sample batch.*meta.*values",
        ),
        ({"model": model().to("meta")}, r"model.*meta.*values"),
        ({"sample_batch": _holding_itself()}, r"batch \(a list\) holds itself"),
        (
            {"sample_batch": (torch.zeros(1, 8), torch.zeros(1), torch.zeros(9))},
            r"2 of its 3 tensors.*n -> batch",
        ),
        ({"sample_batch": lambda n: f"{n} texts"}, r"holds tensors.*\bstr\b"),
        ({"model": "resnet50"}, r"nn\.Module.*'resnet50'"),
        ({"model": lambda: 7}, r"nn\.Module.*\bint\b"),
        ({"optimizer": lambda parameters: None}, r"torch\.optim\.Optimizer.*None"),
        (
            {"optimizer": torch.optim.SGD(model().parameters(), lr=0.1)},
            r"live optimizer.*live model",
        ),
    ],
)
def test_an_argument_that_cannot_mean_anything(said: dict[str, Any], words: str) -> None:
    arguments = {"model": model, "sample_batch": batch(), **HERE, **said}
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.search(arguments.pop("model"), arguments.pop("sample_batch"), **arguments)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"loss_weight": 3}, r"loss_weight.*3"),
        ({"training_step": 3}, r"training_step.*3"),
        ({"clip_grad_norm": "1"}, r"clip_grad_norm.*'1'"),
        ({"clip_grad_norm": True}, r"clip_grad_norm.*True"),
        ({"clip_grad_norm": float("inf")}, r"clip_grad_norm.*inf"),
        ({"clip_grad_norm": 0.0}, r"clip_grad_norm.*0\.0"),
        ({"model": WRAPPED}, r"model is .*DataParallel.*plain model"),
    ],
)
def test_a_workload_of_what_cannot_be_trained(said: dict[str, Any], words: str) -> None:
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.Workload(**{"model": model, "sample_batch": batch(), **said})


def test_a_function_that_builds_what_is_wrapped_is_refused_once_it_has() -> None:
    workload = autofit.Workload(lambda: nn.Sequential(WRAPPED), batch())
    with pytest.raises(autofit.InvalidArgument, match=r"'0' is .*DataParallel.*plain model"):
        workload.build_model()


def test_a_loss_that_is_not_finite_on_the_baseline() -> None:
    seen: list[Event] = []
    loss_fn = lambda m, b: m(b).mean() * float("inf")  # noqa: E731 - as users write it
    with pytest.raises(autofit.WorkloadFailed, match="not finite"):
        autofit.search(model, batch(), loss_fn=loss_fn, progress=seen.append, **HERE)
    assert sum(isinstance(event, ProbeFinished) for event in seen) == 1


# -- nothing fits -----------------------------------------------------------------------------


def test_when_nothing_fits_it_says_what_was_tried_needed_and_allowed() -> None:
    workload = autofit.Workload(
        lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)),
        torch.randn(4, 512),
        global_batch=8,
    )
    # Whether an optimizer's implementations are offered depends on their measured times.
    given = {"vram_budget": "4MiB", "strategies": ["precision", "checkpointing"]}
    with pytest.raises(autofit.NoFeasiblePlan, match=r"needs least, 1 x \d+") as caught:
        autofit.search(workload, **HERE | given)
    refused: Any = caught.value
    assert refused.plan.micro_batch == 1
    assert refused.required_bytes > refused.allowed_bytes == 4 * 2**20
    enough = format_bytes(refused.sufficient_bytes)
    words = rf"(?s)(?=.*VRAM budget)(?=.*4\.00 MiB).*a budget of {enough} is expected"
    assert re.search(words, str(refused))
    proposed = HERE | {"vram_budget": refused.sufficient_bytes}
    assert autofit.probe(workload, plan=refused.plan, **proposed).ok


# -- the user's own code raises ---------------------------------------------------------------


class OutOfCoffee(Exception):
    """The user's own error, whose text must not be taken for a lack of memory."""


def raising(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise OutOfCoffee("out of memory of what to do with " + str(tuple(batch.shape)))


OWN_FRAME = re.compile(rf'File "{re.escape(os.path.dirname(autofit.__file__))}/')


def test_what_the_users_code_raises_reaches_the_user() -> None:
    seen: list[Event] = []
    with pytest.raises(OutOfCoffee, match="out of memory of what to do") as caught:
        autofit.search(model, batch(), loss_fn=raising, progress=seen.append, **HERE)
    finished = [event.trial for event in seen if isinstance(event, ProbeFinished)]
    assert len(finished) <= 2
    assert {t.measurement.outcome for t in finished} <= {autofit.Outcome.USER_ERROR}
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise OutOfCoffee("out of memory' in shown
    assert len(OWN_FRAME.findall(shown)) <= 1


@pytest.mark.parametrize(
    "call",
    [
        lambda workload: autofit.search(workload, **HERE),
        lambda workload: autofit.probe(workload, **HERE),
        lambda workload: autofit.predict(workload, gpu="L4"),
        lambda workload: autofit.check(workload, gpu="L4", vram_budget="1GiB"),
    ],
    ids=["search", "probe", "predict", "check"],
)
def test_a_traceback_shows_the_users_frames_and_at_most_one_of_ours(call: Any) -> None:
    """Torch refuses what is done to the batch, below the mode of a dry run or a probe."""

    def narrow(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch[:, 1:]).mean()

    with pytest.raises(RuntimeError, match=r"4.*8") as caught:
        call(autofit.Workload(model, batch(), loss_fn=narrow))
    shown = "".join(traceback.format_exception(caught.value))
    assert "return model(batch[:, 1:]).mean()" in shown
    assert "F.linear(input, self.weight" in shown
    assert len(OWN_FRAME.findall(shown)) <= 1


class Lightning(nn.Module):
    """Like a LightningModule, whose loss is in its training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.layer(batch).mean()


def test_a_module_without_forward_is_told_of_loss_fn() -> None:
    workload = autofit.Workload(Lightning(), batch())
    words = r"Lightning.*loss_fn=lambda model, batch: model\.training_step"
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.probe(workload, **HERE)
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.predict(workload)
    loss_fn = lambda model, batch: model.training_step(batch, 0)  # noqa: E731 - as it is proposed
    assert autofit.predict(replace(workload, loss_fn=loss_fn)).required_bytes > 0


def test_what_an_optimizer_raises_reaches_the_user() -> None:
    optimizer = functools.partial(torch.optim.SGD, lr=-1.0)
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        autofit.search(model, batch(), optimizer=optimizer, **HERE)
