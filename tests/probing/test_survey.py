"""What is found out about a workload on the CPU device before its first probe."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.cpu import CpuDevice
from autofit.equivalence.comparison import compare_plans
from autofit.errors import InvalidArgument, is_users
from autofit.measurement import Outcome
from autofit.plan import Dimension, NoFeasiblePlan, Plan, ResolvedPlan
from autofit.probing.looks import take_survey
from autofit.probing.requests import Call, ProbeRequest, Reply
from autofit.probing.session import Session
from autofit.probing.survey import check_weights_fit
from autofit.registry import load_strategies
from autofit.strategy import Comparison
from autofit.training.builder import TrainingBuilder
from autofit.training.workload import Workload
from benchmarks.workloads import tiny_gpt
from tests.classifier import CROSS_ENTROPY, classifier, labelled, session_of
from tests.plugin import Plugin

MIB = 2**20


def _look(session: Session, budget: int = 256 * MIB, **more: Any) -> Any:
    return session.run(Call(partial(take_survey, vram_budget_bytes=budget, **more), budget))


def _survey_of(session: Session, budget: int = 256 * MIB) -> Any:
    return _look(session, budget).value_or_raise()


def _surveyed(*middle: nn.Module, **more: Any) -> Any:
    arguments = {"sample_batch": labelled(), "criterion": CROSS_ENTROPY, "global_batch": 12}
    return _survey_of(session_of(lambda: Workload(classifier(*middle), **{**arguments, **more})))


def test_a_survey_says_what_the_workload_is() -> None:
    survey = _surveyed()
    assert survey.parameters == 6 * 16 + 16 + 16 * 4 + 4
    assert survey.parameter_bytes == 4 * survey.parameters
    assert survey.loss == "criterion"
    assert survey.sample_shapes == {"[0]": "float32[4, 6]", "[1]": "int64[4]"}
    assert survey.space().baseline == Plan.split(12, 4)
    assert survey.environment.device == "cpu"


def _contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return CROSS_ENTROPY(output @ output.T, torch.arange(len(output)))


WEIGHED = {"criterion": nn.CrossEntropyLoss(ignore_index=1)}


@pytest.mark.parametrize(
    ("middle", "more", "words"),
    [
        ([nn.BatchNorm1d(16)], {}, {}),
        ([], {"criterion": nn.CrossEntropyLoss(reduction="sum")}, {"loss_weight"}),
        (
            [],
            {"criterion": _contrastive},
            {"loss_weight"},
        ),
        ([], WEIGHED, {"loss_weight"}),
    ],
    ids=["BatchNorm", "summed", "contrastive", "masked"],
)
def test_where_splitting_changes_gradients_the_count_stays_and_the_report_says_why(
    middle: list[nn.Module], more: dict[str, Any], words: set[str]
) -> None:
    survey = _surveyed(*middle, **more)
    assert not survey.split_gradients.equal
    assert not survey.may_change_accumulation
    (note,) = survey.notes
    assert f"{survey.split_gradients.gradient:.1%}" in note
    assert survey.split_gradients.modules[0] in note
    assert "allow_accumulation_change" in note
    assert ("loss_weight" in note) is ("loss_weight" in words)
    assert survey.space().plan(1, {}) == survey.space().baseline


class _Noisy(nn.Module):
    """Draws noise whatever its mode, as a variational autoencoder does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(len(x), 37)[:, : x.shape[1]]


