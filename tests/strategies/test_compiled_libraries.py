"""Models that nobody here wrote train compiled as they do eagerly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autofit import Workload
from autofit.testing import check_strategy
from benchmarks.library_models import MakeBatch, MakeModel, labelled, tokens, transformers_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama() -> Workload:
    make = transformers_model("LlamaForCausalLM", vocab_size=256, pad_token_id=0, **_SIZES)
    return _trained(make, tokens(4, 16, 256))


def vit() -> Workload:
    make = transformers_model(
        "ViTForImageClassification", image_size=32, patch_size=8, num_labels=10, **_SIZES
    )
    return _trained(make, labelled(4, 32))


def _trained(make: MakeModel, batch: MakeBatch) -> Workload:
    torch.manual_seed(0)
    return Workload(make(), batch())


@pytest.mark.parametrize("build", [llama, vit])
def test_compiled_they_train_as_eager_ones_do(build: Callable[[], Workload]) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    plain_ones = 1
    assert check_strategy("compile", workloads=[build]) > plain_ones
