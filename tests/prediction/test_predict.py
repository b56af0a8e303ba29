"""`autofit.predict`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from autofit.devices.gpu_catalogue import find_gpu
from autofit.errors import InvalidArgument, PredictionUnavailable
from autofit.memory.allocator import VARIABLES
from autofit.plan import Plan
from autofit.prediction.needs import MAX_LOOKS, largest_that_fits
from autofit.prediction.predict import predict
from autofit.training.workload import Workload
from autofit.units import GIB, MIB
from benchmarks.traces.models import GPT


def tokens(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (samples, 128)
    return torch.randint(0, 1000, shape), torch.randint(0, 1000, shape)


def gpt(**options: Any) -> Workload:
    given = {"vocabulary": 1000, "width": 256, "heads": 4, "layers": 4, "length": 128} | options
    return Workload(lambda: GPT(**given), tokens())


def test_a_prediction_adds_up() -> None:
    prediction = predict(gpt(), gpu="A100")
    held = sum(size for kind, size in prediction.breakdown.items() if kind != "non_torch")
    assert held == prediction.peak_allocated_bytes
    assert prediction.breakdown["non_torch"] == find_gpu("A100").context_bytes
    assert prediction.peak_allocated_bytes < prediction.required_bytes
    low, high = prediction.interval
    assert low < prediction.required_bytes < high
    assert prediction.to_dict()["required_bytes"] == prediction.required_bytes
    assert prediction.plan == Plan(4)


@pytest.mark.slow
def test_the_interval_is_wider_where_the_context_was_not_measured() -> None:
    def margin(gpu: str, **given: Any) -> int:
        found = predict(gpt(), gpu=gpu, **given)
        return found.interval[1] - found.required_bytes

    measured = {"non_torch_bytes": 500 * MIB}
    assert margin("H100") > margin("H200")  # of the same architecture
    assert margin("139GiB") > margin("H200")
    assert margin("H200") < margin("H100", calibration=measured) < margin("H100")


def test_printed_it_is_lines_of_sizes_and_explains_gradients_of_nothing() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).mean()
        return loss + torch.zeros(2**22, device=batch.device).sum()

    prediction = predict(Workload(nn.Linear(8, 4), torch.ones(2, 8), loss_fn=loss_fn), gpu="L4")
    shown = str(prediction)
    assert re.match(r"2 x 1 fits on L4: needs up to \d+ MiB of 22\.0 GiB\n", shown)
    assert prediction.breakdown["gradients"] == 0
    assert re.search(r"required +\d+ MiB.*\n(.*\n)+ +gradients +0 B \(.*at the peak\)", shown)
    assert "Workload(" not in shown
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    too_large = predict(Workload(layers, torch.ones(512, 64)), plan=Plan(10**9), gpu="L4")
    assert str(too_large).startswith("1000000000 x 1 does not fit on L4: needs up to ")
    assert "at the peak" not in str(too_large)


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not() -> None:
    """Fragmentation bends the line, so the next sample may happen to fit; a fifth more does not."""
    prediction = predict(gpt(), gpu="A100")
    budget = 2 * GIB
    largest: Any = prediction.largest_micro_batch_within(budget)
    assert predict(gpt(), plan=Plan(largest), gpu="A100").fits(budget)
    assert not predict(gpt(), plan=Plan(largest + largest // 5), gpu="A100").fits(budget)
    assert prediction.largest_micro_batch_within(prediction.breakdown["non_torch"]) is None


def of(**settings: Any) -> Plan:
    return Plan(4, settings={name.replace("_", "."): value for name, value in settings.items()})


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"plan": of(precision_dtype="bfloat16"), "gpu": "T4"}, InvalidArgument, "'bfloat16'"),
        ({"plan": of(magic_wand=1)}, InvalidArgument, "'magic'"),
        (  # ignored, it would be another training that is predicted
            {"plan": of(precision_dtype="bfloat16"), "strategies": ["memory_format"]},
            InvalidArgument,
            r"precision\.dtype",
        ),
        (  # what it means takes a run
            {"plan": of(compile_mode="default")},
            PredictionUnavailable,
            r"default.*measured.*plan=",
        ),
        *(
            ({"calibration": {"non_torch_bytes": size}}, InvalidArgument, "non_torch_bytes")
            for size in (-5, float("nan"), "620MiB", None)
        ),
    ],
)
def test_what_no_gpu_can_be_asked_is_refused(
    asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        predict(gpt(), **{"gpu": "A100"} | asked)


def test_with_its_payload_it_can_be_predicted() -> None:
    level = Plan(64, settings={"checkpointing.level": 1})
    units = [f"blocks.{at}" for at in range(4)]
    payloads = {"checkpointing.level": {"units": units, "state": []}}
    saved = predict(gpt(), plan=level, payloads=payloads, gpu="A100")
    plain = predict(gpt(), plan=Plan(64), gpu="A100")
    assert saved.peak_allocated_bytes < 0.7 * plain.peak_allocated_bytes


def test_expandable_segments_where_the_environment_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixed = predict(gpt(), plan=Plan(64), gpu="A100")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    expandable = predict(gpt(), plan=Plan(64), gpu="A100")
    assert expandable.required_bytes != fixed.required_bytes
    assert expandable.peak_reserved_bytes <= fixed.peak_reserved_bytes + 40 * MIB


def test_a_probe_teaches_the_bytes_outside_the_allocator() -> None:
    of_an_older_report = {"non_torch_bytes": 400 * MIB, "residual_bytes": 5 * MIB}
    first, again, empty = (
        predict(gpt(), gpu="A100", calibration=each) for each in (None, of_an_older_report, {})
    )
    assert again.peak_allocated_bytes == first.peak_allocated_bytes
    assert again.breakdown["non_torch"] == 400 * MIB
    assert again.required_bytes < first.required_bytes == empty.required_bytes


def looks(need: Callable[[int], int], budget: int, start: int) -> tuple[Any, int]:
    watched = Mock(side_effect=need)
    return largest_that_fits(watched, budget, start=start), watched.call_count


@pytest.mark.parametrize(
    ("need", "budget", "start", "most"),
    [
        *((lambda n: 1000 + 10 * n, 8000, start, 700) for start in (1, 7, 100, 5000)),
        (lambda n: 1000 + n, 1000, 16, None),
        (lambda n: 500 * n, 999, 16, 1),
    ],
)
def test_a_line_takes_few_looks(
    need: Callable[[int], int], budget: int, start: int, most: int | None
) -> None:
    largest, count = looks(need, budget, start)
    assert largest == most
    assert count <= 8


@pytest.mark.parametrize("start", [1, 8, 10**6, 10**10])
@pytest.mark.parametrize("sample_bytes", [40, 160, 10_000])
def test_long_steps_hide_no_larger_micro_batch(start: int, sample_bytes: int) -> None:
    """A small model's needs stay the same until the allocator takes another segment of 2 MiB."""

    def need(n: int) -> int:
        return 600 * 2**20 + -(-sample_bytes * n // 2**21) * 2**21

    budget = 22 * 2**30
    found, _ = looks(need, budget, start)
    largest = (budget - 600 * 2**20) // sample_bytes
    assert 0.998 * largest < found <= largest


def test_the_number_of_looks_is_bounded() -> None:
    _, count = looks(lambda n: int(n**0.3 * 1e6), int(2**6 * 1e6), 3)
    assert count <= MAX_LOOKS


class Guarded(nn.Module):
    """Keeps one activation on a GPU, and thirty elsewhere."""

    def __init__(self, asks: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(64, 64), asks

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(data)
        if not self.asks(result):
            for _ in range(30):
                result = torch.sin(result)
        return result


@pytest.mark.parametrize(
    "asks",
    [
        lambda tensor: tensor.is_cuda,
        lambda tensor: tensor.device.type == "cuda",
        lambda tensor: tensor.device == torch.device("cuda", 0),
        lambda tensor: tensor.get_device() == 0,
        lambda tensor: torch.cuda.is_available(),
        lambda tensor: torch.cuda.get_device_capability(tensor.device) == (8, 9),
    ],
)
def test_a_model_that_asks_where_it_runs_takes_the_branch_of_the_gpu(
    asks: Callable[[torch.Tensor], bool],
) -> None:
    def needs(model: nn.Module) -> int:
        workload = Workload(model, torch.ones(512, 64))
        return predict(workload, gpu="L4").required_bytes

    assert needs(Guarded(asks)) == needs(Guarded(lambda tensor: True))


def test_what_is_written_by_out_is_not_known_any_more() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        data, mask = batch
        result = model(data)
        torch.gt(result.detach()[:, 0], -1e9, out=mask)
        return result.mean() if mask.any() else result.sum()

    batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.bool)
    with pytest.raises(PredictionUnavailable, match=r"mask\.any"):
        predict(Workload(nn.Linear(8, 8), batch, loss_fn=loss_fn), gpu="L4")


@pytest.mark.parametrize(
    "change",
    [
        lambda kept, result: kept.lerp_(result.detach().mean(0), 0.1),
        lambda kept, result: kept.add_(result.detach()),
        lambda kept, result: torch._foreach_add_([kept], [result.detach()]),
    ],
)
def test_in_place_operators_check_their_shapes(change: Callable[..., Any]) -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch)
        change(torch.zeros(15, device=batch.device), result)
        return result.mean()

    workload = Workload(nn.Linear(16, 16), torch.ones(4, 16), loss_fn=loss_fn)
    with pytest.raises(RuntimeError):
        predict(workload, gpu="L4")


def test_what_was_assumed_or_ignored_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    made = Workload(nn.Linear(8, 4), torch.ones(2, 8))
    assert predict(made, gpu="L4").notes == ()
    assert "assumed" not in str(predict(made, gpu="L4"))
    unnamed, sized = predict(made), predict(made, gpu="8GiB")
    assert "assumed" in str(unnamed)
    assert unnamed.to_dict()["gpu_assumed"]
    assert sized.notes == (sized.gpu.assumed,)
    assert str(sized.gpu.assumed) in str(sized)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    with pytest.warns(UserWarning, match="max_split_size_mb:64"):
        tuned = predict(made, gpu="L4")
    assert "max_split_size_mb:64" in str(tuned)
    assert tuned.to_dict()["notes"] == list(tuned.notes)
