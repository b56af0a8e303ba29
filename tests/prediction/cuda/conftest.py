"""A GPU whose allocations are counted while a test runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autofit.devices.gpu_catalogue import find_gpu
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import stage


@pytest.fixture
def tracer() -> Iterator[CudaTracer]:
    """The tracer of an H200, in whose place the meta device is until the test ends."""
    tracer = CudaTracer(find_gpu("H200"))
    with stage(tracer):
        yield tracer
