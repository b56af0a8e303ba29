"""Which tensors hold samples, and how batches of any shape are grown and cut."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument
from autofit.training.batch import (
    batch_size,
    pieces,
    resize,
    tensors_of,
)
from autofit.training.contradictions import check_rows
from autofit.training.lengths import Tokens, tokens_of
from autofit.training.samples import Rows
from autofit.training.workload import Workload

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Graphs:
    nodes: torch.Tensor
    labels: torch.Tensor
    name: str = "graphs"


class Encoding(UserDict[str, Any]):
    """What a tokenizer returns: a mapping that is no dict, with attributes for its keys."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Fussy(Mapping[str, Any]):
    """A mapping whose constructor takes no mapping."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self._values = {"one": one, "other": other}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _rows(samples: int, width: int = 3) -> torch.Tensor:
    return torch.arange(samples * width, dtype=torch.float32).reshape(samples, width)


def _batches() -> list[Any]:
    x, y = _rows(4), torch.arange(4)
    return [
        x,
        (x, y),
        [x, {"deep": (y, None, "text")}],
        Pair(x, y),
        {"x": x, "scale": torch.tensor(2.0), "n": 7},
        Encoding(input_ids=x, labels=y),
        (Encoding(input_ids=x), y),
        Graphs(x, y),
        {"graphs": [Graphs(x, y)]},
    ]


@pytest.mark.parametrize("batch", _batches(), ids=lambda batch: type(batch).__name__)
@pytest.mark.parametrize("samples", [1, 3, 4, 9])
def test_growing_repeats_each_sample_beside_itself_and_keeps_the_kind_of_batch(
    batch: Any, samples: int
) -> None:
    grown = resize(batch, samples)
    assert type(grown) is type(batch)
    assert batch_size(grown) == samples
    for before, after in zip(tensors_of(batch), tensors_of(grown), strict=True):
        if before.dim() == 0:
            assert after is before
        else:
            chosen = (torch.arange(samples) % 4).sort().values
            assert torch.equal(after, before[chosen])


@pytest.mark.parametrize("batch", _batches(), ids=lambda batch: type(batch).__name__)
def test_pieces_are_views_that_make_up_the_batch(batch: Any) -> None:
    cut = list(pieces(batch, (2, 1, 1), Rows.of(batch).places(batch)))
    assert [batch_size(piece) for piece in cut] == [2, 1, 1]
    for place, whole in enumerate(tensors_of(batch)):
        parts = [tensors_of(piece)[place] for piece in cut]
        if whole.dim() == 0:
            assert all(part is whole for part in parts)
        else:
            assert torch.equal(torch.cat(parts), whole)
            storage = whole.untyped_storage().data_ptr()
            assert all(part.untyped_storage().data_ptr() == storage for part in parts)


def test_attributes_of_a_tokenizers_output_survive() -> None:
    batch = Encoding(input_ids=_rows(2), labels=torch.arange(2))
    assert resize(batch, 4).input_ids.shape == (4, 3)
    assert next(pieces(batch, (1, 1), Rows.of(batch).places(batch))).labels.shape == (1,)


class Tagged(dict[str, Any]):
    """A mapping whose constructor takes something else than its items."""

    def __init__(self, tag: Any, **items: Any) -> None:
        super().__init__(**items)
        self.tag = tag


def test_a_mapping_that_is_made_of_something_else_keeps_its_items_and_attributes() -> None:
    batch = Tagged(3, x=torch.arange(4), y=torch.arange(4))
    micro: Any = next(pieces(batch, (2, 2), Rows.of(batch).places(batch)))
    assert (type(micro), micro.tag, micro["x"].tolist()) == (Tagged, 3, [0, 1])


def test_a_mapping_that_cannot_be_made_anew_becomes_a_dict() -> None:
    grown = resize(Fussy(_rows(2), torch.arange(2)), 3)
    assert type(grown) is dict
    assert torch.equal(grown["other"], torch.tensor([0, 0, 1]))


def test_a_tensor_of_another_size_stays_whole_also_where_a_grown_batch_reaches_its_size() -> None:
    batch = (_rows(4), torch.arange(8))
    places = Rows.of(batch).places(batch)
    grown = resize(batch, 8)
    assert grown[1] is batch[1]
    for piece in pieces(grown, (4, 4), places):
        assert piece[0].shape == (4, 3)
        assert piece[1] is batch[1]


def test_a_shared_row_beside_several_samples_is_no_sample() -> None:
    check_rows((torch.zeros(1, 3), torch.tensor(0.0), torch.zeros(7)))
    check_rows((torch.zeros(2, 3), torch.zeros(1)))


def test_a_target_of_other_samples_is_for_a_loss_of_the_users_own() -> None:
    inputs, targets = torch.zeros(8, 3), torch.zeros(6)
    Workload(nn.Linear(3, 1), (inputs, targets), loss_fn=lambda model, batch: model(batch[0]).sum())
    for fits in (torch.zeros(8), torch.tensor(0.0), torch.zeros(1), {"a": inputs, "b": targets}):
        check_rows((inputs, fits), has_criterion=True)


DESCRIBED = Rows.of({"x": torch.ones(4, 3), "y": torch.ones(4)})


@pytest.mark.parametrize(
    ("use", "batch", "words"),
    [
        (batch_size, [], "n -> batch"),
        (batch_size, {}, "n -> batch"),
        (batch_size, "text", "n -> batch"),
        (batch_size, 3, "n -> batch"),
        (batch_size, None, "n -> batch"),
        (batch_size, (torch.tensor(1.0),), "n -> batch"),
        (batch_size, torch.empty(0, 3), "0 samples"),
        # one sample cannot be distinguished from a row that all share
        (
            check_rows,
            (torch.zeros(1, 3), torch.zeros(1), torch.zeros(7)),
            "2 of its 3 tensors",
        ),
        *(
            (check_rows, {"x": torch.ones(4, 2), "other": other}, "n -> batch")
            for other in (
                torch.eye(4).to_sparse_csr(),
                torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
                torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            )
        ),
        (
            lambda batch: Workload(nn.Linear(3, 1), batch, criterion=nn.MSELoss()),
            (torch.zeros(8, 3), torch.zeros(6)),
            r"8 in the input and 6 in the target.*function n",
        ),
        (
            DESCRIBED.size,
            {"x": torch.ones(4, 3), "y": torch.ones(4), "mask": torch.ones(4)},
            r"\['mask'\], which the sample batch",
        ),
        (DESCRIBED.size, {"x": torch.ones(4, 3), "y": torch.ones(5)}, r"\['y'\]: \(5,\)"),
        (Rows(frozenset({"batch"}), frozenset()).size, torch.zeros(0, 8), "0 samples"),
    ],
)
def test_what_is_no_batch_is_refused_with_the_way_out(use: Any, batch: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        use(batch)


def test_where_every_tensor_has_size_1_it_is_one_sample() -> None:
    row = torch.ones(1, 16, dtype=torch.int64)
    batch = {"input_ids": row, "attention_mask": row, "labels": row, "scale": torch.tensor(2.0)}
    check_rows(batch)
    assert Rows.of(batch).places(batch) == {0, 1, 2}
    assert resize(batch, 3)["labels"].shape == (3, 16)


def test_a_sparse_batch_grows_and_is_cut() -> None:
    whole = torch.eye(4)
    grown = resize(whole.to_sparse(), 4, 2)
    cut = [piece.to_dense() for piece in pieces(grown, (4, 2), {0})]
    assert torch.equal(cut[0], whole)
    assert torch.equal(cut[1], whole[:2])


def test_each_micro_batch_of_a_grown_batch_has_other_samples_in_their_order() -> None:
    lengths = torch.tensor([9, 7, 4, 2, 1])
    grown = resize(lengths, 3, 3, 2)
    assert [piece.tolist() for piece in pieces(grown, (3, 3, 2), {0})] == [
        [9, 7, 4],
        [9, 2, 1],
        [7, 4],
    ]


def test_a_maker_shows_by_two_batches_what_holds_samples() -> None:
    """In one batch of two samples a constant of two elements would look like one of them."""
    samples = Rows.made_by(lambda n: {"scale": torch.ones(2), "x": torch.ones(n, 3)})
    assert samples == Rows(frozenset({"['x']"}), frozenset({"['scale']"}))
    assert samples.size({"scale": torch.ones(2), "x": torch.ones(7, 3)}) == 7


# -- Which batches have tokens, how many, and what share of them is padding

IDS = torch.zeros(4, 16, dtype=torch.int64)
IMAGES = torch.zeros(4, 3, 8, 8)
MASK = torch.arange(16).expand(4, 16) < 12


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((IDS, IDS), Tokens("[0]", 16)),
        ({"labels": IDS[:, :5], "input_ids": IDS}, Tokens("['input_ids']", 16)),
        (
            {"input_ids": IDS, "attention_mask": MASK.long()},
            Tokens("['input_ids']", 16, padding_share=0.25),
        ),
        (
            {"pixels": IMAGES, "input_ids": IDS, "attention_mask": MASK[:, :2]},
            Tokens("['input_ids']", 16),
        ),
        ((IMAGES, IDS), None),
        ((IDS[:, 0], IDS), None),
        ((IDS[:, :1], IDS), None),
        ((MASK, IDS), None),
        ((IDS.float(), IDS), None),
        ({"input_ids": IDS[:3], "x": IMAGES}, None),
    ],
)
def test_token_ids_are_told_by_their_name_or_their_place(
    batch: Any, expected: Tokens | None
) -> None:
    batched = Rows.of_size(batch, 4).batched
    assert tokens_of(batch, batched) == expected
