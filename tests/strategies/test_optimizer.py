"""optimizer.implementation: the same updates by other kernels, with other temporaries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from autofit import predict
from autofit.devices.cpu import CpuDevice
from autofit.errors import Unsupported
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.testing import PlainContext
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

(IMPLEMENTATION,) = load_strategies(["optimizer"])
SETTING = "optimizer.implementation"
WIDTH, LAYERS = 64, 24
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
LARGEST_BYTES = 4 * WIDTH * WIDTH

adamw = torch.optim.AdamW
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def workload(optimizer: Any, **given: Any) -> Workload:
    return Workload(make_model, torch.randn(2, WIDTH), optimizer=optimizer, **given)


def offered(optimizer: Any, device: str = "cpu", **given: Any) -> list[Any]:
    context = PlainContext(lambda: workload(optimizer, **given), device)
    return list(IMPLEMENTATION.dimensions(context)[SETTING].values)


def found_on_a_gpu(optimizer: Any) -> list[Any]:
    """Return what a dry run offers, where nothing is left out for its time."""
    from autofit.devices.gpu_catalogue import find_gpu
    from autofit.prediction.dry_run import meta_dimensions

    plain = {SETTING: "default"}
    found = meta_dimensions(IMPLEMENTATION, plain, workload(optimizer), find_gpu("H200"))
    return list(found[SETTING].values)


@pytest.mark.usefixtures("any_time_is_worth_it")
def test_what_saves_time_is_offered_and_nothing_that_is_in_use() -> None:
    assert offered(adamw) == ["default", "fused"]
    assert offered(partial(adamw, foreach=True)) == ["default", "for_loop", "fused"]


MUON = [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []  # from torch 2.9


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, torch.optim.LBFGS, *MUON])
def test_an_optimizer_without_fused_kernels_has_nothing_to_choose(optimizer: Any) -> None:
    steps_alone = optimizer is not torch.optim.LBFGS
    step = None if steps_alone else lambda training, batch: training.model(batch).mean()
    make = lambda _: optimizer([nn.Parameter(torch.zeros(2, 2))])  # noqa: E731  # by its parameters
    assert offered(make, training_step=step) == ["default"]


@pytest.mark.usefixtures("any_time_is_worth_it")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [adamw, sgd, torch.optim.Adagrad])
def test_weights_in_16_bits_are_updated_by_what_is_offered_and_applied(
    optimizer: Any, dtype: torch.dtype
) -> None:
    """With torch 2.13 the fused SGD of a CPU updates none of a whole vector."""

    def changed(value: str) -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(dtype)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        payloads = {SETTING: {"optimizers": [""]}}
        plan = ResolvedPlan(Plan(2, settings={SETTING: value}), payloads, [IMPLEMENTATION])
        made = optimizer(model.parameters(), lr=0.5)
        with Training(model, made, Recipe(), plan, device=torch.device("cpu")) as training:
            training.step(torch.randn(2, WIDTH, dtype=dtype))
        return [(p != s).float().mean() for p, s in zip(model.parameters(), start, strict=True)]

    samples = torch.randn(2, WIDTH, dtype=dtype)
    context = PlainContext(
        lambda: Workload(lambda: make_model().to(dtype), samples, optimizer=optimizer)
    )
    values = list(IMPLEMENTATION.dimensions(context)[SETTING].values)
    for value in ("for_loop", "fused"):
        try:
            assert min(changed(value)) > 0.9
        except Unsupported:
            assert value == "fused"
            assert value not in values


class WithAFrozenTable(nn.Module):
    """A layer, and weights of a type of 8 bits, which no optimizer can update."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        table = torch.ones(8).to(torch.float8_e4m3fn)
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


