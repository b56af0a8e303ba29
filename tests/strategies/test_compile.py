"""compile: calls of the model or of its blocks compiled, at what cost, and how it ends if not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit import Dimension, InvalidArgument, Outcome, Plan, Training, Workload
from autofit.devices.cpu import CpuDevice
from autofit.errors import Unsupported
from autofit.plan import ResolvedPlan
from autofit.probing.probe import probe_if
from autofit.registry import load_strategies
from autofit.space import Space
from autofit.testing import PlainContext
from autofit.training.builder import TrainingBuilder
from autofit.training.loss import Recipe
from autofit.units import MIB
from tests.strategies.trainings import in_place, offered as offers, training

COMPILE: Any = load_strategies(["compile"])[0]
MODE, REGION, BUDGET = "compile.mode", "compile.region", "compile.memory_budget"
NAMES = [f"blocks.{number}" for number in range(12)]
PAYLOADS = {REGION: {"modules": [NAMES[:10], NAMES[10:]]}}
OF_MODEL, OF_BLOCKS = {MODE: "default"}, {MODE: "default", REGION: "blocks"}
OWN_LOSS = Recipe(loss_fn=lambda model, batch: model(batch))


class Model(nn.Module):
    """A perceptron that notes the shapes that run as written.

    Args:
        looks: break its forward up, to look at its values.
    """

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.looks = nn.Linear(8, 64), nn.Linear(64, 8), looks
        self.eager = list[tuple[int, ...]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.eager.append(tuple(x.shape))
        inner = nn.functional.gelu(self.first(x))
        if self.looks:
            inner.sum().item()
        return self.last(inner).square().mean()


def workload(kind: Callable[[], nn.Module] = Model, samples: int = 4, **given: Any) -> Workload:
    torch.manual_seed(0)
    return Workload(kind(), torch.randn(samples, 8), **given)


class Block(nn.Module):
    """x -> x: a perceptron with batch normalization; it notes the shapes that run as written."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, inner), nn.Linear(inner, 8)
        self.norm, self.eager = nn.BatchNorm1d(8), list[tuple[int, ...]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.eager.append(tuple(x.shape))
        mixed = self.last(nn.functional.gelu(self.first(x))).flatten(0, -2)
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
        return self.head(x).square().mean()


def of_blocks() -> Workload:
    optimizer = partial(torch.optim.SGD, lr=1e-3)  # a gradient of noise moves nothing
    return workload(Blocks, 27, optimizer=optimizer)


def started(build: Callable[[], Workload], settings: dict[str, Any], micro_batch: int = 4) -> Any:
    """Return a training on the CPU as a probe has it, in micro-batches of that size."""
    made = build()
    plan = Plan.split(made.sample_batch_size, micro_batch, settings=settings)
    resolved = ResolvedPlan(plan, PAYLOADS, load_strategies(["compile", "precision"]))
    return TrainingBuilder(build, CpuDevice(), 0).training(made, resolved)


def training_of(model: nn.Module, settings: dict[str, Any]) -> Training:
    """Return a training that leaves the weights."""
    still = torch.optim.SGD(model.parameters(), 0.0)
    return training(
        model, COMPILE, optimizer=still, payloads=PAYLOADS, recipe=OWN_LOSS, settings=settings
    )


def modes(build: Callable[[], Workload], device: str = "cpu") -> tuple[list[Any], list[str]]:
    mode, notes = offers(COMPILE, MODE, build, device)
    return list(mode.values), notes


@pytest.fixture(scope="module")
def of_model() -> Any:
    return COMPILE.dimensions(PlainContext(workload))


@pytest.fixture(scope="module")
def offered() -> Any:
    return COMPILE.dimensions(PlainContext(of_blocks))


def test_it_is_offered_at_a_cost_that_grows_with_the_model(
    of_model: Any,
) -> None:
    small = of_model[MODE]
    assert small.values == ("off", "default")
    assert small.fresh_worker
    assert small.when == {"checkpointing.level": (0, None)}
    layers = [nn.Linear(8, 8) for _ in range(20)]
    large, _ = offers(COMPILE, MODE, lambda: Workload(nn.Sequential(*layers), torch.ones(4, 8)))
    assert large.trial_cost_s > small.trial_cost_s > 10


@pytest.mark.cuda
def test_a_gpu_has_cuda_graphs_too() -> None:
    mode, _ = offers(COMPILE, MODE, workload, "cuda")
    assert list(mode.values)[1:] == ["default", "reduce-overhead"]
    assert mode.accumulation == {"reduce-overhead": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "micro_batch"), [("reduce-overhead", 2), ("reduce-overhead", 4), ("default", 2)]
)
def test_cuda_graphs_refuse_to_add_gradients_up(mode: str, micro_batch: int) -> None:
    """Each replay writes its gradients over those of the last."""
    refused = mode == "reduce-overhead" and micro_batch == 2
    with started(workload, {MODE: mode}, micro_batch) as live:
        with pytest.raises(Unsupported, match="169545") if refused else nullcontext():
            live.step(workload().batch(4))
        with torch.no_grad():  # as an evaluation
            live.loss(workload().batch(4))


