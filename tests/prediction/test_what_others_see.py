"""A dry run makes torch answer like a GPU's, and only to itself."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.prediction.predict import predict
from autofit.training.workload import Workload


def test_a_function_kept_by_a_module_imported_meanwhile_tells_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = "from torch.cuda import device_count, is_available\nfound = device_count()\n"
    (tmp_path / "imported_meanwhile.py").write_text(kept)
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[bool] = []

    def build() -> nn.Module:
        import imported_meanwhile  # type: ignore[import-not-found]  # written above

        seen.append(imported_meanwhile.is_available())
        return nn.Linear(16, 16)

    try:
        predict(Workload(build, torch.randn(4, 16)), gpu="L4")
        module: Any = sys.modules["imported_meanwhile"]
        assert True in seen  # the dry run itself takes the GPU's branch
        assert module.is_available() is torch.cuda.is_available()
        assert module.device_count() == torch.cuda.device_count()
        assert module.found == torch.cuda.device_count()
    finally:
        sys.modules.pop("imported_meanwhile", None)


def test_another_thread_sees_no_gpu_that_is_not_there() -> None:
    seen: set[bool] = set()
    asks, answered = threading.Event(), threading.Event()

    def other() -> None:
        asks.wait(60)
        seen.add(torch.cuda.is_available())
        answered.set()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        asks.set()
        answered.wait(60)
        output: torch.Tensor = model(batch)
        return output.sum()

    thread = threading.Thread(target=other)
    thread.start()
    predict(Workload(nn.Linear(16, 16), torch.randn(4, 16), loss_fn=loss), gpu="L4")
    thread.join()
    assert seen == {torch.cuda.is_available()}
