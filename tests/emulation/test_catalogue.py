"""autofit and the emulated GPU, which know nothing of each other, mean the same card by a name."""

from __future__ import annotations

import pytest

from autofit.devices.gpus import Gpu, known_gpus
from emulated_gpu import card_names, find_card


@pytest.mark.parametrize("gpu", known_gpus(), ids=lambda gpu: gpu.name)
def test_a_known_gpu_is_emulated_as_it_is_known(gpu: Gpu) -> None:
    card = find_card(gpu.name)
    assert (card.total_bytes, card.capability) == (gpu.total_bytes, gpu.capability)
    assert (card.multiprocessors, card.context_bytes) == (gpu.multiprocessors, gpu.context_bytes)


def test_no_other_card_has_a_name() -> None:
    assert sorted(card_names()) == sorted(gpu.name for gpu in known_gpus())
