"""What bounds a search and where it is kept, refused before minutes are spent on it."""

from __future__ import annotations

import os
from typing import Any

from optuna.samplers import BaseSampler

from autofit.errors import InvalidRequest

_LARGEST_SEED = 2**32 - 1


def check_limits(
    *,
    max_micro_batch: Any,
    max_probes: Any,
    timeout: Any,
    study: Any,
    sampler: Any,
    seed: Any,
) -> None:
    """Refuse what is no count, no time, no place, no sampler or no seed.

    Raises:
        InvalidRequest: the message names the argument and its value.
    """
    _check_count("max_micro_batch", max_micro_batch, 1)
    _check_count("max_probes", max_probes, 1)
    if seed is None:
        raise InvalidRequest("seed must be a whole number, got None")
    _check_count("seed", seed, 0)
    if seed > _LARGEST_SEED:
        raise InvalidRequest(f"seed must be at most {_LARGEST_SEED}, got {seed}")
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):
        raise InvalidRequest(f"timeout must be above zero seconds, got {timeout!r}")
    if study is not None and not isinstance(study, (str, os.PathLike)):
        raise InvalidRequest(f"study must be a file path or an Optuna storage URL, got {study!r}")
    if sampler is not None and not isinstance(sampler, BaseSampler):
        raise InvalidRequest(f"sampler must be an Optuna sampler object, got {sampler!r}")


def _check_count(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise InvalidRequest(f"{name} must be at least {least}, got {value}")
