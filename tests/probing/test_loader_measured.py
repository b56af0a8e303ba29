"""Real loaders in a worker process: what they deliver, how they fail, and what they leave."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from autofit.errors import InvalidArgument, WorkerFailed
from autofit.plan import Plan
from autofit.probing.loader import Delivery, deliver
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.training.loader import LoaderSettings
from autofit.training.workload import Workload
from tests.probing.conftest import is_running

BATCH = 8
ALONE = LoaderSettings(BATCH)
PLAN = Plan(BATCH)


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Rows of 4 numbers; notes the process that makes one, and does to it what `fault` does."""

    def __init__(self, folder: Path, fault: Callable[[], object], width: int = 4) -> None:
        self.folder, self.fault, self.width = folder, fault, width

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        (self.folder / str(os.getpid())).touch()
        self.fault()
        return torch.ones(self.width), index % 3


def quick() -> None:
    """Makes a row at once."""


def tired() -> None:
    time.sleep(0.01)


def torn() -> None:
    raise ValueError("this row is torn")


def stuck() -> None:
    time.sleep(1000)


def ends() -> None:
    os._exit(3)


def prober_for(loader: Any, deadlines: Deadlines = Deadlines(), **given: Any) -> Prober:  # noqa: B008 - frozen
    batch = (torch.ones(BATCH, 4), torch.arange(BATCH) % 3)
    trained: dict[str, Any] = {"criterion": nn.CrossEntropyLoss(), "sample_batch": batch} | given
    workload = Workload(nn.Linear(4, 3), loader=loader, **trained)
    return open_prober(workload, (), Target("cpu", "64MiB"), deadlines=deadlines)


def with_workers(workers: int) -> LoaderSettings:
    return LoaderSettings(BATCH, workers, False, 2)


def delivered(prober: Prober, settings: LoaderSettings = ALONE) -> Delivery:
    return prober.run(functools.partial(deliver, settings=settings, plan=PLAN))


def none_left(folder: Path) -> bool:
    """Return whether all processes that made rows end, but this one."""
    pids = {int(path.name) for path in folder.iterdir()} - {os.getpid()}
    end = time.monotonic() + 60
    while any(map(is_running, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_users_code_runs_in_the_worker_and_the_loaders_processes_end(tmp_path: Path) -> None:
    with prober_for(functools.partial(DataLoader, Rows(tmp_path, tired))) as prober:
        alone, four = delivered(prober), delivered(prober, with_workers(4))
        assert 0 < alone.samples_per_second <= 100  # a row takes 10 ms at least
        assert four.samples_per_second > 0
        assert four.batch_bytes == BATCH * (4 * 4 + 8)
        assert not four.warnings
        pids = {int(path.name) for path in tmp_path.iterdir()}
        assert os.getpid() not in pids
        assert len(pids) == 1 + 4  # the worker; the loader's
        assert {pid for pid in pids if is_running(pid)} <= {prober.worker_pid}
    assert none_left(tmp_path)


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """Each worker that reads it reads all of it."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(10_000):
            yield torch.ones(4), index % 3


@pytest.mark.slow
def test_a_stream_is_told_from_rows(tmp_path: Path) -> None:
    with prober_for(functools.partial(DataLoader, Stream())) as prober:
        assert delivered(prober).is_stream
    with prober_for(DataLoader(Rows(tmp_path, quick))) as prober:
        assert not delivered(prober).is_stream


def test_what_is_no_batch_is_named_as_the_loaders(tmp_path: Path) -> None:
    loader = functools.partial(DataLoader, Rows(tmp_path, quick), collate_fn=lambda rows: None)
    with (
        prober_for(loader) as prober,
        pytest.raises(InvalidArgument, match="the loader delivers None"),
    ):
        delivered(prober)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_is_raised_as_it_was(tmp_path: Path, workers: int) -> None:
    settings = with_workers(workers) if workers else ALONE
    loader = functools.partial(DataLoader, Rows(tmp_path, torn))
    with prober_for(loader) as prober:
        with pytest.raises(ValueError, match="this row is torn"):
            delivered(prober, settings)
        assert prober.run(lambda session: "it answers") == "it answers"
    assert none_left(tmp_path)


@pytest.mark.slow
def test_a_hang_is_ended_and_says_where(tmp_path: Path) -> None:
    loader = functools.partial(DataLoader, Rows(tmp_path, stuck))
    with prober_for(loader, deadlines=Deadlines(unknown_s=6)) as prober:
        with pytest.raises(WorkerFailed, match=r"(?s)no answer within.*hung here.*dataloader.py"):
            delivered(prober, with_workers(2))
        assert none_left(tmp_path)
        with pytest.raises(WorkerFailed, match=r"(?s)hung here.*in stuck"):
            delivered(prober)
    assert none_left(tmp_path)


def test_a_worker_of_the_loader_that_dies_is_an_error_in_words(tmp_path: Path) -> None:
    with prober_for(functools.partial(DataLoader, Rows(tmp_path, ends))) as prober:
        with pytest.raises(RuntimeError, match=r"DataLoader worker.*exited unexpectedly"):
            delivered(prober, with_workers(2))
        with pytest.raises(WorkerFailed, match="exited with 3"):
            delivered(prober)
    assert none_left(tmp_path)


def test_a_loader_that_cannot_be_sent_is_refused_before_anything_runs() -> None:
    def rows() -> Iterator[int]:
        yield 1

    held = rows()
    with pytest.raises(InvalidArgument, match=r"the loader cannot be sent.*makes the dataset"):
        prober_for(lambda batch_size, num_workers: held)


class Texts(Dataset[torch.Tensor]):
    """Of 4 numbers, each third of 9, and from the `longer`th on of 30."""

    def __init__(self, longer: int) -> None:
        self.longer = longer

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.ones(30 if at >= self.longer else 9 if at % 3 == 2 else 4)


def padded(texts: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)


def as_they_are(texts: list[torch.Tensor]) -> list[torch.Tensor]:
    return texts


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch.mean(1, keepdim=True).expand(-1, 4)).mean()


@pytest.mark.parametrize("collate_fn", [padded, as_they_are])
@pytest.mark.parametrize(("longer", "warned"), [(64, 0), (0, 1)])
def test_a_collated_batch_is_compared_with_one_of_its_size(
    collate_fn: Any, longer: int, warned: int
) -> None:
    loader = functools.partial(DataLoader, Texts(longer), collate_fn=collate_fn)
    given: dict[str, Any] = {
        "sample_batch": Texts(64),
        "collate_fn": padded,
        "criterion": None,
        "loss_fn": mean,
    }
    with prober_for(loader, **given) as prober:
        assert len(delivered(prober).warnings) == warned


def test_a_list_that_collating_made_is_one_batch(tmp_path: Path) -> None:
    """Torch's own collate makes a list of two tensors of pairs."""
    rows = Rows(tmp_path, quick)
    samples = [rows[at] for at in range(BATCH)]
    loader = functools.partial(DataLoader, rows)
    with prober_for(loader, sample_batch=samples, collate_fn=default_collate) as prober:
        assert not delivered(prober).warnings


def test_batches_that_the_search_did_not_see_are_told(tmp_path: Path) -> None:
    def any_width(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0][:, :4]), batch[1])

    loader = functools.partial(DataLoader, Rows(tmp_path, quick, width=6))
    with prober_for(loader, criterion=None, loss_fn=any_width) as prober:
        (warning,) = delivered(prober).warnings
    assert "float32[8, 6]" in warning
    assert "float32[8, 4]" in warning
