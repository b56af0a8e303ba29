"""Samples, functions and objects as batches: what a step takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

from autofit.errors import InvalidArgument
from autofit.plan import Plan, ResolvedPlan
from autofit.training.batch import describe, pieces, placed, tensors_of
from autofit.training.lengths import Lengths
from autofit.training.loss import Recipe
from autofit.training.samples import Collated, Made, Rows
from autofit.training.training import Training
from autofit.training.watch import BatchWatch
from autofit.training.workload import Workload

CPU = torch.device("cpu")


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def texts(*lengths: int) -> list[torch.Tensor]:
    return [torch.full((length,), float(length)) for length in lengths]


def mean(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (batch.sum(1) * model.weight).mean()


def build() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def training(workload: Workload, plan: Plan) -> Training:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    resolved = ResolvedPlan(plan)
    return Training(
        model, optimizer, workload.recipe, resolved, device=CPU, samples=workload.samples
    )


def test_sorted_samples_stay_sorted_where_there_are_more_than_were_given() -> None:
    workload = Workload(build, texts(5, 3, 2), collate_fn=collate, loss_fn=mean)
    assert workload.sample_batch_size == 3
    assert workload.batch(7)[:, 0].tolist() == [5, 5, 5, 3, 3, 2, 2]
    step = workload.step_of(2, 2)
    assert [batch.whole()[:, 0].tolist() for batch in step.batches] == [[5, 3], [5, 2]]


def test_a_step_collates_each_micro_batch_of_its_samples() -> None:
    seen: list[torch.Size] = []

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch.shape)
        return mean(model, batch)

    workload = Workload(build, texts(5, 3, 2), collate_fn=collate, loss_fn=loss_fn)
    with training(workload, Plan(2, accumulation_steps=2)) as one:
        one.step(texts(9, 1, 2, 3))
        weights = [weight for _, weight in one.micro_batches(texts(9, 1, 2))]
    assert seen == [(2, 9), (2, 3)]
    assert weights == [2 / 3, 1 / 3]


def test_a_data_set_has_no_size_of_its_own() -> None:
    data = TensorDataset(torch.randn(500, 4), torch.randn(500))
    workload = Workload(build, data, collate_fn=torch.utils.data.default_collate, global_batch=48)
    assert workload.sample_batch_size == 48
    assert not workload.chose_size
    kept: Any = workload.sample_batch
    assert len(kept) == 48
    assert workload.plan() == Plan(48, global_batch=48)
    assert torch.equal(workload.batch(2)[0], data.tensors[0][:2])


@pytest.mark.parametrize(
    ("given", "more", "words"),
    [
        (torch.ones(3, 4), {}, "list of samples"),
        ({"x": 1}, {}, "list of samples"),
        ([], {}, "no samples"),
        (texts(2), {"collate_fn": 3}, "collate_fn must be a function"),
        (lambda n: n, {}, "list of samples"),
        (texts(2), {"collate_fn": lambda samples: "text"}, "holds tensors"),
    ],
)
def test_what_no_batch_can_be_made_of_is_refused(given: Any, more: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Workload(build, given, **({"collate_fn": collate} | more)).batch(2)


def test_a_step_takes_a_batch_of_rows_too_that_collate_fn_made() -> None:
    workload = Workload(build, texts(5, 3, 4), collate_fn=collate, loss_fn=mean)
    losses = []
    for given in (texts(5, 3, 4), collate(texts(5, 3, 4))):
        torch.manual_seed(0)
        with training(workload, Plan(3)) as one:
            losses.append(float(one.step(given)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("given", [{"x": torch.ones(4)}, []])
def test_a_step_takes_samples_where_the_search_did(given: Any) -> None:
    workload = Workload(build, texts(5, 3), collate_fn=collate, loss_fn=mean)
    with (
        training(workload, Plan(2)) as one,
        pytest.raises(InvalidArgument, match="list of samples"),
    ):
        one.step(given)


def test_lengths_are_of_samples_too() -> None:
    lists = [texts(5, 4), texts(2, 1, 2)]
    for given, collate_fn in (
        (Lengths(lists, [1, 3], collate_fn=collate), None),
        (Lengths(lists, [1, 3]), collate),
    ):
        workload = Workload(build, given, loss_fn=mean, collate_fn=collate_fn)
        assert isinstance(workload.samples, Collated)
        assert workload.sample_batch_size == 2
        assert [(share, tuple(batch.shape)) for share, batch in workload.mix(4)] == [
            (0.75, (4, 2)),
            (0.25, (4, 5)),
        ]


@pytest.mark.parametrize("training_step", [None, lambda training, batch: batch])
def test_a_step_of_each_length_has_that_length(training_step: Any) -> None:
    rows = Lengths([torch.ones(2, 5), torch.ones(2, 3)])
    workload = Workload(build, rows, loss_fn=mean, training_step=training_step)
    shapes = [tuple(step.shape) for _, step in workload.mix_of_steps([2, 2])]
    assert shapes == [(4, 3), (4, 5)]


def test_the_largest_batch_of_a_size_is_of_all_samples_that_were_given() -> None:
    samples = texts(2, 3, 2, 5, 1)
    workload = Workload(build, samples, collate_fn=collate, loss_fn=mean)
    batches = [workload.largest_batch(size) for size in (1, 2, 3, 7)]
    assert batches == [{"batch": f"float32[{size}, 5]"} for size in (1, 2, 3, 7)]
    shapes = [tuple(batch.shape) for _, batch in workload.whole_mix(2)]
    assert shapes == [(2, 3), (2, 5), (2, 2)]  # the last sample, and the first again
    made = Workload(build, lambda n: collate(samples[:n]), loss_fn=mean)
    assert made.largest_batch(4) == {"batch": "float32[4, 5]"}
    assert Workload(build, collate(samples), loss_fn=mean).largest_batch(2) is None


def test_evaluations_are_collated() -> None:
    given: dict[str, Any] = {"collate_fn": collate, "eval_step": lambda model, batch: None}
    workload = Workload(build, texts(5, 3), **given, eval_batch=texts(7, 6, 1))
    assert workload.eval_samples == 3
    assert workload.evaluation_batch(4).shape == (4, 7)
    assert workload.with_eval_samples(5).eval_samples == 5
    assert Workload(build, texts(5, 3), **given, eval_batch=4).evaluation_batch(4).shape == (4, 5)


# A function n -> batch


def time_first(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(6, samples, 1), "y": torch.ones(samples)}


def test_a_function_is_believed_about_n() -> None:
    workload = Workload(build, time_first, global_batch=8)
    assert isinstance(workload.samples, Made)
    assert workload.plan() == Plan(8, global_batch=8)  # in one micro-batch
    assert [dict(batch.named)["['y']"].shape for batch in workload.step_of(3, 2).batches] == [
        (3,),
        (2,),
    ]
    assert isinstance(Workload(build, lambda n: torch.ones(n, 3)).samples, Rows)


def test_a_step_calls_a_function_for_each_micro_batch() -> None:
    asked: list[int] = []

    def make(samples: int) -> dict[str, torch.Tensor]:
        asked.append(samples)
        return time_first(samples)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch["x"]).sum(0)[:, 0] - batch["y"]).mean()

    workload = Workload(build, time_first, loss_fn=loss_fn)
    with training(workload, Plan.split(5, 3)) as one:
        one.step(make)
        with pytest.raises(InvalidArgument, match="cannot be divided"):
            one.step(time_first(5))
    assert asked == [3, 2]
    with training(workload, Plan(5)) as one:
        one.step(time_first(5))


# Objects of other libraries


class Moved:
    """Holds its tensors where nobody looks, and moves them."""

    __slots__ = ("device", "hidden")

    def __init__(self, hidden: torch.Tensor, device: Any = "cpu") -> None:
        self.hidden, self.device = hidden, device

    def to(self, device: Any) -> Moved:
        return Moved(self.hidden.to(device), device)


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.name, self.parts = x, "plain", [x + 1]
        self.own = self


def test_objects_are_moved_by_themselves_or_by_their_attributes() -> None:
    meta = torch.device("meta")
    batch: dict[str, Any] = {"one": Moved(torch.ones(2)), "other": Plain(torch.ones(3, 4))}
    assert list(describe(batch)) == ["['other']['x']", "['other']['parts'][0]"]
    there = placed(batch, lambda tensor: tensor.to(meta), meta)
    assert there["one"].device == meta
    assert type(there["other"]) is Plain
    assert {tensor.device for tensor in tensors_of(there)} == {meta}
    assert batch["other"].x.device == CPU


# What a step does once


class Counted:
    """Two tensors that torch's pytree opens, and how often it did, for their names too."""

    opened = 0

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def parts(self) -> list[torch.Tensor]:
        type(self).opened += 1
        return [self.x, self.y]


