"""Units that keep the results of products and attention, and recompute what lies between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, linear, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.plan import Dimension
from autofit.registry import load_strategies
from autofit.testing import PlainContext
from autofit.training.workload import Workload

SETTING = "checkpointing.level"


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


class OfOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(self.up(Own.apply(x, self.up.weight).sin()))


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "attention": (Attending, torch.randn(4, 12, 32)),
    "dropout after": (lambda: Attending(after=0.3), torch.randn(4, 12, 32)),
    "dropout within": (lambda: Attending(within=0.3, after=0.3), torch.randn(4, 12, 32)),
    "convolutions": (Convolving, torch.randn(4, 32, 12, 12)),
    "a product fewer": (Remembering, torch.randn(4, 12, 32)),
}


def _model(name: str) -> Blocks:
    torch.manual_seed(0)
    return Blocks(MODELS[name][0])


@pytest.fixture(scope="module")
def levels() -> Dimension:
    (strategy,) = load_strategies(["checkpointing"])
    model, batch = _model("attention"), MODELS["attention"][1]
    return strategy.dimensions(PlainContext(lambda: Workload(model, batch)))[SETTING]


def test_the_first_levels_keep_products(levels: Dimension) -> None:
    units = [levels.payloads[level]["units"] for level in levels.values[1:]]
    assert all(unit.endswith("~") for unit in units[0])
    assert any(not unit.endswith("~") for unit in units[-1]), "the least memory keeps nothing"


class Forwards(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Counts forward products and attention; backward passes use others (`mm`, `..._backward`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.products = self.attentions = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        self.products += name in ("addmm", "convolution")
        self.attentions += "attention" in name and not name.endswith("_backward")
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_exact_and_runs_no_product_again(name: str, part: Callable[[str], Any]) -> None:
    batch = MODELS[name][1]

    def trained(ending: str | None) -> tuple[list[torch.Tensor], Forwards]:
        model = _model(name)
        units = [] if ending is None else [f"blocks.{number}{ending}" for number in range(4)]
        state = [buffer for buffer, _ in model.named_buffers()] if units else []
        with part("checkpointed").checkpointed(model, units, state):
            torch.manual_seed(1)
            loss = model(batch).square().mean()
            with Forwards() as again:
                loss.backward(retain_graph=True)
                loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [loss.detach(), *gradients, *model.buffers()], again

    (plain, without), (whole, all_again), (keeping, again) = map(trained, (None, "", "~"))
    assert all(map(torch.equal, plain, whole))
    assert all(map(torch.equal, plain, keeping))
    assert without.products == 0 < all_again.products
    if name != "a product fewer":  # which takes all others out of their places
        assert (again.products, again.attentions) == (0, 0)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_attention_that_draws_numbers_is_run_again(
    share: float, part: Callable[[str], Any]
) -> None:
    """What follows it would draw its numbers otherwise."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    given = (*torch.zeros(3, 1, 1, 4, 8), share)
    assert part("products").is_product(op, given, {}) == (share == 0)


@pytest.mark.parametrize("make", [Attending, Overwriting])
def test_one_block_called_often_under_autocast(
    make: Callable[[], nn.Module], part: Callable[[str], Any]
) -> None:
    """Autocast casts its weights in the first call alone, and recomputations cast them again."""

    def trained(units: list[str]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = make()
        model = Blocks(lambda: block)
        with part("checkpointed").checkpointed(model, units):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(MODELS["attention"][1]).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(map(torch.equal, trained([]), trained(["blocks.0~"])))


def _gradients(
    make: Callable[[], nn.Module], units: list[str], part: Any, *, halved: bool = False
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make())
    x = torch.randn(4, 12, 32)
    with part("checkpointed").checkpointed(model, units):
        with torch.autocast("cpu", torch.bfloat16, enabled=halved):
            loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("halved", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("way", WAYS)
def test_a_product_that_is_written_to_is_run_again(
    way: str, halved: bool, part: Callable[[str], Any]
) -> None:
    """What a product returns may count its changes apart from what the operator made."""
    plain, keeping = (
        _gradients(lambda: Writing(way), units, part, halved=halved) for units in ([], ["0~", "1~"])
    )
    assert all(map(torch.equal, plain, keeping))


def test_a_product_within_a_function_of_the_users_own(part: Callable[[str], Any]) -> None:
    plain, keeping = (_gradients(OfOwn, units, part) for units in ([], ["0~", "1~"]))
    assert all(map(torch.equal, plain, keeping))


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


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_that_is_written_to_after_the_unit(
    bias: bool, part: Callable[[str], Any]
) -> None:
    plain, keeping = (
        _gradients(lambda: Caller(bias=bias), units, part)
        for units in ([], ["0.inner~", "1.inner~"])
    )
    assert all(map(torch.equal, plain, keeping))


@pytest.mark.parametrize("unit", ["0", "0~"])
def test_compiled_code_within_a_unit_stays_compiled(unit: str, part: Callable[[str], Any]) -> None:
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
    plain, keeping = (_gradients(Compiled, units, part) for units in ([], [unit]))
    assert all(map(torch.equal, plain, keeping))
    first = len(ran)
    assert first == 2 + 4, "two forwards, then two with two recomputations of one unit"
    _gradients(Compiled, [], part)
    assert len(ran) == first + 2
    torch._dynamo.reset()