def test_without_a_compiler_it_is_empty_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    why = ["compile.mode skipped: no C++ compiler found (no-such-compiler)"]
    assert modes(workload) == (["off"], why)
    assert "no-such-compiler" in str(COMPILE.unavailable("cpu"))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert modes(workload)[0] == ["off"]


def test_what_never_calls_the_model_is_left_alone() -> None:
    def step(training: Any, batch: Any) -> torch.Tensor:
        loss = training.model.first(batch).mean()
        training.backward(loss)
        training.optimizer_step()
        return loss

    values, notes = modes(partial(workload, training_step=step))
    assert values == ["off"]
    assert "does not call the model" in notes[0]


def test_blocks_that_repeat_may_be_compiled_alone_for_less(offered: Any, of_model: Any) -> None:
    space = Space(offered, 27)
    variants = list(space.variants())
    costs = {each[REGION]: space.trial_cost_s(each) for each in variants if each[MODE] != "off"}
    assert 10 < costs["blocks"] < 0.8 * costs["whole"]
    assert offered[REGION].payloads == {"blocks": PAYLOADS[REGION]}
    plain = {MODE: "off", REGION: "whole", BUDGET: 1.0}
    assert [each for each in variants if each[MODE] == "off"] == [plain]
    assert list(of_model[REGION].values) == ["whole"]


def test_budgets_fall_and_are_how_compiled_plans_alone_recompute(
    offered: Any, of_model: Any
) -> None:
    budget = offered[BUDGET]
    assert budget.values[0] == 1.0
    assert budget.is_ordered
    assert budget.when == of_model[BUDGET].when == {MODE: ("default",)}
    held = [budget.hints[value].bytes_per_sample for value in budget.values[1:]]
    assert 1.0 > held[0] > held[-1]
    assert set(of_model[BUDGET].values) < set(budget.values)


def test_of_several_ranks_blocks_are_compiled_where_each_holds_the_model() -> None:
    region, _ = offers(COMPILE, REGION, of_blocks, ranks=2)
    assert "fsdp2" not in region.when["parallel.mode"]
    lines = COMPILE.describe(OF_BLOCKS, {REGION: region.payloads["blocks"]})
    assert "model.module.get_submodule(name)" in lines[-1]


def test_on_a_cpu_blocks_alone_are_tried_only_where_they_are_named(
    offered: Any,
) -> None:
    assert offered[REGION].opt_in
    assert not offered[MODE].opt_in
    left = {**offered, REGION: Dimension(offered[REGION].values[:1])}  # where none is named
    budgets = {v[BUDGET] for v in Space(left, 4).variants() if v[MODE] == "default"}
    assert budgets == set(offered[BUDGET].values)


