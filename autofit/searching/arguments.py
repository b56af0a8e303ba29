"""A search's own arguments, its limits and where it is kept, refused before it starts."""

from __future__ import annotations

import os
from typing import Any

from optuna.samplers import BaseSampler

from autofit.errors import InvalidRequest
from autofit.plan import check_count


def check_search_arguments(
    *,
    max_micro_batch: Any,
    max_probes: Any,
    timeout: Any,
    study: Any,
    sampler: Any,
    progress: Any,
) -> None:
    """Refuse what is no count, no time, no place, no sampler or nothing to be called.

    Raises:
        InvalidRequest: the message names the argument and its value.
    """
    for name, count in (("max_micro_batch", max_micro_batch), ("max_probes", max_probes)):
        if count is not None:
            check_count(name, count)
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):
        raise InvalidRequest(f"timeout must be above zero seconds, got {timeout!r}")
    if study is not None and not (isinstance(study, (str, os.PathLike)) and os.fspath(study)):
        raise InvalidRequest(f"study must be a file path or an Optuna storage URL, got {study!r}")
    if sampler is not None and not isinstance(sampler, BaseSampler):
        raise InvalidRequest(f"sampler must be an Optuna sampler object, got {sampler!r}")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise InvalidRequest(
            f"progress must be True or a function that is called with each event, got {progress!r}"
        )
