"""The canary: small trainings on an emulated card, and their values beside the CPU's.

A new torch that asks the driver for something new fails here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from emulated_gpu.cards import find_card

pytestmark = pytest.mark.emulated

Run = Callable[..., str]

TRAININGS = Path(__file__).with_name("trainings.py").read_text()

MODES = """
import itertools
for name, precision, kind in itertools.product(MODELS, PRECISIONS, ("fused", "foreach", "forloop")):
    losses = train(name, precision, kind, "cuda")
    assert len(losses) == STEPS, (name, precision, kind, losses)
print("done")
"""

VALUES = """
import json
print(json.dumps({name: [train(name, "float32", "fused", at) for at in ("cpu", "cuda")]
                  for name in MODELS}))
"""

ASSERT = """
import torch
torch.zeros(4, device="cuda")[torch.tensor([10**6], device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""

OPERATORS = """
import torch
host = torch.randn(5, 7)
card = host.to("cuda")
assert torch.equal((card > 0).nonzero().cpu(), (host > 0).nonzero())
assert torch.equal(card[card > 0].cpu(), host[host > 0])
assert torch.equal(card.unique().cpu(), host.unique())
assert torch.equal(card.half().float().cpu(), host.half().float())
assert torch.equal(card.sort(1)[0].cpu(), host.sort(1)[0])
torch.manual_seed(3)
first = torch.randn(1000, device="cuda")
torch.manual_seed(3)
before = torch.get_rng_state()
assert torch.equal(torch.randn(1000, device="cuda"), first)
assert torch.equal(torch.get_rng_state(), before), "the CPU draws as if nothing had been drawn"
assert not torch.equal(torch.randn(1000, device="cuda"), first)
assert abs(first.mean()) < 0.2 and 0.8 < first.std() < 1.2
print("done")
"""

GROUPED = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
given = [torch.randn(2, heads, 16, 32) for heads in (8, 2, 2)]
found = []
for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
    inputs = [each.detach().to(device, dtype).requires_grad_() for each in given]
    output = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    output.square().sum().backward()
    found.append([output, *(each.grad for each in inputs)])
for host, card in zip(*found):
    assert torch.allclose(host, card.cpu().float(), atol=0.1, rtol=0.05)
print("done")
"""

PACKED = """
import torch
from torch import nn
torch.manual_seed(0)
layer, x = nn.LSTM(8, 12, batch_first=True), torch.randn(4, 5, 8)
found = []
for device in ("cpu", "cuda"):
    layer.to(device).zero_grad()
    packed = nn.utils.rnn.pack_padded_sequence(x.to(device), [5, 4, 3, 2], batch_first=True)
    output, (state, _) = layer(packed)
    (output.data.square().sum() + state.sum()).backward()
    found.append([output.data, state, *(p.grad.clone() for p in layer.parameters())])
for host, card in zip(*found):
    assert torch.allclose(host, card.cpu(), atol=1e-4)
print("done")
"""

STREAMS = """
import torch
first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    first.record()
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    last.record()
product.record_stream(stream)
torch.cuda.synchronize()
assert first.elapsed_time(last) > 0
assert last.query()
torch.cuda._sleep(10**8)
busy = torch.cuda.Event()
busy.record()
assert not busy.query()
busy.synchronize()
assert busy.query()
print("done")
"""


SORTED = """
import torch
table = torch.nn.Embedding(100, 8, device="cuda")
table(torch.zeros(4096, dtype=torch.long, device="cuda")).sum().backward()  # sorts by CUB
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("gpu", ["T4", "A100", "L4", "H200", "B200", "RTX 5090"])
def test_cub_runs_on_every_generation(run_on: Run, gpu: str) -> None:
    assert run_on(SORTED, cards=[find_card(gpu)]) == "done\n"


def test_every_model_trains_in_every_precision_with_every_optimizer(run_on: Run) -> None:
    assert run_on(TRAININGS + MODES).endswith("done\n")


def test_losses_and_gradients_agree_with_the_cpu(run_on: Run) -> None:
    for name, (host, card) in json.loads(run_on(TRAININGS + VALUES, values=True)).items():
        for expected, found in zip(host, card, strict=True):
            assert found == pytest.approx(expected, rel=1e-4), name


def test_operators_have_the_values_of_the_cpu(run_on: Run) -> None:
    assert run_on(OPERATORS, values=True) == "done\n"


def test_a_packed_sequence_has_the_values_of_the_cpu(run_on: Run) -> None:
    assert run_on(PACKED, values=True) == "done\n"


def test_attention_of_fewer_heads_of_keys_has_the_values_of_the_cpu(run_on: Run) -> None:
    assert run_on(GROUPED, values=True) == "done\n"


def test_an_index_out_of_range_is_an_assert_on_the_device(run_on: Run) -> None:
    assert run_on(ASSERT, values=True) == "CUDA error: device-side assert triggered\n"


def test_streams_and_events_keep_order(run_on: Run) -> None:
    assert run_on(STREAMS) == "done\n"


def test_a_guess_is_noted(run_on: Run) -> None:
    program = """
import torch
from emulated_gpu.driver import estimates
(torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).softmax(0)
assert estimates() == (), estimates()
torch.fft.rfft(torch.ones(8, 8, device="cuda"))
print(*estimates())
"""
    assert "cufftXtMakePlanMany" in run_on(program)
