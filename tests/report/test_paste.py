"""The lines to paste: batch geometry first, then what each strategy says of its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autofit.plan import Dimension, Plan, ResolvedPlan, Scalar
from autofit.searching.result import paste_lines
from autofit.strategy import Context, Numerics, Phase, TrainingView


class Folding:
    """A strategy of a third party."""

    name = "folding"
    phase = Phase.MODEL
    numerics = Numerics.EXACT

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {"folding.level": Dimension([0, 1])}

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        return [f"fold({dict(settings)}, {dict(payloads)})"]


def test_one_micro_batch_is_one_line() -> None:
    (line,) = paste_lines(ResolvedPlan(Plan(8), {}, [Folding()]))
    assert line.startswith("micro_batch = 8 ")


def test_accumulation_says_how_many_samples_an_optimizer_step_has() -> None:
    lines = paste_lines(ResolvedPlan(Plan.split(30, 8), {}, []))
    assert [line.partition("  #")[0] for line in lines] == [
        "micro_batch = 8",
        "accumulation_steps = 4",
    ]
    assert "30 samples" in lines[1]


def test_a_strategy_is_given_its_own_settings_and_payloads_and_no_others() -> None:
    plan = Plan(8, settings={"folding.level": 1, "folding_too.level": 2})
    payloads = {"folding.level": ["a"], "folding_too.level": ["b"]}
    lines = paste_lines(ResolvedPlan(plan, payloads, [Folding()]))
    assert lines[1:] == ["fold({'folding.level': 1}, {'folding.level': ['a']})"]


def test_the_lines_are_python() -> None:
    plan = Plan.split(30, 8, {"folding.level": 1})
    compile("\n".join(paste_lines(ResolvedPlan(plan, {}, [Folding()]))), "pasted", "exec")
