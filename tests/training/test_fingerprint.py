"""The fingerprint changes with what changes memory or speed, and with nothing else."""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.base import Environment
from autofit.torch_flags import computing as computing_now
from autofit.training.fingerprint import fingerprint
from autofit.training.workload import Workload

HERE = Environment("cpu", None, None, 2**34, None, None, "2.13.0", "3.11")
GPU = replace(HERE, device="cuda:0", gpu="NVIDIA H200")


class Net(nn.Module):
    """Settings that no parameter shows: how often a layer is repeated, and whether it drops."""

    def __init__(
        self, width: int = 8, repeats: int = 2, gated: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(width))
        self.repeats, self.gated, self.dropout = repeats, gated, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        for _ in range(self.repeats):
            hidden = self._again(hidden)
        return hidden

    def _again(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(hidden))


def _helper_of_another_kind(self: Net, hidden: torch.Tensor) -> torch.Tensor:
    again: torch.Tensor = self.second(hidden)
    return again.relu().exp()


def _loss(steps: int, temperature: float = 1.0) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value: torch.Tensor = sum((model(batch) for _ in range(steps)), torch.zeros(()))
        return value.mean() / temperature

    return loss


class _RepeatedLoss:
    def __init__(self, steps: int) -> None:
        self.options = {"steps": steps}

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.stack([model(batch).mean() for _ in range(self.options["steps"])]).mean()


class _Mode(Enum):
    FEW = 1
    MANY = 2


@dataclass(frozen=True)
class _Config:
    layers: int
    names: set[str]


def _mixed(helper: Callable[..., torch.Tensor]) -> nn.Module:
    mixin = type("Mixin", (), {"helper": helper})
    made: nn.Module = type("Mixed", (nn.Linear, mixin), {})(4, 4)
    return made


def _workload(model: nn.Module | Callable[[], nn.Module] | None = None, **more: Any) -> Workload:
    torch.manual_seed(0)
    return Workload(**{"model": model or Net(), "sample_batch": torch.randn(3, 4), **more})


def _digest(
    workload: Workload,
    environment: Environment = HERE,
    computing: Mapping[str, Any] | None = None,
) -> str:
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    flags = computing_now() if computing is None else computing
    return fingerprint(workload, model, optimizer, environment, flags)


def _prepared(change: Callable[[Net], object]) -> Net:
    model = Net()
    change(model)
    return model


def _adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **options)


def _two_groups(model: Net) -> torch.optim.Optimizer:
    parts = (model.first, model.second)
    return torch.optim.AdamW([{"params": list(part.parameters())} for part in parts])


MODEL = Net()
CHANGES: dict[str, Callable[[], Workload]] = {
    "nothing": _workload,
    "width": lambda: _workload(Net(width=9)),
    "repeats": lambda: _workload(Net(repeats=3)),
    "flag": lambda: _workload(Net(gated=True)),
    "dropout from none": lambda: _workload(Net(dropout=0.1)),
    "dtype": lambda: _workload(Net().double(), sample_batch=torch.randn(3, 4).double()),
    "one frozen": lambda: _workload(_prepared(lambda m: m.first.bias.requires_grad_(False))),
    "evaluation mode of a part": lambda: _workload(_prepared(lambda m: m.second.eval())),
    "buffer": lambda: _workload(_prepared(lambda m: m.register_buffer("mask", torch.ones(9)))),
    "forward of the instance": lambda: _workload(
        _prepared(lambda m: setattr(m.second, "forward", lambda x: x.exp()))
    ),
    "hook": lambda: _workload(
        _prepared(lambda m: m.second.register_forward_hook(lambda module, given, out: out + 1))
    ),
    "activation": lambda: _workload(_prepared(lambda m: setattr(m, "act", torch.relu))),
    "another activation": lambda: _workload(_prepared(lambda m: setattr(m, "act", torch.tanh))),
    "sizes": lambda: _workload(_prepared(lambda m: setattr(m, "sizes", ((1, 2), (3,))))),
    "other sizes": lambda: _workload(_prepared(lambda m: setattr(m, "sizes", ((1, 2), (4,))))),
    "mode": lambda: _workload(_prepared(lambda m: setattr(m, "mode", _Mode.FEW))),
    "another mode": lambda: _workload(_prepared(lambda m: setattr(m, "mode", _Mode.MANY))),
    "config": lambda: _workload(_prepared(lambda m: setattr(m, "config", _Config(1, {"a"})))),
    "other config": lambda: _workload(_prepared(lambda m: setattr(m, "config", _Config(2, {"a"})))),
    "config's set": lambda: _workload(_prepared(lambda m: setattr(m, "config", _Config(1, {"b"})))),
    "mixin": lambda: _workload(_mixed(lambda self, x: x)),
    "other mixin": lambda: _workload(_mixed(lambda self, x: x.exp().log())),
    "shared": lambda: _workload(_prepared(lambda m: setattr(m.first, "bias", m.second.bias))),
    "part of another class": lambda: _workload(
        _prepared(lambda m: setattr(m, "second", nn.Sequential(nn.Linear(8, 8), nn.GELU())))
    ),
    "longer samples": lambda: _workload(sample_batch=torch.randn(3, 5, 4)),
    "more samples": lambda: _workload(sample_batch=torch.randn(4, 4)),
    "sample type": lambda: _workload(sample_batch=torch.randn(3, 4).double()),
    "sample structure": lambda: _workload(sample_batch={"x": torch.randn(3, 4)}),
    "optimizer": lambda: _workload(optimizer=torch.optim.SGD),
    "optimizer option": lambda: _workload(optimizer=functools.partial(_adam, amsgrad=True)),
    "optimizer groups": lambda: _workload(MODEL, optimizer=_two_groups(MODEL)),
    "loss": lambda: _workload(loss_fn=_loss(1)),
    "criterion": lambda: _workload(criterion=nn.functional.mse_loss),
    "clipping": lambda: _workload(clip_grad_norm=1.0),
    "before_step": lambda: _workload(before_step=lambda m, o: None),
    "loss_weight": lambda: _workload(loss_weight=len),
    "global batch": lambda: _workload(global_batch=12),
}


