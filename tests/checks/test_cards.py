"""`autofit.cards`: what it tells of a GPU is what a prediction for that GPU alone tells."""

from __future__ import annotations

import csv
import io
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.checks.card_table import Cards
from autofit.checks.cards import cards
from autofit.errors import InvalidArgument, PredictionUnavailable
from autofit.plan import Dimension, Plan
from autofit.prediction.predict import predict
from autofit.strategy import Numerics, Phase
from autofit.training.workload import Workload
from autofit.units import GIB
from benchmarks.workload_models import GPT, resnet

GPUS = ["T4", "L4", "RTX 5090", "H100"]


def decoder(**options: Any) -> Workload:
    ids = torch.randint(0, 5000, (4, 256))
    return Workload(lambda: GPT(5000, 256, 256, 2, 4), {"ids": ids}, **options)


def convolutions() -> Workload:
    batch = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    return Workload(lambda: resnet((16, 32), 1, 10), batch, criterion=nn.CrossEntropyLoss())


@pytest.fixture(scope="module")
def table() -> Cards:
    return cards(decoder(global_batch=4096), gpus=GPUS, vram_budget="8GiB")


def test_the_gpus_are_in_the_order_of_their_memory(table: Cards) -> None:
    assert [card.gpu for card in table.cards] == GPUS
    assert {card.vram_budget_bytes for card in table.cards} == {8 * GIB}
    assert table.plan == decoder(global_batch=4096).plan()


def test_types_that_a_gpu_lacks_are_no_variants_of_it(table: Cards) -> None:
    types = {
        card.gpu: [fit.plan.settings["precision.dtype"] for fit in card.fits]
        for card in table.cards
    }
    assert types["T4"] == ["default", "float16"]
    assert types["L4"] == types["H100"] == ["default", "tf32", "bfloat16", "float16"]


def test_the_asked_plan_needs_what_a_prediction_says(table: Cards) -> None:
    for card in table.cards:
        for fit in card.fits:
            alone = predict(decoder(global_batch=4096), plan=fit.plan, gpu=card.gpu)
            assert fit.required_bytes == alone.required_bytes
            assert fit.required_bytes + (fit.margin_bytes or 0) == alone.interval[1]
            assert fit.fits == alone.fits(card.vram_budget_bytes)


