"""How much faster several workers end one search, and what a killed machine costs.

`python -m benchmarks.executors speed` runs one search on 1, 2 and 4 CPU workers of this machine;
each step of its workload sleeps, so that the cores are no limit. `python -m benchmarks.executors
kills` runs searches on a Dask cluster of 3 local processes and kills one process at a random moment
of each; it needs `pip install dask distributed`. `python -m benchmarks.executors owner` kills the
process that searches at random moments, looks what is left of it after 5 s, and lets the next
search take up its study. `python -m benchmarks.executors loky` runs one search on 2 processes of
loky (`pip install loky`); so does, of MPI (`pip install mpi4py mpich`), `mpiexec -n 3 python -m
mpi4py.futures -m benchmarks.executors mpi`. Prints Markdown.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from multiprocessing import Process
from pathlib import Path
from typing import Any

import optuna
import psutil  # type: ignore[import-untyped]  # no types; the extra `accelerate` brings it
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from torch import nn

import autofit
from autofit.measurement import Trial, TrialKind, probes_of

LONG_S, SHORT_S = 0.5, 0.02
"""What a micro-batch sleeps, about: where speed is measured, and where machines are killed."""
_RESTART_S = 120
"""Within which the cluster has started its killed process again, or the benchmark fails."""
_LONG_S = 300.0
"""After so long all threads of a search on the cluster print where they are; most take 20 to 70."""
_MARK = "AUTOFIT_BENCHMARK_SEARCH"
_LIMITS: dict[str, Any] = {
    "vram_budget": "64MiB",
    "strategies": ["checkpointing", "precision"],
    "progress": False,
}


class Sleeper(nn.Module):
    """(n, 32) -> (n, 8); sleeps so many seconds a micro-batch and a little a sample."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Sleep, then compute."""
        time.sleep(self.sleep_s * (1 + 0.01 * len(batch)))
        output: torch.Tensor = self.layers(batch)
        return output


def searched(sleep_s: float, **given: Any) -> autofit.Report:
    """Search the sleeping workload."""
    batch = (torch.randn(4, 32), torch.randn(4, 8))
    workload = autofit.Workload(
        partial(Sleeper, sleep_s), batch, criterion=nn.MSELoss(), global_batch=64
    )
    return autofit.search(workload, device=given.pop("device", "cpu"), **(_LIMITS | given))


def speed(most_probes: int) -> None:
    """Print the wall time of one search by the number of workers."""
    print("| workers | seconds | against one | probes | answer |")
    print("|---|---|---|---|---|")
    alone_s = None
    for workers in (1, 2, 4):
        began = time.monotonic()
        report = searched(LONG_S, device=["cpu"] * workers, max_probes=most_probes)
        taken_s = time.monotonic() - began
        alone_s = alone_s or taken_s
        cells = (f"{taken_s:.0f}", f"{taken_s / alone_s:.2f}", str(len(report.trials)))
        print(f"| {workers} | {' | '.join(cells)} | {report.best.plan} |", flush=True)


def kills(searches: int, seed: int) -> None:
    """Print what became of searches in each of which one process of the cluster was killed.

    A search that ends before its kill is told apart. A plan ran twice where two of its trials fit
    and neither belongs to the final comparison.
    """
    from distributed import Client, LocalCluster  # type: ignore[import-not-found]  # no test needs it

    drawn, folder = random.Random(seed), Path(tempfile.mkdtemp())
    hit, twice, lost = 0, 0, []
    print("| killed after | trials | accidents | plans that ran twice |")
    print("|---|---|---|---|")
    processes = LocalCluster(n_workers=3, threads_per_worker=1, processes=True)
    with processes as cluster, Client(cluster) as client:
        for number in range(searches):
            killed_s: list[float] = []
            killer = threading.Thread(
                target=_kill_one,
                args=(
                    cluster,
                    folder / f"{number}.log",
                    drawn,
                    killed_s,
                    ended := threading.Event(),
                ),
            )
            killer.start()
            faulthandler.dump_traceback_later(_LONG_S)  # where a search waits that does not end
            report = searched(
                SHORT_S,
                max_probes=8,
                study=folder / f"{number}.log",
                options=autofit.SearchOptions(executor=client.get_executor(pure=False), workers=3),
            )
            faulthandler.cancel_dump_traceback_later()
            ended.set()
            killer.join()
            plans = [str(t.plan) for t in report.trials if _is_of_the_search(t)]
            again = [plan for plan, count in Counter(plans).items() if count > 1]
            crashed = sum(t.measurement.outcome.may_be_accident for t in report.trials)
            hit += len(killed_s)
            twice += len(again)
            lost.append(8 - len(probes_of(report.trials)))
            when = f"{killed_s[0]:.1f} s" if killed_s else "ended before"
            print(f"| {when} | {len(report.trials)} | {crashed} | {len(again)} |", flush=True)
            client.wait_for_workers(3, timeout=_RESTART_S)
    print(
        f"\n{searches} of {searches} ended, {hit} of them with a process killed; {twice} plans ran "
        f"twice; fewer probes than allowed: median {statistics.median(lost):g}, most {max(lost)}"
    )


