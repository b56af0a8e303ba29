"""What tunes a search, beside what is trained and where."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from optuna.samplers import BaseSampler

from autofit.errors import InvalidArgument
from autofit.plan import check_count
from autofit.planning.search_spec import Effort


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How a search chooses plans, and where it runs its probes.

    Attributes:
        effort: "quick", "normal" or "thorough": how small a gain is still worth a probe.
        sampler: an Optuna sampler in place of autofit's own.
        max_micro_batch: the largest micro-batch to try, in samples; at least the baseline's.
        even_split: try only micro-batches of one size, as trainers need whose loader makes them.
        allow_accumulation_change: change the accumulation steps even where that changes gradients.
        executor: any `concurrent.futures.Executor`, in whose processes plans run: those of a Dask
            cluster, of MPI, or of this machine. docs/distributed.md says what it must do. None:
            plans run on this machine.
        workers: how many plans are in flight at the executor at once: as many as it has machines
            that are alike.
        ranks: workers that train one model together, each on a GPU of its own or all on the CPU; if
            None, as many as torchrun started, or one.
        profile: a .json or .json.gz file, to which a trace of the best plan's steps is written in
            torch's own format.

    Raises:
        InvalidArgument: a value is of another kind; the message names it.
    """

    effort: Effort | str = "normal"
    sampler: BaseSampler | None = None
    max_micro_batch: int | None = None
    even_split: bool = False
    allow_accumulation_change: bool = False
    executor: Executor | None = None
    workers: int = 1
    ranks: int | None = None
    profile: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.effort not in list(Effort):  # a list asks for no hash, and it may be anything
            names = ", ".join(repr(each.value) for each in Effort)
            raise InvalidArgument(f"effort must be one of {names}, got {self.effort!r}")
        if self.sampler is not None and not isinstance(self.sampler, BaseSampler):
            raise InvalidArgument(f"sampler must be an Optuna sampler object, got {self.sampler!r}")
        for name in ("max_micro_batch", "workers", "ranks"):
            if (count := getattr(self, name)) is not None:
                check_count(name, count)
        for name in ("even_split", "allow_accumulation_change"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidArgument(f"{name} must be True or False, got {value!r}")
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
        if self.profile is not None:
            _check_profile(self.profile)


def _check_profile(profile: Any) -> None:
    """Refuse a file for the trace before the search rather than after it."""
    is_path = isinstance(profile, (str, os.PathLike)) and bool(os.fspath(profile))
    if not is_path or not os.fspath(profile).endswith((".json", ".json.gz")):
        raise InvalidArgument(
            f"profile must be a .json or .json.gz file for a trace, got {profile!r}"
        )
    if "\0" in os.fspath(profile):
        raise InvalidArgument(f"profile={os.fspath(profile)!r}: the name of a file has no NUL")
    folder = os.path.dirname(os.path.abspath(profile))
    is_other = os.path.exists(profile) and not os.path.isfile(profile)  # a folder, or a pipe
    if is_other or not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidArgument(
            f"profile={os.fspath(profile)!r}: give a file in a folder that can be written"
        )