def test_the_largest_fits_and_the_next_one_does_not(table: Cards) -> None:
    workload = decoder(global_batch=4096)
    for card in table.cards:
        for fit in (card.fits[0], card.fits[-1]):
            assert fit.largest is not None
            assert fit.largest.global_batch == 4096
            alone = predict(workload, plan=fit.largest, gpu=card.gpu)
            assert alone.fits(8 * GIB)
            assert fit.largest_required_bytes == alone.required_bytes
            steps = fit.largest.accumulation_steps - 1
            larger = Plan.split(4096, -(-4096 // steps), fit.plan.settings)
            assert not predict(workload, plan=larger, gpu=card.gpu).fits(8 * GIB)


def test_the_chosen_one_has_the_least_estimated_time(table: Cards) -> None:
    for card in table.cards:
        times = [fit.relative_time for fit in card.fits]
        assert all(time is not None and 0 < time < 1.1 for time in times)
        assert card.chosen is not None
        assert card.chosen.relative_time <= 1.02 * min(times)  # type: ignore[operator, type-var]  # none is None
    # bfloat16 and float16 have one rate; the first of them needs no gradient scaler.
    h100 = table.cards[-1].chosen
    assert h100 is not None
    assert h100.plan.settings["precision.dtype"] == "bfloat16"


def test_a_small_time_keeps_its_digits(table: Cards) -> None:
    card = table.cards[0]
    fit = replace(card.fits[0], relative_time=0.00412)
    shown = str(replace(table, cards=(replace(card, fits=(fit,)),)))
    assert " 0.0041" in shown
    assert " 0.00 " not in shown


def test_a_plan_that_is_already_the_largest_takes_its_own_time() -> None:
    plain = cards(decoder(), gpus="L4", plan=Plan(8), strategies=[], vram_budget="1340MiB")
    again = plain.cards[0].fits[0].largest
    assert again is not None
    assert again.micro_batch > 8
    found = cards(decoder(), gpus="L4", plan=again, strategies=[], vram_budget="1340MiB")
    (fit,) = found.cards[0].fits
    assert fit.largest == again
    assert fit.relative_time == 1.0


def test_layouts_and_types_are_combined() -> None:
    found = cards(convolutions(), gpus=["A100", "V100"], vram_budget="2GiB")
    v100, a100 = found.cards
    assert len(a100.fits) == 2 * 4
    assert len(v100.fits) == 2 * 2
    for fit in (a100.fits[0], a100.fits[-1]):
        assert fit.largest is not None
        assert predict(convolutions(), plan=fit.largest, gpu="A100").fits(2 * GIB)
        larger = Plan(round(1.01 * fit.largest.micro_batch) + 1, settings=fit.plan.settings)
        assert not predict(convolutions(), plan=larger, gpu="A100").fits(2 * GIB)


def test_settings_of_the_plan_stay() -> None:
    plan = Plan(4, accumulation_steps=2, settings={"precision.dtype": "bfloat16"})
    found = cards(decoder(), gpus=["T4", "L4"], plan=plan, vram_budget="1340MiB")
    t4, l4 = found.cards
    assert t4.fits == ()
    assert "bfloat16" in (t4.detail or "")
    (fit,) = l4.fits
    assert fit.plan == plan
    assert fit.largest is not None
    assert fit.largest.accumulation_steps == 2
    assert "bfloat16" in str(found)


def test_payloads_of_a_report_are_used() -> None:
    setting = "checkpointing.level"
    payloads = {setting: {"units": ["blocks.0", "blocks.1"], "state": []}}
    plan = Plan(64, settings={setting: 3})
    checkpointed = cards(
        decoder(), gpus="L4", plan=plan, payloads=payloads, strategies=["checkpointing"]
    )
    plain = cards(decoder(), gpus="L4", plan=Plan(64), strategies=["checkpointing"])
    (with_levels,), (without,) = checkpointed.cards[0].fits, plain.cards[0].fits
    assert (with_levels.required_bytes or 0) < (without.required_bytes or 0)
    assert any("checkpoint levels" in note for note in plain.notes)
    with pytest.raises(PredictionUnavailable, match="payloads"):
        cards(decoder(), gpus="L4", plan=plan)


def test_a_gpu_of_unknown_speed_has_bytes_and_no_choice() -> None:
    (card,) = cards(decoder(), gpus=["8GiB"]).cards
    assert all(fit.fits and fit.largest and fit.relative_time is None for fit in card.fits)
    assert card.chosen is None


def test_where_one_sample_does_not_fit_nothing_is_chosen() -> None:
    found = cards(decoder(), gpus="L4", vram_budget="640MiB")
    assert [(fit.fits, fit.largest) for fit in found.cards[0].fits] == [(False, None)] * 4
    assert found.cards[0].chosen is None
    assert "none" in str(found)


class _Costly:
    """A strategy that does nothing, and whose second value is costly to try."""

    name = "costly"
    phase = Phase.STEP
    numerics = Numerics.EXACT

    def dimensions(self, context: Any) -> dict[str, Dimension]:
        return {"costly.mode": Dimension(["off", "on"], trial_cost_s=60.0)}

    def apply(self, training: Any, settings: Any, payloads: Any) -> Any:
        assert settings == {"costly.mode": "off"}
        return nullcontext()

    def describe(self, settings: Any, payloads: Any) -> list[str]:
        return []


def test_what_is_costly_is_left_out_and_named() -> None:
    found = cards(decoder(), gpus="L4", strategies=[_Costly()])
    assert len(found.cards[0].fits) == 1
    assert any("costly.mode was left at off" in note for note in found.notes)


def test_what_stood_in_for_a_loss_is_said() -> None:
    made = Workload(lambda: nn.Linear(8, 4), torch.randn(4, 8))
    assert any("no loss" in note for note in cards(made, gpus="L4").notes)
    given = replace(made, loss_fn=lambda model, batch: model(batch).mean())
    assert not any("no loss" in note for note in cards(given, gpus="L4").notes)


def test_code_that_looks_at_values_cannot_be_told() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).mean()
        return loss if loss.item() > 0 else -loss

    workload = Workload(nn.Linear(4, 4), torch.randn(8, 4), loss_fn=loss_fn)
    with pytest.raises(PredictionUnavailable, match="item"):
        cards(workload, gpus=["L4", "T4"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpus": ["Voodoo 2"]}, "Voodoo 2"),
        ({"gpus": []}, "gpus"),
        ({"vram_budget": 2.0}, "fraction"),
        ({"strategies": ["nothing"]}, "nothing"),
        ({"numerics": "sloppy"}, "sloppy"),
        ({"plan": 8}, "plan"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        cards(decoder(), **options)


def test_the_forms_tell_the_same(table: Cards, tmp_path: Path) -> None:
    for suffix in (".json", ".csv", ".txt"):
        table.save(tmp_path / f"cards{suffix}")
    read = json.loads((tmp_path / "cards.json").read_text())
    assert read == json.loads(json.dumps(table.to_dict()))
    assert read["time_error"]["median"] > 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "cards.csv").read_text())))
    assert len(rows) == sum(len(card.fits) for card in table.cards)
    fits = [(card, fit) for card in table.cards for fit in card.fits]
    for row, (card, fit) in zip(rows, fits, strict=True):
        assert fit.largest is not None
        assert row["gpu"] == card.gpu
        assert int(row["required_bytes"]) == fit.required_bytes
        assert int(row["largest_micro_batch"]) == fit.largest.micro_batch
        assert (row["chosen"] == "True") == (fit is card.chosen)
    text = (tmp_path / "cards.txt").read_text()
    assert text == f"{table}\n"
    assert text.count(" *") >= len(table.cards)
    assert "samples/s" not in text
    with pytest.raises(InvalidArgument, match=r"cards\.xml"):
        table.save(tmp_path / "cards.xml")
