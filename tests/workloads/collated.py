"""Twelve kinds of training whose batch is not one row a sample, each with samples and a collate_fn.

The size of a sample depends on its number modulo `PERIOD` and its values on its number, so that a
batch of `PERIOD` samples stands for one of more. Every loss is a mean over samples, and no sample
changes what another one gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

PERIOD = 8
_SIZES = (5, 3, 9, 4, 2, 7, 6, 8)


def _of(number: int) -> tuple[int, torch.Generator]:
    return _SIZES[number % PERIOD], torch.Generator().manual_seed(number)


def _index(sizes: Sequence[int]) -> torch.Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def _mean_of(values: torch.Tensor, index: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the mean of the rows of each sample."""
    sums = values.new_zeros(samples, *values.shape[1:]).index_add(0, index, values)
    counts = values.new_zeros(samples).index_add(0, index, values.new_ones(len(values)))
    return sums / counts.view(-1, *[1] * (values.dim() - 1))


@dataclass(frozen=True)
class Case:
    """One kind of training.

    Attributes:
        build: the model.
        sample: number -> a sample.
        collate: samples -> batch.
        loss_fn: (model, batch) -> the mean over samples.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[int], Any]
    collate: Callable[[list[Any]], Any]
    loss_fn: Callable[[Any, Any], torch.Tensor]

    def samples(self, count: int, first: int = 0) -> list[Any]:
        return [self.sample(first + at) for at in range(count)]


# Graphs: nodes and edges side by side, targets first in the batch.


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node, self.edge, self.out = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, index: torch.Tensor, n: int) -> Any:
        hidden = self.node(x).relu()
        sent = torch.zeros_like(hidden).index_add(0, edges[1], self.edge(hidden)[edges[0]])
        return self.out(_mean_of((hidden + sent).relu(), index, n)).squeeze(-1)


def _graph(number: int) -> dict[str, torch.Tensor]:
    size, generator = _of(number)
    nodes = 10 * size
    edges = torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
    x = torch.randn(nodes, 8, generator=generator)
    return {"x": x, "edges": edges, "y": torch.randn((), generator=generator)}


def _graphs(graphs: list[Any]) -> dict[str, torch.Tensor]:
    sizes = [len(graph["x"]) for graph in graphs]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    return {
        "y": torch.stack([graph["y"] for graph in graphs]),
        "x": torch.cat([graph["x"] for graph in graphs]),
        "edges": torch.cat([g["edges"] + at for g, at in zip(graphs, starts, strict=False)], 1),
        "index": _index(sizes),
    }


def _graph_loss(model: Any, batch: Any) -> torch.Tensor:
    found = model(batch["x"], batch["edges"], batch["index"], len(batch["y"]))
    return (found - batch["y"]).square().mean()


class Graphs:
    """As libraries of graphs have it: no mapping, and moved by `to`."""

    def __init__(self, **parts: torch.Tensor) -> None:
        self.__dict__.update(parts)

    def to(self, device: Any) -> Graphs:
        return Graphs(**{name: tensor.to(device) for name, tensor in vars(self).items()})


# Detection: images of several sizes, and a mapping of boxes and labels for each.


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        self.body = nn.Sequential(*layers)
        self.box, self.label = nn.Linear(32, 4), nn.Linear(32, 5)

    def forward(self, images: list[torch.Tensor], targets: list[Any]) -> torch.Tensor:
        losses = []
        for image, target in zip(images, targets, strict=True):
            seen = self.body(image[None]).mean((2, 3))
            boxes = self.box(seen).expand_as(target["boxes"])
            labels = self.label(seen).expand(len(target["labels"]), -1)
            losses.append(
                functional.l1_loss(boxes, target["boxes"])
                + functional.cross_entropy(labels, target["labels"])
            )
        return torch.stack(losses).mean()


def _picture(number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    size, generator = _of(number)
    image = torch.randn(3, 16 + 8 * size, 64, generator=generator)
    labels = torch.randint(0, 5, (size,), generator=generator)
    return image, {"boxes": torch.rand(size, 4, generator=generator), "labels": labels}


def _unzipped(samples: list[Any]) -> tuple[list[Any], list[Any]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


# CTC: the targets of all samples one after the other.


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 12))

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.layers(sound).log_softmax(-1).transpose(0, 1)


def _utterance(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    size, generator = _of(number)
    sound = torch.randn(20 + 4 * size, 16, generator=generator)
    return sound, torch.randint(1, 12, (size,), generator=generator)


def _speech(samples: list[Any]) -> dict[str, torch.Tensor]:
    sounds, targets = zip(*samples, strict=True)
    return {
        "sound": pad_sequence(list(sounds), batch_first=True),
        "targets": torch.cat(targets),
        "frames": torch.tensor([len(sound) for sound in sounds]),
        "letters": torch.tensor([len(target) for target in targets]),
    }


def _ctc_loss(model: Any, batch: Any) -> torch.Tensor:
    given = model(batch["sound"]), batch["targets"], batch["frames"], batch["letters"]
    return (functional.ctc_loss(*given, reduction="none") / batch["letters"]).mean()


# Packed rows: the tokens of all samples in one row, without padding.


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.embed(ids[0])).chunk(3, -1)
        index = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths)
        seen = functional.scaled_dot_product_attention(
            query[None], key[None], value[None], index[:, None] == index[None]
        )
        losses = functional.cross_entropy(self.head(seen[0]), ids[0], reduction="none")
        return _mean_of(losses, index, len(lengths)).mean()


def _text(number: int) -> torch.Tensor:
    size, generator = _of(number)
    return torch.randint(0, 50, (4 * size,), generator=generator)


def _packed(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"ids": torch.cat(samples)[None], "lengths": torch.tensor(list(map(len, samples)))}


# Point clouds: the points of all samples one after the other.


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.out = nn.Linear(64, 4)

    def forward(self, points: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        each = torch.split(self.point(points), sizes.tolist())
        found: torch.Tensor = self.out(torch.stack([one.amax(0) for one in each]))
        return found


def _cloud(number: int) -> tuple[torch.Tensor, int]:
    size, generator = _of(number)
    return torch.randn(20 * size, 3, generator=generator), number % 4


def _clouds(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    points, labels = zip(*samples, strict=True)
    sizes = torch.tensor([len(each) for each in points])
    return torch.cat(points), sizes, torch.tensor(labels)


def _cloud_loss(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(*batch[:2]), batch[2])


# Retrieval: two passages for each query.


class Retriever(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(60, 64, padding_idx=0)
        self.out = nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.words(ids))
        return found


def _query(number: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    size, generator = _of(number)
    passages = [torch.randint(1, 60, (4 * size + at,), generator=generator) for at in range(2)]
    return torch.randint(1, 60, (size,), generator=generator), passages


def _queries(samples: list[Any]) -> dict[str, torch.Tensor]:
    queries, passages = zip(*samples, strict=True)
    both = [passage for pair in passages for passage in pair]
    return {
        "query": pad_sequence(list(queries), batch_first=True),
        "passages": pad_sequence(both, batch_first=True),
    }


def _retrieval_loss(model: Any, batch: Any) -> torch.Tensor:
    queries, passages = model(batch["query"]), model(batch["passages"])
    scores = (queries[:, None] * passages.view(len(queries), 2, -1)).sum(-1)
    return functional.cross_entropy(
        scores, torch.zeros(len(scores), dtype=torch.int64).to(scores.device)
    )


# Crops: two large and four small ones of each image, side by side.


class Crops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.GELU()
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))

    def forward(self, crops: list[torch.Tensor]) -> torch.Tensor:
        large, small = (self.body(each) for each in crops)
        large, small = large.view(-1, 2, 8), small.view(-1, 4, 8)
        return (small.mean(1) - large.mean(1)).square().sum(-1).mean()


def _crops(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    _, generator = _of(number)
    sizes = (2, 3, 32, 32), (4, 3, 16, 16)
    large, small = (torch.randn(size, generator=generator) for size in sizes)
    return large, small


def _side_by_side(samples: list[Any]) -> list[torch.Tensor]:
    return [torch.cat(each) for each in zip(*samples, strict=True)]


# Ragged text: the words of all samples one after the other, and where each begins.


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 64), nn.Linear(64, 3)

    def forward(self, words: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        index = torch.zeros_like(words).index_fill(0, starts[1:], 1).cumsum(0)
        hidden = self.words(words).tanh()
        found: torch.Tensor = self.out(_mean_of(hidden, index, len(starts)))
        return found


def _bag(number: int) -> tuple[torch.Tensor, int]:
    size, generator = _of(number)
    return torch.randint(0, 20, (6 * size,), generator=generator), number % 3


def _bags(samples: list[Any]) -> dict[str, torch.Tensor]:
    words, labels = zip(*samples, strict=True)
    starts = torch.tensor([0, *map(len, words[:-1])]).cumsum(0)
    return {"words": torch.cat(words), "starts": starts, "labels": torch.tensor(labels)}


def _bag_loss(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["words"], batch["starts"]), batch["labels"])


# A mapping of lists.


class Lists(Detector):
    def forward(self, images: list[torch.Tensor], targets: list[Any]) -> torch.Tensor:
        seen = torch.cat([self.body(image[None]).mean((2, 3)) for image in images])
        labels = torch.stack([target["labels"][0] for target in targets])
        return functional.cross_entropy(self.label(seen), labels)


def _lists(samples: list[Any]) -> dict[str, list[Any]]:
    images, targets = _unzipped(samples)
    return {"images": images, "targets": targets}


# Time first.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[1], 32)
        for step in x:
            state = self.cell(step, state)
        found: torch.Tensor = self.out(state)
        return found


def _series(number: int) -> tuple[torch.Tensor, int]:
    _, generator = _of(number)
    return torch.randn(12, 8, generator=generator), number % 5


def _time_first(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    series, labels = zip(*samples, strict=True)
    return torch.stack(series, 1), torch.tensor(labels)


def _pair_loss(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


# Sets of images.


class Sets(Crops):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, images: torch.Tensor, index: torch.Tensor, n: int) -> torch.Tensor:  # type: ignore[override]
        found: torch.Tensor = self.out(_mean_of(self.body(images), index, n))
        return found


def _set(number: int) -> tuple[torch.Tensor, int]:
    size, generator = _of(number)
    return torch.randn(size, 3, 16, 16, generator=generator), number % 3


def _sets(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return torch.cat(images), _index([len(each) for each in images]), torch.tensor(labels)


def _set_loss(model: Any, batch: Any) -> torch.Tensor:
    images, index, labels = batch
    return functional.cross_entropy(model(images, index, len(labels)), labels)


CASES = {
    "graphs": Case(GraphNet, _graph, _graphs, _graph_loss),
    "graphs in an object": Case(
        GraphNet,
        _graph,
        lambda graphs: Graphs(**_graphs(graphs)),
        lambda model, batch: _graph_loss(model, vars(batch)),
    ),
    "detection": Case(Detector, _picture, _unzipped, lambda model, batch: model(*batch)),
    "CTC": Case(Speech, _utterance, _speech, _ctc_loss),
    "packed rows": Case(Packed, _text, _packed, lambda model, batch: model(**batch)),
    "point clouds": Case(PointNet, _cloud, _clouds, _cloud_loss),
    "retrieval": Case(Retriever, _query, _queries, _retrieval_loss),
    "crops": Case(Crops, _crops, _side_by_side, lambda model, batch: model(batch)),
    "ragged text": Case(Bags, _bag, _bags, _bag_loss),
    "lists in a mapping": Case(Lists, _picture, _lists, lambda model, batch: model(**batch)),
    "time first": Case(Recurrent, _series, _time_first, _pair_loss),
    "sets of images": Case(Sets, _set, _sets, _set_loss),
}
