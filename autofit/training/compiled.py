"""Which part of a model is compiled, and by what."""

from __future__ import annotations

import torch

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `Module.compile` leaves the compiled call; it does not pickle."""


def compiled_part(model: torch.nn.Module) -> str | None:
    """Return the first part of a model that is compiled, in words; None: there is none."""
    for name, module in model.named_modules():
        is_script = isinstance(module, torch.jit.ScriptModule)
        is_wrapped = type(module).__name__ == "OptimizedModule"
        if is_script or is_wrapped or vars(module).get(COMPILED_CALL) is not None:
            compiler = "torch.jit" if is_script else "torch.compile"
            return f"{name or 'the model'} is already compiled, by {compiler}"
    return None


def compiled_in_place(model: torch.nn.Module) -> bool:
    """Return whether a call of the model is compiled that a pickled copy does not have."""
    return any(vars(module).get(COMPILED_CALL) is not None for module in model.modules())