def test_blocks_that_a_model_lacks_are_refused_by_name() -> None:
    payloads = {REGION: {"modules": [["nowhere.0", "nowhere.1"]]}}
    with pytest.raises(InvalidArgument, match="nowhere"):
        training(Blocks(), COMPILE, payloads=payloads, settings=OF_BLOCKS)


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

    def trained(settings: dict[str, Any]) -> tuple[Any, list[float], Any, list[int]]:
        with started(of_blocks, settings, 14) as live:
            model, seen = live.model, list[int]()
            parts, names = list(model.modules()), list(model.state_dict())
            model.blocks[3].first.register_forward_hook(lambda *_: seen.append(1))
            losses = [float(live.step(of_blocks().batch(27))) for _ in range(3)]
            assert list(model.modules()) == parts
            assert list(model.state_dict()) == names
            compiled = [n for n, m in model.named_modules() if "_compiled_call_impl" in vars(m)]
            assert compiled == (NAMES if MODE in settings else [])
            notes = live.notes()
        assert not any("_compiled_call_impl" in vars(part) for part in parts)
        return model, losses, notes, seen

    as_written = {n: v for n, v in settings.items() if n == "precision.dtype"}
    plain, eager, _, all_seen = trained(as_written)
    model, losses, notes, seen = trained(settings)
    assert losses == pytest.approx(eager, rel=apart)
    torch.testing.assert_close(
        dict(model.state_dict()), dict(plain.state_dict()), rtol=10 * apart, atol=apart
    )
    assert seen == all_seen  # the block with a hook runs as it is written
    assert not any(block.eager for number, block in enumerate(model.blocks) if number != 3)
    assert int(notes[0].split()[1]) <= 2 * 2  # graphs, for two sizes and two kinds


def test_blocks_of_torch_evaluate_nested_tensors_as_they_are_written() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()  # nests padded samples in evaluation
    padding = torch.tensor([[False, False, False], [False, True, True]])
    words = torch.randn(2, 3, 8)
    payloads = {REGION: {"modules": [["layers.0", "layers.1"]]}}
    with torch.no_grad():
        plain = model(words, src_key_padding_mask=padding)
        with training(model, COMPILE, payloads=payloads, settings=OF_BLOCKS):
            ours = model(words, src_key_padding_mask=padding)
    torch.testing.assert_close(ours, plain)


def compiled() -> nn.Module:
    return in_place(Model())


def traced() -> Any:
    return torch.jit.trace(nn.Linear(8, 8), torch.randn(4, 8))  # type: ignore[no-untyped-call]  # torch's


@pytest.mark.parametrize(("kind", "device"), [(compiled, "cpu"), (traced, "cpu"), (Model, "meta")])
def test_a_compiled_model_and_a_dry_run_are_left_alone(kind: Any, device: str) -> None:
    assert modes(partial(workload, kind), device)[0] == ["off"]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({MODE: "off"}, []),
        (OF_MODEL, ["import torch", "model = torch.compile(model)"]),
        (
            {**OF_BLOCKS, BUDGET: 0.5},
            [
                "from autofit.strategies.memory_budget import within_budget",
                "within = within_budget(0.5)",
                f"for name in {NAMES}:",
                "    model.get_submodule(name).compile(backend=within)",
            ],
        ),
    ],
)
def test_the_lines_to_paste_compile_the_model(settings: dict[str, Any], lines: list[str]) -> None:
    assert COMPILE.describe(settings, PAYLOADS) == lines


def of_torch() -> Workload:
    blocks = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(12))
    batch = torch.randn(4, 8), torch.randn(4, 8)
    return Workload(nn.Sequential(*blocks), batch, criterion=nn.MSELoss())


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_the_lines_to_paste_compile_classes_of_torch_too() -> None:
    """`Module.compile` compiles nothing of them."""
    region, _ = offers(COMPILE, REGION, of_torch)
    model, before = of_torch().build_model(), compiled_graphs()
    lines = COMPILE.describe({**OF_BLOCKS, BUDGET: 0.5}, {REGION: region.payloads["blocks"]})
    exec("\n".join(lines), {"model": model})
    model(torch.randn(4, 8)).sum().backward()
    # The input of the first needs no gradient
    assert before < compiled_graphs() <= before + 2


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [OF_BLOCKS, {MODE: "default", BUDGET: 0.5}])
def test_the_lines_to_paste_train(chosen: dict[str, Any]) -> None:
    model: Any = Blocks()
    found = {"model": model}
    exec("\n".join(COMPILE.describe(chosen, PAYLOADS)), found)
    found["model"](torch.randn(4, 8)).backward()
    assert not run_eagerly(model)


