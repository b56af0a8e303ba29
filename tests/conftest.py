"""What all tests share: GPU tests skip where there is no GPU, and the CPU is shared fairly."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

# Workers inherit it: on two cores, several threads a process only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # it reads the variable above when it is imported

from autofit.snapshot import process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:  # keywords hold names of folders too
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch finds none"))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Probes collect garbage many times, and need not go through all of pytest's and torch's."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _computing_as_before() -> Iterator[None]:
    """A flag of torch's that a test leaves changed would change the fingerprints of later tests."""
    before = process.computing()
    yield
    process.restore(before)
