"""`autofit.search` and `autofit.probe` as a user calls them: real trainings on the CPU device."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

import autofit
from autofit.plan import Scalar
from autofit.probing.probe import probe_if
from autofit.probing.survey import Survey
from autofit.searching.events import (
    Event,
    MachineBusy,
    ProbeStarted,
    Repeating,
    StageStarted,
)
from autofit.strategy import Context, TrainingView

HERE: dict[str, Any] = {"device": "cpu", "vram_budget": "32MiB"}
"""A search on the CPU device."""


def classifier(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def labelled(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def cross_entropy_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class WithLoss(nn.Module):
    """Takes keywords and returns an object with a loss, as many libraries' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = classifier()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.layers(inputs)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


# -- what can be searched ---------------------------------------------------------------------


def live_optimizer() -> dict[str, Any]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "criterion": nn.CrossEntropyLoss(), "optimizer": optimizer}


def own_training_step(training: autofit.Training, batch: Any) -> torch.Tensor:
    (micro_batch, weight) = next(iter(training.micro_batches(batch)))
    loss = cross_entropy_of(training.model, micro_batch)
    training.backward(loss, weight)
    training.optimizer_step()
    return loss


@pytest.mark.parametrize(
    ("given", "loss", "n"),
    [
        ({"model": classifier(), "loss_fn": cross_entropy_of}, "loss_fn", 4),
        ({"criterion": nn.CrossEntropyLoss()}, "criterion", 4),
        (
            {
                "model": WithLoss,
                "sample_batch": dict(zip(("inputs", "labels"), labelled(), strict=True)),
            },
            "the model's own loss",
            4,
        ),
        ({"sample_batch": labelled()[0]}, "the mean of the model's outputs", 4),
        ({"sample_batch": labelled, "loss_fn": cross_entropy_of}, "loss_fn", 2),
        (live_optimizer(), "criterion", 4),
        ({"training_step": own_training_step}, "training_step", 4),
    ],
    ids=lambda each: "" if isinstance(each, dict) else None,
)
def test_every_way_to_say_what_is_trained(given: dict[str, Any], loss: str, n: int) -> None:
    said = {"model": classifier, "sample_batch": labelled(), **given}
    if "training_step" in given:  # which a workload alone may have
        said = {"model": autofit.Workload(**said), "sample_batch": None}
    report = autofit.search(
        said.pop("model"), said.pop("sample_batch"), **said, strategies=[], max_probes=1, **HERE
    )
    assert report.baseline.ok, report.baseline.measurement
    assert report.baseline.plan.micro_batch == n
    assert report.baseline.samples_per_second
    assert report.record.workload["loss"].startswith(loss)
    assert report.record.lacks_loss == ("stands in" in report.record.workload["loss"])
    assert report.record.search.stopped_because == "max_probes=1 was reached"


# -- one search, looked at from all sides -----------------------------------------------------


@dataclass(frozen=True)
class Searched:
    """A search that was run once, and what stood around it."""

    report: autofit.Report
    model: nn.Module
    weights_before: dict[str, torch.Tensor]
    states_before: tuple[Any, ...]
    states_after: tuple[Any, ...]
    frozen_before: int
    frozen_after: int


def states() -> tuple[Any, ...]:
    """What a search must leave as it was."""
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(part) for part in np.random.get_state()],
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_tf32,
        optuna.logging.get_verbosity(),
        os.getcwd(),
        signal.getsignal(signal.SIGINT),
    )


