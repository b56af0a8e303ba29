"""What a loader delivers, and what a training that it feeds makes of it; measured in the worker.

Rates are those of a training under way: the start of the loader's processes, and what they load
while nobody takes it, are left out.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autofit.errors import InvalidRequest, collect_garbage
from autofit.plan import ResolvedPlan
from autofit.training.batch import (
    Batch,
    BatchWatch,
    batch_size,
    describe,
    map_tensors,
    tensors_of,
)
from autofit.training.loader import (
    LoaderSettings,
    batches_without_end,
    generators_kept,
    is_stream,
    make_loader,
)
from autofit.units import kind_of

if TYPE_CHECKING:
    from autofit.probing.session import Session

DELIVERY_S = 1.5
"""A loader alone is measured for so many seconds, or one round of its workers if that is longer."""
FEEDING_S = 3.0
"""A training that it feeds, likewise."""
_STEPS_PER_BLOCK = 3
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Delivery:
    """What a loader delivers while nothing else runs.

    Attributes:
        settings: of the loader.
        samples_per_second: taken as fast as they come.
        first_batch_s: seconds from making the loader to its first batch.
        batch_bytes: of the tensors of one batch.
        worker_bytes: host memory of the loader's processes that they share with no other; 0
            without workers, None: unknown.
        is_stream: whether it reads an `IterableDataset`, of which each worker has a copy.
    """

    settings: LoaderSettings
    samples_per_second: float
    first_batch_s: float
    batch_bytes: int
    worker_bytes: int | None
    is_stream: bool = False


@dataclass(frozen=True)
class Feeding:
    """What a plan trains while a loader feeds it.

    Attributes:
        settings: of the loader.
        samples_per_second: end to end.
        waiting: share of the time in which the training process waited for a batch. On a GPU that
            is no loss while the device still has work.
        warnings: about batches for which the plan was not searched.
    """

    settings: LoaderSettings
    samples_per_second: float
    waiting: float
    warnings: Sequence[str] = ()


def deliver(session: Session, *, settings: LoaderSettings) -> Delivery:
    """Measure the workload's loader while nothing is trained.

    Raises:
        InvalidRequest: it delivers nothing, or no batches of samples.
        Exception: what the user's code raised.
    """
    already = _children()
    began = time.perf_counter()
    with _batches_of(session, settings) as (made, batches):
        batch = next(batches)
        first_batch_s = time.perf_counter() - began
        batch_bytes = sum(tensor.nbytes for tensor in tensors_of(batch))
        _check_batch(batch)
        del batch
        round_of = max(1, settings.num_workers)
        for _ in range(round_of - 1):  # workers that started together deliver together
            next(batches)
        worker_bytes = _sum_of([_private_bytes(pid) for pid in _children() - already])
        samples, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < DELIVERY_S:
            samples += sum(batch_size(next(batches)) for _ in range(round_of))
    rate = samples / elapsed
    return Delivery(settings, rate, first_batch_s, batch_bytes, worker_bytes, is_stream(made))


def feed(session: Session, *, resolved: ResolvedPlan, settings: LoaderSettings) -> Feeding:
    """Train a plan on what the workload's loader delivers, at full accumulation.

    Raises:
        Exception: what the user's code, the model or the device raised.
    """
    builder, plan = session.builder, resolved.plan
    device, workload = builder.device, builder.fresh_workload()
    builder.reclaim()
    watch = BatchWatch(plan, describe(workload.batch(workload.sample_batch_size)))
    samples, waited = 0, 0.0
    with builder.training(workload, resolved) as training:
        sample = map_tensors(device.stage, workload.batch(plan.samples_per_step))
        for _ in range(_WARM_UP_STEPS):
            training.step(sample)
        device.synchronize()
        with _batches_of(session, settings) as (_, batches):
            for _ in range(max(1, settings.num_workers)):
                warned = _warnings_of(watch, next(batches))
            start = time.perf_counter()
            while (elapsed := time.perf_counter() - start) < FEEDING_S:
                # Whole rounds: workers that started together deliver together
                for _ in range(max(_STEPS_PER_BLOCK, settings.num_workers)):
                    asked = time.perf_counter()
                    batch = next(batches)
                    waited += time.perf_counter() - asked
                    samples += batch_size(batch)
                    training.step(batch)
                device.synchronize()
    builder.reclaim_or_not()
    return Feeding(settings, samples / elapsed, waited / elapsed, warned)


@contextmanager
def _batches_of(
    session: Session, settings: LoaderSettings
) -> Iterator[tuple[Iterable[Batch], Iterator[Batch]]]:
    """Yield a loader and its batches; its processes have ended and its generators are put back."""
    loader = session.builder.fresh_workload().loader
    assert loader is not None  # a search without one does not ask
    torch.manual_seed(session.builder.seed)
    with generators_kept(loader), warnings.catch_warnings():
        # More workers than cores are tried on purpose: some of them wait for disks
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        made = make_loader(loader, settings)
        # A function may hold a generator that all its loaders share
        with generators_kept(made), closing(batches_without_end(made)) as batches:
            yield made, batches
    collect_garbage()  # the processes of a loader end with its iterator


def _check_batch(batch: Batch) -> None:
    """Raise InvalidRequest where a loader delivers what is no batch of samples."""
    try:
        batch_size(batch)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"the loader delivers {kind_of(batch)} in which no tensor has a dimension for samples: "
            "have its collate_fn return tensors, samples in dimension 0"
        ) from error


def _warnings_of(watch: BatchWatch, batch: Batch) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.look(batch, batch_size(batch), stacklevel=1)
    return [str(each.message) for each in caught]


def _children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


def _sum_of(amounts: list[int | None]) -> int | None:
    """Return the sum; None where one is unknown."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def _private_bytes(pid: int) -> int | None:
    """Return the memory that a process wrote and shares with no other; None: unknown."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_D"))
    return None
