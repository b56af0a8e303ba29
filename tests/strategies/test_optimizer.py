"""optimizer.implementation: the same updates by other kernels, with other temporaries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autofit import Plan, Workload, predict
from autofit.devices.cpu import CpuDevice
from autofit.devices.gpu_catalogue import find_gpu
from autofit.errors import Unsupported
from autofit.prediction.dry_run import meta_dimensions
from autofit.registry import load_strategies
from tests.strategies.trainings import offered, training

(IMPLEMENTATION,) = load_strategies(["optimizer"])
SETTING = "optimizer.implementation"
PAYLOADS = {SETTING: {"optimizers": [""]}}
WIDTH, LAYERS = 64, 24
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
LARGEST_BYTES = 4 * WIDTH * WIDTH

adamw = torch.optim.AdamW
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
any_time = pytest.mark.usefixtures("any_time_is_worth_it")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def samples(dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(2, WIDTH, dtype=dtype)


def workload(optimizer: Any, model: Any = make_model, **given: Any) -> Workload:
    return Workload(model, samples(), optimizer=optimizer, **given)


def found(optimizer: Any, model: Any = make_model, **given: Any) -> tuple[list[Any], list[str]]:
    """Return the values that are offered, and the notes."""
    dimension, notes = offered(IMPLEMENTATION, SETTING, lambda: workload(optimizer, model, **given))
    return list(dimension.values), notes


def values(optimizer: Any, model: Any = make_model, **given: Any) -> list[Any]:
    return found(optimizer, model, **given)[0]


def with_value(value: str, model: nn.Module, optimizer: Any, device: Any = "cpu") -> Any:
    """Return a training with an implementation."""
    return training(
        model,
        IMPLEMENTATION,
        payloads=PAYLOADS,
        optimizer=optimizer,
        device=device,
        settings={SETTING: value},
    )


@any_time
def test_what_saves_time_is_offered_and_nothing_that_is_in_use() -> None:
    assert values(adamw) == ["default", "fused"]
    assert values(partial(adamw, foreach=True)) == ["default", "for_loop", "fused"]


MUON = [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []  # from torch 2.9


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, torch.optim.LBFGS, *MUON])
def test_an_optimizer_without_fused_kernels_has_nothing_to_choose(optimizer: Any) -> None:
    steps_alone = optimizer is not torch.optim.LBFGS
    step = None if steps_alone else lambda training, batch: training.model(batch).mean()
    make = lambda _: optimizer([nn.Parameter(torch.zeros(2, 2))])  # noqa: E731  # by its parameters
    assert values(make, training_step=step) == ["default"]


@any_time
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [adamw, sgd, torch.optim.Adagrad])
def test_weights_in_16_bits_are_updated_by_what_is_offered_and_applied(
    optimizer: Any, dtype: torch.dtype
) -> None:
    """With torch 2.13 the fused SGD of a CPU updates none of a whole vector."""

    def changed(value: str) -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(dtype)
        start = copy.deepcopy(model)
        with with_value(value, model, optimizer(model.parameters(), lr=0.5)) as live:
            live.step(samples(dtype))
        pairs = zip(model.parameters(), start.parameters(), strict=True)
        return min((p != s).float().mean() for p, s in pairs)

    def build() -> Workload:
        return Workload(lambda: make_model().to(dtype), samples(dtype), optimizer=optimizer)

    dimension, _ = offered(IMPLEMENTATION, SETTING, build)
    assert changed("for_loop") > 0.9
    try:
        assert changed("fused") > 0.9
    except Unsupported:
        assert "fused" not in dimension.values


class WithFrozen(nn.Module):
    """Layers, and a frozen weight of a type that no optimizer can update."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(8).to(dtype), requires_grad=False)
        self.layers = make_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@any_time
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, adamw])
def test_frozen_weights_in_8_bits_do_not_hinder_an_optimizer(
    optimizer: Any, dtype: torch.dtype
) -> None:
    model = WithFrozen(dtype)
    assert values(optimizer, lambda: WithFrozen(dtype)) == ["default", "fused"]
    start = copy.deepcopy(model.layers)
    with with_value("fused", model, optimizer(model.parameters(), lr=0.5)) as live:
        live.step(samples())
    assert not any(map(torch.equal, model.layers.parameters(), start.parameters()))


