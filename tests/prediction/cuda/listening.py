"""A tracer that notes the operators of a dry run."""

from __future__ import annotations

from typing import Any

from autofit.devices.gpu_catalogue import Gpu
from autofit.prediction.cuda.tracer import CudaTracer


class Listening(CudaTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """Notes each operator that runs, in order."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)
