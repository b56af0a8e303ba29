"""`autofit.find_batch_size` as a user calls it: real trainings on the CPU device."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.searching.batch_size import CLOSE, next_larger
from autofit.testing.digest import digest

HERE: dict[str, Any] = {
    "device": "cpu",
    "vram_budget": "256MiB",
    "criterion": nn.CrossEntropyLoss(),
}
QUICK = autofit.SearchOptions(effort="quick")


def wide() -> nn.Sequential:
    """A model of 0.2 MiB whose samples hold 0.4 MiB of activations each."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def pictures(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 1, 32, 32, generator=generator)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def test_a_batch_that_is_too_large_is_split_evenly_and_kept_whole() -> None:
    given = HERE | {"vram_budget": "8MiB", "global_batch": 48, "max_probes": 5}
    found: Any = autofit.find_batch_size(wide, pictures(48), **given)
    assert found.micro_batch * found.accumulation_steps == found.global_batch == 48
    assert 1 <= found.micro_batch < 48
    assert 0 < found.peak_bytes <= 8 << 20
    assert found.samples_per_second > 0
    assert not found.report.plan.settings
    assert {trial.plan.samples_per_step for trial in found.report.trials} == {48}


@pytest.mark.parametrize("batch", [pictures(2), pictures], ids=["batch", "function"])
def test_without_a_global_batch_larger_micro_batches_are_found(batch: Any) -> None:
    given = HERE | {"vram_budget": "64MiB", "max_probes": 4, "options": QUICK}
    found = autofit.find_batch_size(wide, batch, **given)
    assert found.accumulation_steps == 1
    assert found.largest_micro_batch >= max(3, found.micro_batch)
    record = found.report.record
    assert found.is_decided == record.is_decided
    assert found.samples_per_second == record.speed_of(record.recommended)
    is_changed = any("global batch changed" in each for each in found.warnings)
    assert (found.micro_batch != 2) == is_changed