def run_eagerly(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of all calls of the model or its blocks that ran as written."""
    return [shape for part in model.modules() for shape in getattr(part, "eager", ())]


@pytest.mark.slow
def test_a_compiled_training_is_accounted_for_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # an earlier test may set them
        monkeypatch.delenv(name, raising=False)
    device, batch = CpuDevice(), workload().batch(4)
    builder = TrainingBuilder(workload, device, 0)
    device.limit(64 * MIB)
    with builder.training(workload(), ResolvedPlan(Plan(4))) as plain:
        eager_loss = plain.step(batch)
        assert plain.notes() == ()
    variables = dict(os.environ)  # torch's optimizers import parts that set some
    plan = ResolvedPlan(Plan(4, settings=OF_MODEL), {}, (COMPILE,))
    with device.accounting(), builder.training(workload(), plan) as live:
        assert "_compiled_call_impl" in vars(live.model)
        losses = [live.step(batch) for _ in range(2)]
        before = device.read().allocated_bytes
        device.reset_peaks()
        losses.append(live.step(batch))
        seen, notes = device.read(), live.notes()
    assert notes == ("compile: 1 graphs, 0 graph breaks, 0 recompilations",)
    torch.testing.assert_close(losses[0], eager_loss)
    assert losses[2] < losses[0]
    assert seen.allocated_bytes - before <= 512  # one loss more
    # the kept product of the first layer, and the gradients of all parameters
    least = 4 * 64 * 4 + sum(p.nbytes for p in live.model.parameters())
    assert seen.peak_allocated_bytes - before >= least
    assert "_compiled_call_impl" not in vars(live.model)
    assert not any(vars(parameter) for parameter in live.model.parameters())
    assert dict(os.environ) == variables


@pytest.mark.slow
def test_a_second_worker_and_the_users_own_training_start_warm(
    run_python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a script, whose model is compiled with its globals."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
from torch.nn import functional as F

import autofit
from autofit.plan import ResolvedPlan
from autofit.probing.compiler_cache import CacheUse
from autofit.registry import load_strategies
from autofit.training.training import Training


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
    plain, compiled = autofit.Plan(4), autofit.Plan(4, settings={"compile.mode": "default"})
    model, batch = Model(), torch.randn(4, 8)
    workload = autofit.Workload(model, batch)
    for plan in (plain, compiled, compiled):
        measured = autofit.probe(workload, plan=plan, device="cpu").measurement
        print(measured.outcome.value, measured.start_is_warm, *measured.notes)
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
    one = "compile: 1 graphs, 0 graph breaks, 0 recompilations"
    expected = ["ok None", f"ok False {one}", f"ok True {one}", "True"]
    assert ran.stdout.splitlines() == expected, ran.stderr


@pytest.mark.slow
def test_graph_breaks_are_counted_and_named() -> None:
    plan = Plan(4, settings=OF_MODEL)
    measured = autofit.probe(workload(partial(Model, True)), plan=plan, device="cpu").measurement
    first, *others = measured.notes
    assert first.startswith("compile: 2 graphs, ")
    assert " 0 graph breaks" not in first
    assert any("graph break (" in note and "item" in note for note in others), others
    assert (measured.start_up_s or 0) > 0


class Counting(Model):
    """Keeps the number of its calls, which dynamo takes for a constant."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.slow
def test_recompilations_are_counted_their_cause_named_once_and_too_many_run_eagerly() -> None:
    counting = partial(workload, Counting)
    with started(counting, OF_MODEL) as live:
        for _ in range(4):
            live.step(counting().batch(4))
        counted, cause = live.notes()
        for _ in range(8):
            live.step(counting().batch(4))
        assert any("run eagerly" in note for note in live.notes())
    assert counted == "compile: 4 graphs, 0 graph breaks, 3 recompilations"
    assert cause.startswith("compile: recompiled (3 x): ")
    assert "self.calls += 1" in cause


@dataclass
class Sentence:
    words: torch.Tensor


class OfSentences(Model):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x.words if isinstance(x, Sentence) else x)


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "lengths": [(4, 2 + length, 8) for length in range(32)],
    "sizes": [(2 + size, 8) for size in range(20)],
    "lengths and sizes": [(2 + number % 5, 2 + number, 8) for number in range(20)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "settings", "kind"),
    [
        *((make, OF_MODEL, kind) for make in (Model, OfSentences) for kind in SHAPES),
        (Blocks, OF_BLOCKS, "lengths"),
    ],
)
def test_no_length_and_no_size_runs_eagerly(
    make: Callable[[], nn.Module], settings: dict[str, Any], kind: str
) -> None:
    model = make()
    batches: list[Any] = [torch.randn(shape) for shape in SHAPES[kind]]
    given = [Sentence(each) for each in batches] if make is OfSentences else batches
    with training_of(model, settings) as live:
        compiled = [float(live.loss(each)) for each in given * 2]
        notes = live.notes()
    assert run_eagerly(model) == []
    assert "0 graph breaks" in notes[0]
    assert len(notes) == 1 or make is Blocks
    assert compiled == pytest.approx([float(model(each)) for each in given * 2], rel=1e-4)


