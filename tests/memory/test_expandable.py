"""Whether a process uses expandable segments: what its user chose."""

from __future__ import annotations

import pytest

from autofit.memory.expandable import CONFIGURED_BY, expandable_segments


@pytest.mark.parametrize("name", CONFIGURED_BY)
def test_either_variable_chooses_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in CONFIGURED_BY:
        monkeypatch.delenv(each, raising=False)
    assert not expandable_segments()
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    assert expandable_segments()


def test_torch_reads_the_newer_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert not expandable_segments()
