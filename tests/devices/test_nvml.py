"""NVML may refuse, and a device may go by several names."""

from __future__ import annotations

import pytest

from autofit.devices.nvml import Nvml, device_uuid


@pytest.mark.parametrize(
    ("visible", "index", "uuid"),
    [
        ("MIG-aaaa,MIG-bbbb", 1, "MIG-bbbb"),
        ("MIG-aaaa, MIG-bbbb ", 1, "MIG-bbbb"),
        ("MIG-GPU-aaaa/1/0", 0, "MIG-GPU-aaaa/1/0"),
    ],
)
def test_a_mig_slice_is_known_by_the_uuid_that_made_it_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str, index: int, uuid: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_uuid(index) == uuid


def test_where_nvml_refuses_every_answer_is_none() -> None:
    unknown = Nvml("GPU-00000000-0000-0000-0000-000000000000")
    assert not unknown.is_there
    assert unknown.read() is None
    assert unknown.bytes_by_process() is None
    assert unknown.driver() is None


@pytest.mark.cuda
def test_the_first_device_is_known() -> None:
    nvml = Nvml(device_uuid(0))
    if not nvml.is_there:
        pytest.skip("NVML is not there, or does not know the device")
    reading = nvml.read()
    assert reading is None or 0 <= reading.used_bytes <= reading.total_bytes
