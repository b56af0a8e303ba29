"""compile: calls of the model or of its blocks compiled, at what cost, and how it ends if not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.devices.cpu import CpuDevice
from autofit.errors import InvalidArgument, Unsupported
from autofit.measurement import Outcome
from autofit.plan import Dimension, Plan, ResolvedPlan
from autofit.probing.probe import probe_if
from autofit.registry import load_strategies
from autofit.space import Space
from autofit.strategy import World
from autofit.testing import PlainContext
from autofit.training.builder import TrainingBuilder
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload
from autofit.units import MIB

COMPILE: Any = load_strategies(["compile"])[0]
MODE, REGION, BUDGET = "compile.mode", "compile.region", "compile.memory_budget"
PLAN = ResolvedPlan(Plan(4, settings={MODE: "default"}), {}, (COMPILE,))


class Model(nn.Module):
    """A perceptron whose forward is broken up where it is told to look at its values."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.looks = nn.Linear(8, 64), nn.Linear(64, 8), looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.first(x))
        if self.looks:
            inner.sum().item()
        output: torch.Tensor = self.last(inner)
        return output.square().mean()


def workload(looks: bool = False, samples: int = 4, **given: Any) -> Workload:
    torch.manual_seed(0)
    return Workload(Model(looks), torch.randn(samples, 8), **given)


def offered(**given: Any) -> tuple[list[Any], list[str]]:
    context = PlainContext(lambda: workload(**given))
    return list(COMPILE.dimensions(context)[MODE].values), context.notes


def test_it_is_offered_at_a_cost_that_grows_with_the_model() -> None:
    small = COMPILE.dimensions(PlainContext(workload))[MODE]
    assert list(small.values) == ["off", "default"]
    assert small.fresh_worker
    assert small.when == {"checkpointing.level": (0, None)}
    layers = [nn.Linear(8, 8) for _ in range(20)]
    large = COMPILE.dimensions(
        PlainContext(lambda: Workload(nn.Sequential(*layers), torch.ones(4, 8)))
    )[MODE]
    assert large.trial_cost_s > small.trial_cost_s > 10


@pytest.mark.cuda
def test_a_gpu_has_cuda_graphs_too() -> None:
    context = PlainContext(lambda: Workload(Model(), torch.ones(4, 8, device="cuda")), "cuda")
    mode = COMPILE.dimensions(context)[MODE]
    assert list(mode.values)[1:] == ["default", "reduce-overhead"]
    assert mode.accumulation == {"reduce-overhead": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "micro_batch"), [("reduce-overhead", 2), ("reduce-overhead", 4), ("default", 2)]
)
def test_cuda_graphs_refuse_to_add_gradients_up(mode: str, micro_batch: int) -> None:
    """Each replay writes its gradients over those of the last."""
    plan = ResolvedPlan(Plan.split(4, micro_batch, settings={MODE: mode}), {}, (COMPILE,))
    refused = mode == "reduce-overhead" and micro_batch == 2
    with TrainingBuilder(workload, CpuDevice(), 0).training(workload(), plan) as training:
        with pytest.raises(Unsupported, match="169545") if refused else nullcontext():
            training.step(workload().batch(4))
        with torch.no_grad():  # as an evaluation
            training.loss(workload().batch(4))


def test_without_a_compiler_it_is_empty_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert offered() == (
        ["off"],
        ["compile.mode skipped: no C++ compiler found (no-such-compiler)"],
    )
    assert "no-such-compiler" in str(COMPILE.unavailable("cpu"))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert offered()[0] == ["off"]


def test_what_never_calls_the_model_is_left_alone() -> None:
    def step(training: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = training.model.first(batch).mean()
        training.backward(loss)
        training.optimizer_step()
        return loss

    values, notes = offered(training_step=step)
    assert values == ["off"]
    assert "does not call the model" in notes[0]


class Block(nn.Module):
    """x -> x: a perceptron with batch normalization; it notes the shapes that run as written."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, inner), nn.Linear(inner, 8)
        self.norm, self.eager = nn.BatchNorm1d(8), list[tuple[int, ...]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.eager.append(tuple(x.shape))
        mixed: torch.Tensor = self.last(nn.functional.gelu(self.first(x))).flatten(0, -2)
        return x + self.norm(mixed).reshape(x.shape)


class Blocks(nn.Module):
    """Ten blocks of one kind and two of another, between layers that do not repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(16 if number < 10 else 32) for number in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output.square().mean()


NAMES = [f"blocks.{number}" for number in range(12)]
PAYLOADS = {REGION: {"modules": [NAMES[:10], NAMES[10:]]}}
OF_BLOCKS = {MODE: "default", REGION: "blocks"}


def of_blocks(samples: int = 27) -> Workload:
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=1e-3)  # a gradient of noise moves nothing
    return Workload(Blocks(), torch.randn(samples, 8), optimizer=optimizer)


