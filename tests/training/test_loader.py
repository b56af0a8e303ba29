"""A loader is made again with other numbers, and delivers what the user's own does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from autofit.errors import InvalidArgument, is_users
from autofit.training.loader import (
    LoaderSettings,
    batches_without_end,
    check_loader,
    generators_kept,
    make_loader,
    own_settings,
    settings_taken,
)

ROWS = TensorDataset(torch.arange(10))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10))


class Whole(Dataset[torch.Tensor]):
    """Makes whole batches by itself."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index)


def values(loader: Any) -> list[list[int]]:
    return [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader]


def negated(rows: list[Any]) -> torch.Tensor:
    return -torch.stack([row[0] for row in rows])


def test_a_live_loader_is_made_again_with_what_it_has() -> None:
    live = DataLoader(ROWS, 3, collate_fn=negated, drop_last=True)
    again = make_loader(live, LoaderSettings(4))
    assert values(again) == [[0, -1, -2, -3], [-4, -5, -6, -7]]
    assert values(live) == [[0, -1, -2], [-3, -4, -5], [-6, -7, -8]]


@pytest.mark.parametrize(
    "live",
    [
        DataLoader(ROWS, batch_sampler=[[1, 2], [3]]),
        DataLoader(Whole(), batch_size=None),
        DataLoader(Stream(), batch_size=None),
    ],
)
def test_a_loader_with_batches_of_its_own_keeps_them(live: DataLoader[Any]) -> None:
    assert settings_taken(live) == {"num_workers", "pin_memory", "prefetch_factor"}
    assert values(make_loader(live, LoaderSettings(7))) == values(live)


def test_a_stream_is_batched_anew() -> None:
    again = make_loader(DataLoader(Stream(), 2), LoaderSettings(5))
    assert values(again) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_what_only_workers_have_is_left_out_without_them() -> None:
    live = DataLoader(
        ROWS,
        3,
        num_workers=2,
        timeout=5,
        multiprocessing_context="fork",
        persistent_workers=True,
        prefetch_factor=4,
    )
    assert own_settings(live, 3) == LoaderSettings(3, 2, False, 4)
    assert values(make_loader(live, LoaderSettings(3))) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    again: Any = make_loader(live, LoaderSettings(3, 1, False, 2))
    assert (again.timeout, again.persistent_workers) == (5, True)


@pytest.mark.parametrize("gives_seeds", [False, True])
def test_iterating_leaves_the_users_generators_alone(gives_seeds: bool) -> None:
    """The sampler's, and the one by which a loader gives its processes their seeds."""
    generator = torch.Generator().manual_seed(3)
    own, its = (generator, None) if gives_seeds else (None, generator)
    live = DataLoader(ROWS, 3, sampler=RandomSampler(ROWS, generator=its), generator=own)
    before = generator.get_state()
    with generators_kept(live):
        values(make_loader(live, LoaderSettings(3)))
        assert not torch.equal(generator.get_state(), before)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (
            lambda batch_size, num_workers: DataLoader(ROWS, batch_size, num_workers=num_workers),
            {"batch_size", "num_workers"},
        ),
        (
            lambda **numbers: DataLoader(ROWS, **numbers),
            {"batch_size", "num_workers", "pin_memory", "prefetch_factor"},
        ),
        (
            functools.partial(DataLoader, ROWS, shuffle=False),
            {"batch_size", "num_workers", "pin_memory", "prefetch_factor"},
        ),
    ],
)
def test_a_function_gets_the_numbers_that_it_takes(
    function: Callable[..., DataLoader[Any]], taken: set[str]
) -> None:
    check_loader(function)
    assert settings_taken(function) == taken
    made: Any = make_loader(function, LoaderSettings(5, 1, False, 3))
    assert (made.batch_size, made.num_workers) == (5, 1)
    assert made.prefetch_factor == (3 if "prefetch_factor" in taken else 2)


class OwnLoader(DataLoader[Any]):
    pass


@pytest.mark.parametrize(
    ("use", "loader", "words"),
    [
        (check_loader, ROWS, "loader must be .*TensorDataset.*functools.partial"),
        (check_loader, lambda: 0, "must accept batch_size and num_workers"),
        (check_loader, lambda batch_size, workers: 0, "must accept num_workers"),
        (check_loader, OwnLoader(ROWS), "an OwnLoader.*pass a function"),
        (
            lambda loader: make_loader(loader, LoaderSettings(2)),
            lambda batch_size, num_workers: 3,
            "got an int",
        ),
        (
            lambda loader: next(batches_without_end(loader)),  # it would go on for ever
            DataLoader(ROWS, 11, drop_last=True),
            r"no batch.*drop_last",
        ),
    ],
)
def test_what_no_loader_can_be_made_of_is_refused(use: Any, loader: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        use(loader)


def test_a_generator_ends_after_its_only_epoch_and_is_named() -> None:
    batches = batches_without_end(torch.arange(n + 1) for n in range(2))
    assert [len(next(batches)) for _ in range(2)] == [1, 2]
    with pytest.raises(InvalidArgument, match="only be iterated once"):
        next(batches)


def test_an_error_of_the_users_dataset_is_the_users() -> None:
    def fails(rows: list[Any]) -> Any:
        raise ValueError("row 3 is torn")

    with pytest.raises(ValueError, match="row 3 is torn") as raised:
        next(batches_without_end(DataLoader(ROWS, 2, collate_fn=fails)))
    assert is_users(raised.value)
