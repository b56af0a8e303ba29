"""Whatever a training does to the user's objects and to the process, `restore` undoes exactly."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from autofit.snapshot.snapshot import Snapshot, preserved
from autofit.strategy import attributes_kept
from autofit.testing.digest import differences, digest, hash_of


class Net(nn.Module):
    """Of everything that modules keep: tied weights, buffers of both kinds, caches, counters."""

    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.cache: list[torch.Tensor] = [torch.ones(2)]
        self.recent: deque[int] = deque([1, 2], maxlen=3)
        self.names: set[str] = {"a"}
        self.counts: dict[str, Any] = {"calls": 0, "inner": {"deep": [1]}}
        self.noise = torch.Generator().manual_seed(3)
        self.dice = random.Random(4)
        self.rng = numpy.random.default_rng(5)
        self.old_rng = numpy.random.RandomState(6)
        self.last: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(tokens))
        self.counts["calls"] += 1
        self.last = hidden
        return self.head(hidden)


def batch_norm(net: Net) -> Any:
    return net.body[1]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        tokens = torch.randint(0, 5, (6,))
        loss = nn.functional.cross_entropy(net(tokens), tokens)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def assert_undone(objects: dict[str, object], change: Callable[[], object]) -> None:
    """`change` is seen by the digest, and gone after `restore`."""
    before = digest(objects)
    assert differences(before, digest(objects)) == [], "the digest itself must be stable"
    snapshot = Snapshot(objects)
    change()
    assert differences(before, digest(objects)) != [], "a change that nothing sees proves nothing"
    snapshot.restore()
    assert differences(before, digest(objects)) == []


@pytest.mark.parametrize("algorithm", [torch.optim.AdamW, torch.optim.SGD])
def test_a_training_leaves_no_trace(net: Net, algorithm: Callable[..., Any]) -> None:
    optimizer = algorithm(net.parameters(), lr=0.1)
    assert_undone({"model": net, "optimizer": optimizer}, lambda: train(net, optimizer))
    assert not optimizer.state


def test_a_training_that_had_begun_goes_on_as_if_nothing_had_been(net: Net) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer)

    def continued() -> list[str]:
        with preserved({"model": net, "optimizer": optimizer}):
            train(net, optimizer, steps=3)
            return [hash_of(parameter) for parameter in net.parameters()]

    assert continued() == continued()


def hook_late(parameter: Any) -> None:
    parameter.register_post_accumulate_grad_hook(lambda _: None)


MODEL_CHANGES: dict[str, Callable[[Net], object]] = {
    "weights": lambda net: net.head.weight.data.add_(1),
    "a NaN": lambda net: net.head.weight.data.fill_(float("nan")),
    "training flag": lambda net: net.eval(),
    "one training flag": lambda net: net.body[2].eval(),
    "requires_grad": lambda net: net.head.requires_grad_(False),
    "dtype": lambda net: net.to(torch.bfloat16),
    "device": lambda net: net.to("meta"),
    "memory format": lambda net: setattr(
        net.head.weight, "data", net.head.weight.data.t().contiguous().t()
    ),
    "forward hook": lambda net: net.body.register_forward_hook(lambda *_: None),
    "backward hook": lambda net: net.body.register_full_backward_hook(lambda *_: None),
    "a parameter's hook": lambda net: net.head.weight.register_hook(lambda grad: grad),  # type: ignore[no-untyped-call]  # torch left it so
    "a parameter's late hook": lambda net: hook_late(net.head.weight),
    "a parameter's attribute": lambda net: setattr(net.head.weight, "decay", 0.1),
    "persistent buffer": lambda net: batch_norm(net).running_mean.add_(1),
    "other buffer": lambda net: net.scratch.add_(1),
    "another buffer object": lambda net: setattr(net, "scratch", torch.zeros(3)),
    "new attribute": lambda net: setattr(net, "extra", 1),
    "lost attribute": lambda net: delattr(net, "names"),
    "list": lambda net: net.cache.append(torch.zeros(1)),
    "tensor in a list": lambda net: net.cache[0].zero_(),
    "deque": lambda net: net.recent.append(3),
    "set": lambda net: net.names.add("b"),
    "nested container": lambda net: net.counts["inner"]["deep"].append(2),
    "new submodule": lambda net: net.body.append(nn.ReLU()),
    "another submodule": lambda net: net.body.__setitem__(0, nn.Linear(4, 4)),
    "untied weights": lambda net: setattr(net.head, "weight", nn.Parameter(torch.zeros(5, 4))),
    "class": lambda net: setattr(net, "__class__", nn.Module),
    "parametrization": lambda net: nn.utils.parametrizations.weight_norm(net.body[0]),
    "replaced forward": lambda net: setattr(net, "forward", lambda tokens: tokens),
    "torch generator": lambda net: torch.rand(1, generator=net.noise),
    "python generator": lambda net: net.dice.random(),
    "numpy generator": lambda net: net.rng.random(),
    "old numpy generator": lambda net: net.old_rng.rand(),
    "gradient": lambda net: setattr(net.head.weight, "grad", torch.ones(5, 4)),
}


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_undoes_changes_of_a_model(net: Net, change: str) -> None:
    assert_undone({"model": net}, lambda: MODEL_CHANGES[change](net))
    assert net.head.weight is net.embed.weight


def test_views_that_the_user_holds_stay_views() -> None:
    flat = torch.zeros(8)
    layer = nn.Linear(2, 4, bias=False)
    layer.weight.data = flat.view(4, 2)
    with preserved({"model": layer}):
        layer.to(torch.float64)
        layer.weight.data.add_(1)
    flat.add_(2)
    assert layer.weight.detach().tolist() == [[2.0, 2.0]] * 4


def test_a_buffer_whose_cells_repeat_and_one_that_a_graph_took_in_are_put_back() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("repeated", torch.ones(1).expand(4))
    layer.register_buffer("total", torch.zeros(()))
    total = layer.get_buffer("total")
    with preserved({"model": layer}):
        layer.get_buffer("repeated")[:1].mul_(3)
        total += layer.weight.square().sum() + 1
        assert not total.is_leaf
    assert layer.get_buffer("repeated").tolist() == [1.0] * 4
    assert total.item() == 0.0


def test_storage_that_was_freed_is_there_again() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    with preserved({"model": layer}):
        layer.weight.untyped_storage().resize_(0)
    assert torch.equal(layer.weight, before)


def test_a_lazy_module_is_lazy_again() -> None:
    layer = nn.LazyLinear(3)
    with preserved({"model": layer}):
        layer(torch.ones(2, 4))
        assert type(layer) is nn.Linear
    assert type(layer) is nn.LazyLinear
    assert layer.has_uninitialized_params()
    assert layer(torch.ones(2, 7)).shape == (2, 3)


def test_a_recurrent_module_keeps_its_flat_weights() -> None:
    lstm = nn.LSTM(3, 4)
    with preserved({"model": lstm}):
        lstm.to(torch.float64)
        lstm.weight_ih_l0 = nn.Parameter(torch.zeros(16, 3))
    assert lstm(torch.ones(2, 1, 3))[0].dtype is torch.float32
    assert lstm._flat_weights[0] is lstm.weight_ih_l0


def test_undoes_changes_of_an_optimizer_its_schedule_and_scaler(net: Net) -> None:
    groups: list[dict[str, Any]] = [
        {"params": [net.head.weight]},
        {"params": list(net.body.parameters()), "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    train(net, optimizer)

    def change() -> None:
        loss = net(torch.tensor([0, 1, 2])).sum()
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update(2.0)
        schedule.step()
        optimizer.param_groups[0]["lr"] = 9.0
        optimizer.add_param_group({"params": [net.cache[0]]})
        optimizer.state.clear()

    assert_undone({"model": net, "optimizer": optimizer, "s": schedule, "scaler": scaler}, change)
    assert len(optimizer.param_groups) == 2


def test_restores_when_the_body_raises(net: Net) -> None:
    before = digest({"model": net})

    def train_badly() -> None:
        with preserved({"model": net}):
            net.eval()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_badly()
    assert differences(before, digest({"model": net})) == []


def test_variables_that_stay_are_there_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads, C code among them, may read one while they are put back."""
    gone: list[str] = []
    really_unset = os.unsetenv

    def unset(name: bytes) -> None:
        gone.append(os.fsdecode(name))
        really_unset(name)

    monkeypatch.setenv("AUTOFIT_TEST_STAYS", "1")
    with preserved({}):
        monkeypatch.setenv("AUTOFIT_TEST_GOES", "1")
        monkeypatch.setattr(os, "unsetenv", unset)
    assert gone == ["AUTOFIT_TEST_GOES"]
    assert os.environ["AUTOFIT_TEST_STAYS"] == "1"


