"""GPUs by name and by size."""

from __future__ import annotations

from typing import Any

import pytest

from autofit.devices.gpus import find_gpu
from autofit.errors import InvalidArgument
from autofit.units import GIB, MIB


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
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives_it(driver: str, name: str) -> None:
    assert find_gpu(driver).name == name


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090"])
def test_a_name_is_found_however_it_is_written(name: str) -> None:
    assert find_gpu(name).name == "RTX 4090"


def test_a_data_centre_card_has_its_architecture() -> None:
    found = find_gpu("L4")
    assert found.capability == (8, 9)
    assert found.native_bfloat16
    assert 21 * GIB < found.total_bytes < 24 * GIB
    assert not find_gpu("T4").native_bfloat16
    assert not find_gpu("V100").tf32


@pytest.mark.parametrize("name", ["V100", "T4", "A100", "L4", "RTX 4090", "H200", "RTX PRO 6000"])
def test_a_known_gpu_is_no_slower_in_fewer_bits(name: str) -> None:
    found = find_gpu(name)
    assert found.rates is not None
    flops = found.rates.half_flops_per_s, found.rates.tf32_flops_per_s
    assert flops[0] > flops[1] >= found.rates.float32_flops_per_s > 0


def test_a_size_stands_for_a_gpu_of_that_size() -> None:
    assert find_gpu("24GiB").total_bytes == 24 * GIB
    assert find_gpu(80 * GIB).total_bytes == 80 * GIB
    assert find_gpu(80 * GIB).rates is None


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidArgument, match=r"'Voodoo 2'.*A100-80GB"):
        find_gpu("Voodoo 2")


@pytest.mark.parametrize("gpu", [0, -1, 24, "24", True, 1.5, float("nan"), "1B", "nan", "", b"L4"])
def test_what_is_no_gpu_is_refused(gpu: Any) -> None:
    with pytest.raises(InvalidArgument, match="24GiB") as caught:
        find_gpu(gpu)
    assert repr(gpu) in str(caught.value)


def test_workspaces_of_cublas_follow_the_architecture() -> None:
    assert find_gpu("H100").cublas_workspace_bytes == 32 * MIB
    assert find_gpu("B200").cublas_workspace_bytes == 32 * MIB
    assert find_gpu("A100").cublas_workspace_bytes == 8 * MIB + 128 * 2**10