def test_an_update_that_takes_next_to_no_time_is_left_alone() -> None:
    why = ["optimizer.implementation: fused skipped: saves less than 1% of a step"]
    assert found(adamw, global_batch=2**16) == (["default"], why)


def test_what_saves_the_temporaries_of_lists_need_not_save_time() -> None:
    by_lists = partial(adamw, foreach=True)
    assert values(by_lists, global_batch=2**16) == ["default", "for_loop", "fused"]


class SparseFirst(nn.Module):
    """An embedding with sparse gradients, which fused kernels refuse, before many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layers = nn.Embedding(8, WIDTH, sparse=True), make_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.rows((x[:, 0] > 0).long()))


@pytest.mark.parametrize(("foreach", "others"), [(None, []), (True, ["for_loop"])])
def test_an_implementation_that_raises_on_real_gradients_is_left_out_alone(
    foreach: bool | None, others: list[str]
) -> None:
    offers, (note,) = found(partial(torch.optim.SGD, foreach=foreach), SparseFirst)
    assert offers == ["default", *others]
    assert note.startswith("optimizer.implementation=fused skipped: a step with it raised")
    assert "sparse" in note


class OneAtATime(nn.Sequential):
    """Has room for one sample only."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise torch.OutOfMemoryError("for one sample only")
        return super().forward(x)  # type: ignore[no-untyped-call]  # torch's


class Hungry(adamw):
    """Has no room for a fused step of real gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["fused"] and any(p.grad is not None and p.grad.any() for p in group["params"]):
                raise torch.OutOfMemoryError("not fused")
        return super().step(closure)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [(lambda: OneAtATime(make_model()), adamw), (make_model, Hungry)],
    ids=["no model", "no update"],
)
def test_without_room_to_time_them_all_are_offered(model: Any, optimizer: Any) -> None:
    """They may fit in smaller micro-batches; running out of memory is no fault of theirs."""
    assert found(optimizer, model) == (["default", "fused"], [])


def test_what_a_train_step_updates_by_itself_is_offered_unmeasured() -> None:
    def step(training: Any, batch: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss: Tensor = training.model(batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        training.optimizer.step()
        return loss

    assert values(adamw, training_step=step, global_batch=2**16) == ["default", "fused"]


class Decaying(adamw):
    """Works on lists after the update, however that is made."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            torch._foreach_mul_([p for p in group["params"] if p.grad is not None], 0.999)
        return loss


class Ignoring(torch.optim.SGD):
    """Has the flags, and updates in its own way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)


@pytest.mark.parametrize(
    ("optimizer", "others"),
    [
        (adamw, ["for_loop", "fused"]),
        (torch.optim.RMSprop, ["for_loop"]),
        (partial(adamw, fused=True), ["for_loop", "foreach"]),
        (partial(Decaying, fused=True), ["foreach"]),  # lists after the update leave it fused
        (Ignoring, []),  # its flags are no choice
    ],
)
def test_in_a_dry_run_of_a_gpu_all_that_cuda_has_is_offered(
    optimizer: Any, others: list[str]
) -> None:
    plain = {SETTING: "default"}
    dimensions = meta_dimensions(IMPLEMENTATION, plain, workload(optimizer), find_gpu("H200"))
    assert list(dimensions[SETTING].values) == ["default", *others]


@cache
def twenty_steps(value: str, make: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of the model and the optimizer after them."""
    model = make_model()
    optimizer = make(model.parameters())
    with with_value(value, model, optimizer) as live:
        for _ in range(20):
            live.step(samples())
    return dict(model.state_dict()), optimizer.state_dict()