@pytest.mark.slow
def test_the_largest_that_fits_is_found_beside_the_fastest() -> None:
    given: Any = HERE | {"vram_budget": "96MiB", "options": QUICK}
    found = autofit.find_batch_size(wide, pictures(4), **given, max_probes=16)
    ran = [trial.plan.micro_batch for trial in found.report.trials if trial.ok]
    assert found.largest_micro_batch >= max(ran) > 4
    workload = autofit.Workload(wide, pictures(4), criterion=given["criterion"])
    larger = autofit.Plan(found.largest_micro_batch * 5 // 4)
    for plan, fits in ((autofit.Plan(found.largest_micro_batch), True), (larger, False)):
        trial = autofit.probe(workload, plan=plan, device="cpu", vram_budget="96MiB")
        assert trial.ok == fits, trial


@pytest.mark.parametrize(
    ("fixed", "each", "rounding"), [(50, 1, 1), (900, 2, 1), (0, 100, 1), (200, 3, 64)]
)
@pytest.mark.parametrize("ran", [(8,), (4, 8)])
def test_the_largest_size_of_a_line_is_found_in_few_probes(
    fixed: int, each: int, rounding: int, ran: tuple[int, ...]
) -> None:
    budget, failed, probes = 10_000, set[int](), 0

    def bytes_at(size: int) -> int:
        return -(-(fixed + each * size) // rounding) * rounding

    held = {size: bytes_at(size) for size in ran}
    while (size := next_larger(held, failed, budget, 2**20)) is not None:
        probes += 1
        assert size not in held.keys() | failed
        if bytes_at(size) <= budget:
            held[size] = bytes_at(size)
        else:
            failed.add(size)
    largest = (budget - fixed) // each
    assert largest * (1 - 2 / CLOSE) - 1 <= max(held) <= largest
    assert probes <= 8


def test_no_larger_size_is_tried_than_is_allowed() -> None:
    assert next_larger({8: 100, 16: 200}, set(), 10_000, most=100) == 100
    assert next_larger({8: 100, 100: 200}, set(), 10_000, most=100) is None
    assert next_larger({8: 100, 16: 200}, {18}, 10_000, most=100) == 17
    assert next_larger({64: 100}, {65}, 10_000, most=100) is None


def graphs(samples: int) -> dict[str, torch.Tensor]:
    """A batch of graphs of three to six nodes, whose rows do not tell the samples."""
    nodes = torch.tensor([3 + place % 4 for place in range(samples)])
    of = torch.repeat_interleave(torch.arange(samples), nodes)
    return {"nodes": torch.randn(len(of), 64), "of": of, "labels": torch.arange(samples) % 3}


def loss_of_graphs(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    by_node = model(batch["nodes"])
    pooled = by_node.new_zeros(len(batch["labels"]), 3).index_add(0, batch["of"], by_node)
    return nn.functional.cross_entropy(pooled, batch["labels"])


def _of_nodes() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 3))


@pytest.mark.parametrize(
    ("global_batch", "budget", "probes"), [(256, "12MiB", 5), (16, "64MiB", 2)]
)
def test_a_function_whose_rows_do_not_tell_is_split_where_it_does_not_fit_at_once(
    global_batch: int, budget: str, probes: int
) -> None:
    given: Any = {"loss_fn": loss_of_graphs, "global_batch": global_batch}
    here: Any = {"device": "cpu", "vram_budget": budget, "max_probes": probes, "options": QUICK}
    found = autofit.find_batch_size(autofit.Workload(_of_nodes, graphs, **given), **here)
    is_split = found.report.baseline.measurement.outcome.about_memory
    assert is_split == (budget == "12MiB") == (found.accumulation_steps > 1)
    assert found.micro_batch * found.accumulation_steps == found.global_batch == global_batch
    assert is_split == any("normalize over a batch" in each for each in found.warnings)
    model = _of_nodes()
    with found.report.apply(model, torch.optim.SGD(model.parameters(), lr=0.1)) as training:
        assert torch.isfinite(training.step(graphs))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sample_batch": None}, "give a sample batch"),
        ({"global_batch": 0}, "global_batch must be"),
        ({"options": "quick"}, "options must be autofit.SearchOptions"),
        ({"options": autofit.SearchOptions(ranks=2)}, "one process, not 2 ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.find_batch_size(wide, **({"sample_batch": pictures(4)} | HERE | given))


def normalizing() -> nn.Sequential:
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def test_accumulation_that_would_change_gradients_stays_as_it_is() -> None:
    given = HERE | {"global_batch": 32, "max_probes": 3, "options": QUICK}
    found = autofit.find_batch_size(normalizing, pictures(8), **given)
    assert (found.micro_batch, found.accumulation_steps) == (8, 4)
    assert any("Split gradients differ" in each for each in found.warnings)
    assert found.report.to_dict()["workload"]["optimizer"] == "AdamW"
    assert "Trained by AdamW, the default" in found.report.to_text(verbose=True)


def test_an_optimizer_that_was_given_is_named_without_a_word_of_a_default() -> None:
    given = HERE | {"optimizer": torch.optim.SGD, "max_probes": 1, "options": QUICK}
    report = autofit.find_batch_size(normalizing, pictures(8), **given).report
    assert report.to_dict()["workload"]["optimizer"] == "SGD"
    assert "SGD" in report.to_text(verbose=True)
    assert "the default: pass optimizer=" not in report.to_text(verbose=True)


# -- A toy library whose batch-size finder is autofit's, as docs/embedding.md tells its author


PAGE = Path(__file__).parents[1] / "docs" / "embedding.md"
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def library() -> Any:
    """The trainer of the page, as its reader has it."""
    text = PAGE.read_text().partition('title="trainer.py"\n')[2].partition("```")[0]
    made: dict[str, Any] = {"__name__": "trainer"}
    exec(text, made)
    assert made["autofit"].find_batch_size is autofit.find_batch_size
    return made["Trainer"]


def around(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What a search must leave as it was."""
    objects = {"model": model, "optimizer": optimizer}
    dice = torch.get_rng_state().tolist(), random.getstate()
    return (
        [each for each in digest(objects).items() if each[0].startswith(tuple(objects))],
        [(module.training, len(module._forward_hooks)) for module in model.modules()],
        dice,
        (torch.get_default_dtype(), torch.get_num_threads()),
    )


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("loss", "budget", "raised"),
    [
        (squares, "64MiB", None),
        (squares, "1MiB", autofit.NoFeasiblePlan),
        (squares, "much", autofit.InvalidArgument),
        (failing, "64MiB", KeyError),
    ],
    ids=["found", "nothing fits", "no budget", "an error of the user's"],
)
def test_a_toy_library_finds_a_size_and_leaves_all_as_it_was(
    loss: Loss, budget: str, raised: type[Exception] | None, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.Dropout(), nn.Linear(1024, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(squares(model, torch.ones(2, 64)))
    optimizer.step()

    def noted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        (tmp_path / str(os.getpid())).touch()
        return loss(model, batch)

    trainer = library()(model, noted, optimizer)
    dataset = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    before = around(model, optimizer)
    with nullcontext() if raised is None else pytest.raises(raised):
        trainer.scale_batch_size(dataset, vram_budget=budget, device="cpu", max_probes=3)
    assert trainer.batch_size * trainer.accumulation_steps == (48 if raised is None else 1)
    assert around(model, optimizer) == before
    workers = [path.name for path in tmp_path.iterdir()]
    assert workers or raised is not None
    status = [Path(f"/proc/{pid}/stat") for pid in workers]
    assert [one for one in status if one.exists() and ") Z " not in one.read_text()] == []