@pytest.fixture(scope="module")
def searched() -> Searched:
    class LocalBlock(nn.Module):
        """No module of this name can be imported: it exists in this function alone."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x).relu()

    blocks = [LocalBlock() for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before, frozen = states(), gc.get_freeze_count()
    workload = autofit.Workload(
        model,
        labelled(4),
        criterion=nn.CrossEntropyLoss(),
        clip_grad_norm=1.0,
        global_batch=12,
    )
    report = autofit.search(
        workload,
        vram_budget="32MiB",
        device="cpu",
        max_probes=4,
    )
    return Searched(report, model, weights, before, states(), frozen, gc.get_freeze_count())


def test_the_best_plan_is_compared_and_keeps_the_global_batch(searched: Searched) -> None:
    report = searched.report
    assert report.best.ok
    assert any(trial.kind is autofit.TrialKind.CONFIRMATION for trial in report.trials)
    if report.record.search.comparison_ended:  # which four probes may be too few for
        assert report.best.kind is autofit.TrialKind.CONFIRMATION
    assert report.best.plan.samples_per_step == 12
    assert report.baseline.number == 0
    assert report.baseline.kind is autofit.TrialKind.BASELINE
    assert report.baseline.plan.micro_batch == 4
    assert report.baseline.plan.accumulation_steps == 3
    assert all(trial.plan.samples_per_step == 12 for trial in report.trials)


def test_it_stays_within_its_limits(searched: Searched) -> None:
    assert searched.report.record.search.probes == len(searched.report.trials) <= 4
    held = [trial.measurement.held_bytes or 0 for trial in searched.report.trials if trial.ok]
    assert 0 < max(held) <= 32 * 2**20


def test_a_search_changes_nothing_of_the_users(searched: Searched) -> None:
    assert searched.states_after == searched.states_before
    # A frozen object may die meanwhile; thawed, none would be left, and frozen anew, many more.
    assert 0 < searched.frozen_after <= searched.frozen_before
    assert searched.model.state_dict().keys() == searched.weights_before.keys()
    for name, value in searched.model.state_dict().items():
        assert torch.equal(value, searched.weights_before[name])
    assert all(parameter.grad is None for parameter in searched.model.parameters())


def shown_but_lines_to_run(report: autofit.Report) -> list[str]:
    """What a report prints, less the lines that can be run as printed."""
    return [line for line in str(report).splitlines() if not line.startswith(("Apply:", "More:"))]


def test_its_file_is_strict_json_and_reads_back(searched: Searched, tmp_path: Path) -> None:
    path = searched.report.save(tmp_path / "report.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert data["workload"]["given"] == ["criterion"]
    assert data["workload"]["global_batch"] == 12
    assert data["environment"]["device"] == "cpu"
    assert data["best"]["paste"]
    loaded = autofit.load(path)
    assert loaded.best == searched.report.best
    # The loaded one does not know the loss, so its line to apply names it.
    assert shown_but_lines_to_run(loaded) == shown_but_lines_to_run(searched.report)
    table = loaded.to_dataframe()
    assert set(loaded.best.plan.settings) <= set(table.columns)
    assert len(table) == len(loaded.trials)


@pytest.mark.parametrize("loaded", [False, True])
def test_apply_trains_with_the_best_plan_and_gives_everything_back(
    searched: Searched, tmp_path: Path, loaded: bool
) -> None:
    report, criterion = searched.report, None
    if loaded:
        report = autofit.load(report.save(tmp_path / "report.json"))
        criterion = nn.CrossEntropyLoss()
    model = searched_copy(searched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = labelled(12)
    loss_before = float(cross_entropy_of(model, batch).detach())
    keys_before = {name: set(vars(module)) for name, module in model.named_modules()}
    weights_before = {name: value.clone() for name, value in model.state_dict().items()}
    with report.apply(model, optimizer, criterion=criterion) as training:
        losses = [float(training.step(batch)) for _ in range(20)]
        short = training.step(labelled(5))
    assert losses[0] == pytest.approx(loss_before, rel=0.02)  # the plan may use bfloat16
    assert losses[-1] < losses[0]
    assert short.shape == ()
    assert not short.requires_grad
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys_before
    assert any(not torch.equal(v, weights_before[n]) for n, v in model.state_dict().items())


def test_apply_clips_as_the_search_did(searched: Searched) -> None:
    model = searched_copy(searched)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = tuple(part * 100 if part.is_floating_point() else part for part in labelled(12))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with searched.report.apply(model, optimizer) as training:
        training.step(batch)
    moved = [(p.detach() - before[name]).norm() for name, p in model.named_parameters()]
    assert float(torch.stack(moved).norm()) == pytest.approx(1.0, rel=0.02)


def searched_copy(searched: Searched) -> nn.Module:
    blocks = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 3))
    weights = searched.weights_before.values()
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    return model


def test_apply_refuses_to_train_on_a_stand_in_for_a_loss() -> None:
    report = search_here(criterion=None, sample_batch=torch.randn(8, 8), max_probes=1)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert any(line.startswith("! ") and "criterion=" in line for line in str(report).splitlines())
    with pytest.raises(autofit.InvalidArgument, match=r"no loss .*mean.*criterion="):
        report.apply(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.apply(model, optimizer, loss_fn=cross_entropy_of).undo()


def test_apply_takes_another_loss_than_the_search_had(searched: Searched) -> None:
    model = searched_copy(searched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return 0 * cross_entropy_of(model, batch) + 7.0

    with searched.report.apply(model, optimizer, loss_fn=loss_fn) as training:
        assert float(training.step(labelled(12))) == pytest.approx(7.0)


# -- stopping and resuming --------------------------------------------------------------------


def search_here(**more: Any) -> autofit.Report:
    """A search of a classifier, among micro-batches alone unless strategies are given."""
    said = {
        "criterion": nn.CrossEntropyLoss(),
        "global_batch": 16,
        "strategies": [],
        **HERE,
        **more,
    }
    model = said.pop("model", classifier)
    return autofit.search(model, said.pop("sample_batch", labelled()), **said)


@pytest.mark.slow
def test_a_resumed_search_says_so_and_counts_the_seconds_of_all_sessions(tmp_path: Path) -> None:
    study = tmp_path / "search.log"
    seen: list[Event] = []
    first = search_here(max_probes=2, study=study, progress=seen.append)
    assert not any(isinstance(e, StageStarted) and "resuming" in e.stage for e in seen)
    assert "sessions" not in first.to_text(verbose=True)
    seen.clear()
    second = search_here(max_probes=3, study=study, progress=seen.append)
    stages = [event.stage for event in seen if isinstance(event, StageStarted)]
    assert any(re.search(r"resuming .*search\.log, with 2 trials", stage) for stage in stages)
    assert "in 2 sessions" in second.to_text(verbose=True)
    summary = second.to_dict()["search"]
    assert summary["sessions"] == 2
    assert summary["seconds"] > sum(trial.measurement.seconds or 0.0 for trial in second.trials)


def step_of_all(training: autofit.Training, batch: Any) -> torch.Tensor:
    loss = cross_entropy_of(training.model, batch)
    training.backward(loss)
    training.optimizer_step()
    return loss


def step_of_each(training: autofit.Training, batch: Any) -> torch.Tensor:
    loss = training.accumulate(batch)
    training.optimizer_step()
    return loss


@pytest.mark.parametrize(("training_step", "splits"), [(step_of_all, False), (step_of_each, True)])
def test_a_training_step_that_does_not_split_is_said_not_to(
    training_step: Any, splits: bool
) -> None:
    workload = autofit.Workload(
        classifier,
        labelled(),
        criterion=nn.CrossEntropyLoss(),
        training_step=training_step,
        global_batch=16,
    )
    report = autofit.search(workload, strategies=[], max_probes=1, **HERE)
    assert report.best.plan == autofit.Plan.split(16, 4, report.best.plan.settings)
    words = "all 16 samples of a step ran at once"
    assert (words in " ".join(report.record.notes)) is not splits


def test_a_model_in_eval_mode_is_said_to_be(searched: Searched) -> None:
    words = "The model was in eval mode"
    assert words in " ".join(search_here(model=classifier().eval(), max_probes=1).record.notes)
    assert words not in " ".join(searched.report.record.notes)


def test_ctrl_c_returns_the_report_of_what_was_measured() -> None:
    def press_ctrl_c(event: Event) -> None:
        if isinstance(event, ProbeStarted) and event.progress.probes == 2:
            os.kill(os.getpid(), signal.SIGINT)

    report = search_here(progress=press_ctrl_c)
    assert report.record.search.stopped_because == "interrupted"
    assert len(report.trials) == 2
    assert report.best.ok
    assert report.best in report.trials
    shown = report.to_text(width=1000)  # of a noisy machine it decides nothing
    assert "Not confirmed: " in shown or "interrupted first" in shown
    assert "idle" not in shown, "that is no noise"


def hangs_in_a_worker(parent: int) -> nn.Module:
    if os.getpid() != parent:
        time.sleep(10_000)
    return classifier()


def test_a_builder_that_hangs_is_ended_by_the_timeout() -> None:
    build = functools.partial(hangs_in_a_worker, os.getpid())
    with pytest.raises(autofit.SearchTimedOut, match="2 s"):
        search_here(model=build, timeout=2)


class Loaded:
    """The worker that reads it sees a machine of that load."""

    def __init__(self, load: float) -> None:
        self.load = load

    def __reduce__(self) -> Any:
        return set_load, (self.load,)


def set_load(load: float) -> None:
    vars(os)["getloadavg"] = lambda: (load, 0.0, 0.0)


def on_a_machine_of(load: float) -> nn.Module:
    model = classifier()
    vars(model)["loaded"] = Loaded(load)
    return model


@pytest.mark.parametrize(("load", "is_busy"), [(0.0, False), (99.0, True)])
def test_a_busy_machine_is_named_in_progress_and_report(
    monkeypatch: pytest.MonkeyPatch, load: float, is_busy: bool
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    seen: list[Event] = []
    report = search_here(model=on_a_machine_of(load), max_probes=1, progress=seen.append)
    words = f"load 99.0 on {os.cpu_count()} cores"
    assert [e.how for e in seen if isinstance(e, MachineBusy)] == [words] * is_busy
    assert report.to_dict()["search"]["busy"] == (words if is_busy else None)
    assert (words in " ".join(report.record.notes)) is is_busy


def test_a_machine_that_becomes_busy_is_named_in_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    report = search_here(model=on_a_machine_of(0.0), max_probes=1)
    assert report.record.search.busy == f"load 99.0 on {os.cpu_count()} cores"


def test_a_load_that_changes_is_told_with_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    report = search_here(model=on_a_machine_of(80.0), max_probes=1)
    cores = os.cpu_count()
    told = f"load 80.0 on {cores} cores at the start, load 99.0 on {cores} cores at the end"
    assert report.record.search.busy == told


def test_a_model_is_built_once_for_the_survey_and_once_for_each_probe_and_look(
    tmp_path: Path,
) -> None:
    path = tmp_path / "processes"
    report = autofit.search(
        functools.partial(Signing, path),
        labelled(),
        criterion=nn.CrossEntropyLoss(),
        global_batch=16,
        max_probes=1,
        **HERE,
    )
    assert report.record.dimensions
    assert report.record.memory.keys() == {"best"}  # which is the baseline
    built = [line.split()[0] for line in path.read_text().splitlines()].count("built")
    assert built == 2 + 2  # looks: at its memory, and what bounds a step


class DiesOnce(nn.Module):
    """Ends the process of its first forward of so many samples."""

    def __init__(self, path: Path, samples: int) -> None:
        super().__init__()
        self.path, self.samples, self.layer = path, samples, nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) == self.samples and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(inputs)


@pytest.mark.parametrize(("samples", "probes"), [(2, 0), (4, 1)], ids=["survey", "baseline"])
def test_a_worker_killed_once_costs_a_worker_and_no_more(
    tmp_path: Path, samples: int, probes: int
) -> None:
    path, seen = tmp_path / "died", list[Event]()
    report = search_here(
        model=functools.partial(DiesOnce, path, samples),
        max_probes=1,
        progress=seen.append,
    )
    assert path.exists()
    assert report.baseline.ok
    repeated = [event.first.detail for event in seen if isinstance(event, Repeating)]
    assert repeated == ["the worker was killed by SIGKILL"] * probes


# -- a single probe ---------------------------------------------------------------------------


class Naming:
    """A strategy of the user's own, given as an object: it names the model and nothing else."""

    name = "naming"
    phase = autofit.Phase.MODEL
    numerics = autofit.Numerics.EXACT

    def dimensions(self, context: Context) -> Mapping[str, autofit.Dimension]:
        return {"naming.word": autofit.Dimension(["none", "Anna"], payloads={"Anna": [1, 2]})}

    @contextmanager
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> Iterator[None]:
        if settings["naming.word"] == "none":
            yield
            return
        assert payloads == {"naming.word": [1, 2]}
        training.model.named = "Anna"  # type: ignore[assignment]  # torch: modules and tensors
        yield
        del training.model.named

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        return [f"model.named = {settings['naming.word']!r}"]