@pytest.mark.usefixtures("any_time_is_worth_it")
def test_frozen_weights_in_8_bits_do_not_hinder_an_optimizer() -> None:
    def made(optimizer: Any) -> Any:
        given = Workload(WithAFrozenTable, torch.randn(2, WIDTH), optimizer=optimizer)
        return IMPLEMENTATION.dimensions(PlainContext(lambda: given))[SETTING].values

    assert [*made(torch.optim.SGD)] == offered(torch.optim.SGD) == ["default", "fused"]
    plan = ResolvedPlan(
        Plan(2, settings={SETTING: "fused"}), {SETTING: {"optimizers": [""]}}, [IMPLEMENTATION]
    )
    model = WithAFrozenTable()
    start = [parameter.detach().clone() for parameter in model.layers.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Training(model, optimizer, Recipe(), plan, device=torch.device("cpu")) as training:
        training.step(torch.randn(2, WIDTH))
    assert not any(map(torch.equal, model.layers.parameters(), start))


def test_an_update_that_takes_next_to_no_time_is_left_alone() -> None:
    context = PlainContext(lambda: workload(adamw, global_batch=2**16))
    assert list(IMPLEMENTATION.dimensions(context)[SETTING].values) == ["default"]
    assert context.notes == [
        "optimizer.implementation: fused skipped: saves less than 1% of a step"
    ]


def test_what_saves_the_temporaries_of_lists_need_not_save_time() -> None:
    by_lists = partial(adamw, foreach=True)
    assert offered(by_lists, global_batch=2**16) == ["default", "for_loop", "fused"]


class SparseFirst(nn.Module):
    """An embedding with sparse gradients, which fused kernels refuse, before many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layers = nn.Embedding(8, WIDTH, sparse=True), make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.rows((x[:, 0] > 0).long()))


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        (torch.optim.SGD, ["default"]),
        (partial(torch.optim.SGD, foreach=True), ["default", "for_loop"]),
    ],
)
def test_an_implementation_that_raises_on_real_gradients_is_left_out_alone(
    optimizer: Any, values: list[str]
) -> None:
    context = PlainContext(
        lambda: Workload(SparseFirst, torch.randn(2, WIDTH), optimizer=optimizer)
    )
    assert list(IMPLEMENTATION.dimensions(context)[SETTING].values) == values
    (note,) = context.notes
    assert note.startswith("optimizer.implementation=fused skipped: a step with it raised")
    assert "sparse" in note


class OneAtATime(nn.Module):
    """Has room for one sample only."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            raise torch.OutOfMemoryError("for one sample only")
        return self.layers(x)


class Hungry(torch.optim.AdamW):
    """Has no room for a fused step of real gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["fused"] and any(p.grad is not None and p.grad.any() for p in group["params"]):
                raise torch.OutOfMemoryError("not fused")
        return super().step(closure)


def test_without_room_to_time_them_all_are_offered() -> None:
    """They may fit in smaller micro-batches; running out of memory is no fault of theirs."""
    for model, optimizer in ((OneAtATime, adamw), (nn.Sequential, Hungry)):

        def made(model: Any = model) -> nn.Module:
            return model(make_model())

        batch = torch.randn(2, WIDTH)
        context = PlainContext(lambda: Workload(made, batch, optimizer=optimizer))  # noqa: B023  # run here
        assert list(IMPLEMENTATION.dimensions(context)[SETTING].values) == ["default", "fused"]
        assert context.notes == []


class Quantized(nn.Module):
    """A frozen weight of integers, smaller than others, which no optimizer can update."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
        self.layers = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.codes[0])


@pytest.mark.usefixtures("any_time_is_worth_it")
def test_frozen_parameters_are_not_stepped_to_find_implementations() -> None:
    context = PlainContext(lambda: Workload(Quantized, torch.randn(2, WIDTH), optimizer=adamw))
    assert list(IMPLEMENTATION.dimensions(context)[SETTING].values) == ["default", "fused"]


class Decaying(torch.optim.AdamW):
    """Works on lists after the update, however that is made."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            torch._foreach_mul_([p for p in group["params"] if p.grad is not None], 0.999)
        return loss


def test_lists_after_a_fused_update_leave_it_fused() -> None:
    assert found_on_a_gpu(partial(Decaying, fused=True)) == ["default", "foreach"]


class Ignoring(torch.optim.SGD):
    """Has the flags, and updates in its own way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


def test_flags_that_an_optimizer_ignores_are_no_choice() -> None:
    assert found_on_a_gpu(Ignoring) == ["default"]


def test_what_a_train_step_updates_by_itself_is_offered_unmeasured() -> None:
    def step(training: Any, batch: torch.Tensor) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss: torch.Tensor = training.model(batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        training.optimizer.step()
        return loss

    assert offered(adamw, training_step=step, global_batch=2**16) == ["default", "fused"]


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        (adamw, ["default", "for_loop", "fused"]),
        (torch.optim.RMSprop, ["default", "for_loop"]),
        (partial(adamw, fused=True), ["default", "for_loop", "foreach"]),
    ],
)
def test_in_a_dry_run_of_a_gpu_all_that_cuda_has_is_offered(
    optimizer: Any, values: list[str]
) -> None:
    assert found_on_a_gpu(optimizer) == values


def training(value: str, optimizer: Any) -> Training:
    resolved = ResolvedPlan(
        Plan(2, settings={SETTING: value}),
        {SETTING: {"optimizers": [""]}},
        (IMPLEMENTATION,),
    )
    return Training(make_model(), optimizer, Recipe(), resolved, device=torch.device("cpu"))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(20)]