def other(name: str) -> None:
    """Print how a search on 2 processes of loky or of MPI ended."""
    if name == "loky":
        from loky import get_reusable_executor  # type: ignore[import-not-found]  # no test needs it

        executor = get_reusable_executor(max_workers=2)
    else:
        from mpi4py.futures import MPIPoolExecutor  # type: ignore[import-not-found]  # likewise

        executor = MPIPoolExecutor(2)
    with executor:
        options = autofit.SearchOptions(executor=executor, workers=2)
        report = searched(SHORT_S, max_probes=6, options=options)
    ran = sum(trial.ok for trial in report.trials)
    print(f"{name}: {ran} of {len(report.trials)} trials fit; {report.best.plan}", flush=True)


def _kill_one(
    cluster: Any, study: Path, drawn: random.Random, killed_s: list[float], ended: threading.Event
) -> None:
    """Kill a process of the cluster once a drawn number of trials has finished, and a moment."""
    began, due = time.monotonic(), drawn.randrange(6)
    while len(_finished(study)) < due:
        if ended.wait(0.2):
            return
    if not ended.wait(drawn.uniform(0, 1.5)):
        # Not by client.run, which waits for a process that is just being replaced
        pids = [nanny.pid for nanny in cluster.workers.values() if nanny.pid is not None]
        killed_s.append(time.monotonic() - began)
        os.kill(drawn.choice(pids), signal.SIGKILL)


def _is_of_the_search(trial: Trial) -> bool:
    return trial.ok and trial.kind is not TrialKind.CONFIRMATION


def owner_kills(searches: int, seed: int) -> None:
    """Print what is left of searches whose own process was killed, and what the next one keeps.

    The kill comes once a drawn number of trials has finished, and a moment. Processes of the search
    are found by a variable that they inherit, those that started beside the kill included. A
    search repeats a plan on purpose where speeds disagree: on a busy machine some run again.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    drawn, folder = random.Random(seed), Path(tempfile.mkdtemp())
    print("| killed after | finished trials | alive after 5 s | kept by the next | ran again |")
    print("|---|---|---|---|---|")
    for number in range(searches):
        study, mark, began = folder / f"{number}.log", f"{os.getpid()}-{number}", time.monotonic()
        killed = Process(target=_search_alone, args=(study, mark))
        killed.start()
        due = drawn.randrange(6)
        while killed.is_alive() and len(_finished(study)) < due:
            time.sleep(0.1)
        killed.join(drawn.uniform(0, 1.5))
        after = f"{time.monotonic() - began:.1f} s" if killed.is_alive() else "ended before"
        killed.kill()
        killed.join()
        time.sleep(5)
        alive = [process.pid for process in psutil.process_iter() if _is_marked(process, mark)]
        before = _finished(study)
        following = Process(target=_search_alone, args=(study, f"{mark}-next"))
        following.start()
        following.join()
        finished = _finished(study)
        kept = finished[: len(before)] == before and following.exitcode == 0
        again = _plans(before) & _plans(finished[len(before) :])
        print(
            f"| {after} | {len(before)} | {len(alive)} | {kept} | {len(again)} |",
            flush=True,
        )


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(_MARK) == mark)
    except psutil.Error:
        return False


def _search_alone(study: Path, mark: str) -> None:
    os.environ[_MARK] = mark
    searched(SHORT_S, max_probes=8, study=study)


def _finished(study: Path) -> list[optuna.trial.FrozenTrial]:
    """Return every finished trial of a study that may not have begun."""
    if not study.exists():
        return []
    journal = JournalStorage(JournalFileBackend(str(study)))
    if not optuna.get_all_study_names(journal):
        return []
    trials = optuna.load_study(study_name="autofit", storage=journal).trials
    return [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]


def _plans(trials: Sequence[optuna.trial.FrozenTrial]) -> set[str]:
    """Return what fitted, beside the trials of the final comparison, which repeat plans."""
    return {
        str(trial.params)
        for trial in trials
        if trial.state is TrialState.COMPLETE
        and trial.user_attrs["autofit_trial"]["kind"] != TrialKind.CONFIRMATION
    }


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("speed", "kills", "owner", "loky", "mpi"))
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--probes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.probes)
    elif arguments.what == "owner":
        owner_kills(arguments.searches, arguments.seed)
    elif arguments.what in ("loky", "mpi"):
        other(arguments.what)
    else:
        kills(arguments.searches, arguments.seed)


if __name__ == "__main__":
    main()
