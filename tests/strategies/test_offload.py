"""Activations in the host's memory: the same gradients, fewer bytes on the device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autofit
from autofit import InvalidArgument, Outcome, Plan, Training, Workload
from autofit.registry import load_strategies
from autofit.testing import check_strategy
from tests.strategies.trainings import offered

module: Any = import_module("autofit.strategies.offload")  # lies elsewhere in the tree
SETTING: str = module.SETTING
(OFFLOAD,) = load_strategies(["offload"])
WIDTH, SAMPLES = 128, 512


def workload_of(*layers: nn.Module) -> Workload:
    batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    return Workload(nn.Sequential(*layers), batch, criterion=nn.functional.mse_loss)


def deep() -> Workload:
    """Eight layers whose activations are 256 KiB each, with dropout."""
    torch.manual_seed(0)
    layers = ((nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8))
    return workload_of(*(part for parts in layers for part in parts))


def two_layers(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def samples(width: int = WIDTH) -> Tensor:
    return torch.randn(SAMPLES, width)


def probed(workload: Workload, value: bool, device: str = "cpu") -> Any:
    plan = Plan(SAMPLES, settings={SETTING: value})
    return autofit.probe(workload, plan=plan, device=device, strategies=["offload"]).measurement


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    assert check_strategy("offload", workloads=[deep]) > 1


on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def check_gradients(model: nn.Module, backward: Callable[[], Any]) -> None:
    """They are the same to the bit after a backward with the setting and without."""

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with module.offloaded(model):
        assert all(map(torch.equal, gradients(), plain))


@on_each_device
def test_gradients_are_the_same_to_the_bit(device: str) -> None:
    model, given = deep().build_model().to(device), samples().to(device)
    first = next(model.children())
    check_gradients(
        model,
        lambda: (model(given) * first(given).t().contiguous().t()).square().mean().backward(),
    )


def by_parts_of_one_storage(rows: Tensor) -> Tensor:
    left, right = rows.chunk(2)
    return (left.exp() * right.t().contiguous().t()).sin() + rows[:1].expand(SAMPLES // 2, WIDTH)


def one_after_another(rows: Tensor) -> Tensor:
    """Frees what it made, so that addresses come again."""
    total = torch.zeros_like(rows)
    for number in range(8):
        total = total + (rows + number).tanh().exp().mul(0.1)
    return total


def times_its_lazy_conjugate(rows: Tensor) -> Tensor:
    turned = torch.complex(rows, rows.tanh())
    return (turned * turned.conj()).real


SHARING: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": lambda rows: (
        torch.complex(rows, rows.tanh()) * torch.complex(rows, rows.tanh()).conj()
    ).abs(),
    "lazy conjugate": times_its_lazy_conjugate,
    "lazy negative": lambda rows: (rows * torch._neg_view(rows)).tanh(),
    "parts of one storage": by_parts_of_one_storage,
    "one after another": one_after_another,
}


@pytest.mark.parametrize("name", SHARING)
def test_tensors_that_share_memory_keep_their_own_values(name: str) -> None:
    layer, given = nn.Linear(WIDTH, WIDTH), samples()
    check_gradients(layer, lambda: SHARING[name](layer(given)).square().mean().backward())  # type: ignore[no-untyped-call]  # torch's


def moves(model: nn.Module, run: Callable[[], Tensor]) -> dict[Any, set[bool]]:
    """Return for each shape that a loss saved whether it was moved."""
    pack, unpack = module._packing(module._Host(), model)
    found: dict[Any, set[bool]] = {}

    def noted(tensor: Tensor) -> Any:
        saved = pack(tensor)
        found.setdefault(tuple(tensor.shape), set()).add(saved[1] is not None)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
        torch.autograd.backward(run())
    return found


def test_a_forward_moves_its_activations_and_leaves_parameters_and_small_tensors() -> None:
    wide = 256  # a weight is larger than what is worth moving
    model, given = two_layers(wide), samples(wide)
    is_moved = moves(model, lambda: model(given)[:1].exp().sum())
    assert is_moved == {(SAMPLES, wide): {True}, (wide, wide): {False}, (1, wide): {False}}


@pytest.mark.usefixtures("one_rank")
def test_weights_that_are_gathered_for_a_call_stay() -> None:
    from torch.distributed.fsdp import fully_shard

    wide = 256
    model, given = two_layers(wide), samples(wide).requires_grad_()
    model[0].requires_grad_(False)
    for part in (model[0], model[2], model):
        fully_shard(part)
    is_moved = moves(model, lambda: model(given).square().mean())
    assert [shape for shape, moved in is_moved.items() if True in moved] == [(SAMPLES, wide)]


def stepped_too_early(layer: nn.Linear, given: Tensor) -> Tensor:
    loss = layer(layer(given).tanh()).square().sum()
    layer.weight.detach().add_(1)  # a parameter stays where it is
    return loss


def small_one_doubled(layer: nn.Linear, given: Tensor) -> Tensor:
    return layer(given[:1]).tanh().mul_(2).sum()  # tanh saved its output


@pytest.mark.parametrize("function", [stepped_too_early, small_one_doubled])
def test_what_stays_and_is_changed_before_backward_raises_as_it_does_without(
    function: Any,
) -> None:
    layer, given = nn.Linear(WIDTH, WIDTH), samples()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(layer, given).backward()
    with module.offloaded(layer), pytest.raises(RuntimeError, match="modified in place"):
        function(layer, given).backward()


def test_what_moved_keeps_the_values_that_it_was_saved_with() -> None:
    layer, given = nn.Linear(WIDTH, WIDTH), samples()

    def gradient(*, in_place: bool) -> Tensor:
        output = layer(given).tanh()  # which saves its output
        doubled = output.mul_(2) if in_place else output * 2
        if in_place:
            doubled.data.add_(0)  # written to without a count of it
        return torch.autograd.grad(doubled.square().sum(), layer.weight)[0]

    plain = gradient(in_place=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(in_place=True)
    with module.offloaded(layer):
        assert torch.equal(gradient(in_place=True), plain)


def test_a_tensor_saved_again_after_a_write_that_nobody_counts_has_its_new_values() -> None:
    given = samples().requires_grad_()

    def gradient() -> Tensor:
        inner = given.tanh()
        unused = inner * inner
        inner.data.mul_(3)
        (gradient,) = torch.autograd.grad((inner * inner).sum(), inner)
        del unused
        return gradient

    plain = gradient()
    with module.offloaded(nn.Identity()):
        assert torch.equal(gradient(), plain)


def test_branches_that_the_loss_does_not_use_are_freed() -> None:
    """With all that their graphs saved."""
    body, gate, host = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), module._Host()
    packing = module._packing(host, nn.ModuleList([body, gate]))
    with torch.autograd.graph.saved_tensors_hooks(*packing):
        for _ in range(3):
            used = body(samples())
            unused = used.exp().sigmoid(), gate(used).sigmoid()  # whose own nodes save them
            used.square().mean().backward()
            del used, unused
    assert host._held_bytes == 0


def test_lengths_that_vary_take_no_more_than_the_longest() -> None:
    model, longest = two_layers(), 2 * SAMPLES
    held_by_one = 2**18 * 2 * 4  # four tensors of the longest at most
    host = module._Host(most_bytes=held_by_one)
    with torch.autograd.graph.saved_tensors_hooks(*module._packing(host, model)):
        for length in range(longest, longest - 20, -1):
            model(torch.randn(length, WIDTH)).square().mean().backward()
        with pytest.raises(MemoryError):
            model(torch.randn(8 * longest, WIDTH))
    assert host._held_bytes == 0


def normalized() -> Workload:
    return workload_of(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


@pytest.mark.parametrize("build", [deep, normalized])
def test_it_is_not_combined_with_compiled_code_and_pinning_costs(
    build: Callable[[], Workload],
) -> None:
    """Also of a model that normalizes over samples."""
    dimension, _ = offered(OFFLOAD, SETTING, build)
    assert dimension.values == (False, True)
    assert dimension.when == {"compile.mode": ("off", None)}
    assert dimension.trial_cost_s > 0


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
        return setattr, (Training, "host_available_bytes", 2 * module.MIN_BYTES)


@pytest.mark.slow
def test_a_host_without_room_is_the_hosts_fault() -> None:
    workload = deep()
    vars(workload.model)["host"] = Cramped()
    measured = probed(workload, True)
    assert measured.outcome is Outcome.HOST_OOM
    assert "the host's available memory" in (measured.detail or "")


def test_a_model_that_saves_little_has_nothing_to_choose() -> None:
    with pytest.raises(InvalidArgument, match=SETTING):
        probed(Workload(nn.Linear(8, 8), torch.randn(4, 8)), True)


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
