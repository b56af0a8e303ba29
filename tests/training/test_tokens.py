"""Which batches have tokens, how many, and what share of them is padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.training.batch import Samples
from autofit.training.lengths import Tokens, tokens_of

IDS = torch.zeros(4, 16, dtype=torch.int64)
IMAGES = torch.zeros(4, 3, 8, 8)
MASK = torch.arange(16).expand(4, 16) < 12


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((IDS, IDS), Tokens("[0]", 16)),
        ({"labels": IDS[:, :5], "input_ids": IDS}, Tokens("['input_ids']", 16)),
        (
            {"input_ids": IDS, "attention_mask": MASK.long()},
            Tokens("['input_ids']", 16, padding_share=0.25),
        ),
        (
            {"pixels": IMAGES, "input_ids": IDS, "attention_mask": MASK[:, :2]},
            Tokens("['input_ids']", 16),
        ),
        ((IMAGES, IDS), None),
        ((IDS[:, 0], IDS), None),
        ((IDS[:, :1], IDS), None),
        ((MASK, IDS), None),
        ((IDS.float(), IDS), None),
        ({"input_ids": IDS[:3], "x": IMAGES}, None),
    ],
)
def test_token_ids_are_told_by_their_name_or_their_place(
    batch: Any, expected: Tokens | None
) -> None:
    batched = Samples._with(batch, 4).batched
    assert tokens_of(batch, batched) == expected