@pytest.mark.slow
def test_the_size_of_the_micro_batch_keeps_code_of_its_own() -> None:
    with training_of(Model(), OF_MODEL) as live:
        for size in (4, 3, 4):
            live.loss(torch.randn(size, 8))
        assert live.notes() == ("compile: 2 graphs, 0 graph breaks, 0 recompilations",)


def assert_alike(live: Training, twin: nn.Module, images: torch.Tensor) -> None:
    """The gradients of a training's loss are those of its model's plain twin."""
    live.plain_model.zero_grad()
    twin.zero_grad()
    live.loss(images).backward()  # type: ignore[no-untyped-call]  # torch
    twin(images).backward()
    gradients = [[p.grad for p in each.parameters()] for each in (live.plain_model, twin)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        places = self.convolution(images).relu().flatten(2).transpose(1, 2)
        return self.head(places).relu().square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_convolutions_of_lengths_that_change_train(
    budget: float, memory_format: torch.memory_format
) -> None:
    model = Convolved().to(memory_format=memory_format)  # type: ignore[call-overload]  # torch's
    twin = deepcopy(model)
    with training_of(model, {**OF_MODEL, BUDGET: budget}) as live:
        for length in (2, 9, 16, 3):
            images = torch.randn(4, 3, 6, length).to(memory_format=memory_format)
            assert_alike(live, twin, images)


@pytest.mark.slow
def test_a_compiler_that_fails_makes_a_plan_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    given, plan = workload(samples=5), Plan(5, settings=OF_MODEL)
    failed = autofit.probe(given, plan=plan).measurement
    assert failed.outcome is Outcome.UNSUPPORTED
    assert "compiler (" in str(failed.detail)
    monkeypatch.setenv("CXX", "no-such-compiler")
    missing = probe_if(lambda survey: None, given, plan=plan, payloads={MODE: None}).measurement
    assert missing.outcome is Outcome.UNSUPPORTED
    assert "no-such-compiler" in str(missing.detail)


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
        return of_given_lengths(smaller).square().mean()


@pytest.mark.slow
@pytest.mark.usefixtures("_lowered")
@pytest.mark.parametrize(("budget", "breaks"), [(1.0, False), (1.0, True), (0.5, False)])
def test_what_cannot_be_compiled_for_any_length_runs_as_it_is_written(
    budget: float, breaks: bool
) -> None:
    model = Pooled(breaks)
    twin, errors = deepcopy(model), torch._dynamo.config.suppress_errors
    with training_of(model, {**OF_MODEL, BUDGET: budget}) as live:
        for length in (9, 12, 7, 9, 23):
            assert_alike(live, twin, torch.randn(4, 3, length, length + 3))
        graphs, *_, failed = live.notes()
    assert graphs.startswith(f"compile: {4 if breaks else 2} graphs")  # it is tried once
    assert "runs as it is written" in failed
    # nothing ran twice
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert torch._dynamo.config.suppress_errors is errors
