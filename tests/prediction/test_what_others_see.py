"""A prediction leaves the process that asks as it is: its dry run has a worker of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import WorkerFailed
from autofit.prediction.dry_run_worker import _written
from autofit.prediction.predict import predict
from autofit.training.workload import Workload

BATCH = torch.ones(4, 16)


def test_what_the_process_is_now_is_what_the_worker_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        return nn.Linear(16, int(os.environ["WIDTH"]))

    def weights() -> int:
        return predict(Workload(build, BATCH), gpu="L4").breakdown["weights"]

    monkeypatch.setenv("WIDTH", "4096")
    first = weights()
    monkeypatch.setenv("WIDTH", "8192")
    assert weights() > 1.9 * first
    monkeypatch.delenv("WIDTH")
    with pytest.raises(KeyError, match="WIDTH"):
        weights()


def write(file: Path, width: int) -> None:
    file.write_text(f"import torch\ndef build(): return torch.nn.Linear(16, {width})\n")
    os.utime(file, (width, width))


def test_a_module_that_was_edited_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def weights(width: int) -> int:
        write(tmp_path / "edited_meanwhile.py", width)
        made = Workload(lambda: import_module("edited_meanwhile").build(), BATCH)
        return predict(made, gpu="L4").breakdown["weights"]

    assert 1.9 * weights(4096) < weights(8192)


def test_a_module_that_now_hides_another_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for folder in ("second", "first"):
        (tmp_path / folder).mkdir()
        monkeypatch.syspath_prepend(tmp_path / folder)
    for folder, width in (("second", 4096), ("first", 8192)):
        write(tmp_path / folder / "hides_another.py", width)
        monkeypatch.delitem(sys.modules, "hides_another", raising=False)
        invalidate_caches()
        build = import_module("hides_another").build
        weights.append(predict(Workload(build, BATCH), gpu="L4").breakdown["weights"])
    assert weights[1] > 1.9 * weights[0]


def test_a_large_live_model_is_sent_without_its_values() -> None:
    """Its values would be five times what a message is worth."""
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(26)))
    live = nn.Sequential(nn.Linear(16, 16384), nn.Linear(16384, 16))
    for model, width in ((large, 16384), (live, 16)):
        held = sum(parameter.nbytes for parameter in model.parameters())
        weights = predict(Workload(model, torch.empty(8, width)), gpu="B200").breakdown["weights"]
        assert weights == pytest.approx(held, rel=0.001)


def test_a_live_model_that_a_closure_reaches_is_sent_without_its_values() -> None:
    live = nn.Linear(1024, 1024)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - live.weight.sum()).mean()

    made = Workload(live, torch.empty(8, 1024), loss_fn=loss_fn)
    assert len(_written(predict, made, ())) < live.weight.nbytes / 10


def test_a_worker_that_dies_is_replaced_and_blamed_when_it_dies_again(tmp_path: Path) -> None:
    died = tmp_path / "died"

    def dies_once() -> nn.Module:
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Linear(16, 16)

    def dies() -> nn.Module:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    assert predict(Workload(dies_once, BATCH), gpu="L4").required_bytes > 0
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        predict(Workload(dies, BATCH), gpu="L4")
    assert predict(Workload(nn.Linear(16, 16), BATCH), gpu="L4").required_bytes > 0


def test_threads_may_predict_at_the_same_time() -> None:
    found: dict[int, int] = {}

    def ask(width: int) -> None:
        told = predict(Workload(lambda: nn.Linear(16, width), BATCH), gpu="L4")
        found[width] = told.breakdown["weights"]

    threads = [threading.Thread(target=ask, args=(width,)) for width in (4096, 8192, 16384)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[4096] < found[8192] < found[16384]


SLEEPS = """
import os, time, torch
from torch import nn
from autofit.prediction.dry_run_worker import _written
from autofit.prediction.predict import predict
from autofit.training.workload import Workload

def loss(model, batch):
    print("in the dry run", flush=True, file=open(os.environ["TOLD"], "w"))
    time.sleep(600)

predict(Workload(nn.Linear(16, 16), torch.ones(4, 16), loss_fn=loss), gpu="L4")
"""


def test_ctrl_c_ends_a_prediction_and_its_worker(
    tmp_path: Path, python: Callable[..., subprocess.Popen[Any]]
) -> None:
    script, told = tmp_path / "sleeps.py", tmp_path / "told"
    script.write_text(SLEEPS)
    os.mkfifo(told)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with python(script, env=os.environ | {"TOLD": str(told)}, **pipes) as started:
        assert told.read_text().startswith("in the dry run")
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=120)
    assert re.search("KeyboardInterrupt", errors)
    assert started.returncode != 0
