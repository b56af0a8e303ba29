"""`autofit.Lengths` as a user gives it: batches of several lengths on the CPU device."""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autofit
from autofit.errors import InvalidArgument
from autofit.integrations.loader_batches import longest_samples
from autofit.training.lengths import tokens_of_mix

HERE: dict[str, Any] = {"device": "cpu", "vram_budget": "64MiB", "strategies": []}
SLOW_S = 0.02


class Tagger(nn.Module):
    """Notes the length of each batch; takes time by it, and much more at a length that is new."""

    def __init__(self, seen: Path) -> None:
        super().__init__()
        self.seen, self.known = seen, set[int]()
        self.layers = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        with self.seen.open("a") as file:
            print(length, file=file)
        time.sleep(SLOW_S * (10 if length not in self.known else length // 8))
        self.known.add(length)
        return self.layers(ids).square().mean()


def tokens(length: int, samples: int = 4) -> torch.Tensor:
    return torch.arange(samples * length).reshape(samples, length) % 64


def workload(tmp_path: Path, batch: Any) -> autofit.Workload:
    return autofit.Workload(Tagger(tmp_path / "seen"), batch)


def test_memory_is_of_the_longest_and_speed_of_the_mix(tmp_path: Path) -> None:
    longest, shortest = tokens(64), tokens(8)
    mixed = autofit.Lengths([longest, shortest], weights=[1, 9])
    long: Any = autofit.probe(workload(tmp_path, longest), **HERE).measurement
    mix: Any = autofit.probe(workload(tmp_path, mixed), **HERE).measurement
    assert mix.peak_allocated_bytes == long.peak_allocated_bytes
    assert long.new_shape_s == ()
    # the longest sleeps for 8 units and the shortest for one: 0.1 * 8 + 0.9 * 1 against 8
    assert SLOW_S * 1.7 <= mix.step_time_s < long.step_time_s
    (new_shape_s,) = mix.new_shape_s
    assert new_shape_s > SLOW_S * 2  # the first step sleeps for ten units, others for one


@pytest.mark.slow
def test_a_plan_found_with_three_lengths_holds_the_longest(tmp_path: Path) -> None:
    given: dict[str, Any] = {"device": "cpu", "vram_budget": "2MiB", "strategies": []}
    lengths = autofit.Lengths([tokens(16), tokens(32), tokens(64)])
    report = autofit.search(workload(tmp_path, lengths), max_probes=3, **given)
    assert "samples up to batch[64]" in " ".join(str(report).split())  # the longest
    text = " ".join(report.to_text(verbose=True).split())
    assert re.search("(?=.*3 lengths)(?=.*first step of another length)", text)
    assert set((tmp_path / "seen").read_text().split()) == {"16", "32", "64"}


def test_rows_are_as_long_as_any_of_the_lengths() -> None:
    """The longest batch has the longest sources, and shorter targets than another one."""

    def batch(source: int, target: int) -> dict[str, torch.Tensor]:
        return {"source": tokens(source), "target": tokens(target)}

    def mean(model: nn.Module, pair: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(pair["source"]).square().mean() + model(pair["target"]).square().mean()

    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 4))
    lengths = autofit.Lengths([batch(16, 4), batch(4, 8)])
    given = autofit.Workload(model, lengths, loss_fn=mean)
    assert given.sample_shapes() == {"['source']": "int64[4, 16]", "['target']": "int64[4, 8]"}
    report = autofit.search(given, max_probes=1, **HERE)
    with report.apply(model, torch.optim.SGD(model.parameters())) as training:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            training.step(batch(4, 8))
        with pytest.warns(UserWarning, match=r"target.*int64\[4, 9\].*int64\[4, 8\]"):
            training.step(batch(4, 9))


def test_a_prediction_is_of_the_longest() -> None:
    model, longest = nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, 256)), tokens(512)
    lengths = autofit.Lengths([longest, tokens(8, samples=16)])
    one, several = (
        autofit.predict(autofit.Workload(model, batch), gpu="L4") for batch in (longest, lengths)
    )
    assert (one.plan, one.required_bytes) == (several.plan, several.required_bytes)


