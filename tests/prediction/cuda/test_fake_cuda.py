"""User code that says "cuda", on a machine without one."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Callable
from importlib import import_module

import pytest
import torch

import autofit
from autofit.devices.gpu_catalogue import find_gpu
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import dry_run, stage


@pytest.mark.usefixtures("tracer")
@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", torch.device("cuda", 1)], ids=["name", "numbered", "object"]
)
def test_tensors_are_made_and_moved_there(device: str | torch.device) -> None:
    host = torch.randn(3, 4)
    moved = [
        torch.zeros(2, device=device),
        torch.tensor([1.0, 2.0], device=device),
        torch.arange(4, device=device),
        host.to(device),
        host.to(device, torch.float16),
        host.to(device=device, non_blocking=True),
        host.new_zeros(3, device=device),
        torch.empty_like(host, device=device),
        host.cuda(),
        host.to(0),
        host.pin_memory().cuda(non_blocking=True),
        *torch.nn.BatchNorm1d(4).cuda().state_dict().values(),  # parameters and buffers
    ]
    with torch.device(device):
        moved += [torch.ones(3), torch.nn.Linear(3, 4).weight]
    assert all(tensor.is_meta and tensor.is_cuda for tensor in moved)


@pytest.mark.usefixtures("tracer")
def test_torch_cuda_answers_as_that_gpu() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    assert torch.cuda.is_bf16_supported()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    asks_the_driver = inspect.getattr_static(torch.cuda.graphs, "is_current_stream_capturing")
    assert torch.cuda.is_current_stream_capturing is not asks_the_driver
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.usefixtures("tracer")
def test_streams_ranges_and_generators_do_no_harm() -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it
    with torch.cuda.stream(stream), torch.cuda.device(0), torch.cuda.nvtx.range("step"):
        generator = torch.Generator(device="cuda").manual_seed(0)
        drawn = torch.randn(4, device="cuda", generator=generator)
        drawn.bernoulli_(0.5, generator=generator)
        assert drawn.is_meta
    stream.wait_stream(torch.cuda.current_stream())
    assert isinstance(generator, torch.Generator)


@pytest.mark.usefixtures("tracer")
def test_a_gradient_scaler_steps() -> None:
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    scaler.scale(model(torch.randn(4, 8, device="cuda")).sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert stepped
    assert scaler.get_scale() == 65536.0


def test_everything_is_put_back() -> None:
    watched = [torch.cuda, torch, torch.autograd, torch.amp, import_module("torch.optim.optimizer")]
    before = [dict(vars(module)) for module in watched]
    tracer = CudaTracer(find_gpu("A100"))
    with pytest.raises(KeyError), stage(tracer):
        raise KeyError("anything")
    for module, names in zip(watched, before, strict=True):
        changed = {n for n, v in names.items() if vars(module).get(n) is not v}
        assert changed == set()
    assert not torch.ones(3).is_meta


def test_a_torch_without_a_part_that_is_replaced_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a later version may be, whose optimizers are arranged in another way."""
    monkeypatch.delattr(import_module("torch.optim.optimizer"), "_get_capturable_supported_devices")
    workload = autofit.Workload(torch.nn.Linear(8, 8), torch.randn(4, 8))
    with pytest.raises(
        autofit.PredictionUnavailable, match=r"with torch .*cannot be predicted.*_get_capturable"
    ):
        dry_run(workload, ResolvedPlan(Plan(4)), find_gpu("L4"))


def test_a_torch_without_the_dispatch_keys_is_refused(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Importing autofit and searching need none of them."""
    said = run_python(
        "-c",
        """
import torch
del torch._C.DispatchKey.AutocastIPU, torch._C.DispatchKey.AutocastHPU
import autofit
from autofit.devices.gpu_catalogue import find_gpu
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.dry_run import dry_run
workload = autofit.Workload(torch.nn.Linear(8, 8), torch.randn(4, 8))
try:
    dry_run(workload, ResolvedPlan(Plan(4)), find_gpu("L4"))
except autofit.PredictionUnavailable as error:
    print(error)
""",
    )
    assert said.returncode == 0, said.stderr
    assert re.search(r"torch \d.*AutocastIPU", said.stdout)
