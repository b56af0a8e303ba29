"""Devices by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.cuda import device_meant, open_device
from autofit.errors import DeviceUnavailable, InvalidArgument


def test_the_cpu_is_always_there() -> None:
    assert open_device("cpu").torch_device == torch.device("cpu")
    assert open_device(torch.device("cpu")).torch_device == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_nothing_said_means_the_cpu_and_cuda_is_refused() -> None:
    assert open_device(None).torch_device.type == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(DeviceUnavailable, match=name):
            open_device(name)


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:one", "cuda:-1", "cpu:0", "CUDA", "mps"])
def test_what_is_no_device_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidArgument, match='"cuda:N"') as refusal:
        open_device(name)
    assert repr(name) in str(refusal.value)


@pytest.mark.parametrize("name", ["cpu", "cuda:1", torch.device("cuda", 3), None, "cuda"])
def test_what_the_caller_said_stays_where_it_computes_on_no_gpu(name: Any) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
        pytest.skip("this process computes on a GPU")
    assert device_meant(name, nn.Linear(2, 2)) == (None if name is None else str(name))


@pytest.mark.cuda
def test_a_gpu_without_an_index_is_the_callers() -> None:
    last = torch.cuda.device_count() - 1
    model = nn.Linear(2, 2).to(f"cuda:{last}")
    assert device_meant("cuda:0", model) == "cuda:0"
    assert device_meant("cpu", model) == "cpu"
    assert device_meant(None, model) == device_meant("cuda", model) == f"cuda:{last}"
    with torch.cuda.device(last):
        assert device_meant("cuda", None) == f"cuda:{last}"