@pytest.mark.parametrize(
    ("batches", "weights", "words"),
    [
        ([], None, "list of batches"),
        (tokens(8), None, "list of batches"),
        ([{"ids": tokens(8)}, {"ids": tokens(16), "mask": tokens(16)}], None, "batch 1.*mask"),
        ([tokens(8), tokens(8).float()], None, "same tensors"),
        ([tokens(8), tokens(8)[0]], None, "same tensors"),
        ([tokens(8)], [1, 2], "weights"),
        ([tokens(8), tokens(16)], [0, 0], "weights"),
        ([tokens(8), tokens(16)], [1, -1], "weights"),
        ([tokens(8), tokens(16)], ["often", 1], "weights"),
    ],
)
def test_lengths_of_different_structure_are_refused(batches: Any, weights: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        autofit.Lengths(batches, weights)


def test_tokens_and_padding_are_those_of_the_mix() -> None:
    def batch(length: int, padding: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(4, length, dtype=torch.int64)
        mask[:, length - padding :] = 0
        return {"input_ids": tokens(length), "attention_mask": mask}

    names = {"['input_ids']", "['attention_mask']"}
    mixed = autofit.Lengths([batch(8, 8), batch(24, 0)], weights=[3, 1])
    found: Any = tokens_of_mix(mixed.mix, names)
    assert found.per_sample == 12  # 3/4 of 8 and 1/4 of 24
    assert found.padding_share == 0.5  # 3 * 8 of 3 * 8 + 24
    assert tokens_of_mix([(1.0, torch.randn(4, 8))], {"batch"}) is None


class Texts(Dataset[torch.Tensor]):
    """Texts of 1 to 64 tokens; counts those that are read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return tokens(1 + 7 * index % 64, samples=1)[0]


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"input_ids": nn.utils.rnn.pad_sequence(samples, batch_first=True)}


def test_a_loader_tells_three_lengths_and_is_left_as_it_was() -> None:
    texts = Texts()
    loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=padded)
    state = torch.get_rng_state()
    lengths: Any = autofit.from_loader(loader, 320)
    assert torch.equal(torch.get_rng_state(), state)
    shapes = [lengths.collate_fn(given)["input_ids"].shape for _, given in lengths.mix]
    (_, short), (_, typical), longest = shapes
    assert short < typical < longest[1] == 63  # of the even places, which are 320
    assert {samples for samples, _ in shapes} == {4}
    assert [share for share, _ in lengths.mix] == [0.5, 0.5, 0.0]
    assert texts.read == 320 + 3 * 4


def test_a_loader_that_never_ends_is_looked_at_for_a_while() -> None:
    class Endless:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return map(tokens, itertools.count(1))

    assert autofit.from_loader(Endless(), 10).longest.shape == (4, 10)


@pytest.mark.parametrize(
    ("loader", "words"), [([], "no batch"), (7, "DataLoader"), (iter([tokens(1)]), "iterator")]
)
def test_what_is_no_loader_is_refused(loader: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        autofit.from_loader(loader)


def test_what_delivers_its_batches_once_keeps_them() -> None:
    batches = map(tokens, range(1, 40))
    with pytest.raises(InvalidArgument, match="iterator"):
        autofit.from_loader(batches)
    with pytest.raises(InvalidArgument, match="iterator"):
        longest_samples(batches)
    assert next(batches).shape == (4, 1)


def test_samples_without_a_length_make_one_batch() -> None:
    images: Any = [torch.ones(3, 8, 8)] * 1000
    lengths: Any = autofit.from_loader(DataLoader(images, batch_size=4))
    ((share, given),) = lengths.mix
    assert (share, lengths.collate_fn(given).shape) == (1.0, (4, 3, 8, 8))
