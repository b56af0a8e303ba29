"""What a loader delivers, measured in the worker.

Rates are those of a training under way: the start of the loader's processes, and what they load
while nobody takes it, are left out.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from autofit.errors import InvalidArgument, collect_garbage
from autofit.plan import Plan, split_evenly, steps_for
from autofit.probing.requests import Workplace
from autofit.training.batch import (
    Batch,
    FlatBatch,
    batch_size,
    tensors_of,
)
from autofit.training.loader import (
    LoaderSettings,
    batches_without_end,
    generators_kept,
    is_stream,
    make_loader,
)
from autofit.training.samples import Collated, MicroBatches, Rows, samples_in
from autofit.training.watch import BatchWatch
from autofit.training.workload import Workload
from autofit.units import kind_of

# A loader is measured for this many seconds, or one round of its workers if that is longer.
DELIVERY_S = 1.5


@dataclass(frozen=True)
class Delivery:
    """What a loader delivers while nothing else runs.

    Attributes:
        samples_per_second: taken as fast as they come.
        batch_bytes: of the tensors of one batch.
        is_stream: whether it reads an `IterableDataset`, of which each worker has a copy.
        warnings: about batches for which the plan was not searched.
    """

    samples_per_second: float
    batch_bytes: int
    is_stream: bool = False
    warnings: Sequence[str] = ()


def deliver(session: Workplace, *, settings: LoaderSettings, plan: Plan) -> Delivery:
    """Measure the workload's loader while nothing is trained.

    Raises:
        InvalidArgument: it delivers nothing, or no batches of samples.
        Exception: what the user's code raised.
    """
    workload = session.builder.fresh_workload()
    watch = BatchWatch(
        plan,
        workload.sample_shapes(),
        micro_batch_shapes=workload.largest_batch(plan.micro_batch),
    )
    with _batches_of(session, settings) as (made, batches):
        batch = next(batches)
        batch_bytes = sum(tensor.nbytes for tensor in tensors_of(batch))
        samples = _samples_in(batch, workload, settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.look(_as_trained(batch, samples, workload, plan), stacklevel=1)
        warned = [str(each.message) for each in caught]
        del batch
        round_of = max(1, settings.num_workers)
        for _ in range(round_of - 1):  # workers that started together deliver together
            next(batches)
        samples, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < DELIVERY_S:
            samples += sum(_samples_in(next(batches), workload, settings) for _ in range(round_of))
    return Delivery(samples / elapsed, batch_bytes, is_stream(made), warned)


def _as_trained(batch: Batch, samples: int, workload: Workload, plan: Plan) -> MicroBatches:
    """Return a loader's batch as a training would run it; one that is collated is whole."""
    how, _ = samples_in(batch, workload.samples)
    if isinstance(batch, list) and isinstance(how, Collated):
        return how.step_of(batch, split_evenly(samples, steps_for(samples, plan.micro_batch)))
    return MicroBatches((FlatBatch.of(batch),), (samples,))


def _samples_in(batch: Batch, workload: Workload, settings: LoaderSettings) -> int:
    """Return the samples of a loader's batch: as many as were asked for, where rows do not tell.

    Raises:
        InvalidArgument: no tensor of a batch of rows has a dimension for samples.
    """
    if not isinstance(samples_in(batch, workload.samples)[0], Rows):
        return len(batch) if isinstance(batch, list) else settings.batch_size
    try:
        return batch_size(batch)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"the loader delivers {kind_of(batch)} in which no tensor has a sample dimension: "
            "its collate_fn must return tensors with the samples in dimension 0"
        ) from error


@contextmanager
def _batches_of(
    session: Workplace, settings: LoaderSettings
) -> Iterator[tuple[Iterable[Batch], Iterator[Batch]]]:
    """Yield a loader and its batches; then end its processes and restore its generators."""
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