@cache
def twenty_steps(value: str, make: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of the model and the optimizer after them."""
    with training(value, lambda model: make(model.parameters())) as live:
        for batch in batches():
            live.step(batch)
    assert isinstance(live.optimizer, torch.optim.Optimizer)
    return live.model.state_dict(), live.optimizer.state_dict()


@pytest.mark.parametrize("value", ["for_loop", "foreach", "fused"])
@pytest.mark.parametrize("make", [adamw, partial(adamw, amsgrad=True, foreach=True), sgd])
def test_twenty_steps_end_alike_with_the_same_state(
    value: str, make: Callable[..., torch.optim.Optimizer]
) -> None:
    plain, state = twenty_steps("default", make)
    other, others_state = twenty_steps(value, make)
    for name, tensor in plain.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)
    assert others_state["param_groups"] == state["param_groups"]
    assert others_state["state"].keys() == state["state"].keys()
    for key, values in state["state"].items():
        assert others_state["state"][key].keys() == values.keys()
        for name, tensor in values.items():
            if tensor is not None:
                torch.testing.assert_close(
                    others_state["state"][key][name], tensor, rtol=1e-3, atol=1e-6
                )
                assert others_state["state"][key][name].dtype == tensor.dtype


def test_a_flag_that_an_optimizer_lacks_is_not_added() -> None:
    optimizer = torch.optim.RMSprop(make_model().parameters())
    before = optimizer.state_dict()["param_groups"]
    with training("for_loop", optimizer):
        assert optimizer.param_groups[0]["foreach"] is False
        assert "fused" not in optimizer.param_groups[0]
    assert optimizer.state_dict()["param_groups"] == before


@pytest.mark.cuda
def test_a_capturable_optimizer_counts_its_steps_on_the_gpu() -> None:
    model = make_model().cuda()
    optimizer = adamw(model.parameters(), capturable=True)
    resolved = ResolvedPlan(
        Plan(2, settings={SETTING: "for_loop"}), {SETTING: {"optimizers": [""]}}, (IMPLEMENTATION,)
    )
    first = next(model.parameters())
    for _ in range(2):
        with Training(model, optimizer, Recipe(), resolved, device=torch.device("cuda")) as live:
            live.step(torch.randn(2, WIDTH, device="cuda"))
            assert optimizer.state[first]["step"].is_cuda
    assert int(optimizer.state[first]["step"]) == 2


def test_a_live_optimizer_goes_on_where_it_was() -> None:
    """It counts on through a change of kernels, in double precision and scaled steps too."""
    torch.set_default_dtype(torch.float64)
    try:
        model = make_model()
        optimizer = adamw(model.parameters())
        first = next(model.parameters())
        resolved = ResolvedPlan(
            Plan(2, settings={SETTING: "fused"}),
            {SETTING: {"optimizers": [""]}},
            (IMPLEMENTATION,),
        )
        model(torch.randn(2, WIDTH)).mean().backward()
        optimizer.step()
        with Training(model, optimizer, Recipe(), resolved, device=torch.device("cpu")) as live:
            assert optimizer.state[first]["step"].dtype == torch.float32
            assert optimizer._step_supports_amp_scaling  # for a scaler
            live.step(torch.randn(2, WIDTH))
        assert optimizer.state[first]["step"].dtype == torch.float64
        assert int(optimizer.state[first]["step"]) == 2
        assert not hasattr(optimizer, "_step_supports_amp_scaling")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("value", "temporaries"),
    [("for_loop", 2 * LARGEST_BYTES), ("foreach", PARAMETER_BYTES), ("fused", 0)],
)
def test_temporaries_of_an_update_are_seen_by_the_allocator(value: str, temporaries: int) -> None:
    device = CpuDevice()
    device.limit(2**30)
    with device.accounting():
        model = device.place_model(make_model())
        resolved = ResolvedPlan(
            Plan(2, settings={SETTING: value}),
            {SETTING: {"optimizers": [""]}},
            (IMPLEMENTATION,),
        )
        with Training(
            model, adamw(model.parameters()), Recipe(), resolved, device=device.torch_device
        ) as live:
            live.step(torch.randn(2, WIDTH))
            live.accumulate(torch.randn(2, WIDTH))
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


@pytest.mark.usefixtures("any_time_is_worth_it")
def test_one_of_several_optimizers_is_chosen_by_name() -> None:
    model = nn.ModuleDict({"a": make_model(), "b": nn.Linear(WIDTH, 4)})
    optimizers = {
        "a": adamw(model["a"].parameters()),
        "b": torch.optim.RMSprop(model["b"].parameters()),
    }

    def step(training: Any, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = training.model["b"](training.model["a"](batch)).mean()
        training.backward(loss)
        training.optimizer_step("a")
        training.optimizer_step("b")
        return loss

    context = PlainContext(
        lambda: Workload(
            copy.deepcopy(model),
            torch.randn(2, WIDTH),
            optimizer={"a": adamw, "b": torch.optim.RMSprop},
            training_step=step,
        )
    )
    found = IMPLEMENTATION.dimensions(context)[SETTING]
    assert found.payloads["fused"] == {"optimizers": ["a"]}
    lines = IMPLEMENTATION.describe({SETTING: "fused"}, {SETTING: found.payloads["fused"]})
    exec("\n".join(lines), {"optimizer": optimizers})
    assert optimizers["a"].param_groups[0]["fused"] is True
    assert "fused" not in optimizers["b"].param_groups[0]


def test_the_lines_to_paste_run() -> None:
    optimizer = adamw([nn.Parameter(torch.zeros(2))])
    payload = {SETTING: {"optimizers": [""]}}
    lines = IMPLEMENTATION.describe({SETTING: "foreach"}, payload)
    exec("\n".join(lines), {"optimizer": optimizer})
    assert optimizer.param_groups[0]["foreach"] is True
    assert optimizer.param_groups[0]["fused"] is False