def _steps_itself(training: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = training.loss(batch)
    training.backward(loss)
    training.optimizer_step()
    return loss


def _fails(output: Any, target: Any) -> torch.Tensor:
    raise LookupError("no such class")


@pytest.mark.parametrize(
    ("middle", "more", "loss", "words"),
    [
        ([_Noisy()], {}, "criterion", "random.*allow_accumulation_change"),
        ([], {"training_step": _steps_itself}, "training_step", "training_step"),
        ([], {"criterion": _fails}, None, "LookupError: no such class"),
        (
            [],
            {
                "sample_batch": torch.ones(2, 6, dtype=torch.int64),
                "criterion": None,
                "loss_fn": lambda model, batch: model(batch.float()).mean(),
            },
            "loss_fn",
            "one sample.*samples that differ",
        ),
    ],
    ids=["noise", "a step of the user's", "a loss that fails", "copies of one sample"],
)
def test_where_it_is_not_known_whether_splitting_changes_gradients_the_count_stays(
    middle: list[nn.Module], more: dict[str, Any], loss: str | None, words: str
) -> None:
    survey = _surveyed(*middle, **more)
    assert survey.loss == loss
    assert not survey.may_change_accumulation
    assert re.search(words, survey.notes[0])
    assert "loss_weight" not in survey.notes[0]
    assert survey.with_accumulation_free().may_change_accumulation


@pytest.mark.parametrize(
    ("middle", "more", "is_compared"),
    [
        ([], WEIGHED | {"loss_weight": lambda batch: float((batch[1] != 1).sum())}, True),
        ([], {"sample_batch": (torch.randn(1, 6), torch.ones(1).long())}, True),
        ([], {"sample_batch": labelled}, True),
        ([nn.BatchNorm1d(16)], {"global_batch": None}, False),
        ([nn.BatchNorm1d(16)], {"global_batch": 1}, False),
    ],
    ids=["weighed", "one sample is varied", "a function", "no global batch", "one sample in all"],
)
def test_the_count_is_free_where_gradients_are_alike_or_there_is_nothing_to_split(
    middle: list[nn.Module], more: dict[str, Any], is_compared: bool
) -> None:
    survey = _surveyed(*middle, **more)
    assert survey.may_change_accumulation
    assert bool(survey.split_gradients) is is_compared
    assert not is_compared or survey.split_gradients.equal
    assert survey.notes == ()


def test_one_sample_that_is_varied_tells_of_batch_norm() -> None:
    sample = (torch.randn(1, 6), torch.ones(1).long())
    assert not _surveyed(nn.BatchNorm1d(16), sample_batch=sample).may_change_accumulation


def _tokens(**more: torch.Tensor) -> dict[str, Any]:
    batch = {"inputs": torch.randn(4, 8, 6), "targets": torch.randint(4, (4, 8)), **more}
    return {"sample_batch": batch, "criterion": None}


def test_a_sample_without_padding_is_said_to_show_nothing_of_batches_with_it() -> None:
    def mean_over_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
        return CROSS_ENTROPY(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    survey = _surveyed(**_tokens(), loss_fn=mean_over_tokens)
    assert survey.may_change_accumulation
    (note,) = survey.notes
    differs: Any = re.search(r"targets .*change gradients by ([\d.]+)%.*loss_weight", note)
    assert float(differs[1]) > 1


@pytest.mark.parametrize("mask", [torch.ones(4, 8).long(), torch.ones(4, 8), torch.ones(4, 8) > 0])
def test_a_mask_that_leaves_nothing_out_is_tried_with_some_left_out(mask: torch.Tensor) -> None:
    def mean_over_valid(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = model(batch["inputs"]).square().mean(2)
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    given = _tokens(mask=mask) | {"loss_fn": mean_over_valid}
    survey = _surveyed(**given)
    assert not survey.may_change_accumulation
    (note,) = survey.notes
    assert re.search(r"\['mask'\].*differ by \d+\.\d%.*loss_weight", note)
    weighted = _surveyed(**given, loss_weight=lambda batch: float(batch["mask"].sum()))
    assert weighted.may_change_accumulation
    assert weighted.notes == ()


@pytest.mark.parametrize(("budget", "loss"), [(8 * MIB, None), (1024 * MIB, "loss_fn")])
def test_the_first_loss_is_computed_within_the_budget(budget: int, loss: str | None) -> None:
    """Two samples of it take 32 MiB, beside a single weight."""

    def wide(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model.weight * x).expand(4 * MIB, -1, -1).exp().mean()

    session = session_of(lambda: Workload(nn.Linear(1, 1), torch.ones(2, 1), loss_fn=wide))
    assert _survey_of(session, budget).loss == loss


class _Looks(Plugin):
    """A strategy that looks at a training as it is told to."""

    def __init__(self, look: Callable[[Any], Any], name: str = "looks") -> None:
        self.look, self.name = look, name

    def dimensions(self, context: Any) -> Any:
        return self.look(context)


def _curious(context: Any) -> dict[str, Dimension]:
    """Look at the model, profile it twice, say so, and offer a setting."""
    assert context.model.weight.shape == (4, 6)
    for micro_batch in (1, 3):
        loss = context.with_training(lambda training, batch: training.step(batch), micro_batch)
        context.note(f"{loss:.0f} at {micro_batch} on {context.device}")
    return {"looks.level": Dimension([0, context.capabilities.device_type])}


def _failing(context: Any) -> Any:
    raise RuntimeError("cannot look")


def test_strategies_look_at_models_and_say_what_they_find() -> None:
    survey = _survey_of(
        session_of(
            lambda: Workload(
                nn.Linear(6, 4), torch.zeros(4, 6), loss_fn=lambda m, b: (0 * m(b)).abs().sum()
            ),
            strategies=[_Looks(_failing, "failing"), _Looks(_curious)],
        )
    )
    assert survey.dimensions == {"looks.level": Dimension([0, "cpu"])}
    assert survey.notes == (
        "failing left out: RuntimeError: cannot look",
        "0 at 1 on cpu",
        "0 at 3 on cpu",
    )
    nothing_to_choose = replace(survey, dimensions={"looks.level": Dimension([0])}).space()
    assert (nothing_to_choose.dimensions, nothing_to_choose.fixed) == ({}, {"looks.level": 0})


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        (["looks.level"], "'looks'.*mapping"),
        ({"another.level": Dimension([0, 1])}, "'another.level'.*'looks.'"),
        ({"looks.level": [0, 1]}, "Dimension"),
    ],
)
def test_a_strategy_that_breaks_the_contract_is_refused_and_not_left_out(
    offers: Any, words: str
) -> None:
    session = session_of(
        lambda: Workload(classifier(), labelled()[0]), strategies=[_Looks(lambda _: offers)]
    )
    with pytest.raises(InvalidArgument, match=words):
        _survey_of(session)


def test_a_teacher_that_the_loss_trains_starts_alike_in_each_look() -> None:
    """And the batch, and the generator that draws the loss's own noise."""
    teacher, noise, batch = nn.Linear(6, 4), torch.Generator().manual_seed(3), torch.ones(4, 6)
    optimizer = torch.optim.AdamW(teacher.parameters())
    seen = list[list[torch.Tensor]]()

    def taught(student: nn.Module, x: torch.Tensor) -> torch.Tensor:
        state = [each["exp_avg"] for each in optimizer.state.values()]
        held = [teacher.weight.detach(), batch, noise.get_state(), *state]
        seen.append([each.clone() for each in held])
        target = teacher(x + torch.rand(6, generator=noise))
        target.square().mean().backward()
        optimizer.step()
        batch.data.add_(1)  # of which x may be a view
        return (student(x) - target.detach()).square().mean()

    def twice(context: Any) -> dict[str, Dimension]:
        for _ in range(2):
            context.with_training(lambda training, given: training.step(given), 2)
        return {}

    make = partial(Workload, classifier(), batch, loss_fn=taught)
    _survey_of(session_of(make, strategies=[_Looks(twice)]))
    first, *others = seen
    assert len(others) >= 2
    for each in others:
        assert len(first) == len(each)
        assert all(map(torch.equal, first, each))


def test_a_model_whose_loss_exists_in_training_only_is_compared_in_training() -> None:
    class Shy(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            loss = CROSS_ENTROPY(super().forward(x), labels)
            return {"loss": loss} if self.training else {"labels": labels}

    survey = _survey_of(session_of(lambda: Workload(Shy(6, 4), labelled(), global_batch=8)))
    assert survey.split_gradients.equal


def test_one_model_is_alive_at_a_time() -> None:
    alive, counts = weakref.WeakSet[nn.Module](), list[int]()

    def build() -> nn.Module:
        made = nn.Linear(6, 4)
        alive.add(made)
        counts.append(len(alive))
        return made

    def make() -> Workload:
        return Workload(build, labelled()[0], global_batch=8)

    session = session_of(make, strategies=[_Looks(_curious)])
    gc.collect()
    counts.clear()
    survey = _survey_of(session)
    assert survey.may_change_accumulation
    session.probe(ProbeRequest(ResolvedPlan(survey.space().baseline), 256 * MIB))
    compare_plans(session.builder, ResolvedPlan(Plan(4)), ResolvedPlan(Plan.split(4, 2)), 4)
    assert counts == [1] * 4  # the survey's, the probe's, and two that were compared


def test_a_model_that_fails_is_surveyed_all_the_same() -> None:
    def fails(output: Any, target: Any) -> torch.Tensor:
        raise LookupError("no such class")

    survey = _surveyed(criterion=fails)
    assert survey.loss is None
    assert not survey.may_change_accumulation
    assert "LookupError: no such class" in survey.notes[0]


def test_a_budget_below_the_weights_is_refused_with_both_numbers() -> None:
    session = session_of(lambda: Workload(nn.Linear(512, 512), torch.randn(2, 512)))
    survey = _survey_of(session, MIB)
    with pytest.raises(NoFeasiblePlan, match=r"1\.00 MiB") as refusal:
        check_weights_fit(survey)
    assert refusal.value.plan is None
    assert refusal.value.allowed_bytes == MIB
    assert refusal.value.required_bytes == 4 * (512 * 512 + 512)


# -- One workload on the CPU device: its probes' endings, and plans compared.


def _probe(session: Session, plan: Plan, budget: int = 256 * MIB) -> Reply:
    resolved = ResolvedPlan(plan, strategies=session.strategies)
    return session.probe(ProbeRequest(resolved, budget))


def _compare(session: Session, first: Plan, second: Plan, samples: int) -> Comparison:
    one, other = (ResolvedPlan(plan, strategies=session.strategies) for plan in (first, second))
    return compare_plans(session.builder, one, other, samples)


def test_gradients_of_parameters_that_no_optimizer_has_are_compared_once() -> None:
    """They stay as they are while the others are updated one by one."""

    def make() -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        return Workload(
            model, torch.randn(8, 4), optimizer=lambda ps: torch.optim.SGD([*ps][:2], 0.1)
        )

    session = session_of(make, strategies=load_strategies(["optimizer"]))
    plans = Plan(4), Plan(4, settings={"optimizer.when": "backward"})
    assert _compare(session, *plans, 4).gradient == 0


def test_a_plan_without_room_for_one_more_segment_is_not_repeated() -> None:
    """As many bytes are free, but in pieces, as they would be in a repeat."""
    reply = _probe(session_of(tiny_gpt), Plan(16, accumulation_steps=2), 64 * MIB)
    assert reply.value.outcome is Outcome.OOM
    assert reply.value.peak_allocated_bytes < 60 * MIB
    assert not reply.worth_repeating


def test_plans_are_compared_from_equal_weights_also_where_a_function_builds_them() -> None:
    session = session_of(
        lambda: Workload(lambda: nn.Linear(6, 4), labelled(), criterion=CROSS_ENTROPY),
        strategies=load_strategies(["precision"]),
    )
    assert _compare(session, Plan(4), Plan.split(4, 3), 4).equal
    half = Plan(4, settings={"precision.dtype": "bfloat16"})
    found = _compare(session, Plan(4), half, 4)
    assert 1e-4 < found.gradient < 0.1


def test_the_budget_is_in_force_from_the_first_look_on() -> None:
    limits: list[int] = []

    class Limited(CpuDevice):
        def limit(self, vram_budget_bytes: int) -> None:
            super().limit(vram_budget_bytes)
            limits.append(vram_budget_bytes)

    workload = Workload(classifier(), labelled()[0])
    session = Session(lambda: workload, (), Limited())
    _look(session, 64 * MIB)
    assert limits == [64 * MIB]
    assert _probe(session, Plan(4), 32 * MIB).value.ok
    assert limits == [64 * MIB, 32 * MIB]


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
    class Labels(nn.Linear):
        def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
            out = super().forward(x)
            return out.argmax(1) if more.get("criterion", 0) is None else out

    arguments = {"sample_batch": labelled(), "criterion": CROSS_ENTROPY, **more}
    reply: Any = _probe(session_of(lambda: Workload(Labels(6, 4), **arguments)), Plan(4))
    assert reply.value.outcome is Outcome.USER_ERROR
    with pytest.raises(InvalidArgument, match=message):
        raise reply.exception


def _raises() -> nn.Module:
    raise LookupError("no weights")


@pytest.mark.parametrize(
    ("model", "look", "error", "is_theirs"),
    [
        (lambda width: nn.Linear(6, width), {}, TypeError, True),
        (_raises, {}, LookupError, True),
        (classifier, {"no_such_argument": 1}, TypeError, False),
    ],
    ids=["wants a width", "raises", "our own"],
)
def test_what_the_users_code_raises_in_the_survey_is_the_users(
    model: Any, look: dict[str, Any], error: type[Exception], is_theirs: bool
) -> None:
    reply = _look(session_of(lambda: Workload(model, labelled()[0])), 64 * MIB, **look)
    assert isinstance(reply.exception, error)
    assert is_users(reply.exception) is is_theirs


class _Mortal(CpuDevice):
    """Dies when told to."""

    is_dead = False

    def synchronize(self) -> None:
        if self.is_dead:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    check_health = synchronize


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
    died = _look(session)
    assert died.exception.strategy == "checkpointing"
    assert not is_users(died.exception)
    assert died.spent
    device.is_dead = False
    survey = _look(session, left_out={"checkpointing": "because"}).value
    assert survey.notes == ("checkpointing left out: because",)
    assert survey.dimensions == {}
