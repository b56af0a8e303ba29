"""The limits of a search in probes and time, and checks of its arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.samplers import BaseSampler

from autofit.errors import InvalidRequest
from autofit.measurement import Trial, probes_of
from autofit.plan import check_count
from autofit.planning.search_spec import Effort


@dataclass(frozen=True)
class Allowance:
    """The limits of one run of a search; its time starts when this is made.

    Attributes:
        max_probes: the most probes, those of earlier runs included; None: unlimited.
        timeout_s: seconds; None: unlimited.
    """

    max_probes: int | None
    timeout_s: float | None
    _began: float = field(default_factory=time.monotonic, init=False)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the timeout; None: unlimited."""
        return None if self.timeout_s is None else max(0.0, self.timeout_s - self.elapsed_s)

    def probes_left(self, trials: Sequence[Trial], reserved: int = 0) -> int | None:
        """Return the probes left after those trials, less the reserved ones; None: unlimited."""
        if self.max_probes is None:
            return None
        return max(0, self.max_probes - reserved - len(probes_of(trials)))

    def time_is_short(self, trials: Sequence[Trial], probes: int) -> bool:
        """Return whether so many more probes of the mean duration would end after the timeout."""
        left = self.seconds_left
        if left is None:
            return False
        lengths = [trial.measurement.seconds or 0.0 for trial in probes_of(trials)]
        return left <= probes * sum(lengths) / max(1, len(lengths))

    def spent(self, trials: Sequence[Trial]) -> str | None:
        """Return why no further plan may be tried, with one confirmation reserved; None: it may."""
        if not trials:
            return None
        if self.probes_left(trials, reserved=1) == 0:
            return f"max_probes={self.max_probes} reached"
        if self.time_is_short(trials, probes=2):
            return f"timeout of {self.timeout_s:g} s reached"
        return None


def check_search_arguments(
    *,
    max_micro_batch: Any,
    max_probes: Any,
    timeout: Any,
    study: Any,
    sampler: Any,
    progress: Any,
    effort: Any,
) -> None:
    """Check the arguments of `autofit.search` that say how to search.

    Raises:
        InvalidRequest: one is invalid; the message names it and its value.
    """
    for name, count in (("max_micro_batch", max_micro_batch), ("max_probes", max_probes)):
        if count is not None:
            check_count(name, count)
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):
        raise InvalidRequest(f"timeout must be above zero seconds, got {timeout!r}")
    if effort not in list(Effort):  # a list asks for no hash, and it may be anything
        names = ", ".join(repr(each.value) for each in Effort)
        raise InvalidRequest(f"effort must be one of {names}, got {effort!r}")
    if study is not None and not (isinstance(study, (str, os.PathLike)) and os.fspath(study)):
        raise InvalidRequest(f"study must be a file path or an Optuna storage URL, got {study!r}")
    if sampler is not None and not isinstance(sampler, BaseSampler):
        raise InvalidRequest(f"sampler must be an Optuna sampler object, got {sampler!r}")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise InvalidRequest(
            f"progress must be True or a function that is called with each event, got {progress!r}"
        )
