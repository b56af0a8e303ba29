"""Which batches of tensors bear out the number of samples that is taken from them."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument
from autofit.training.contradictions import check_rows, doubtful, uncut
from autofit.training.workload import Workload

GENERATOR = torch.Generator().manual_seed(0)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(5, 50, shape, generator=GENERATOR)


X = torch.randn(8, 16)
IMAGES = torch.randn(8, 3, 32, 32)
LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
CAUSAL = torch.ones(12, 12).tril()

GOOD: dict[str, Any] = {
    "one tensor": X,
    "one image tensor": IMAGES,
    "images and labels": (IMAGES, LABELS),
    "a pair of equal samples": (X, X),
    "a list of a pair": [torch.randn(3, 4, 9), torch.randn(3, 6, 9)],
    "weights of two views": ([X, X], torch.rand(2)),
    "token ids in order": {"ids": ids(8, 12).sort(0).values, "weights": torch.rand(4)},
    "input and a table of prototypes": (X, torch.randn(10, 16)),
    "position ids": {"input_ids": ids(8, 12), "position_ids": torch.arange(12)},
    "position ids of one row": {"ids": ids(8, 12), "position_ids": torch.arange(12)[None]},
    "a causal mask": {"input_ids": ids(8, 12), "mask": CAUSAL},
    "a causal mask of integers": {"input_ids": ids(6, 12), "mask": CAUSAL.long()},
    "a bias of each head": {"ids": ids(8, 12), "bias": torch.zeros(1, 4, 12, 12)},
    "rotations": {"ids": ids(8, 12), "cos": torch.randn(12, 6), "sin": torch.randn(12, 6)},
    "masks and labels": {"input_ids": ids(8, 12), "attention_mask": ids(8, 12), "labels": LABELS},
    "scalars": {"x": X, "y": LABELS, "scale": torch.tensor(2.0), "n": 7},
    "class weights": {"x": X, "labels": LABELS, "weights": torch.rand(4)},
    "weights of labels": {"x": X, "y": LABELS, "label_weights": torch.rand(5)},
    "two views": [{"input_ids": ids(8, 12)}, {"input_ids": ids(8, 20)}],
    "views with positions": [
        {"ids": ids(8, 12), "at": torch.arange(12)},
        {"ids": ids(8, 20), "at": torch.arange(20)},
    ],
    "crops of two sizes": [torch.randn(4, 3, 32, 32)] * 2 + [torch.randn(4, 3, 16, 16)] * 6,
    "normalized images": {"images": IMAGES, "labels": LABELS, "mean": torch.rand(3)},
    "one sample": {"input_ids": ids(1, 12), "labels": ids(1, 12)},
    "time first, target as well": (torch.randn(50, 8, 4), torch.randn(50, 8)),
    "integers of one sample's length": {"ids": ids(8, 12), "segments": torch.arange(12)},
}


@pytest.mark.parametrize("name", GOOD)
def test_constants_beside_samples_are_none(name: str) -> None:
    Workload(nn.Linear(1, 1), GOOD[name], loss_fn=lambda model, batch: batch)


SIZES = torch.tensor([5, 3, 9, 4, 2, 7, 6, 1])
OF_SAMPLE = torch.arange(8).repeat_interleave(SIZES)
NODES = torch.randn(len(OF_SAMPLE), 9)
BOXES = [{"boxes": torch.rand(1 + at % 4, 4), "labels": ids(1 + at % 4)} for at in range(8)]
EDGES = ids(2, 90)

BAD: dict[str, tuple[Any, str]] = {
    "graphs, targets first": (
        {"y": torch.randn(8), "x": NODES, "edge_index": EDGES, "batch": OF_SAMPLE},
        "'batch'",
    ),
    "graphs, nodes first": (
        {"x": NODES, "edge_index": EDGES, "batch": OF_SAMPLE, "out": torch.randn(8)},
        "'batch'",
    ),
    "graphs without an index": (
        {"out": torch.randn(8), "x": NODES, "position": torch.randn(len(NODES), 3)},
        "'x'.*'position'",
    ),
    "graphs with named targets": ({"x": NODES, "edge_index": EDGES, "y": torch.randn(8)}, "'y'"),
    "graphs in a tuple, targets first": ((torch.randn(8), NODES, EDGES), "only input"),
    "images of several sizes": ([torch.randn(3, 20 + at, 20) for at in range(8)], "list of 8"),
    "detection": (([torch.randn(3, 20, 20)] * 8, BOXES), "list of 8 mappings"),
    "mappings of one sample each": (
        [{"x": torch.randn(4), "y": torch.tensor(at % 3)} for at in range(8)],
        "list of 8 mappings",
    ),
    "stacked images, list of mappings": ((IMAGES, BOXES), "list of 8 mappings"),
    "time first, named": ({"x": torch.randn(50, 8, 4), "y": LABELS}, "'y'"),
    "time first": ((torch.randn(50, 8, 4), LABELS), r"\[1\]"),
    "time first, lengths": (
        {"x": torch.randn(50, 8, 4), "sizes": SIZES, "out_sizes": SIZES},
        "sizes",
    ),
    "concatenated targets": (
        {"x": torch.randn(8, 50, 4), "goal": ids(int(SIZES.sum())), "sizes": SIZES},
        "'goal'.*sum.*'sizes'",
    ),
    "ragged text": ({"text": ids(37), "offsets": SIZES.cumsum(0), "classes": LABELS}, "offsets"),
    "sets of images": (
        {"images": torch.randn(37, 3, 8, 8), "sizes": SIZES, "classes": LABELS},
        "images",
    ),
    "two passages a query": ({"query": ids(8, 12), "passages": ids(16, 20)}, "'passages'"),
    "a list of queries and passages": ([ids(8, 12), ids(16, 20)], "list of 2"),
    "crops side by side": ([torch.randn(16, 3, 32, 32), torch.randn(48, 3, 9, 9)], "list of 2"),
    "images of one size": (([torch.randn(3, 20, 20)] * 8, LABELS), "list of 8"),
    "two images of one size": (([torch.randn(3, 20, 20)] * 2, ids(2)), "list of 2"),
    "boxes by image": (
        (IMAGES, torch.cat([OF_SAMPLE[:, None], torch.rand(len(OF_SAMPLE), 5)], 1)),
        r"\[1\].*counts to 8",
    ),
    "points by sample": (
        (torch.cat([OF_SAMPLE[:, None], ids(len(OF_SAMPLE), 3)], 1), NODES, torch.randn(8)),
        r"\[0\].*counts to 8",
    ),
    "recordings": ([torch.randn(100 + at) for at in range(8)], "list of 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_contradicts_is_named_with_the_way_out(name: str) -> None:
    batch, words = BAD[name]
    with pytest.raises(InvalidArgument, match=words) as refused:
        Workload(nn.Linear(1, 1), batch, loss_fn=lambda model, batch: batch)
    assert "collate_fn" in str(refused.value)
    assert "n -> batch" in str(refused.value)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"x": X, "y": LABELS, "weights": torch.rand(4)}, ["['weights']"]),
        ({"z": torch.randn(8, 2), "x": NODES, "edges": EDGES, "out": X}, ["['x']"]),
        ((torch.randn(50, 8, 4), torch.randn(8)), ["[1]"]),  # time first, perhaps
        ({"ids": ids(8, 12), "cos": torch.randn(12, 6), "bias": torch.zeros(1, 4, 12, 12)}, []),
        ({"ids": ids(8, 12), "mask": torch.ones(20, 20)}, []),
        ((IMAGES, LABELS), []),
    ],
)
def test_a_floating_point_tensor_that_stays_whole_is_doubtful(batch: Any, names: list[str]) -> None:
    check_rows(batch)
    assert doubtful(batch) == names


@dataclass
class Named:
    x: torch.Tensor
    part: Any


@pytest.mark.parametrize(
    ("part", "is_named"),
    [
        (["a"] * 8, True),
        (tuple(range(8)), True),
        (np.ones((8, 2)), True),
        (["a"] * 3, False),
        (np.ones(3), False),
        (torch.ones(8), False),
        ([torch.ones(8)] * 8, False),
        ("an epoch", False),
    ],
)
def test_what_has_an_entry_for_each_sample_and_is_not_cut_is_named(
    part: Any, is_named: bool
) -> None:
    assert uncut({"x": X, "part": part}) == (["['part']"] if is_named else [])
    assert uncut(Named(X, part)) == (["['part']"] if is_named else [])
    assert uncut({"inner": UserDict(x=X, part=part)}) == (["['inner']['part']"] if is_named else [])
    assert uncut(X) == []


class Fields(NamedTuple):
    x: torch.Tensor
    names: Any


class Words(list[str]):
    """A list that torch does not know."""


class Shaped:
    """A batch that has a shape, as an array does."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.shape = x, tuple(x.shape)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (Fields(X, ["a"] * 8), [".names"]),
        ({"x": X, "inner": Fields(X, ["a"] * 8)}, ["['inner'].names"]),
        ((X, ["a"] * 8), ["[1]"]),
        ({"x": X, "words": Words(["a"] * 8)}, ["['words']"]),
        ({"x": X, "meta": {"ids": [[0] * 8 for _ in range(8)]}}, ["['meta']['ids']"]),
        ({"x": X, "meta": [["a"] * 8, ["b"] * 8]}, ["['meta'][0]", "['meta'][1]"]),
        (Shaped(X), []),
    ],
)
def test_what_is_not_cut_is_named_once_as_tensors_are(batch: Any, names: list[str]) -> None:
    assert uncut(batch) == names


def test_a_list_of_samples_in_a_named_tuple_is_named_by_its_field() -> None:
    samples = [torch.zeros(3, 5), torch.zeros(3, 6), torch.zeros(3, 7)]
    with pytest.raises(InvalidArgument, match=r"samples: \.names is a list of 3 tensors"):
        check_rows(Fields(X, samples))