@pytest.mark.slow
def test_a_strategy_may_be_given_as_an_object() -> None:
    sampler = optuna.samplers.RandomSampler(seed=0)
    options = autofit.SearchOptions(sampler=sampler)
    report = search_here(strategies=[Naming()], options=options, max_probes=8)
    assert list(report.record.dimensions) == ["naming.word"]
    assert all(trial.measurement.outcome is autofit.Outcome.OK for trial in report.trials)
    probed = {trial.plan.settings["naming.word"] for trial in report.trials}
    assert probed == {"none", "Anna"}
    lines = report.record.paste[report.best.number]
    assert lines[-1] == f"model.named = {report.best.plan.settings['naming.word']!r}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"naming.wort": "Anna"}, r"'naming\.wort'.*naming\.word\b"),
        ({"naming.word": "Bob"}, r"naming\.word.*'Bob'.*\['none', 'Anna'\]"),
    ],
)
def test_a_probe_of_a_setting_that_is_not_there_says_which_there_are(
    settings: dict[str, Scalar], words: str
) -> None:
    workload = autofit.Workload(classifier, labelled(), criterion=nn.CrossEntropyLoss())
    plan = autofit.Plan(4, settings=settings)
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.probe(workload, plan=plan, strategies=[Naming()], **HERE)