def test_the_rest_is_put_back_where_a_part_cannot_be(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    before = digest({"model": net})
    snapshot = Snapshot({"model": net})
    monkeypatch.chdir(tmp_path)
    gone.rmdir()
    with torch.no_grad():
        net.cache[0].add_(1)
    net.eval()
    with pytest.raises(ExceptionGroup):
        snapshot.restore()
    (other_folder,) = differences(before, digest({"model": net}))
    assert other_folder.startswith("cwd")


def set_precision(backend: str, operation: str, precision: str) -> None:
    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("from torch 2.9")
    getattr(getattr(torch.backends, backend), operation).fp32_precision = precision


PROCESS_CHANGES: dict[str, Callable[[], object]] = {
    "python random": random.random,
    "numpy random": numpy.random.rand,
    "torch random": lambda: torch.rand(1),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32 of convolutions": lambda: set_precision("cudnn", "conv", "ieee"),
    "mkldnn precision": lambda: set_precision("mkldnn", "matmul", "bf16"),
    "cudnn benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "reduced reductions": lambda: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast dtype": lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "global hook": lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "new variable": lambda: os.environ.update(AUTOFIT_TEST="1"),
    "lost variable": lambda: os.environ.pop("PATH"),
    "cwd": lambda: os.chdir("/"),
    "mkldnn flags": lambda: torch.backends.mkldnn.set_flags(False),  # type: ignore[no-untyped-call]  # torch left it so
    "validation of distributions": lambda: (  # torch.compile sets it
        torch.distributions.Distribution.set_default_validate_args(
            not torch.distributions.Distribution._validate_args
        )
    ),
}


@pytest.mark.usefixtures("spared_process")
@pytest.mark.parametrize("change", PROCESS_CHANGES)
def test_undoes_changes_of_the_process(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_undone({}, PROCESS_CHANGES[change])


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="from torch 2.9")
@pytest.mark.usefixtures("spared_process")
def test_flags_of_mixed_ways_to_set_tf32_are_put_back() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # from here on, the old names cannot be read
    before = digest({})
    with preserved({}):
        torch.set_float32_matmul_precision("highest")
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert before["torch.backends.cuda.matmul.fp32_precision"] == "'tf32'"


def test_attributes_that_are_kept_keep_their_order(net: Net) -> None:
    vars(net).update(first=1, second=2)
    before = digest({"model": net})
    with attributes_kept(net, "first", "third"):
        vars(net).update(first=3, third=3)
    assert vars(net)["first"] == 1
    assert differences(before, digest({"model": net})) == []


def test_differences_name_what_changed(net: Net) -> None:
    before = digest({"model": net})
    batch_norm(net).running_mean.add_(1)
    net.register_buffer("more", torch.zeros(1))
    lines = differences(before, digest({"model": net}))
    assert any(line.startswith("model.body.1.running_mean values:") for line in lines)
    assert any(line.startswith("model.more identity: absent became") for line in lines)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0.0, float("nan")]),
        torch.ones(2, 3).t(),
        torch.zeros(0),
        torch.tensor(3),
        torch.ones(2, dtype=torch.complex64),
        torch.tensor([True]),
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}",
)
def test_hashes_tell_values_apart(tensor: torch.Tensor) -> None:
    assert hash_of(tensor) == hash_of(tensor.clone())
    if tensor.numel():
        assert hash_of(tensor) != hash_of(torch.zeros_like(tensor))
