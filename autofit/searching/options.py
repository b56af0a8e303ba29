"""What tunes a search, beside what is searched."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from autofit.errors import InvalidArgument
from autofit.plan import check_count


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Where and how a search runs its probes.

    Attributes:
        executor: any `concurrent.futures.Executor`, in whose processes plans run: those of a Dask
            cluster, of MPI, or of this machine. docs/distributed.md says what it must do. None:
            plans run on this machine.
        workers: how many plans are in flight at the executor at once: as many as it has machines
            that are alike.
        ranks: workers that train one model together, each on a GPU of its own or all on the CPU; if
            None, as many as torchrun started, or one.

    Raises:
        InvalidArgument: the executor is none, or there is no whole number of workers for it.
    """

    executor: Executor | None = None
    workers: int = 1
    ranks: int | None = None

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        if self.ranks is not None:
            check_count("ranks", self.ranks)
        executor: Any = self.executor
        if executor is None and self.workers > 1:
            raise InvalidArgument(
                f"workers={self.workers} is how many plans an executor runs at once: give "
                "executor= too, or several devices"
            )
        takes_jobs = callable(getattr(executor, "submit", None)) and not isinstance(executor, type)
        if executor is not None and not takes_jobs:
            raise InvalidArgument(
                f"executor must be a concurrent.futures.Executor, got {executor!r}"
            )
