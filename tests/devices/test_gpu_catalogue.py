"""GPUs by name and by size, devices by name, and budgets as people write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.cuda import open_device
from autofit.devices.gpu_catalogue import Gpu, find_gpu, known_gpus
from autofit.devices.request import budget_bytes, check_budget, device_meant
from autofit.errors import DeviceUnavailable, InvalidArgument
from autofit.units import GIB
from emulated_gpu import find_card


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060 Laptop"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti-8GB"),  # of two sizes, the smaller
        ("NVIDIA GeForce RTX 5060 Ti", "RTX 5060 Ti-8GB"),
        ("NVIDIA TITAN RTX", "TITAN RTX"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA RTX A2000 12GB", "A2000-12GB"),
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives_it(driver: str, name: str) -> None:
    assert find_gpu(driver).name == name


def test_a_data_centre_card_has_its_architecture() -> None:
    found = find_gpu("L4")
    assert found.capability == (8, 9)
    assert found.native_bfloat16
    assert 21 * GIB < found.total_bytes < 24 * GIB
    assert not find_gpu("T4").native_bfloat16
    assert not find_gpu("V100").tf32


def test_of_a_size_as_it_is_sold_less_is_usable_and_bytes_are_believed() -> None:
    sold, exact = find_gpu("24GiB"), find_gpu(24 * GIB)
    assert (sold.total_bytes, exact.total_bytes, exact.rates) == (24 * GIB, 24 * GIB, None)
    assert sold.usable_bytes <= find_gpu("L4").total_bytes  # which is sold as 24 GB
    assert exact.usable_bytes == find_gpu(str(24 * GIB)).usable_bytes == 24 * GIB
    assert sold.budget_bytes(None) == sold.usable_bytes
    assert sold.budget_bytes(0.5) == pytest.approx(sold.usable_bytes / 2, abs=1)
    assert sold.budget_bytes("24GiB") == 24 * GIB
    for gpu in (sold, exact):
        assert gpu.assumed is not None
        assert "9.0" in gpu.assumed
    assert all(gpu.assumed is None and gpu.usable_bytes == gpu.total_bytes for gpu in known_gpus())


def test_the_nearest_names_are_suggested() -> None:
    with pytest.raises(InvalidArgument, match=r"mean .*RTX 3070") as caught:
        find_gpu("RTX 3071")
    assert "A100" not in str(caught.value)  # those that are not near are no help
    assert find_gpu("NVIDIA GeForce RTX 3070").total_bytes < 8 * GIB


SOLD_AS = {  # GiB, of cards that people own
    **dict.fromkeys(["RTX 3050 Laptop", "RTX 3050 Ti Laptop"], 4),
    **dict.fromkeys(["RTX 2060", "RTX 3060 Laptop", "RTX 4050 Laptop"], 6),
    **dict.fromkeys(["RTX 2070", "RTX 2080 SUPER", "RTX 3060 Ti", "RTX 3070", "RTX 4060"], 8),
    **dict.fromkeys(["RTX 4060 Laptop", "RTX 4070 Laptop", "RTX 5050", "RTX 5060"], 8),
    **dict.fromkeys(["RTX 3060", "RTX 3080 Ti", "RTX 4070", "RTX 4080 Laptop", "RTX 5070"], 12),
    **dict.fromkeys(["T4", "P100", "V100-16GB", "A2", "RTX 5070 Ti", "RTX 4060 Ti-16GB"], 16),
    **dict.fromkeys(["A10", "A10G", "L4", "RTX 3090", "Quadro RTX 6000"], 24),
    "V100-32GB": 32,
    **dict.fromkeys(["A6000", "RTX 6000 Ada"], 48),
}


@pytest.mark.parametrize(("name", "sold"), SOLD_AS.items())
def test_a_card_has_a_little_less_than_it_is_sold_with(name: str, sold: int) -> None:
    assert 0.9 * sold * GIB < find_gpu(name).total_bytes < sold * GIB


@pytest.mark.parametrize(
    ("name", "half", "bfloat16"),
    [
        ("P100", False, False),
        ("V100", True, False),
        ("T4", True, False),
        ("RTX 2060 SUPER", True, False),
        ("Quadro RTX 6000", True, False),
        ("RTX 3050 Laptop", True, True),
        ("RTX 4070", True, True),
        ("RTX 5060", True, True),
    ],
)
def test_what_a_card_computes_follows_from_its_generation(
    name: str, half: bool, bfloat16: bool
) -> None:
    found = find_gpu(name)
    assert (found.tensor_cores, found.native_bfloat16, found.tf32) == (half, bfloat16, bfloat16)


def test_rates_of_a_card_are_of_one_order() -> None:
    """A figure in the wrong column of the table would be off by more than these."""
    for gpu in known_gpus():
        assert gpu.rates is not None
        bytes_per_flop = gpu.rates.bytes_per_s / gpu.rates.float32_flops_per_s
        assert 0.005 < bytes_per_flop < 0.12, gpu.name
        of_a_multiprocessor = gpu.rates.float32_flops_per_s / gpu.multiprocessors
        assert 0.1e12 < of_a_multiprocessor < 0.6e12, gpu.name
        assert gpu.rates.half_flops_per_s > gpu.rates.float32_flops_per_s


NO_GPUS = [0, -1, 24, "24", True, 1.5, float("nan"), "1B", "nan", "", b"L4"]
NO_DEVICES = ["tpu", "cuda:", "cuda:one", "cuda:-1", "cpu:0", "CUDA", "mps"]


@pytest.mark.parametrize(
    ("find", "given", "words"),
    [
        (find_gpu, "Voodoo 2", "--gpu all"),
        *((find_gpu, gpu, "24GiB") for gpu in NO_GPUS),
        *((open_device, name, '"cuda:N"') for name in NO_DEVICES),
    ],
)
def test_what_is_no_gpu_or_device_is_refused_with_those_there_are(
    find: Any, given: Any, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        find(given)
    assert repr(given) in str(caught.value)


# -- Devices by name


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_nothing_said_means_the_cpu_and_cuda_is_refused() -> None:
    assert open_device(None).torch_device.type == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(DeviceUnavailable, match=name):
            open_device(name)


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


# -- A VRAM budget as people write it


def _budget(asked: Any, *, total: int = 80 * GIB, free: int = 70 * GIB) -> int:
    return budget_bytes(asked, total_bytes=total, free_bytes=free)


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        ("24GiB", 24 * GIB),
        ("80GiB", 80 * GIB),
        (10 * GIB, 10 * GIB),
        (2**20, 2**20),
        (0.125, 10 * GIB),
        (1.0, 80 * GIB),
    ],
)
def test_text_bytes_and_fractions_of_the_device(asked: str | float, budget: int) -> None:
    check_budget(asked)
    assert _budget(asked) == budget


def test_without_one_it_is_what_is_free_less_a_margin() -> None:
    assert _budget(None) == 70 * GIB - int(0.03 * 70 * GIB)
    assert _budget(None, free=4 * GIB) == 4 * GIB - 256 * 2**20
    assert _budget(None, free=GIB) == GIB - GIB // 10


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("81GiB", "81.0 GiB.*80.0 GiB"),
        (81 * GIB, "81.0 GiB.*80.0 GiB"),
        ("lots", "'lots'"),
        (24, "24 bytes.*'24GiB'"),
        ("24", "'24'.*'24GiB'"),
        ("900KiB", "921600 bytes.*1MiB"),
        (1e-9, "85 bytes"),
        (0, "bytes.*0"),
        (-5, "bytes.*-5"),
        (0.0, r"\(0, 1\].*0\.0"),
        (1.01, r"\(0, 1\]"),
        (2**60, "no device|GiB"),
        ("2000000TiB", "no device"),
        (float("nan"), r"\(0, 1\].*nan"),
        (True, "fraction.*True"),
        ([24], "fraction"),
    ],
)
def test_what_is_no_budget_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        _budget(asked)
    if "80.0 GiB" not in message and asked != 1e-9:  # which another device may have
        with pytest.raises(InvalidArgument):
            check_budget(asked)


def test_a_budget_larger_than_the_cpu_names_the_way_to_search_on_it() -> None:
    for is_cpu in (True, False):
        with pytest.raises(InvalidArgument, match=r"24\.0 GiB.*15\.0 GiB") as refused:
            budget_bytes("24GiB", total_bytes=15 * GIB, free_bytes=GIB, is_cpu=is_cpu)
        assert ('device="cpu"' in str(refused.value)) == is_cpu


# -- autofit and the emulated GPU, which know nothing of each other, mean the same card by a


@pytest.mark.parametrize("gpu", known_gpus(), ids=lambda gpu: gpu.name)
def test_a_known_gpu_is_emulated_as_it_is_known(gpu: Gpu) -> None:
    card = find_card(gpu.name)
    assert (card.total_bytes, card.capability) == (gpu.total_bytes, gpu.capability)
    assert (card.multiprocessors, card.context_bytes) == (gpu.multiprocessors, gpu.context_bytes)
