"""What the strategy for several ranks offers, writes and refuses. None of it starts a rank."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from autofit import Workload
from autofit.errors import Unsupported
from autofit.registry import load_strategies
from autofit.strategy import Capabilities
from tests.strategies.trainings import offered, training

(STRATEGY,) = load_strategies(["parallel"])
SHORT = {"parallel.communication": "bfloat16"}


def _workload() -> Workload:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    return Workload(model, torch.randn(4, 4))


def _offered(
    name: str, strategy: Any = STRATEGY, device: str = "cpu", ranks: int = 2, bfloat16: bool = True
) -> Any:
    capabilities = Capabilities(device, bfloat16=bfloat16)
    return offered(strategy, f"parallel.{name}", _workload, device, capabilities, ranks)[0]


def test_nothing_is_offered_where_one_device_trains_alone() -> None:
    assert [_offered(name, ranks=1) for name in ("mode", "accumulation")] == [None, None]


def test_plain_ddp_comes_first_and_what_is_sharded_names_its_modules() -> None:
    mode, accumulation = _offered("mode"), _offered("accumulation")
    assert mode.values == ("ddp", "ddp_view", "zero1", "fsdp2", "fsdp2_keep")
    units = {"modules": ["0", "1"]}
    assert mode.payloads == {"fsdp2": units, "fsdp2_keep": units}
    assert accumulation.values == ("once", "each")
    assert accumulation.accumulation == {"each": True}


@pytest.mark.parametrize("named", [None, ["parallel"]])
@pytest.mark.parametrize(
    ("level", "is_sharded", "communication"),
    [
        ("exact", False, None),
        ("rounding", True, ("default",)),
        ("reduced_precision", True, ("default", "bfloat16")),
    ],
)
def test_ranks_share_one_training_however_little_the_arithmetic_may_change(
    level: str, is_sharded: bool, communication: tuple[str, ...] | None, named: list[str] | None
) -> None:
    chosen = load_strategies(named, numerics=level, ranks=2)
    (strategy,) = (each for each in chosen if each.name == "parallel")
    assert strategy.numerics.name.lower() == level
    assert ("fsdp2" in _offered("mode", strategy, "meta").values) is is_sharded
    assert _offered("mode", strategy, "meta").values[:3] == ("ddp", "ddp_view", "zero1")
    short = _offered("communication", strategy, "meta")
    assert (short and short.values) == communication


@pytest.mark.parametrize(
    ("device", "bfloat16", "types"),
    [
        ("meta", True, ("default", "bfloat16")),
        ("meta", False, ("default",)),
        ("cpu", True, ("default",)),
    ],
)
def test_communication_in_bfloat16_is_for_gpus_that_have_it(
    device: str, bfloat16: bool, types: tuple[str, ...]
) -> None:
    assert _offered("communication", device=device, bfloat16=bfloat16).values == types


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"parallel.mode": "ddp"}, "DistributedDataParallel(model)"),
        ({"parallel.mode": "ddp_view"}, "gradient_as_bucket_view=True"),
        ({"parallel.mode": "zero1"}, "ZeroRedundancyOptimizer"),
        ({"parallel.mode": "fsdp2"}, "reshard_after_forward=True"),
        ({"parallel.mode": "fsdp2_keep"}, "reshard_after_forward=False"),
        ({"parallel.mode": "ddp", **SHORT}, "bf16_compress_hook"),
        ({"parallel.mode": "fsdp2", **SHORT}, "param_dtype=torch.bfloat16"),
        ({"parallel.mode": "fsdp2"}, "set_requires_gradient_sync(is_last)"),
        ({"parallel.mode": "zero1"}, "require_backward_grad_sync = is_last"),
    ],
)
def test_it_writes_what_a_user_would(settings: dict[str, Any], wanted: str) -> None:
    payloads = {"parallel.mode": {"modules": ["0", "1"]}}
    lines = STRATEGY.describe(settings, payloads)
    compile("\n".join(lines), "described", "exec")
    assert any(wanted in line for line in lines)


PASTED = """
import torch
from torch import nn

from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.report.paste import paste_lines

store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
for mode in {modes}:
    settings = {{"parallel.mode": mode, "parallel.accumulation": "once", **{settings}}}
    strategies = load_strategies(["parallel", "compile"], ranks=2)
    resolved = ResolvedPlan(Plan(2, settings=settings, ranks=2), {payloads}, strategies)
    blocks = [nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]
    model = plain = nn.Sequential(nn.Linear(4, 8), *blocks)
    exec("\\n".join(paste_lines(resolved)))
    compiled = [name for name, part in plain.named_modules() if part._compiled_call_impl]
    print(mode, type(model).__name__, *compiled)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_what_it_writes_runs_also_where_the_model_is_compiled(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    named = {
        "parallel.mode": {"modules": ["1", "2"]},
        "compile.region": {"modules": [["1", "2"]], "replicated": True},
    }
    replicated, whole = ("ddp", "ddp_view", "zero1"), {"compile.mode": "default"}
    for modes, settings, made in (
        (replicated, whole, "OptimizedModule"),
        (replicated[:1], {**whole, "compile.region": "blocks"}, "DistributedDataParallel 1 2"),
        (("fsdp2", "fsdp2_keep"), {}, "FSDPSequential"),
    ):
        script = PASTED.format(modes=modes, settings=settings, payloads=named)
        done = run_python("-c", script)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"{mode} {made}" for mode in modes]


def test_one_device_alone_is_refused() -> None:
    with pytest.raises(Unsupported, match="two ranks"):
        training(_workload().build_model(), STRATEGY, settings={"parallel.mode": "ddp"})


def _sharded(model: nn.Module) -> None:
    """As the strategy does it."""
    wrapping = import_module("autofit.strategies.parallel_wrapping")
    with training(model) as live:
        wrapping.sharded(live, ["0", "1"], keeps_gathered=False, is_short=True)


def _sharded_as_described(model: nn.Module) -> None:
    settings = {"parallel.mode": "fsdp2", **SHORT}
    lines = STRATEGY.describe(settings, {"parallel.mode": {"modules": ["0", "1"]}})
    exec("\n".join(lines), {"model": model, "torch": torch})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shard", [_sharded, _sharded_as_described])
def test_a_sharded_model_returns_outputs_in_the_type_of_its_parameters(shard: Any) -> None:
    """So that the loss is taken in it; in between it computes in bfloat16."""
    model: Any = _workload().build_model()
    types = list[torch.dtype]()
    model[1].register_forward_hook(lambda module, given, output: types.append(given[0].dtype))
    shard(model)
    assert model(torch.randn(4, 4)).dtype == torch.float32
    assert types == [torch.bfloat16]