pytree.register_pytree_node(
    Counted,
    lambda pair: (pair.parts(), None),
    lambda parts, _: Counted(*parts),
    flatten_with_keys_fn=lambda pair: (
        list(zip(map(pytree.GetAttrKey, "xy"), pair.parts(), strict=True)),
        None,
    ),
)


class WithoutKeys(Counted):
    """Tells torch its parts, and not their keys."""


pytree.register_pytree_node(
    WithoutKeys, lambda pair: (pair.parts(), None), lambda parts, _: WithoutKeys(*parts)
)


def test_a_container_without_keys_is_cut_and_placed_too() -> None:
    batch = WithoutKeys(torch.ones(4, 3), torch.ones(4))
    assert describe({"pair": batch}) == {"[0]": "float32[4, 3]", "[1]": "float32[4]"}
    first, _ = pieces(batch, (3, 1), Rows.of(batch).places(batch))
    there = placed(first, lambda tensor: tensor.to("meta"), torch.device("meta"))
    assert type(there) is WithoutKeys
    assert (there.x.shape, there.y.device.type) == ((3, 3), "meta")


@pytest.mark.parametrize("micro_batch", [6, 3, 2])
@pytest.mark.parametrize("kind", ["rows", "collated", "made"])
def test_a_step_flattens_a_batch_once_and_so_does_what_watches_and_weighs_it(
    kind: str, micro_batch: int
) -> None:
    """As `tree_flatten_with_path` does: each container once for its leaves, once for their keys."""
    rows = torch.ones(6, 1)
    batch, plan = Counted(rows, rows[:, 0]), Plan.split(6, micro_batch)
    samples, given = {
        "rows": (Rows.of(batch), batch),
        "collated": (Collated(lambda chosen: Counted(rows[chosen], rows[chosen, 0])), [*range(6)]),
        "made": (Made(), lambda size: Counted(rows[:size], rows[:size, 0])),
    }[kind]
    recipe = Recipe(
        loss_fn=lambda model, pair: (model(pair.x)[:, 0] - pair.y).mean(),
        loss_weight=lambda pair: float(len(pair.x)),
    )
    model, watch = build(), BatchWatch(plan, {}, samples=samples, weighs_samples=True)
    one = Training(
        model,
        torch.optim.SGD(model.parameters()),
        recipe,
        ResolvedPlan(plan),
        device=CPU,
        samples=samples,
        watch=watch,
    )
    Counted.opened = 0
    one.step(given)
    assert Counted.opened == 2 * (1 if kind == "rows" else plan.accumulation_steps)
