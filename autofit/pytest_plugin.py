"""A pytest fixture that fails a test where a training does not fit.

    def test_fits_24gib(autofit_check):
        autofit_check(make_workload(), vram_budget="24GiB", micro_batch=8)

Importing this plugin imports no torch: it is loaded in every pytest run of its environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from autofit.checks.verdict import Verdict
    from autofit.plan import Plan, Scalar
    from autofit.training.workload import Workload

Checker = Callable[..., "Verdict"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `autofit`, added to every test that uses the fixture."""
    config.addinivalue_line("markers", "autofit: checks that a training fits a VRAM budget")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the fixture, so that `-m autofit` selects them."""
    for item in items:
        if "autofit_check" in getattr(item, "fixturenames", ()):
            item.add_marker("autofit")


@pytest.fixture
def autofit_check() -> Checker:
    """Return a function that fails the test if a workload does not fit a VRAM budget.

    It takes the workload, `vram_budget`, and either `plan` or `micro_batch`, `accumulation_steps`,
    `global_batch` and `settings`, as on the command line, and the other arguments of
    `autofit.check`, whose verdict it returns. It raises `autofit.InvalidArgument` where `plan` and
    a part of a plan are both given.
    """

    def checker(
        workload: Workload,
        *,
        vram_budget: str | float | None = None,
        micro_batch: int | None = None,
        accumulation_steps: int | None = None,
        global_batch: int | None = None,
        settings: Mapping[str, Scalar] | None = None,
        plan: Plan | None = None,
        gpu: str | int | None = None,
        **options: Any,
    ) -> Verdict:
        __tracebackhide__ = True
        from autofit.checks.check import check
        from autofit.errors import InvalidArgument
        from autofit.training.workload import check_arguments

        check_arguments(workload, plan)
        parts: dict[str, Any] = {
            "micro_batch": micro_batch,
            "accumulation_steps": accumulation_steps,
            "global_batch": global_batch,
            "settings": settings,
        }
        beside = [f"{name}=" for name, value in parts.items() if value is not None]
        if plan is not None and beside:
            raise InvalidArgument(
                f"plan= sets the whole plan: do not pass {' and '.join(beside)} with it"
            )
        verdict = check(
            workload,
            plan=plan or workload.plan(**parts),
            vram_budget=vram_budget,
            gpu=gpu,
            **options,
        )
        if not verdict.fits:
            pytest.fail(verdict.explain(), pytrace=False)
        return verdict

    return checker
