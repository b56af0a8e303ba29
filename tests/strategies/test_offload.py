"""Activations in the host's memory: the same gradients, fewer bytes on the device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.errors import InvalidArgument
from autofit.measurement import Outcome
from autofit.plan import Plan
from autofit.registry import load_strategies
from autofit.testing import PlainContext, check_strategy
from autofit.training.training import Training
from autofit.training.workload import Workload

offload = import_module("autofit.strategies.offload")  # lies elsewhere in the tree
SETTING: str = offload.SETTING
WIDTH, SAMPLES = 128, 512


def deep() -> Workload:
    """Eight layers whose activations are 256 KiB each, with dropout."""
    torch.manual_seed(0)
    layers = [
        part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
    ]
    batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    return Workload(nn.Sequential(*layers), batch, criterion=nn.functional.mse_loss)


def probed(workload: Workload, value: bool, device: str = "cpu") -> Any:
    plan = Plan(SAMPLES, settings={SETTING: value})
    trial = autofit.probe(
        workload,
        plan=plan,
        device=device,
        strategies=["offload"],
    )
    return trial.measurement


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    assert check_strategy("offload", workloads=[deep]) > 1


on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


@on_each_device
def test_gradients_are_the_same_to_the_bit(device: str) -> None:
    model = deep().build_model().to(device)
    first = next(model.children())
    given = torch.randn(SAMPLES, WIDTH, device=device)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.random.fork_rng():
            (model(given) * first(given).t().contiguous().t()).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with offload.offloaded(model):
        moved = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


def times_its_conjugate(rows: torch.Tensor) -> torch.Tensor:
    return (torch.complex(rows, rows.tanh()) * torch.complex(rows, rows.tanh()).conj()).abs()


def times_its_lazy_conjugate(rows: torch.Tensor) -> torch.Tensor:
    turned = torch.complex(rows, rows.tanh())
    return (turned * turned.conj()).real


def times_its_lazy_negative(rows: torch.Tensor) -> torch.Tensor:
    return (rows * torch._neg_view(rows)).tanh()


def by_parts_of_one_storage(rows: torch.Tensor) -> torch.Tensor:
    left, right = rows.chunk(2)
    return (left.exp() * right.t().contiguous().t()).sin() + rows[:1].expand(SAMPLES // 2, WIDTH)


def one_after_another(rows: torch.Tensor) -> torch.Tensor:
    """Frees what it made, so that addresses come again."""
    total = torch.zeros_like(rows)
    for number in range(8):
        total = total + (rows + number).tanh().exp().mul(0.1)
    return total


@pytest.mark.parametrize(
    "function",
    [
        times_its_conjugate,
        times_its_lazy_conjugate,
        times_its_lazy_negative,
        by_parts_of_one_storage,
        one_after_another,
    ],
)
def test_tensors_that_share_memory_keep_their_own_values(function: Any) -> None:
    layer, given = nn.Linear(WIDTH, WIDTH), torch.randn(SAMPLES, WIDTH)
    weight: Any = layer.weight

    def gradient() -> torch.Tensor:
        layer.zero_grad()
        function(layer(given)).square().mean().backward()
        return weight.grad.clone()

    plain = gradient()
    with offload.offloaded(layer):
        assert torch.equal(gradient(), plain)


def test_a_forward_moves_its_activations_and_leaves_parameters_and_small_tensors() -> None:
    wide = 256  # a weight is larger than what is worth moving
    model = nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide))
    pack, unpack = offload._packing(offload._Host(), model)
    is_moved: dict[Any, set[bool]] = {}

    def noted(tensor: torch.Tensor) -> Any:
        saved = pack(tensor)
        is_moved.setdefault(tensor.shape, set()).add(saved[1] is not None)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
        model(torch.randn(SAMPLES, wide))[:1].exp().sum().backward()
    assert is_moved == {(SAMPLES, wide): {True}, (wide, wide): {False}, (1, wide): {False}}


def stepped_too_early(layer: nn.Linear, given: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = layer(layer(given).tanh()).square().sum()
    with torch.no_grad():
        layer.weight.add_(1)  # a parameter stays where it is
    return loss


def small_one_doubled(layer: nn.Linear, given: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = layer(given[:1]).tanh()
    output.mul_(2)  # tanh saved its output
    return output.sum()


@pytest.mark.parametrize("function", [stepped_too_early, small_one_doubled])
def test_what_stays_and_is_changed_before_backward_raises_as_it_does_without(
    function: Any,
) -> None:
    layer, given = nn.Linear(WIDTH, WIDTH), torch.randn(SAMPLES, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(layer, given).backward()
    with offload.offloaded(layer), pytest.raises(RuntimeError, match="modified in place"):
        function(layer, given).backward()


def test_what_moved_keeps_the_values_that_it_was_saved_with() -> None:
    layer, given = nn.Linear(WIDTH, WIDTH), torch.randn(SAMPLES, WIDTH)

    def gradient(*, in_place: bool) -> torch.Tensor:
        layer.zero_grad()
        output = layer(given).tanh()  # which saves its output
        doubled = output.mul_(2) if in_place else output * 2
        if in_place:
            doubled.data.add_(0)  # written to without a count of it
        doubled.square().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    plain = gradient(in_place=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(in_place=True)
    with offload.offloaded(layer):
        assert torch.equal(gradient(in_place=True), plain)


def test_a_tensor_saved_again_after_a_write_that_nobody_counts_has_its_new_values() -> None:
    given = torch.randn(SAMPLES, WIDTH, requires_grad=True)

    def gradient() -> torch.Tensor:
        inner = given.tanh()
        unused = inner * inner
        inner.data.mul_(3)
        (gradient,) = torch.autograd.grad((inner * inner).sum(), inner)
        del unused
        return gradient

    plain = gradient()
    with offload.offloaded(nn.Identity()):
        assert torch.equal(gradient(), plain)


class Branching(nn.Module):
    """x (n, width) -> x again, and outputs that their own nodes save and no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = self.body(x)
        return inner, inner.exp().sigmoid(), self.gate(inner).sigmoid()


