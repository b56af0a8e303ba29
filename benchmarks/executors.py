"""How much faster several workers end one search, and what a killed machine costs.

`python -m benchmarks.executors speed` runs one search on 1, 2 and 4 CPU workers of this machine;
each step of its workload sleeps, so that the cores are no limit. `python -m benchmarks.executors
kills` runs searches on a Dask cluster of 3 local processes and kills one process at a random moment
of each; it needs `pip install dask distributed`. `python -m benchmarks.executors owner` kills the
process that searches at random moments, looks what is left of it after 5 s, and lets the next
search take up its study. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
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
from autofit.measurement import probes_of

LONG_S, SHORT_S = 0.5, 0.02
"""What a micro-batch sleeps, about: where speed is measured, and where machines are killed."""
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
    """Print what became of searches in each of which one process of the cluster was killed."""
    from distributed import Client, LocalCluster  # type: ignore[import-not-found]  # no test needs it

    drawn, lost, ended, twice = random.Random(seed), [], 0, 0
    folder = Path(tempfile.mkdtemp())
    processes = LocalCluster(n_workers=3, threads_per_worker=1, processes=True)
    with processes as cluster, Client(cluster) as client:
        for number in range(searches):
            executor = client.get_executor(pure=False)
            killer = threading.Timer(drawn.uniform(1.0, 25.0), _kill_one, (client, drawn))
            killer.daemon = True
            killer.start()
            study = folder / f"{number}.log"
            options = autofit.SearchOptions(executor=executor, workers=3)
            report = searched(SHORT_S, max_probes=8, study=study, options=options)
            killer.cancel()
            numbers = [trial.number for trial in report.trials]
            ended += 1
            twice += len(set(numbers)) < len(numbers)
            lost.append(8 - len(probes_of(report.trials)))
            crashed = [t for t in report.trials if t.measurement.outcome.may_be_accident]
            print(f"{number}: {len(numbers)} trials, {len(crashed)} accidents", flush=True)
            client.wait_for_workers(3)
    print(
        f"{ended} of {searches} ended, {twice} with a number twice; fewer probes than allowed: "
        f"median {statistics.median(lost):g}, most {max(lost)}"
    )


def _kill_one(client: Any, drawn: random.Random) -> None:
    pids = list(client.run(os.getpid).values())
    os.kill(drawn.choice(pids), signal.SIGKILL)


def owner_kills(searches: int, seed: int) -> None:
    """Print what is left of searches whose own process was killed, and what the next one keeps."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    drawn, folder = random.Random(seed), Path(tempfile.mkdtemp())
    print("| killed after | trials | alive after 5 s | kept by the next search |")
    print("|---|---|---|---|")
    for number in range(searches):
        study = folder / f"{number}.log"
        after_s = drawn.uniform(1.0, 20.0)
        killed = Process(target=_search_alone, args=(study,))
        killed.start()
        killed.join(after_s)
        children = psutil.Process(killed.pid).children(recursive=True) if killed.is_alive() else []
        killed.kill()
        killed.join()
        _, alive = psutil.wait_procs(children, timeout=5)
        before = _finished(study)
        following = Process(target=_search_alone, args=(study,))
        following.start()
        following.join()
        kept = _finished(study)[: len(before)] == before and following.exitcode == 0
        print(f"| {after_s:.1f} s | {len(before)} | {len(alive)} | {kept} |", flush=True)


def _search_alone(study: Path) -> None:
    searched(SHORT_S, max_probes=8, study=study)


def _finished(study: Path) -> list[tuple[Any, ...]]:
    """Return number, state, settings and end of every finished trial."""
    if not study.exists():
        return []
    journal = JournalStorage(JournalFileBackend(str(study)))
    if not optuna.get_all_study_names(journal):
        return []
    trials = optuna.load_study(study_name=None, storage=journal).trials
    return [(t.number, t.state, t.params, t.datetime_complete) for t in trials if _is_trial(t)]


def _is_trial(trial: optuna.trial.FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("speed", "kills", "owner"))
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--probes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.probes)
    elif arguments.what == "owner":
        owner_kills(arguments.searches, arguments.seed)
    else:
        kills(arguments.searches, arguments.seed)


if __name__ == "__main__":
    main()
