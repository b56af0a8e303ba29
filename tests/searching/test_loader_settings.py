"""The numbers of workers that are measured and recommended, of loaders whose rates are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autofit.plan import Plan
from autofit.probing.loader import Delivery
from autofit.searching.loader_settings import measure_loader, verdict

PLAN = Plan(16)


def waits(workers: int) -> float:
    """Each worker waits for a disk: 50 samples/s."""
    return 50.0 * max(workers, 1)


class KnownLoader:
    """A prober of a loader whose rate follows from its workers; it may fail at one number."""

    def __init__(
        self,
        rate: Callable[[int], float],
        *,
        batch_bytes: int = 1,
        fails_at: int = -1,
        **given: Any,
    ) -> None:
        self.rate, self.batch_bytes, self.fails_at, self.given = rate, batch_bytes, fails_at, given
        self.asked: list[int] = []

    def run(self, function: Any) -> Delivery:
        settings = function.keywords["settings"]
        assert settings.batch_size == PLAN.samples_per_step
        assert (settings.prefetch_factor is None) == (settings.num_workers == 0)
        self.asked.append(settings.num_workers)
        if settings.num_workers == self.fails_at:
            raise RuntimeError("this disk is gone")
        return Delivery(self.rate(settings.num_workers), self.batch_bytes, **self.given)


def measured(prober: KnownLoader, consumed: float, own: int = 0) -> dict[str, Any]:
    loader = DataLoader(TensorDataset(torch.ones(4)), num_workers=own)
    facts: dict[str, Any] = {}
    measure_loader(prober, loader, PLAN, consumed, lambda _: None, facts)  # type: ignore[arg-type]  # it runs functions, which is all that is asked
    return facts


def test_each_number_of_workers_has_its_row_and_the_fewest_that_keep_up_win() -> None:
    prober = KnownLoader(waits)
    facts = measured(prober, 180)
    assert prober.asked == [0, 1, 2, 4, 8]
    assert facts["delivered"] == [
        {"num_workers": count, "samples_per_second": waits(count)} for count in (0, 1, 2, 4, 8)
    ]
    assert (facts["num_workers"], facts["bottleneck"]) == (4, "device")


def test_the_users_own_number_is_measured_too() -> None:
    prober = KnownLoader(waits)
    facts = measured(prober, 1e6, own=5)
    assert prober.asked == [5, 0, 1, 2, 4, 8]
    assert [row["num_workers"] for row in facts["delivered"]] == [0, 1, 2, 4, 5, 8]
    assert (facts["own_workers"], facts["num_workers"]) == (5, 8)


@pytest.mark.parametrize("own", [0, 2])
def test_of_a_stream_the_workers_stay_the_users(own: int) -> None:
    prober = KnownLoader(waits, is_stream=True)
    facts = measured(prober, 1e6, own)
    assert prober.asked == [own]
    assert facts["keeps_workers"]
    assert (facts["num_workers"], facts["bottleneck"]) == (own, "loader")


def test_no_more_is_loaded_ahead_than_the_host_has_room_for() -> None:
    prober = KnownLoader(waits, batch_bytes=2**60)
    assert measured(prober, 1e6)["num_workers"] == 0
    assert prober.asked == [0]


def test_what_was_measured_before_an_error_is_kept() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4)))
    facts: dict[str, Any] = {}
    prober: Any = KnownLoader(waits, fails_at=2, warnings=("rows are longer",))
    with pytest.raises(RuntimeError, match="disk"):
        measure_loader(prober, loader, PLAN, 180, lambda _: None, facts)
    assert [row["num_workers"] for row in facts["delivered"]] == [0, 1]
    assert facts["bottleneck"] is None
    assert facts["warnings"] == ["rows are longer"]


@pytest.mark.parametrize(
    ("rates", "consumed", "found"),
    [
        ({0: 1e6, 1: 1e5}, 100.0, (0, "device")),  # it takes no time
        ({0: 300.0, 1: 1e3}, 100.0, (1, "device")),  # they take turns: 75 a second
        ({0: 1e5, 4: 1e3}, 2e4, (0, "loader")),  # handing batches on takes longer than making them
        ({0: 50.0, 1: 50.0, 2: 100.0, 4: 101.0, 8: 99.0}, 1e3, (2, "loader")),  # two cores
    ],
)
def test_what_bounds_the_training(
    rates: dict[int, float], consumed: float, found: tuple[int, str]
) -> None:
    assert verdict(rates, consumed) == found