def test_blocks_that_repeat_may_be_compiled_alone_for_less() -> None:
    dimensions = COMPILE.dimensions(PlainContext(of_blocks))
    space = Space(dimensions, 27)
    costs = {
        variant[REGION]: space.trial_cost_s(variant)
        for variant in space.variants()
        if variant[MODE] != "off"
    }
    assert 10 < costs["blocks"] < 0.8 * costs["whole"]
    assert dimensions[REGION].payloads == {"blocks": PAYLOADS[REGION]}
    plain = {MODE: "off", REGION: "whole", BUDGET: 1.0}
    assert [each for each in space.variants() if each[MODE] == "off"] == [plain]
    assert list(COMPILE.dimensions(PlainContext(workload))[REGION].values) == ["whole"]


def test_budgets_fall_and_are_how_compiled_plans_alone_recompute() -> None:
    budget = COMPILE.dimensions(PlainContext(of_blocks))[BUDGET]
    assert budget.values[0] == 1.0
    assert budget.is_ordered
    assert budget.when == {MODE: ("default",)}
    held = [budget.hints[value].bytes_per_sample for value in budget.values[1:]]
    assert 1.0 > held[0] > held[-1]
    of_the_model = COMPILE.dimensions(PlainContext(workload))[BUDGET]
    assert of_the_model.when == {MODE: ("default",)}
    assert set(of_the_model.values) < set(budget.values)


def test_of_several_ranks_blocks_are_compiled_where_each_holds_the_model() -> None:
    context = PlainContext(of_blocks)
    context._builder = replace(context._builder, world=World(size=2))
    region = COMPILE.dimensions(context)[REGION]
    assert "fsdp2" not in region.when["parallel.mode"]
    lines = COMPILE.describe(OF_BLOCKS, {REGION: region.payloads["blocks"]})
    assert "model.module.get_submodule(name)" in lines[-1]


def test_on_a_cpu_blocks_alone_are_tried_only_where_they_are_named() -> None:
    dimensions = COMPILE.dimensions(PlainContext(of_blocks))
    assert dimensions[REGION].opt_in
    assert not dimensions[MODE].opt_in
    left = {**dimensions, REGION: Dimension(dimensions[REGION].values[:1])}  # where none is named
    budgets = {v[BUDGET] for v in Space(left, 4).variants() if v[MODE] == "default"}
    assert budgets == set(dimensions[BUDGET].values)


