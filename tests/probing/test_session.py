"""One workload on the CPU device: its probes' endings, and plans compared."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.cpu import CpuDevice
from autofit.equivalence.comparison import compare_plans
from autofit.errors import InvalidArgument, is_users
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.looks import take_survey
from autofit.probing.requests import Call, ProbeRequest, Reply
from autofit.probing.session import Session
from autofit.registry import load_strategies
from autofit.strategy import Comparison
from autofit.training.builder import TrainingBuilder
from autofit.training.workload import Workload
from benchmarks.workloads import tiny_gpt
from tests.classifier import CROSS_ENTROPY, classifier, labelled, session_of

MIB = 2**20


def _probe(session: Session, plan: Plan, budget: int = 256 * MIB) -> Reply:
    resolved = ResolvedPlan(plan, strategies=session.strategies)
    return session.probe(ProbeRequest(resolved, budget))


def _compare(session: Session, first: Plan, second: Plan, samples: int) -> Comparison:
    one, other = (ResolvedPlan(plan, strategies=session.strategies) for plan in (first, second))
    return compare_plans(session.builder, one, other, samples)


def test_the_budget_is_in_force_from_the_first_look_on() -> None:
    class Limited(CpuDevice):
        limits: list[int]

        def limit(self, vram_budget_bytes: int) -> None:
            super().limit(vram_budget_bytes)
            self.limits.append(vram_budget_bytes)

    device = Limited()
    device.limits = []
    workload = Workload(classifier(), labelled()[0])
    session = Session(lambda: workload, (), device)
    session.run(Call(partial(take_survey, vram_budget_bytes=64 * MIB), 64 * MIB))
    assert device.limits == [64 * MIB]
    assert _probe(session, Plan(4), 32 * MIB).value.ok
    assert device.limits == [64 * MIB, 32 * MIB]


def test_class_weights_follow_the_model_to_the_device() -> None:
    weights = torch.rand(4)

    def make() -> Workload:
        return Workload(classifier(), labelled(), criterion=nn.CrossEntropyLoss(weight=weights))

    device = CpuDevice()
    with device.accounting():
        training = TrainingBuilder(make, device, 0).training(make(), ResolvedPlan(Plan(4)))
    criterion: Any = training.recipe.criterion
    assert torch.equal(criterion.weight, weights)
    assert criterion.weight.data_ptr() != weights.data_ptr()
    assert _probe(session_of(make), Plan(4)).value.ok


def test_probes_do_not_see_each_other() -> None:
    session = session_of(
        lambda: Workload(classifier(nn.Tanh()), labelled(), criterion=CROSS_ENTROPY)
    )
    first = _probe(session, Plan(64)).value
    _probe(session, Plan(512))
    again = _probe(session, Plan(64)).value
    assert again.peak_allocated_bytes == first.peak_allocated_bytes
    assert again.peak_reserved_bytes == first.peak_reserved_bytes


def test_a_plan_without_room_for_one_more_segment_is_not_repeated() -> None:
    """As many bytes are free, but in pieces, as they would be in a repeat."""
    reply = _probe(session_of(tiny_gpt), Plan(16, accumulation_steps=2), 64 * MIB)
    assert reply.value.outcome is Outcome.OOM
    assert reply.value.peak_allocated_bytes < 60 * MIB
    assert not reply.worth_repeating


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"criterion": lambda y, t: y}, "criterion"),
        ({"criterion": None}, "loss_fn="),
        ({"sample_batch": torch.randn(4, 6)}, r"\(input, target\)"),
        ({"training_step": lambda t, b: None}, "training_step.*None"),
    ],
)
def test_what_is_no_loss_is_refused_in_our_words(more: dict[str, Any], message: str) -> None:
    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier()

        def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
            out: torch.Tensor = self.net(x)
            return out.argmax(1) if more.get("criterion", 0) is None else out

    arguments = {"sample_batch": labelled(), "criterion": CROSS_ENTROPY, **more}
    reply: Any = _probe(session_of(lambda: Workload(Labels(), **arguments)), Plan(4))
    assert reply.value.outcome is Outcome.USER_ERROR
    with pytest.raises(InvalidArgument, match=message):
        raise reply.exception


def test_plans_are_compared_from_equal_weights_also_where_a_function_builds_them() -> None:
    session = session_of(
        lambda: Workload(lambda: nn.Linear(6, 4), labelled(), criterion=CROSS_ENTROPY),
        strategies=load_strategies(["precision"]),
    )
    assert _compare(session, Plan(4), Plan.split(4, 3), 4).equal
    half = Plan(4, settings={"precision.dtype": "bfloat16"})
    found = _compare(session, Plan(4), half, 4)
    assert 1e-4 < found.gradient < 0.1


def _wants_a_width(width: int) -> nn.Module:
    return nn.Linear(6, width)


def _raises() -> nn.Module:
    raise LookupError("no weights")


@pytest.mark.parametrize("model", [_wants_a_width, _raises])
def test_what_the_users_code_raises_in_the_survey_is_the_users(model: Any) -> None:
    session = session_of(lambda: Workload(model, labelled()[0]))
    reply: Any = session.run(Call(partial(take_survey, vram_budget_bytes=64 * MIB), 64 * MIB))
    assert is_users(reply.exception)


def test_what_autofits_own_code_raises_is_not_the_users() -> None:
    session = session_of(lambda: Workload(classifier(), labelled()[0]))
    not_called_so: Any = take_survey
    reply = session.run(Call(partial(not_called_so, budget=64 * MIB), 64 * MIB))
    assert isinstance(reply.exception, TypeError)
    assert not is_users(reply.exception)


class _Mortal(CpuDevice):
    """Dies when told to."""

    is_dead = False

    def synchronize(self) -> None:
        if self.is_dead:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def check_health(self) -> None:
        self.synchronize()


class _Batch(list[torch.Tensor]):
    """A list that can be referred to weakly, in place of pinned memory."""


@pytest.mark.parametrize("dies", [False, True])
def test_what_a_failed_step_holds_is_freed_unless_that_would_end_the_process(dies: bool) -> None:
    held: list[weakref.ref[_Batch]] = []

    class Fails(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            batch = _Batch([inputs])
            held.append(weakref.ref(batch))
            device.is_dead = dies
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `c`")

    device, workload = _Mortal(), Workload(Fails(6, 6), labelled()[0])
    reply = _probe(Session(lambda: workload, (), device), Plan(4))
    assert reply.value.outcome is (Outcome.POISONED if dies else Outcome.USER_ERROR)
    del reply
    gc.collect()
    assert (held[0]() is not None) == dies


def test_a_strategy_under_which_the_device_dies_is_named_and_can_be_left_out() -> None:
    class Dies(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            device.is_dead = torch.is_grad_enabled()  # a trial forward has none
            return super().forward(inputs)

    device, workload = _Mortal(), Workload(nn.Sequential(Dies(6, 6)), labelled()[0])
    session = Session(lambda: workload, load_strategies(["checkpointing"]), device)
    look_up = partial(take_survey, vram_budget_bytes=64 * MIB)
    died: Any = session.run(Call(look_up, 64 * MIB))
    assert died.exception.strategy == "checkpointing"
    assert not is_users(died.exception)
    assert died.spent
    device.is_dead = False
    reply = session.run(Call(partial(look_up, left_out={"checkpointing": "because"}), 64 * MIB))
    assert reply.value.notes == ("checkpointing left out: because",)
    assert reply.value.dimensions == {}