@pytest.mark.parametrize("value", ["for_loop", "foreach", "fused"])
@pytest.mark.parametrize("make", [adamw, partial(adamw, amsgrad=True, foreach=True), sgd])
def test_twenty_steps_end_alike_with_the_same_state(
    value: str, make: Callable[..., torch.optim.Optimizer]
) -> None:
    (plain, state), (other, others_state) = (twenty_steps(v, make) for v in ("default", value))
    torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-6)
    assert others_state["param_groups"] == state["param_groups"]
    ours, theirs = (
        [{n: v for n, v in each.items() if v is not None} for each in held["state"].values()]
        for held in (others_state, state)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_a_flag_that_an_optimizer_lacks_is_not_added() -> None:
    model = make_model()
    optimizer = torch.optim.RMSprop(model.parameters())
    before = optimizer.state_dict()["param_groups"]
    with with_value("for_loop", model, optimizer):
        assert optimizer.param_groups[0]["foreach"] is False
        assert "fused" not in optimizer.param_groups[0]
    assert optimizer.state_dict()["param_groups"] == before


@pytest.mark.cuda
def test_a_capturable_optimizer_counts_its_steps_on_the_gpu() -> None:
    model = make_model().cuda()
    optimizer, first = adamw(model.parameters(), capturable=True), next(model.parameters())
    for _ in range(2):
        with with_value("for_loop", model, optimizer, "cuda") as live:
            live.step(samples().cuda())
            assert optimizer.state[first]["step"].is_cuda
    assert int(optimizer.state[first]["step"]) == 2


@pytest.fixture
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
def test_a_live_optimizer_goes_on_where_it_was() -> None:
    """It counts on through a change of kernels, in double precision and scaled steps too."""
    model = make_model()
    optimizer, first = adamw(model.parameters()), next(model.parameters())
    model(samples()).mean().backward()
    optimizer.step()
    with with_value("fused", model, optimizer) as live:
        assert optimizer.state[first]["step"].dtype == torch.float32
        assert optimizer._step_supports_amp_scaling  # for a scaler
        live.step(samples())
    assert optimizer.state[first]["step"].dtype == torch.float64
    assert int(optimizer.state[first]["step"]) == 2
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


@pytest.mark.parametrize(
    ("value", "temporaries"),
    [("for_loop", 2 * LARGEST_BYTES), ("foreach", PARAMETER_BYTES), ("fused", 0)],
)
def test_temporaries_of_an_update_are_seen_by_the_allocator(value: str, temporaries: int) -> None:
    device = CpuDevice()
    device.limit(2**30)
    with device.accounting():
        model = device.place_model(make_model())
        optimizer = adamw(model.parameters())
        with with_value(value, model, optimizer, device.torch_device) as live:
            live.step(samples())
            live.accumulate(samples())
            device.reset_peaks()
            before = device.allocated_bytes()
            live.optimizer_step()
            added = device.read().peak_allocated_bytes - before
    # Blocks are rounded up to 512 bytes; each parameter's update makes a scalar or two besides.
    assert temporaries <= added <= temporaries + 4 * 512 + 0.1 * temporaries


@pytest.mark.slow
def test_temporaries_of_an_update_are_predicted() -> None:
    required = {
        value: predict(
            workload(adamw), plan=Plan(1, settings={SETTING: value}), gpu="H200"
        ).peak_allocated_bytes
        for value in ("default", "for_loop", "fused")  # as it is, CUDA's updates go by lists
    }
    saved = required["default"] - required["fused"]
    assert saved == pytest.approx(PARAMETER_BYTES, rel=0.1)  # the peak then lies elsewhere
    assert 0 < required["for_loop"] - required["fused"] <= 2 * LARGEST_BYTES


@any_time
def test_one_of_several_optimizers_is_chosen_by_name() -> None:
    model = nn.ModuleDict({"a": make_model(), "b": nn.Linear(WIDTH, 4)})
    makers: Any = {"a": adamw, "b": torch.optim.RMSprop}
    optimizers = {name: make(model[name].parameters()) for name, make in makers.items()}

    def step(training: Any, batch: Tensor) -> Tensor:
        loss: Tensor = training.model["b"](training.model["a"](batch)).mean()
        training.backward(loss)
        training.optimizer_step("a")
        training.optimizer_step("b")
        return loss

    dimension: Any = offered(
        IMPLEMENTATION,
        SETTING,
        lambda: workload(makers, copy.deepcopy(model), training_step=step),
    )[0]
    assert dimension.payloads["fused"] == {"optimizers": ["a"]}
    paste("fused", optimizers, dimension.payloads["fused"])
    assert optimizers["a"].param_groups[0]["fused"] is True
    assert "fused" not in optimizers["b"].param_groups[0]


def paste(value: str, optimizer: Any, payload: Any) -> None:
    """Run the lines that a script gets."""
    lines = IMPLEMENTATION.describe({SETTING: value}, {SETTING: payload})
    exec("\n".join(lines), {"optimizer": optimizer})


def test_the_lines_to_paste_run() -> None:
    optimizer = adamw([nn.Parameter(torch.zeros(2))])
    paste("foreach", optimizer, PAYLOADS[SETTING])
    assert optimizer.param_groups[0]["foreach"] is True
    assert optimizer.param_groups[0]["fused"] is False