def test_branches_that_the_loss_does_not_use_are_freed() -> None:
    """With all that their graphs saved."""
    model, host = Branching(), offload._Host()
    with torch.autograd.graph.saved_tensors_hooks(*offload._packing(host, model)):
        for _ in range(3):
            used, *unused = model(torch.randn(SAMPLES, WIDTH))
            used.square().mean().backward()
            del used, unused
    assert host._held_bytes == 0


def test_lengths_that_vary_take_no_more_than_the_longest() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    longest = 2 * SAMPLES
    held_by_one = 2**18 * 2 * 4  # four tensors of the longest at most
    host = offload._Host(most_bytes=held_by_one)
    with torch.autograd.graph.saved_tensors_hooks(*offload._packing(host, model)):
        for length in range(longest, longest - 20, -1):
            model(torch.randn(length, WIDTH)).square().mean().backward()
        with pytest.raises(MemoryError):
            model(torch.randn(8 * longest, WIDTH))
    assert host._held_bytes == 0


def twice(loss: Any, model: nn.Module) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def penalized(loss: torch.Tensor, model: nn.Module) -> None:
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()  # type: ignore[union-attr]


def in_parts(loss: Any, model: Any) -> None:
    (gradient,) = torch.autograd.grad(loss, [model[2].weight], retain_graph=True)
    (loss * gradient.norm()).backward()


@pytest.mark.parametrize("backward", [twice, penalized, in_parts])
def test_graphs_may_be_used_more_than_once(backward: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    given = torch.randn(SAMPLES, WIDTH)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        backward(model(given).square().mean(), model)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with offload.offloaded(model):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))


@pytest.mark.usefixtures("one_rank")
def test_weights_that_are_gathered_for_a_call_stay() -> None:
    from torch.distributed.fsdp import fully_shard

    wide, sizes = 256, list[torch.Size]()
    model = nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide))
    model[0].requires_grad_(False)
    for part in (model[0], model[2], model):
        fully_shard(part)
    pack, unpack = offload._packing(offload._Host(), model)

    def noted(tensor: torch.Tensor) -> Any:
        saved = pack(tensor)
        sizes.extend([tensor.shape] if saved[1] is not None else [])
        return saved

    with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
        given = torch.randn(SAMPLES, wide, requires_grad=True)
        model(given).square().mean().backward()
    assert set(sizes) == {torch.Size([SAMPLES, wide])}


def test_it_is_not_combined_with_compiled_code_and_pinning_costs() -> None:
    (strategy,) = load_strategies(["offload"])
    dimension = strategy.dimensions(PlainContext(deep))[SETTING]
    assert dimension.when == {"compile.mode": ("off", None)}
    assert dimension.trial_cost_s > 0


def test_a_model_that_normalizes_over_samples_may_have_it() -> None:
    def normalized() -> Workload:
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()]
        batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
        return Workload(nn.Sequential(*layers), batch, criterion=nn.functional.mse_loss)

    (strategy,) = load_strategies(["offload"])
    assert strategy.dimensions(PlainContext(normalized))[SETTING].values == (False, True)


@pytest.mark.slow
@on_each_device
def test_a_step_holds_fewer_bytes_of_the_device(device: str) -> None:
    plain, moved = probed(deep(), False, device), probed(deep(), True, device)
    assert plain.ok, plain.detail
    assert moved.ok, moved.detail
    activation = 4 * SAMPLES * WIDTH
    # tanh and dropout keep their outputs, and dropout its mask: of eight layers two stay at a time
    assert plain.peak_allocated_bytes - moved.peak_allocated_bytes > 8 * activation


class Cramped:
    """The worker that reads it has hardly any host memory."""

    def __reduce__(self) -> Any:
        return cramp, ()


def cramp() -> None:
    setattr(Training, "host_available_bytes", 2 * offload.MIN_BYTES)  # noqa: B010  # a property


@pytest.mark.slow
def test_a_host_without_room_is_the_hosts_fault() -> None:
    workload = deep()
    vars(workload.model)["host"] = Cramped()
    measured = probed(workload, True)
    assert measured.outcome is Outcome.HOST_OOM
    assert "the host's available memory" in (measured.detail or "")


def small() -> Workload:
    return Workload(nn.Linear(8, 8), torch.randn(4, 8))


def test_a_model_that_saves_little_has_nothing_to_choose() -> None:
    with pytest.raises(InvalidArgument, match=SETTING):
        probed(small(), True)


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [None, ["offload"]])
def test_a_search_offers_it_only_where_it_is_named(strategies: list[str] | None) -> None:
    report = autofit.search(
        deep(),
        device="cpu",
        vram_budget="64MiB",
        options=autofit.SearchOptions(max_micro_batch=SAMPLES),
        max_probes=1,
        strategies=strategies,
    )
    assert (SETTING in report.record.dimensions) is (strategies is not None)
