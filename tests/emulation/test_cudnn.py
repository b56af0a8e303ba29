"""What the emulated card reserves: for cuDNN, and in recorded plans of an H200."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from autofit.devices.gpu_catalogue import find_gpu
from autofit.prediction.cuda.convolutions import Convolution, Direction, workspace_bytes

pytestmark = pytest.mark.emulated

Run = Any
H200 = find_gpu("H200")
# The forward pass alone: its peak is the operands, the result and the workspace.
FORWARD = """
import json, sys, torch
given = json.loads(sys.argv[1])
torch.backends.cudnn.allow_tf32 = given["tf32"]
layout = torch.channels_last if given["channels_last"] else torch.contiguous_format
dtype = getattr(torch, given["dtype"])
data = torch.randn(given["data"], device="cuda", dtype=dtype).to(memory_format=layout)
weight = torch.randn(given["weight"], device="cuda", dtype=dtype).to(memory_format=layout)
torch.cuda.synchronize()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_stats()["requested_bytes.all.current"]
result = torch.nn.functional.conv2d(data, weight, stride=given["stride"], padding=given["padding"])
print(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - result.nbytes)
"""
LAYERS = """
import torch
for layer in (
    torch.nn.LSTM(24, 48, 2, batch_first=True),
    torch.nn.LSTM(24, 48, 2, bidirectional=True, dropout=0.1),
    torch.nn.LSTM(24, 48, 2, proj_size=16),
    torch.nn.LSTM(24, 48, bias=False),
    torch.nn.GRU(24, 48, 3, bidirectional=True),
    torch.nn.RNN(24, 48),
):
    layer = layer.cuda()
    lengths = torch.tensor([7, 5, 2])
    data = torch.randn(7, 3, 24, device="cuda", requires_grad=True)
    layer(data)[0].sum().backward()
    packed = torch.nn.utils.rnn.pack_padded_sequence(data, lengths)
    layer(packed)[0].data.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
print(torch.cuda.memory_allocated() > 0)
"""
RECORDED = """
import sys
from benchmarks.emulation_recorded import peaks
print(*peaks(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("data", "out", "kernel", "stride", "dtype", "channels_last", "tf32"),
    [
        ((8, 3, 64, 64), 64, 7, 2, "bfloat16", False, True),
        ((8, 3, 64, 64), 64, 7, 2, "bfloat16", True, True),
        ((8, 64, 40, 40), 64, 3, 1, "float16", False, True),
        ((8, 64, 40, 40), 64, 3, 1, "float16", True, True),
        ((8, 64, 40, 40), 128, 1, 2, "float32", False, True),
        ((8, 64, 40, 40), 64, 3, 1, "float32", False, False),
        ((8, 64, 40, 40), 128, 1, 1, "float32", True, False),
        ((8, 3, 64, 64), 96, 16, 16, "bfloat16", False, True),
    ],
)
def test_a_convolution_takes_the_workspace_of_the_rule(
    data: tuple[int, ...],
    out: int,
    kernel: int,
    stride: int,
    dtype: str,
    channels_last: bool,
    tf32: bool,
    run_on: Run,
) -> None:
    weight, padding = (out, data[1], kernel, kernel), kernel // 2 if kernel != stride else 0
    size = (data[2] + 2 * padding - kernel) // stride + 1
    convolution = Convolution(
        data,
        weight,
        (data[0], out, size, size),
        getattr(torch, dtype),
        channels_last,
        (stride, stride),
        (1, 1),
        1,
    )
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        expected = workspace_bytes(convolution, Direction.FORWARD, H200)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    given = {
        "data": data,
        "weight": weight,
        "stride": stride,
        "padding": padding,
        "dtype": dtype,
        "channels_last": channels_last,
        "tf32": tf32,
    }
    taken = int(run_on(FORWARD, json.dumps(given)))
    assert taken == expected


def test_recurrent_layers_train(run_on: Run) -> None:
    assert run_on(LAYERS).strip() == "True"


@pytest.mark.parametrize(
    ("name", "reserved_mib"),
    [("lstm_fp32", 1356), ("lstm_bf16", 1270), ("resnet_bf16_cl", 2090), ("unet_bf16_cl", 1148)],
)
def test_these_reserve_what_the_h200_did(name: str, reserved_mib: int, run_on: Run) -> None:
    assert int(run_on(RECORDED, name).split()[1]) == reserved_mib * 2**20


# -- Recorded plans of an H200 on the emulated one: what fits, and what does not


PLANS = """
import json, sys
from benchmarks.emulation_recorded import answered
from benchmarks.grids.recorded import recorded_plans
wanted = [tuple(plan) for plan in json.loads(sys.argv[1])]
keys = "workload", "micro_batch", "precision", "checkpointed", "channels_last"
rows = {tuple(row[key] for key in keys): row for row in recorded_plans()}
print(json.dumps([answered(rows[plan]) for plan in wanted]))
"""


def _answers(run_on: Run, *plans: tuple[str, int, str, float, bool]) -> list[dict[str, Any]]:
    return json.loads(run_on(PLANS, json.dumps(plans)))


def test_a_recorded_decoder_takes_the_recorded_bytes(run_on: Run) -> None:
    plans = [("gpt2_small", size, "fp32", 0.0, False) for size in (2, 24)]
    first, last = _answers(run_on, *plans)
    assert first["allocated_error"] == first["reserved_error"] == 0
    assert last["recorded"] == last["emulated"] == "oom"


def test_a_convolution_without_room_for_its_workspace_runs_without(run_on: Run) -> None:
    """Float32 in channels last copies its operands; with no room, a tensor runs out, not cuDNN."""
    (answer,) = _answers(run_on, ("resnet50", 192, "fp32", 0.0, True))
    assert answer["recorded"] == answer["emulated"] == "oom"
