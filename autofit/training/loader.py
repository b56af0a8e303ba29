"""A loader: the user's way to make batches, made again with other numbers of worker processes.

It is a function that takes `batch_size`, `num_workers` and, if it likes, `pin_memory` and
`prefetch_factor`, and returns a `DataLoader` (or any other iterable of batches); or a live
`DataLoader`, of which another is made from the same dataset, sampler and functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autofit.errors import InvalidArgument, users_code
from autofit.training.batch import Batch
from autofit.units import kind_of

Loader: TypeAlias = DataLoader[Any] | Callable[..., Iterable[Batch]]

_NEEDED = ("batch_size", "num_workers")
# What a new loader takes over from a live one, besides dataset and sampler.
_KEPT = (
    "collate_fn",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "pin_memory_device",
    "in_order",
)


@dataclass(frozen=True)
class LoaderSettings:
    """The numbers of a `DataLoader`, by its own names.

    Attributes:
        batch_size: samples in each batch.
        num_workers: processes that load; 0: the training process itself does, between steps.
        pin_memory: whether batches are copied to pinned memory, from which a GPU reads faster.
        prefetch_factor: batches that each worker loads in advance; None: there are no workers.
    """

    batch_size: int
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None


NAMES = tuple(LoaderSettings.__dataclass_fields__)


def check_loader(loader: object) -> None:
    """Refuse an object that no loader can be made from.

    Raises:
        InvalidArgument: it is neither a function nor a `DataLoader`; the function lacks the
            arguments that it has to take; or the class of the `DataLoader` is not torch's own, so
            that its constructor is unknown.
    """
    if isinstance(loader, DataLoader):
        if type(loader) is not DataLoader:
            raise InvalidArgument(
                f"loader is a {kind_of(loader)}; only torch's own DataLoader can be "
                f"rebuilt with another number of workers: {_ASK_FOR_FUNCTION}"
            )
        return
    if not callable(loader):
        raise InvalidArgument(
            "loader must be a DataLoader or a function that makes one, got "
            f"{kind_of(loader)}: {_ASK_FOR_FUNCTION}"
        )
    missing = [name for name in _NEEDED if name not in settings_taken(loader)]
    if missing:
        raise InvalidArgument(
            f"the loader function must accept {' and '.join(missing)}: {_ASK_FOR_FUNCTION}"
        )


_ASK_FOR_FUNCTION = (
    "pass a function of batch_size, num_workers, pin_memory and "
    "prefetch_factor that returns one, such as functools.partial(DataLoader, "
    "dataset, shuffle=True)"
)


def settings_taken(loader: Loader) -> frozenset[str]:
    """Return the names of the settings that can be chosen for a loader."""
    if isinstance(loader, DataLoader):
        return frozenset(NAMES if _is_batched_by_torch(loader) else NAMES[1:])
    try:
        parameters = inspect.signature(loader).parameters.values()
    except ValueError:  # written in C
        return frozenset(NAMES)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(NAMES)
    by_position = inspect.Parameter.POSITIONAL_ONLY
    names = {each.name for each in parameters if each.kind is not by_position}
    return frozenset(names.intersection(NAMES))


def at_rest(loader: Loader) -> Loader | Iterable[Batch]:
    """Return a loader as it can be pickled: a `DataLoader` that is being iterated cannot."""
    if not isinstance(loader, DataLoader):
        return loader
    return make_loader(loader, own_settings(loader, loader.batch_size or 1))


def own_settings(loader: Loader, samples: int) -> LoaderSettings:
    """Return what the user has now, for batches of this many samples: a function's has neither."""
    if not isinstance(loader, DataLoader):
        return LoaderSettings(samples)
    return LoaderSettings(samples, loader.num_workers, loader.pin_memory, loader.prefetch_factor)


def make_loader(loader: Loader, settings: LoaderSettings) -> Iterable[Batch]:
    """Make a loader with these settings, of which a function gets those that it takes.

    Raises:
        InvalidArgument: the function returned something that cannot be iterated.
        Exception: what the function raised.
    """
    taken = settings_taken(loader)
    given = {name: value for name, value in asdict(settings).items() if name in taken}
    if isinstance(loader, DataLoader):
        return _made_again(loader, given)
    with users_code():
        made = loader(**given)
    if not isinstance(made, Iterable):
        raise InvalidArgument(f"the loader function must return a DataLoader, got {kind_of(made)}")
    return made


def is_stream(made: Iterable[Batch]) -> bool:
    """Return whether a loader reads an `IterableDataset`.

    Each of its workers has a copy of that, and delivers the same samples as the others unless the
    dataset shares them out (torch's documentation of `IterableDataset`).
    """
    return isinstance(made, DataLoader) and isinstance(made.dataset, IterableDataset)


def batches_without_end(loader: Iterable[Batch]) -> Generator[Batch, None, None]:
    """Yield the batches of one epoch after the other.

    Raises:
        InvalidArgument: an epoch has no batch, or a batch no samples.
        Exception: what the user's code raised.
    """
    end = object()
    for epoch_number in count():
        with users_code():
            epoch = iter(loader)
            batch = next(epoch, end)
        if batch is end:
            raise InvalidArgument(
                "the loader can only be iterated once, like a generator: return a "
                "DataLoader, or something that makes its batches anew on each iteration"
                if epoch_number
                else "the loader yields no batch: does its dataset have fewer samples than one "
                "batch, with drop_last=True?"
            )
        while batch is not end:
            yield batch
            with users_code():
                batch = next(epoch, end)


@contextmanager
def generators_kept(loader: Loader | Iterable[Batch]) -> Iterator[None]:
    """Put the random generators of a live loader back at the end, as iterating it moves them."""
    generators: dict[int, torch.Generator] = {}
    if isinstance(loader, DataLoader):
        for holder in (loader, loader.sampler, loader.batch_sampler):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generators[id(generator)] = generator
    states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _is_batched_by_torch(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler


def _made_again(loader: DataLoader[Any], given: Mapping[str, Any]) -> DataLoader[Any]:
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if given["num_workers"]:
        kept["persistent_workers"] = loader.persistent_workers
    else:
        kept |= {"timeout": 0, "multiprocessing_context": None}  # both are of workers alone
    is_batched = _is_batched_by_torch(loader)
    if loader.batch_sampler is not None and not is_batched:
        kept["batch_sampler"] = loader.batch_sampler
    else:  # without a size its dataset makes whole batches
        kept |= {"drop_last": loader.drop_last} if is_batched else {"batch_size": None}
        if not isinstance(loader.dataset, IterableDataset):
            kept["sampler"] = loader.sampler
    return DataLoader(loader.dataset, **kept, **given)