class Remembering(Naming):
    """Another release of `Naming`: Anna means something else, and Berta there is no more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> Iterator[None]:
        self.path.write_text(json.dumps([{**settings, **payloads}]))
        yield


def anything(survey: Survey) -> None:
    """Take any workload for that of the plan."""


@pytest.mark.parametrize("word", ["Anna", "Berta"])
def test_a_saved_plan_means_what_its_report_says(word: str, tmp_path: Path) -> None:
    workload = autofit.Workload(classifier, labelled(), criterion=nn.CrossEntropyLoss())
    plan, strategy = (
        autofit.Plan(4, settings={"naming.word": word}),
        Remembering(tmp_path / "applied"),
    )
    given = {"naming.word": [7]}
    trial = probe_if(anything, workload, plan=plan, payloads=given, strategies=[strategy], **HERE)
    assert trial.ok
    assert trial.plan == plan
    assert json.loads(strategy.path.read_text()) == [given]


def test_a_meaning_without_its_strategy_is_refused() -> None:
    workload = autofit.Workload(classifier, labelled(), criterion=nn.CrossEntropyLoss())
    plan, given = autofit.Plan(4, settings={"naming.word": "Anna"}), {"naming.word": [7]}
    with pytest.raises(autofit.InvalidArgument, match=r"'naming\.word'"):
        probe_if(anything, workload, plan=plan, payloads=given, strategies=["precision"], **HERE)


class Signing(nn.Module):
    """Writes the number of the process that builds or runs it to a file, as all functions here."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        sign(path, "built")
        self.path, self.layer = path, nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sign(self.path, "forward")
        return self.layer(inputs)


