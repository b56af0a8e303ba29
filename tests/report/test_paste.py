"""The lines to paste: batch geometry first, then what each strategy says of its own settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from autofit.plan import Dimension, Plan, ResolvedPlan, Scalar
from autofit.registry import load_strategies
from autofit.report.record import parts_of
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_loss_weight_losses_are_not_weighted_by_samples(ranks: int) -> None:
    resolved = ResolvedPlan(Plan.split(32, 4, world_size=ranks), {}, [])
    plain, weighted = paste_lines(resolved), paste_lines(resolved, has_loss_weight=True)
    assert "loss_weight(micro_batch) / " in "\n".join(weighted)
    assert not any("loss_factor" in line or "share of the samples" in line for line in weighted)
    assert "loss_weight(micro_batch)" not in "\n".join(plain)


def test_a_strategy_is_given_its_own_settings_and_payloads_and_no_others() -> None:
    plan = Plan(8, settings={"folding.level": 1, "folding_too.level": 2})
    payloads = {"folding.level": ["a"], "folding_too.level": ["b"]}
    lines = paste_lines(ResolvedPlan(plan, payloads, [Folding()]))
    assert lines[1:] == ["fold({'folding.level': 1}, {'folding.level': ['a']})"]


class Careless(Folding):
    """It describes its lines as one text."""

    name = "careless"

    def describe(self, settings: Any, payloads: Any) -> Any:
        return "import os\nfold(model)"


def test_a_text_of_a_strategy_is_taken_as_its_lines() -> None:
    resolved = ResolvedPlan(Plan(8, settings={"careless.level": 1}), {}, [Careless()])
    first, *_, last = paste_lines(resolved)
    assert (first, last) == ("import os", "fold(model)")
    (part,) = parts_of(resolved, {})
    assert part.lines == ["import os", "fold(model)"]


class Looping(Folding):
    """Its lines hold a block of their own, and open one for the training."""

    name = "looping"

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        loop = ["for layer in model:", "    layer.looped = True"]
        return ["import contextlib", *loop, "with contextlib.nullcontext():  # around all"]


def test_blocks_within_a_strategys_lines_stay_as_they_are() -> None:
    plan = Plan(8, settings={"folding.level": 1, "looping.on": True})
    lines = paste_lines(ResolvedPlan(plan, {}, [Looping(), Folding()]))
    model = torch.nn.Sequential(torch.nn.ReLU())
    folded: list[Any] = []
    exec("\n".join(lines), {"model": model, "fold": lambda *given: folded.append(given)})
    assert vars(model[0])["looped"] is True
    assert len(folded) == 1
    assert lines[-2].startswith("    fold(")


PAYLOADS = {"checkpointing.level": {"units": ["0"], "state": []}}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
def test_a_plan_of_several_strategies_runs_as_it_stands(dtype: str) -> None:
    """Also with the body that a reader fills in: it runs inside all of them."""
    settings: dict[str, Scalar] = {
        "checkpointing.level": 1, "memory_format.layout": "channels_last", "precision.dtype": dtype,
    }  # fmt: skip
    resolved = ResolvedPlan(Plan.split(30, 8, settings), PAYLOADS, load_strategies())
    code = "\n".join(paste_lines(resolved))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    with _kept_precision():
        exec(code, {"model": model})
        assert "forward" not in vars(model[0])
        filled = code.replace("...  #", "seen = 'forward' in vars(model[0]), model(batch).dtype  #")
        scope: dict[str, Any] = {"model": model, "batch": torch.randn(2, 3, 8, 8)}
        exec(filled, scope)
    assert scope["seen"] == (True, torch.float32 if dtype == "tf32" else getattr(torch, dtype))
    assert scope["accumulation_steps"] == 4


@contextmanager
def _kept_precision() -> Iterator[None]:
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    try:
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed
