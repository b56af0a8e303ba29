"""`autofit.search` and `autofit.probe` as a user calls them: real trainings on the CPU device."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
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
from autofit.searching.events import Event, MachineBusy, ProbeStarted, Repeating, StageStarted
from autofit.strategy import Context, TrainingView
from autofit.testing.digest import digest
from tests.classifier import CROSS_ENTROPY, classifier, labelled
from tests.plugin import Plugin

HERE: dict[str, Any] = {"device": "cpu", "vram_budget": "32MiB"}
"""A search on the CPU device."""


def cross_entropy_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return CROSS_ENTROPY(model(batch[0]), batch[1])


def search_here(**more: Any) -> autofit.Report:
    """A search of a classifier, among micro-batches alone unless strategies are given."""
    said: dict[str, Any] = {"model": classifier, "sample_batch": labelled()}
    said |= {"criterion": CROSS_ENTROPY, "global_batch": 16, "strategies": [], "max_probes": 1}
    said |= HERE | more
    return autofit.search(said.pop("model"), said.pop("sample_batch"), **said)


def step_of_all(training: autofit.Training, batch: Any) -> torch.Tensor:
    loss = cross_entropy_of(training.model, batch)
    training.backward(loss)
    training.optimizer_step()
    return loss


def step_of_each(training: autofit.Training, batch: Any) -> torch.Tensor:
    loss = training.accumulate(batch)
    training.optimizer_step()
    return loss


class WithLoss(nn.Linear):
    """Takes keywords and returns an object with a loss, as many libraries' models do."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:  # type: ignore[override]
        logits = super().forward(inputs)
        return SimpleNamespace(loss=CROSS_ENTROPY(logits, labels), logits=logits)


LIVE = classifier()


# -- what can be searched ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "loss", "n"),
    [
        ({"model": classifier(), "loss_fn": cross_entropy_of}, "loss_fn", 4),
        ({"criterion": nn.CrossEntropyLoss()}, "criterion", 4),
        (
            {
                "model": functools.partial(WithLoss, 6, 4),
                "sample_batch": dict(zip(("inputs", "labels"), labelled(), strict=True)),
            },
            "the model's own loss",
            4,
        ),
        ({"sample_batch": labelled()[0]}, "the mean of the model's outputs", 4),
        ({"sample_batch": labelled, "loss_fn": cross_entropy_of}, "loss_fn", 2),
        (
            {
                "model": LIVE,
                "criterion": nn.CrossEntropyLoss(),
                "optimizer": torch.optim.SGD(LIVE.parameters(), lr=0.1, momentum=0.9),
            },
            "criterion",
            4,
        ),
        ({"training_step": step_of_all}, "training_step", 4),
    ],
    ids=lambda each: "" if isinstance(each, dict) else None,
)
def test_every_way_to_say_what_is_trained(given: dict[str, Any], loss: str, n: int) -> None:
    said = {"model": classifier, "sample_batch": labelled(), **given}
    if "training_step" in given:  # which a workload alone may have
        said = {"model": autofit.Workload(**said), "sample_batch": None}
    report = search_here(**{"criterion": None, "global_batch": None, **said})
    assert report.baseline.ok, report.baseline.measurement
    assert report.baseline.plan.micro_batch == n
    facts = report.record.workload
    assert facts["loss"].startswith(loss)
    assert report.record.lacks_loss == ("stands in" in facts["loss"])
    assert report.record.search.stopped_because == "max_probes=1 was reached"


class OnArrival:
    """Calls a function where it is read: in a worker."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        self.called = function, given

    def __reduce__(self) -> Any:
        return self.called


# -- one search, looked at from all sides -----------------------------------------------------


@dataclass(frozen=True)
class Searched:
    """A search that was run once, and what was around it before and after."""

    report: autofit.Report
    model: nn.Module
    before: dict[str, Any]
    after: dict[str, Any]
    frozen: tuple[int, int]


def around(model: nn.Module) -> dict[str, Any]:
    """What a search must leave as it was."""
    return {
        "model": [e for e in digest({"model": model}).items() if e[0].startswith("model")],
        "torch's dice": torch.get_rng_state().tolist(),
        "dice": random.getstate(),
        "numpy's dice": [str(part) for part in np.random.get_state()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "type": torch.get_default_dtype(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "verbosity": optuna.logging.get_verbosity(),
        "folder": os.getcwd(),
        "handler": signal.getsignal(signal.SIGINT),
    }


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
    model = nn.Sequential(nn.Linear(6, 64), *blocks, nn.Linear(64, 4))
    before, frozen = around(model), gc.get_freeze_count()
    workload = autofit.Workload(
        model, labelled(4), criterion=CROSS_ENTROPY, clip_grad_norm=1.0, global_batch=12
    )
    report = autofit.search(workload, max_probes=4, **HERE)
    return Searched(report, model, before, around(model), (frozen, gc.get_freeze_count()))


def test_the_best_plan_is_compared_and_keeps_the_global_batch_and_the_limits(
    searched: Searched,
) -> None:
    report = searched.report
    assert report.best.ok
    assert autofit.TrialKind.CONFIRMATION in {trial.kind for trial in report.trials}
    if report.record.search.comparison_ended:  # which four probes may be too few for
        assert report.best.kind is autofit.TrialKind.CONFIRMATION
    assert (report.baseline.number, report.baseline.kind) == (0, autofit.TrialKind.BASELINE)
    assert report.baseline.plan.micro_batch_sizes == (4, 4, 4)
    assert {trial.plan.samples_per_step for trial in report.trials} == {12}
    assert report.record.search.probes == len(report.trials) <= 4
    held = [trial.measurement.held_bytes or 0 for trial in report.trials if trial.ok]
    assert 0 < max(held) <= 32 * 2**20


def test_a_search_changes_nothing_of_the_users(searched: Searched) -> None:
    assert searched.after == searched.before
    # A frozen object may die meanwhile; thawed, none would be left, and frozen anew, many more.
    before, after = searched.frozen
    assert 0 < after <= before


def shown_but_lines_to_run(report: autofit.Report) -> list[str]:
    """What a report prints, less the lines that can be run as printed."""
    return [line for line in str(report).splitlines() if not line.startswith(("Apply:", "More:"))]


def test_its_file_reads_back(searched: Searched, tmp_path: Path) -> None:
    loaded = autofit.load(searched.report.save(tmp_path / "report.json"))
    assert loaded.to_dict() == json.loads((tmp_path / "report.json").read_text())
    assert loaded.to_dict()["workload"]["given"] == ["criterion"]
    assert loaded.to_dict()["best"]["paste"]
    assert loaded.best == searched.report.best
    # The loaded one does not know the loss, so its line to apply names it.
    assert shown_but_lines_to_run(loaded) == shown_but_lines_to_run(searched.report)
    assert set(loaded.best.plan.settings) <= set(loaded.to_dataframe().columns)


@pytest.mark.parametrize("loaded", [False, True])
def test_apply_trains_with_the_best_plan_and_gives_everything_back(
    searched: Searched, tmp_path: Path, loaded: bool
) -> None:
    report, given, model = searched.report, dict[str, Any](), copy.deepcopy(searched.model)
    if loaded:
        report = autofit.load(report.save(tmp_path / "report.json"))
        given = {"criterion": CROSS_ENTROPY}
    loss_before = float(cross_entropy_of(model, labelled(12)).detach())
    keys_before = {name: set(vars(module)) for name, module in model.named_modules()}
    with report.apply(model, torch.optim.SGD(model.parameters(), lr=0.5), **given) as training:
        losses = [float(training.step(labelled(12))) for _ in range(20)]
        short = training.step(labelled(5))
    assert losses[0] == pytest.approx(loss_before, rel=0.02)  # the plan may use bfloat16
    assert losses[-1] < losses[0]
    assert (short.shape, short.requires_grad) == ((), False)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys_before


def test_apply_clips_as_the_search_did(searched: Searched) -> None:
    model, (inputs, targets) = copy.deepcopy(searched.model), labelled(12)
    with searched.report.apply(model, torch.optim.SGD(model.parameters(), lr=1.0)) as training:
        training.step((inputs * 100, targets))
    pairs = zip(model.parameters(), searched.model.parameters(), strict=True)
    moved = torch.stack([(now - before).detach().norm() for now, before in pairs])
    assert float(moved.norm()) == pytest.approx(1.0, rel=0.02)


def test_apply_refuses_to_train_on_a_stand_in_for_a_loss_and_takes_another_one() -> None:
    report = search_here(criterion=None, sample_batch=torch.randn(8, 6))
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert any(line.startswith("! ") and "criterion=" in line for line in str(report).splitlines())
    with pytest.raises(autofit.InvalidArgument, match=r"no loss .*mean.*criterion="):
        report.apply(model, optimizer)
    loss_fn = lambda model, batch: 0 * model(batch).sum() + 7.0  # noqa: E731 - as users write it
    with report.apply(model, optimizer, loss_fn=loss_fn) as training:
        assert float(training.step(torch.randn(8, 6))) == pytest.approx(7.0)


# -- stopping and resuming --------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_search_says_so_and_counts_the_seconds_of_all_sessions(tmp_path: Path) -> None:
    study, seen = tmp_path / "search.log", list[Event]()
    first = search_here(max_probes=2, study=study, progress=seen.append)
    assert "sessions" not in first.to_text(verbose=True)
    assert "resuming" not in str(seen)
    second = search_here(max_probes=3, study=study, progress=seen.append)
    stages = " ".join(event.stage for event in seen if isinstance(event, StageStarted))
    assert re.search(r"resuming .*search\.log, with 2 trials", stages)
    assert "in 2 sessions" in second.to_text(verbose=True)
    summary = second.record.search
    assert summary.sessions == 2
    assert summary.seconds > sum(trial.measurement.seconds or 0.0 for trial in second.trials)


@pytest.mark.parametrize(("training_step", "splits"), [(step_of_all, False), (step_of_each, True)])
def test_a_training_step_that_does_not_split_is_said_not_to(
    training_step: Any, splits: bool
) -> None:
    given = {"criterion": CROSS_ENTROPY, "training_step": training_step, "global_batch": 16}
    workload = autofit.Workload(classifier, labelled(), **given)
    report = autofit.search(workload, strategies=[], max_probes=1, **HERE)
    assert report.best.plan == autofit.Plan.split(16, 4, report.best.plan.settings)
    words = "all 16 samples of a step ran at once"
    assert (words in " ".join(report.record.notes)) is not splits


def test_a_model_in_eval_mode_is_said_to_be(searched: Searched) -> None:
    words = "The model was in eval mode"
    assert words in " ".join(search_here(model=classifier().eval()).record.notes)
    assert words not in " ".join(searched.report.record.notes)


def test_ctrl_c_returns_the_report_of_what_was_measured() -> None:
    def press_ctrl_c(event: Event) -> None:
        if isinstance(event, ProbeStarted) and event.progress.probes == 2:
            os.kill(os.getpid(), signal.SIGINT)

    report = search_here(max_probes=None, progress=press_ctrl_c)
    assert report.record.search.stopped_because == "interrupted"
    assert len(report.trials) == 2
    assert report.best.ok
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


def on_a_machine_of(load: float) -> nn.Module:
    model = classifier()
    vars(model)["held"] = OnArrival(setattr, os, "getloadavg", lambda: (load, 0.0, 0.0))
    return model


def dying_once(path: Path, samples: int) -> nn.Module:
    """Ends the process of its first forward of so many samples."""

    def die(module: nn.Module, given: Any) -> None:
        if len(given[0]) == samples and not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model = classifier()
    model.register_forward_pre_hook(die)
    return model


@pytest.mark.parametrize(
    ("at_start", "at_end", "words"),
    [
        (0.0, 0.0, None),
        (99.0, 99.0, "load 99.0 on {0} cores"),
        (0.0, 99.0, "load 99.0 on {0} cores"),
        (80.0, 99.0, "load 80.0 on {0} cores at the start, load 99.0 on {0} cores at the end"),
    ],
)
def test_a_busy_machine_is_named_in_progress_and_report(
    monkeypatch: pytest.MonkeyPatch, at_start: float, at_end: float, words: str | None
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (at_end, 0.0, 0.0))
    seen: list[Event] = []
    report = search_here(model=on_a_machine_of(at_start), progress=seen.append)
    told = words and words.format(os.cpu_count())
    assert report.record.search.busy == told
    assert told is None or told in " ".join(report.record.notes)
    at_once = f"load {at_start} on {os.cpu_count()} cores"
    assert [e.how for e in seen if isinstance(e, MachineBusy)] == [at_once] * (at_start > 1)


@pytest.mark.parametrize(("samples", "probes"), [(2, 0), (4, 1)], ids=["survey", "baseline"])
def test_a_worker_killed_once_costs_a_worker_and_no_more(
    tmp_path: Path, samples: int, probes: int
) -> None:
    path, seen = tmp_path / "died", list[Event]()
    model = functools.partial(dying_once, path, samples)
    report = search_here(model=model, progress=seen.append)
    assert path.exists()
    assert report.baseline.ok
    repeated = [event.first.detail for event in seen if isinstance(event, Repeating)]
    assert repeated == ["the worker was killed by SIGKILL"] * probes


# -- a single probe ---------------------------------------------------------------------------


class Naming(Plugin):
    """A strategy of the user's own, given as an object: it names the model and nothing else."""

    name = "naming"

    def dimensions(self, context: Context) -> Mapping[str, autofit.Dimension]:
        return {"naming.word": autofit.Dimension(["none", "Anna"], payloads={"Anna": [1, 2]})}

    @contextmanager
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> Iterator[None]:
        is_named = settings["naming.word"] != "none"
        assert payloads == ({"naming.word": [1, 2]} if is_named else {})
        yield

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        return [f"model.named = {settings['naming.word']!r}"]


NAMED = autofit.Plan(4, settings={"naming.word": "Anna"})
WORKLOAD = autofit.Workload(classifier, labelled(), criterion=CROSS_ENTROPY)


@pytest.mark.slow
def test_a_strategy_may_be_given_as_an_object() -> None:
    options = autofit.SearchOptions(sampler=optuna.samplers.RandomSampler(seed=0))
    report = search_here(strategies=[Naming()], options=options, max_probes=8)
    assert list(report.record.dimensions) == ["naming.word"]
    assert all(trial.ok for trial in report.trials)
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
    plan = autofit.Plan(4, settings=settings)
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.probe(WORKLOAD, plan=plan, strategies=[Naming()], **HERE)


class Remembering(Naming):
    """Another release of `Naming`: Anna means something else, and Berta is there no more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> Iterator[None]:
        self.path.write_text(json.dumps({**settings, **payloads}))
        yield


@pytest.mark.parametrize("word", ["Anna", "Berta"])
def test_a_saved_plan_means_what_its_report_says(word: str, tmp_path: Path) -> None:
    plan, strategy = autofit.Plan(4, settings={"naming.word": word}), Remembering(tmp_path / "it")
    given: dict[str, Any] = {"payloads": {"naming.word": [7]}, "strategies": [strategy]}
    trial = probe_if(lambda survey: None, WORKLOAD, plan=plan, **given, **HERE)
    assert (trial.ok, trial.plan) == (True, plan)
    assert json.loads(strategy.path.read_text()) == given["payloads"]


def test_a_meaning_without_its_strategy_is_refused() -> None:
    given: dict[str, Any] = {"payloads": {"naming.word": [7]}, "strategies": ["precision"]}
    with pytest.raises(autofit.InvalidArgument, match=r"'naming\.word'"):
        probe_if(lambda survey: None, WORKLOAD, plan=NAMED, **given, **HERE)


# -- where the user's code runs ---------------------------------------------------------------


@dataclass(frozen=True)
class Signed:
    """A function of the user's that writes its name and the number of its process to a file."""

    path: Path
    name: str
    function: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        with self.path.open("a") as file:
            print(self.name, os.getpid(), file=file)
        return self.function(*given)


def signing_workload(path: Path) -> autofit.Workload:
    def build() -> nn.Module:
        model = classifier()
        model.register_forward_pre_hook(Signed(path, "forward", lambda *given: None))
        return model

    return autofit.Workload(
        Signed(path, "built", build),
        Signed(path, "batch", labelled),
        criterion=Signed(path, "criterion", CROSS_ENTROPY),
        optimizer=Signed(path, "optimizer", functools.partial(torch.optim.SGD, lr=0.01)),
        loss_weight=Signed(path, "weight", lambda batch: float(len(batch[0]))),
        before_step=Signed(path, "before_step", lambda model, optimizer: None),
        global_batch=4,
    )


def test_a_model_is_built_once_for_the_survey_and_once_for_each_probe_and_look(
    tmp_path: Path,
) -> None:
    path = tmp_path / "processes"
    report = search_here(model=Signed(path, "built", classifier), strategies=None)
    assert report.record.dimensions
    assert report.record.memory.keys() == {"best"}  # which is the baseline
    # the survey, the probe, and looks: at its memory, and what bounds a step
    assert [line.split()[0] for line in path.read_text().splitlines()] == ["built"] * (2 + 2)


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
    assert autofit.soak(workload, plan=report, steps=8).steps >= 8
    signed = {tuple(line.split()) for line in path.read_text().splitlines()}
    everything = "built forward batch criterion optimizer weight before_step"
    assert {what for what, _ in signed} == set(everything.split())
    processes = {process for _, process in signed}
    assert str(os.getpid()) not in processes
    # On the CPU nothing is predicted; a search confirms in a second worker
    assert len(processes) == 5 or device != "cpu"