def test_blocks_that_a_model_lacks_are_refused_by_name() -> None:
    payloads = {REGION: {"modules": [["nowhere.0", "nowhere.1"]]}}
    plan = ResolvedPlan(Plan(27, settings=OF_BLOCKS), payloads, (COMPILE,))
    builder = TrainingBuilder(of_blocks, CpuDevice(), 0)
    with (
        pytest.raises(InvalidArgument, match="nowhere"),
        builder.training(of_blocks(), plan),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "apart"),
    [
        (OF_BLOCKS, 1e-4),
        ({**OF_BLOCKS, BUDGET: 0.05}, 1e-4),
        ({**OF_BLOCKS, BUDGET: 0.05, "precision.dtype": "bfloat16"}, 0.05),
    ],
)
def test_blocks_share_their_code_and_train_as_they_are(
    settings: dict[str, Any], apart: float
) -> None:
    """In uneven micro-batches, through batch normalization, and with a hook on a block."""

    def trained(settings: dict[str, Any]) -> tuple[nn.Module, list[float], Any, list[int]]:
        plan = Plan.split(27, 14, settings=settings)
        builder, seen = TrainingBuilder(of_blocks, CpuDevice(), 0), list[int]()
        resolved = ResolvedPlan(plan, PAYLOADS, load_strategies(["compile", "precision"]))
        with builder.training(of_blocks(), resolved) as training:
            model: Any = training.model
            parts, names = list(model.modules()), list(model.state_dict())
            model.blocks[3].first.register_forward_hook(lambda *_: seen.append(1))
            losses = [float(training.step(of_blocks().batch(27))) for _ in range(3)]
            assert list(model.modules()) == parts
            assert list(model.state_dict()) == names
            compiled = [n for n, m in model.named_modules() if "_compiled_call_impl" in vars(m)]
            assert compiled == (NAMES if MODE in settings else [])
            notes = training.notes()
        assert not any("_compiled_call_impl" in vars(part) for part in parts)
        return model, losses, notes, seen

    plain, eager, _, all_seen = trained(
        {n: v for n, v in settings.items() if n == "precision.dtype"}
    )
    model, losses, notes, seen = trained(settings)
    assert losses == pytest.approx(eager, rel=apart)
    for (name, one), other in zip(
        plain.state_dict().items(), model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=10 * apart, atol=apart, msg=name)
    assert seen == all_seen  # the block with a hook runs as it is written
    blocks: Any = model.blocks
    assert not any(block.eager for number, block in enumerate(blocks) if number != 3)
    graphs = int(notes[0].split()[1])
    assert graphs <= 2 * 2  # for two sizes and two kinds


@pytest.mark.slow
def test_no_length_runs_blocks_eagerly() -> None:
    plan = ResolvedPlan(Plan(4, settings=OF_BLOCKS), PAYLOADS, (COMPILE,))
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    recipe = Recipe(loss_fn=lambda net, batch: net(batch))
    batches = [torch.randn(4, 2 + length, 8) for length in range(20)]
    with Training(model, optimizer, recipe, plan, device=torch.device("cpu")) as training:
        losses = [float(training.loss(each)) for each in batches]
    blocks: Any = model.blocks
    assert not any(block.eager for block in blocks)
    assert losses == pytest.approx([float(model(each)) for each in batches], rel=1e-4)


def test_blocks_of_torch_evaluate_nested_tensors_as_they_are_written() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()  # nests padded samples in evaluation
    padding = torch.tensor([[False, False, False], [False, True, True]])
    words = torch.randn(2, 3, 8)
    payloads = {REGION: {"modules": [["layers.0", "layers.1"]]}}
    plan = ResolvedPlan(Plan(2, settings=OF_BLOCKS), payloads, (COMPILE,))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with torch.no_grad():
        plain = model(words, src_key_padding_mask=padding)
        with Training(model, optimizer, Recipe(), plan, device=torch.device("cpu")):
            ours = model(words, src_key_padding_mask=padding)
    torch.testing.assert_close(ours, plain)


def compiled() -> nn.Module:
    model = Model()
    model.compile()
    return model


def traced() -> Any:
    script: Any = torch.jit
    return script.trace(Model(), torch.randn(4, 8))


@pytest.mark.parametrize(
    "context",
    [
        PlainContext(lambda: Workload(compiled, torch.randn(4, 8))),
        PlainContext(lambda: Workload(traced, torch.randn(4, 8))),
        PlainContext(workload, "meta"),
    ],
    ids=["compiled", "traced", "dry run"],
)
def test_a_compiled_model_and_a_dry_run_are_left_alone(context: PlainContext) -> None:
    assert list(COMPILE.dimensions(context)[MODE].values) == ["off"]


def test_the_lines_to_paste_compile_the_model() -> None:
    assert COMPILE.describe({MODE: "off"}, {}) == []
    assert COMPILE.describe({MODE: "default"}, {}) == [
        "import torch",
        "model = torch.compile(model)",
    ]
    assert COMPILE.describe({**OF_BLOCKS, BUDGET: 0.5}, PAYLOADS) == [
        "from autofit.strategies.memory_budget import within_budget",
        "within = within_budget(0.5)",
        f"for name in {NAMES}:",
        "    model.get_submodule(name).compile(backend=within)",
    ]


def of_torch() -> Workload:
    blocks = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(12))
    return Workload(
        nn.Sequential(*blocks), (torch.randn(4, 8), torch.randn(4, 8)), criterion=nn.MSELoss()
    )


