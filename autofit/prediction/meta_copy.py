"""A workload's twin: the same modules and optimizers, whose tensors have shapes and no values.

A live model is copied with every tensor replaced by a meta tensor; a model function is called with
the meta device as the default one, and only where it needs values (`.item()` while it builds) does
it run on the CPU first. So a model of any size costs no memory, and the user's objects are only
read. Tensors of a twin stand for host memory: they count when they are moved to the device.
What the user's functions reach beside (a teacher, a list of losses) has no twin: it is put back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch

from autofit.errors import CannotTell
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.cuda.values import is_number
from autofit.snapshot.objects import live_objects, walk
from autofit.training.batch import Batch, map_tensors, tensors_of
from autofit.training.workload import Workload
from autofit.units import GIB

LARGE_BYTES = GIB
"""A batch beyond this is made without values first: it is to cost no memory."""
_Made = TypeVar("_Made")
_COPIED = ("model", "optimizer", "loss_fn", "criterion")
_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, Mapping)


def twin_of(workload: Workload, tracer: CudaTracer) -> Workload:
    """The workload with a built model, all its tensors on the meta device and not counted.

    Call it inside `fake_cuda` and the tracer.
    """
    with tracer.aside():
        if not isinstance(workload.model, torch.nn.Module):
            workload = replace(workload, model=_without_values(workload.build_model, tracer))
        refuse_compiled(workload.build_model())
        parts: dict[str, Any] = {
            name: part for name in _COPIED if isinstance(part := getattr(workload, name), _STATEFUL)
        }
        try:
            twins = copy.deepcopy(parts, _memo(parts))
        except Exception as error:
            raise CannotTell(
                f"memory cannot be predicted: the model cannot be copied ({type(error).__name__}: "
                f"{error}); pass a function that builds it, or probe"
            ) from error
        return replace(workload, **twins, sample_batch=_batch_twin(workload, tracer))


def without_twin(workload: Workload) -> dict[str, object]:
    """The live objects that a rehearsal may change, since it works on no copy of them."""
    copied = [name for name in _COPIED if isinstance(getattr(workload, name), _STATEFUL)]
    return live_objects(workload, but=copied)


def refuse_compiled(model: torch.nn.Module) -> None:
    """A compiler fuses operators and reuses buffers, which a trace of operators does not see.

    Raises:
        CannotTell: a part of the model is compiled.
    """
    for name, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)
        wrapped = type(module).__name__ == "OptimizedModule"
        if scripted or wrapped or module._compiled_call_impl is not None:
            compiler = "torch.jit" if scripted else "torch.compile"
            raise CannotTell(
                f"memory cannot be predicted: {name or 'the model'} is compiled by {compiler}, "
                "which fuses operators and reuses buffers. Leave the compiling out, or run it with "
                'autofit.probe, or method="probe", on a machine with the GPU'
            )


def batch_of(workload: Workload, samples: int, tracer: CudaTracer) -> Batch:
    """A batch of a twin, which does not count; a large one without values, if it can be made so.

    Where the user's function makes it, the values may be needed (lengths of packed sequences).
    """
    with tracer.aside():
        if not workload.makes_batches:
            return workload.batch(samples)
        sample_bytes = sum(tensor.nbytes for tensor in tensors_of(workload.batch(1)))
        if sample_bytes * samples <= LARGE_BYTES:
            return workload.batch(samples)
        return _without_values(lambda: workload.batch(samples), tracer)


def _without_values(make: Callable[[], _Made], tracer: CudaTracer) -> _Made:
    state, unsupported = torch.get_rng_state(), tracer.unsupported
    with suppress(Exception), torch.device("meta"):
        made = make()
        if tracer.unsupported is unsupported:
            return made
    # With values it may work; if not, that error is the user's.
    tracer.unsupported = unsupported
    torch.set_rng_state(state)
    return make()


def _memo(parts: Mapping[str, Any]) -> dict[int, Any]:
    """What `deepcopy` is to put in place of each tensor."""
    memo: dict[int, Any] = {}
    for name, part in parts.items():
        for _, node in walk(part, name):
            if isinstance(node, torch.Tensor) and _needs_twin(node):
                memo[id(node)] = _twin(node)
    return memo


def _needs_twin(tensor: torch.Tensor) -> bool:
    """Step counts of optimizers stay numbers on the host."""
    return tensor.dim() > 0 or tensor.device.type != "cpu" or tensor.requires_grad


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    data = torch.empty_like(tensor.detach(), device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)


def _batch_twin(workload: Workload, tracer: CudaTracer) -> Any:
    """The sample batch; with all its values only where the user's `loss_weight` reads them."""
    if workload.makes_batches or workload.loss_weight is not None:
        return workload.sample_batch

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(tensor, device="meta")
        if is_number(tensor):
            tracer.known.learn(made, tensor)
        return made

    return map_tensors(twin, workload.sample_batch)
