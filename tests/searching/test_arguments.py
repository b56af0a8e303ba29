"""What a search refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import RandomSampler

from autofit.errors import InvalidRequest
from autofit.searching.arguments import check_search_arguments

GOOD: dict[str, Any] = {
    "max_micro_batch": 8,
    "max_probes": 3,
    "timeout": 1.5,
    "study": Path("study.log"),
    "sampler": RandomSampler(),
    "progress": print,
}


def test_what_means_something_passes() -> None:
    check_search_arguments(**GOOD)
    check_search_arguments(**dict.fromkeys(GOOD))
    check_search_arguments(**GOOD | {"progress": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_micro_batch", 0),
        ("max_micro_batch", "3"),
        ("max_probes", 0),
        ("max_probes", 1.5),
        ("max_probes", True),
        ("timeout", 0),
        ("timeout", "3"),
        ("timeout", float("nan")),
        ("study", 3),
        ("study", b"x"),
        ("sampler", "tpe"),
        ("sampler", RandomSampler),
        ("study", ""),
        ("progress", 3),
    ],
)
def test_what_means_nothing_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        check_search_arguments(**GOOD | {name: value})