@pytest.mark.slow
def test_the_lines_to_paste_compile_classes_of_torch_too() -> None:
    """`Module.compile` compiles nothing of them."""
    region = COMPILE.dimensions(PlainContext(of_torch))[REGION]
    model = of_torch().build_model()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    lines = COMPILE.describe({**OF_BLOCKS, BUDGET: 0.5}, {REGION: region.payloads["blocks"]})
    exec("\n".join(lines), {"model": model})
    model(torch.randn(4, 8)).sum().backward()
    # The input of the first needs no gradient
    assert before < counters["unique_graphs"] <= before + 2


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [OF_BLOCKS, {MODE: "default", BUDGET: 0.5}])
def test_the_lines_to_paste_train(chosen: dict[str, Any]) -> None:
    model: Any = Blocks()
    found = {"model": model}
    exec("\n".join(COMPILE.describe(chosen, PAYLOADS)), found)
    found["model"](torch.randn(4, 8)).backward()
    assert not any(block.eager for block in model.blocks)


@pytest.mark.slow
def test_a_compiled_training_is_accounted_for_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # an earlier test may set them
        monkeypatch.delenv(name, raising=False)
    device = CpuDevice()
    builder = TrainingBuilder(workload, device, 0)
    batch = workload().batch(4)
    device.limit(64 * MIB)
    with builder.training(workload(), ResolvedPlan(Plan(4))) as plain:
        eager_loss = plain.step(batch)
        assert plain.notes() == ()
    variables = dict(os.environ)  # torch's optimizers import parts that set some
    with device.accounting(), builder.training(workload(), PLAN) as training:
        assert "_compiled_call_impl" in vars(training.model)
        losses = [training.step(batch) for _ in range(2)]
        before = device.read().allocated_bytes
        device.reset_peaks()
        losses.append(training.step(batch))
        seen = device.read()
        notes = training.notes()
    assert notes == ("compile: 1 graphs, 0 graph breaks, 0 recompilations",)
    torch.testing.assert_close(losses[0], eager_loss)
    assert losses[2] < losses[0]
    assert seen.allocated_bytes - before <= 512  # one loss more
    # the kept product of the first layer, and the gradients of all parameters
    least = 4 * 64 * 4 + sum(p.nbytes for p in training.model.parameters())
    assert seen.peak_allocated_bytes - before >= least
    assert "_compiled_call_impl" not in vars(training.model)
    assert not any(vars(parameter) for parameter in training.model.parameters())
    assert dict(os.environ) == variables