def sign(path: Path, what: str) -> None:
    with path.open("a") as file:
        print(what, os.getpid(), file=file)


def signing_workload(path: Path) -> autofit.Workload:
    def make_batch(samples: int) -> Any:
        sign(path, "batch")
        return labelled(samples)

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        sign(path, "criterion")
        return nn.functional.cross_entropy(output, target)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        sign(path, "optimizer")
        return torch.optim.SGD(parameters, lr=0.01)

    def weight(batch: Any) -> float:
        sign(path, "weight")
        return float(len(batch[0]))

    return autofit.Workload(
        functools.partial(Signing, path),
        make_batch,
        criterion=criterion,
        optimizer=optimizer,
        loss_weight=weight,
        before_step=lambda model, optimizer: sign(path, "before_step"),
        global_batch=4,
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_no_code_of_the_users_runs_in_this_process(tmp_path: Path, device: str) -> None:
    """Whatever it does, a crash, a hang or a changed global of it stays in the worker.

    On a GPU a dry run predicts memory, too.
    """
    path = tmp_path / "processes"
    workload = signing_workload(path)
    where: Any = {"device": device, "vram_budget": "32MiB" if device == "cpu" else "4GiB"}
    report = autofit.search(workload, max_probes=3, **where)
    assert autofit.probe(workload, **where).ok
    assert autofit.check(workload, **where).fits
    assert autofit.probe(workload, plan=report, steps=8).steps >= 8
    signed = {tuple(line.split()) for line in path.read_text().splitlines()}
    everything = "built forward batch criterion optimizer weight before_step"
    assert {what for what, _ in signed} == set(everything.split())
    assert str(os.getpid()) not in {process for _, process in signed}
    if device == "cpu":  # where nothing is predicted; a search confirms in a second worker
        assert len({process for _, process in signed}) == 5
