"""Units that keep the results of products and attention, and recompute what lies between."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, linear, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.strategy import Strategy
from autofit.testing import PlainContext
from autofit.training.workload import Workload

checkpointed = importlib.import_module("autofit.strategies.checkpointing.checkpointed").checkpointed
X = torch.randn(4, 12, 32)


class Attending(nn.Module):
    """(n, 12, 32) -> the same; drops within attention by one share and after it by another."""

    def __init__(self, within: float = 0.0, after: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.within, self.after = within, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + scaled_dot_product_attention(q, k, v, dropout_p=self.within).mT.reshape(x.shape)
        return x + dropout(self.down(silu(self.up(x)).square()), self.after)


class Convolving(nn.Module):
    """(n, 32, 12, 12) -> the same, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.relu(self.norms[0](self.first(x)))
        return x + torch.relu(self.norms[1](self.second(x)))


class Overwriting(Attending):
    """Changes the result of a product in place, to what a second change would change again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(silu(self.up(super().forward(x)).add_(1.0)))


class Remembering(Attending):
    """Makes a table in its first run alone, by a product that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Linear(12, 32)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = linear(torch.eye(12), self.positions.weight.detach())
        return super().forward(x + self.table)


class Writing(nn.Module):
    """Writes to the result of a product, in one of the ways in which that can be done."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.plain = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.conv = nn.Conv1d(12, 12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + silu(WAYS[self.way](self, x)) * self.up(x).sin()


def _through_data(made: torch.Tensor) -> torch.Tensor:
    made.data.add_(1.0)
    return made


def _through_a_part(made: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made.unsafe_chunk(2, -1)[0].add_(1.0)
    return made


def _own(x: torch.Tensor, block: Any) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        made = Own.apply(x.float(), block.up.weight)  # type: ignore[no-untyped-call]  # torch
    sine: torch.Tensor = block.up(made.sin())
    return sine


def _attention(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the others keep their results
        return scaled_dot_product_attention(x, keys, x)


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": lambda block, x: block.up(x).add_(1.0),
    "linear without bias": lambda block, x: block.plain(x).add_(1.0),
    "rows": lambda block, x: block.up(x.flatten(0, 1)).add_(1.0).view_as(x),
    "matmul": lambda block, x: (x @ block.up.weight).relu_(),
    "bmm": lambda block, x: (x @ block.up(x).mT @ x).mul_(0.5),
    "four dimensions": lambda block, x: block.plain(x.unsqueeze(1)).add_(1.0).squeeze(1),
    "einsum": lambda block, x: torch.einsum("btd,ed->bte", x, block.up.weight).add_(1.0),
    "convolution": lambda block, x: block.conv(x).add_(1.0),
    "attention": lambda block, x: _attention(x, block.up(x)).add_(1.0),
    "a view": lambda block, x: block.up(x).unflatten(-1, (4, 8)).add_(1.0).flatten(-2),
    "data": lambda block, x: _through_data(block.up(x)),
    "a part": lambda block, x: _through_a_part(block.plain(x)),
    "a function of the user's own": lambda block, x: _own(x, block),
}


class Own(torch.autograd.Function):
    """A product of the user's own, whose result is reused where torch does not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        made = (x @ weight).view(x.shape)
        return torch.from_dlpack(made).add_(1.0)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ weight.mT, (x.flatten(0, 1).mT @ gradient.flatten(0, 1))


class Half(nn.Module):
    """Returns the result of a product, and what has become of it."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32, bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.up(x)
        return made, (made * 2).sin()


class Caller(nn.Module):
    """Writes to what a unit returned, after the unit."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.inner = Half(bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, sine = self.inner(x)
        return made.add_(1.0) * 2 + sine


