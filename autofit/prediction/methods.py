"""How memory is predicted: by rehearsal or by emulation, and which of them "auto" means here."""

from __future__ import annotations

import os
from typing import Any

from autofit.emulation.build import check_can_build
from autofit.emulation.errors import EmulationUnavailable
from autofit.emulation.launch import MACHINE
from autofit.errors import InvalidRequest

METHODS = ("auto", "rehearse", "emulate")


def method_taken(method: str, model: Any) -> str:
    """Return "rehearse" or "emulate": the method, or what "auto" means here for this model.

    Raises:
        InvalidRequest: there is no such method.
        EmulationUnavailable: emulation was asked for, and what it takes is missing.
    """
    if method not in METHODS:
        raise InvalidRequest(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method == "emulate":
        check_can_build()
    if method != "auto":
        return method
    try:
        check_can_build()
    except EmulationUnavailable:
        return "rehearse"
    return "rehearse" if _has_real_gpu() or _lies_on_meta(model) else "emulate"


def words_of(method: str, computed_values: bool | None) -> str:
    """Return how a verdict or a prediction was made, for a reader."""
    if method == "probe":
        return "a probe: run on the device"
    if method == "rehearse":
        return "a rehearsal on torch's meta device"
    values = "computing values" if computed_values else "computing no values"
    return f"a run on an emulated GPU, {values}"


def _has_real_gpu() -> bool:
    import torch  # where a verdict is only read, it is not needed

    return torch.cuda.is_available() and MACHINE not in os.environ


def _lies_on_meta(model: Any) -> bool:
    """Whether a live model has no values: it can be rehearsed, but not run."""
    import torch

    return isinstance(model, torch.nn.Module) and any(p.is_meta for p in model.parameters())
