"""Devices by name."""

from __future__ import annotations

import pytest
import torch

from autofit.devices.open import open_device
from autofit.errors import DeviceUnavailable, InvalidRequest


def test_the_cpu_is_always_there() -> None:
    assert open_device("cpu").torch_device == torch.device("cpu")
    assert open_device(torch.device("cpu")).torch_device == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_nothing_said_means_the_cpu_and_cuda_is_refused() -> None:
    assert open_device(None).torch_device.type == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(DeviceUnavailable, match=f"{name} was asked for, and torch finds no"):
            open_device(name)


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:one", "cuda:-1", "cpu:0", "CUDA", "mps"])
def test_what_is_no_device_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidRequest, match='"cuda", "cuda:N" or "cpu", got') as refusal:
        open_device(name)
    assert repr(name) in str(refusal.value)