@pytest.mark.slow
def test_a_second_worker_and_the_users_own_training_start_warm(
    run_python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch

import autofit
from autofit.plan import ResolvedPlan
from autofit.probing.compiler_cache import CacheUse
from autofit.registry import load_strategies
from autofit.training.training import Training


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.nn.functional.gelu(self.layer(x)).mean()


if __name__ == "__main__":
    plain, compiled = autofit.Plan(4), autofit.Plan(4, settings={"compile.mode": "default"})
    model, batch = Model(), torch.randn(4, 8)
    workload = autofit.Workload(model, batch)
    for plan in (plain, compiled, compiled):
        measured = autofit.probe(workload, plan=plan, device="cpu").measurement
        print(measured.start_is_warm, end=" ")
    cache = CacheUse()
    optimizer = torch.optim.AdamW(model.parameters())
    resolved = ResolvedPlan(compiled, {}, tuple(load_strategies(["compile"])))
    device = torch.device("cpu")
    with Training(model, optimizer, workload.recipe, resolved, device=device) as training:
        training.step(batch)
    print(cache.is_warm())
"""
    )
    ran = run_python(script, forks_workers=False)
    assert ran.stdout.split() == ["None", "False", "True", "True"], ran.stderr


@pytest.mark.slow
def test_graph_breaks_are_counted_and_named() -> None:
    trial = autofit.probe(workload(looks=True), plan=PLAN.plan, device="cpu")
    first, *others = trial.measurement.notes
    assert first.startswith("compile: 2 graphs, ")
    assert " 0 graph breaks" not in first
    assert any("graph break (" in note and "item" in note for note in others), others
    assert (trial.measurement.start_up_s or 0) > 0


class Counting(Model):
    """Keeps the number of its calls, which dynamo takes for a constant."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.slow
def test_recompilations_are_counted_and_their_cause_named_once() -> None:
    def counting() -> Workload:
        return Workload(Counting(), torch.randn(4, 8))

    builder = TrainingBuilder(counting, CpuDevice(), 0)
    with builder.training(counting(), PLAN) as training:
        for _ in range(4):
            training.step(counting().batch(4))
        notes = training.notes()
    assert notes[0] == "compile: 4 graphs, 0 graph breaks, 3 recompilations"
    assert len(notes) == 2, notes
    cause = notes[1]
    assert cause.startswith("compile: recompiled (3 x): ")
    assert "self.calls += 1" in cause


class Watched(Model):
    """Notes the shapes that it runs eagerly on."""

    def __init__(self) -> None:
        super().__init__()
        self.eager: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.eager.append(tuple(x.shape))
        return super().forward(x)


@dataclass
class Sentence:
    words: torch.Tensor


class OfSentences(Watched):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x.words)


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "lengths": [(4, 2 + length, 8) for length in range(32)],
    "sizes": [(2 + size, 8) for size in range(20)],
    "lengths and sizes": [(2 + number % 5, 2 + number, 8) for number in range(20)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("make", [Watched, OfSentences])
def test_no_length_and_no_size_runs_eagerly(make: Callable[[], Watched], kind: str) -> None:
    model = make()
    batches = [torch.randn(shape) for shape in SHAPES[kind]]
    given: list[Any] = [Sentence(each) for each in batches] if make is OfSentences else batches
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    recipe = Recipe(loss_fn=lambda net, batch: net(batch))
    with Training(model, optimizer, recipe, PLAN, device=torch.device("cpu")) as training:
        compiled = [float(training.loss(each)) for each in given * 2]
        (note,) = training.notes()
    assert model.eager == []
    assert "0 graph breaks" in note
    plain = [float(model(each)) for each in given * 2]
    assert compiled == pytest.approx(plain, rel=1e-5)


def _assert_alike(training: Training, twin: nn.Module, images: torch.Tensor) -> None:
    """The gradients of a training's loss are those of its model's plain twin."""
    training.plain_model.zero_grad()
    twin.zero_grad()
    training.loss(images).backward()  # type: ignore[no-untyped-call]  # torch
    twin(images).backward()
    for ours, plain in zip(training.plain_model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-4)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        places = self.convolution(images).relu().flatten(2).transpose(1, 2)
        loss: torch.Tensor = self.head(places).relu().square().mean()
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_convolutions_of_lengths_that_change_train(
    budget: float, memory_format: torch.memory_format
) -> None:
    model = Convolved().to(memory_format=memory_format)  # type: ignore[call-overload]  # torch's
    twin = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    recipe = Recipe(loss_fn=lambda net, batch: net(batch))
    plan = replace(PLAN, plan=Plan(4, settings={MODE: "default", BUDGET: budget}))
    with Training(model, optimizer, recipe, plan, device=torch.device("cpu")) as training:
        for length in (2, 9, 16, 3):
            images = torch.randn(4, 3, 6, length).to(memory_format=memory_format)
            _assert_alike(training, twin, images)


@pytest.mark.slow
def test_the_size_of_the_micro_batch_keeps_code_of_its_own() -> None:
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    recipe = Recipe(loss_fn=lambda net, batch: net(batch))
    with Training(model, optimizer, recipe, PLAN, device=torch.device("cpu")) as training:
        for size in (4, 3, 4):
            training.loss(torch.randn(size, 8))
        (note,) = training.notes()
    assert note == "compile: 2 graphs, 0 graph breaks, 0 recompilations"


@pytest.mark.slow
def test_what_is_compiled_too_often_is_said_to_run_eagerly() -> None:
    def counting() -> Workload:
        return Workload(Counting(), torch.randn(4, 8))

    builder = TrainingBuilder(counting, CpuDevice(), 0)
    with builder.training(counting(), PLAN) as training:
        for _ in range(12):
            training.step(counting().batch(4))
        assert any("run eagerly" in note for note in training.notes())


@pytest.mark.slow
def test_a_compiler_that_fails_makes_a_plan_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    trial = autofit.probe(workload(samples=5), plan=Plan(5, settings={MODE: "default"}))
    assert trial.measurement.outcome is Outcome.UNSUPPORTED
    assert "compiler (" in str(trial.measurement.detail)
    monkeypatch.setenv("CXX", "no-such-compiler")
    payloads: dict[str, Any] = {MODE: None}
    plan = Plan(5, settings={MODE: "default"})
    trial = probe_if(lambda survey: None, workload(samples=5), plan=plan, payloads=payloads)
    assert trial.measurement.outcome is Outcome.UNSUPPORTED
    assert "no-such-compiler" in str(trial.measurement.detail)


@pytest.mark.slow
def test_a_model_of_a_script_is_compiled_with_its_globals(run_python: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
from torch.nn import functional as F

import autofit


class Inner(torch.nn.Linear):
    def forward(self, x):
        return F.gelu(super().forward(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner(8, 8)

    def forward(self, x):
        return F.softplus(self.inner(x)).mean()


if __name__ == "__main__":
    plan = autofit.Plan(4, settings={"compile.mode": "default"})
    trial = autofit.probe(autofit.Workload(Model(), torch.randn(4, 8)), plan=plan, device="cpu")
    print(trial.measurement.outcome.value, *trial.measurement.notes)
"""
    )
    ran = run_python(script, forks_workers=False)
    assert ran.stdout == "ok compile: 1 graphs, 0 graph breaks, 0 recompilations\n", ran.stderr


@torch.library.custom_op("autofit_tests::of_given_lengths", mutates_args=())
def of_given_lengths(places: torch.Tensor) -> torch.Tensor:
    """Twice the input; inductor's lowering below has code for given shapes alone."""
    return places * 2


@of_given_lengths.register_fake
def _(places: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(places)


of_given_lengths.register_autograd(lambda _, gradient: gradient * 2)


def _lower_of_given_lengths(places: Any) -> Any:
    from torch._inductor.lowering import lowerings

    if not all(size.is_Integer for size in places.get_size()):
        raise NotImplementedError("no code for lengths that change")
    return lowerings[torch.ops.aten.mul.Tensor](places, 2)


@pytest.fixture
def _lowered() -> Iterator[None]:
    from torch._inductor.lowering import lowerings, register_lowering

    operator = torch.ops.autofit_tests.of_given_lengths.default
    register_lowering(operator)(_lower_of_given_lengths)
    yield
    del lowerings[operator]


class Pooled(nn.Module):
    """Inductor has code for given lengths alone; what it has seen is counted in a buffer."""

    calls: torch.Tensor

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        # Before a BatchNorm the gradient of a bias is nothing but rounding
        self.convolution = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        places = self.norm(self.convolution(images))
        if self.breaks:
            torch._dynamo.graph_break()  # what is before it has run when the rest fails
        smaller = nn.functional.avg_pool2d(places, 2)
        if len(images[0, 0]) % 2 == 0:  # so that torch compiles again where this changes
            smaller = smaller * 1.5
        loss: torch.Tensor = of_given_lengths(smaller).square().mean()
        return loss


@pytest.mark.slow
@pytest.mark.usefixtures("_lowered")
@pytest.mark.parametrize(("budget", "breaks"), [(1.0, False), (1.0, True), (0.5, False)])
def test_what_cannot_be_compiled_for_any_length_runs_as_it_is_written(
    budget: float, breaks: bool
) -> None:
    model = Pooled(breaks)
    twin = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    recipe = Recipe(loss_fn=lambda net, batch: net(batch))
    plan = replace(PLAN, plan=Plan(4, settings={MODE: "default", BUDGET: budget}))
    errors = torch._dynamo.config.suppress_errors
    with Training(model, optimizer, recipe, plan, device=torch.device("cpu")) as training:
        for length in (9, 12, 7, 9, 23):
            images = torch.randn(4, 3, length, length + 3)
            _assert_alike(training, twin, images)
        graphs, *_, failed = training.notes()
    assert graphs.startswith(f"compile: {4 if breaks else 2} graphs")  # it is tried once
    assert "runs as it is written" in failed
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)  # nothing ran twice
    assert torch._dynamo.config.suppress_errors is errors