def test_all_of_these_differ_from_each_other() -> None:
    digests = {what: _digest(make()) for what, make in CHANGES.items()}
    assert len(set(digests.values())) == len(CHANGES)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"loss_fn": _loss(1)}, {"loss_fn": _loss(2)}),
        ({"criterion": nn.CrossEntropyLoss()}, {"criterion": nn.MSELoss()}),
        (
            {"criterion": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)},
            {"criterion": nn.functional.cross_entropy},
        ),
        ({"loss_fn": lambda m, b: m(b).mean()}, {"loss_fn": lambda m, b: m(b).sum()}),
        ({"loss_fn": lambda m, b, k=1: m(b)}, {"loss_fn": lambda m, b, k=2: m(b)}),
        ({"loss_fn": _RepeatedLoss(1)}, {"loss_fn": _RepeatedLoss(2)}),
        ({"criterion": nn.CrossEntropyLoss()}, {"criterion": nn.CrossEntropyLoss(reduction="sum")}),
        ({"loss_fn": _RepeatedLoss(1).__call__}, {"loss_fn": _RepeatedLoss(2).__call__}),
        ({"loss_weight": len}, {"loss_weight": sum}),
    ],
)
def test_losses_differ_by_code_defaults_and_what_they_close_over(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert _digest(_workload(**one)) != _digest(_workload(**other))


def test_a_method_that_forward_calls_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _digest(_workload())
    monkeypatch.setattr(Net, "_again", _helper_of_another_kind)
    assert _digest(_workload()) != before


def test_torch_and_the_kind_of_device_count() -> None:
    elsewhere = [HERE, replace(HERE, torch="2.12.0"), GPU, replace(GPU, gpu="NVIDIA L4")]
    assert len({_digest(_workload(), environment) for environment in elsewhere}) == 4
    assert _digest(_workload(), replace(GPU, device="cuda:1")) == _digest(_workload(), GPU)


@pytest.mark.parametrize(
    ("flag", "other"),
    [
        ("torch.default_dtype", torch.float64),
        ("torch.float32_matmul_precision", "high"),
        ("torch.deterministic_algorithms", (True, False)),
        ("torch.backends.cudnn.benchmark", True),
        ("torch.backends.cuda.flash_sdp", False),
    ],
)
def test_how_torch_computes_counts(flag: str, other: object) -> None:
    flags = computing_now()
    assert flags[flag] != other
    assert _digest(_workload(), GPU, flags) != _digest(_workload(), GPU, {**flags, flag: other})


def test_the_allocators_options_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _digest(_workload())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert _digest(_workload()) != before


def test_a_model_whose_own_code_reaches_it_and_what_holds_itself_is_described_all_the_same() -> (
    None
):
    def reaching() -> Net:
        model, parts = Net(), dict[str, Any]()
        model.register_forward_hook(lambda module, given, output: model.second(output))
        vars(model)["parts"] = {"inner": [parts]}
        parts["own"] = parts
        return model

    assert _digest(_workload(reaching())) == _digest(_workload(reaching()))


def _with_peers(count: int, *, has_own_sets: bool, act: Callable[..., Any] = torch.relu) -> Net:
    """Return a model whose parts hold one set of them all, or each a set of the others."""
    model = Net()
    model.parts = nn.ModuleList(Net() for _ in range(count))
    peers = set(model.parts)
    for part in model.parts:
        vars(part)["peers"] = peers - {part} if has_own_sets else peers
        vars(part)["act"] = act
    return model


def _in_a_set_that_it_closes_over(steps: int) -> Callable[..., torch.Tensor]:
    handlers: set[Callable[..., torch.Tensor]] = set()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.stack([model(batch).mean() for _ in range(steps + 0 * len(handlers))]).mean()

    handlers.add(loss)
    return loss


@pytest.mark.parametrize(("count", "has_own_sets"), [(2, False), (2, True), (12, True)])
def test_parts_that_hold_sets_of_each_other_are_described(count: int, has_own_sets: bool) -> None:
    def digest(act: Callable[..., Any] = torch.relu) -> str:
        return _digest(_workload(_with_peers(count, has_own_sets=has_own_sets, act=act)))

    assert digest() == digest()
    assert digest() != digest(torch.tanh)


def test_a_function_in_a_set_that_it_closes_over_is_described() -> None:
    one, same, other = (
        _digest(_workload(loss_fn=_in_a_set_that_it_closes_over(n))) for n in (1, 1, 2)
    )
    assert one == same != other


@dataclass(eq=False)
class _Node:
    links: Any


def _chain(length: int, last: Any) -> Any:
    for _ in range(length):
        last = _Node(last)
    return last


def _nested_sets(length: int, last: Any) -> Any:
    for _ in range(length):
        last = frozenset([last])
    return last


def _held(value: Any) -> str:
    return _digest(_workload(_prepared(lambda model: setattr(model, "held", value))))


def test_a_chain_is_described_to_its_end_however_long() -> None:
    assert _held(_chain(3000, 1)) == _held(_chain(3000, 1)) != _held(_chain(3000, 2))
    assert _held(_nested_sets(3000, 1)) == _held(_nested_sets(3000, 1))


def _ring(length: int) -> set[_Node]:
    nodes = [_Node([]) for _ in range(length)]
    for place, node in enumerate(nodes):
        node.links += [nodes[place - 1], nodes[(place + 1) % length]]
    return set(nodes)


def test_elements_of_a_set_that_reach_each_other_are_described() -> None:
    assert _held(_ring(20)) == _held(_ring(20)) != _held(_ring(21))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1, "a"}, {2, "a"}),
        ({(1, "a"), (2, "b")}, {(1, "b"), (2, "a")}),
        ({torch.relu, 1}, {torch.tanh, 1}),
        ({_Mode.FEW}, {_Mode.MANY}),
        ({frozenset({(1, 2)})}, {frozenset({(1, 3)})}),
        ({_chain(2, {(1, 2)})}, {_chain(2, {(1, 3)})}),
        ({_chain(2, {torch.nn.ReLU()})}, {_chain(2, {torch.nn.GELU()})}),
    ],
)
def test_sets_differ_by_their_elements(one: Any, other: Any) -> None:
    assert _held(one) != _held(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: list(range(n)),
        lambda n: {f"token {i}": i for i in range(n // 2)},
        lambda n: {f"token {i}" for i in range(n)},
    ],
    ids=["list", "vocabulary", "set"],
)
def test_a_plain_value_costs_few_calls(make: Callable[[int], Any]) -> None:
    """Counted in calls of Python functions: a vocabulary has 100,000 such values and more."""

    def calls(value: Any) -> int:
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            _held(value)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(make(2000)) - calls(make(1000)) <= 1500


def test_a_model_whose_own_text_raises_or_shows_its_state_is_described_all_the_same() -> None:
    class Shown(Net):
        def __repr__(self) -> str:
            raise RuntimeError(f"no text, {next(counted)}")

    counted = iter(range(9))
    assert _digest(_workload(Shown)) == _digest(_workload(Shown))


def test_the_same_workload_has_it_in_every_process(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    script = Path(__file__).parents[1] / "workloads" / "print_fingerprint.py"
    printed = StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(script))  # the sets of this process have another order
    elsewhere = run_python(script, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert elsewhere.stdout == printed.getvalue(), elsewhere.stderr
    assert elsewhere.stdout.startswith("model=")


def test_values_do_not_count() -> None:
    torch.manual_seed(5)
    other = Net()
    assert not torch.equal(other.first.weight, Net().first.weight)
    same = [
        _workload(other),
        _workload(sample_batch=torch.zeros(3, 4)),
        _workload(optimizer=functools.partial(torch.optim.AdamW, lr=0.5)),
        _workload(lambda: Net()),
    ]
    assert {_digest(workload) for workload in same} == {_digest(_workload())}
    dropping = [_digest(_workload(Net(dropout=p))) for p in (0.1, 0.2)]
    assert dropping[0] == dropping[1]
    decayed = [functools.partial(torch.optim.AdamW, weight_decay=by) for by in (0.1, 0.2)]
    assert len({_digest(_workload(optimizer=optimizer)) for optimizer in decayed}) == 1
    hotter = [_digest(_workload(loss_fn=_loss(1, t))) for t in (0.5, 2.0)]
    assert hotter[0] == hotter[1]
    clipped = [_digest(_workload(clip_grad_norm=norm)) for norm in (0.5, 2.0)]
    assert clipped[0] == clipped[1]