def _pair(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(make(), make())


# Autocast casts the weights of a block in its first call alone, and recomputations cast them again
MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": _pair(Attending),
    "dropout after": _pair(lambda: Attending(after=0.3)),
    "dropout within": _pair(lambda: Attending(within=0.3, after=0.3)),
    "convolutions": _pair(Convolving),
    "a product fewer": _pair(Remembering),
    "called often": lambda: nn.Sequential(*[Attending()] * 3),
    "overwriting, called often": lambda: nn.Sequential(*[Overwriting()] * 3),
    "written to after a unit": _pair(lambda: Caller(bias=True)),
    "written to after a unit without bias": _pair(lambda: Caller(bias=False)),
    **{way: _pair(partial(Writing, way)) for way in WAYS},
}


def _trained(
    build: Callable[[], nn.Module], ending: str | None, *, halved: bool = False
) -> tuple[list[torch.Tensor], Forwards]:
    """Return loss, gradients and buffers, and what two backward passes ran again; None: plain."""
    torch.manual_seed(0)
    model = build()
    inner = ".inner" if isinstance(model.get_submodule("0"), Caller) else ""
    units = (
        [] if ending is None else [f"{name}{inner}{ending}" for name, _ in model.named_children()]
    )
    x = torch.randn(4, 32, 12, 12) if isinstance(model.get_submodule("0"), Convolving) else X
    with checkpointed(model, units, [name for name, _ in model.named_buffers()]):
        with torch.autocast("cpu", torch.bfloat16, enabled=halved):
            loss = model(x).square().mean()
        with Forwards() as again:
            loss.backward(retain_graph=True)
            loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *model.buffers()], again


class Forwards(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Counts forward products and attention; backward passes use others (`mm`, `..._backward`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.runs = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:  # as torch 2.8 asks the same
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        self.runs += name in ("addmm", "convolution")
        self.runs += "attention" in name and not name.endswith("_backward")
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("halved", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_exact(name: str, halved: bool) -> None:
    """Also where what a product returns counts its changes apart from what the operator made."""
    (plain, _), (whole, _), (keeping, _) = (
        _trained(MODELS[name], ending, halved=halved) for ending in (None, "", "~")
    )
    assert all(map(torch.equal, plain, whole))
    assert all(map(torch.equal, plain, keeping))


@pytest.mark.parametrize("name", ["attention", "dropout after", "convolutions"])
def test_no_product_runs_again(name: str) -> None:
    runs = [_trained(MODELS[name], ending)[1].runs for ending in (None, "", "~")]
    assert runs[0] == runs[2] == 0 < runs[1]


def test_the_first_levels_keep_products(checkpointing: Strategy) -> None:
    context = PlainContext(lambda: Workload(MODELS["attention"](), X))
    levels = checkpointing.dimensions(context)["checkpointing.level"]
    units = [levels.payloads[level]["units"] for level in levels.values[1:]]
    assert all(unit.endswith("~") for unit in units[0])
    assert any(not unit.endswith("~") for unit in units[-1]), "the least memory keeps nothing"


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_attention_that_draws_numbers_is_run_again(share: float) -> None:
    """What follows it would draw its numbers otherwise."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    given = (*torch.zeros(3, 1, 1, 4, 8), share)
    assert importlib.import_module("autofit.strategies.checkpointing.products").is_product(
        op, given, {}
    ) == (share == 0)


@pytest.mark.parametrize("ending", ["", "~"])
def test_compiled_code_within_a_unit_stays_compiled(ending: str) -> None:
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    class Compiled(Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(activation(self.up(x)))

    torch._dynamo.reset()
    activation = torch.compile(lambda x: silu(x).square(), backend=backend, fullgraph=True)
    (plain, _), (found, _) = (_trained(_pair(Compiled), each) for each in (None, ending))
    assert all(map(torch.equal, plain, found))
    assert len(ran) == 2 + 6, "two forwards, then two with two recomputations of each unit"
    _trained(_pair(Compiled), None)
    assert len(ran) == 8 + 2
    torch._dynamo.reset()
