"""What `optimizer.state=bfloat16` changes: the losses of 500 steps of three small trainings.

    python -m benchmarks.optimizer_state

A decoder learns a noisy permutation with AdamW, a convolutional network noisy images with AdamW and
with SGD, and a perceptron a noisy function with AdamW. Each step sees fresh samples, the same with
the setting and without. Prints Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autofit.plan import Plan, ResolvedPlan, Scalar
from autofit.registry import load_strategies
from autofit.training.loss import Recipe
from autofit.training.training import Training

STEPS = 500
WINDOW = 50
"""Steps over whose mean loss two trainings are compared: of fresh samples each step differs."""
SETTING = "optimizer.state"
_CLASSES, _LENGTH, _NOISE = 64, 16, 0.2


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        model: makes the model.
        batch: the samples and targets of a step, from a generator.
        criterion: of outputs and targets.
        optimizer: of parameters.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    criterion: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


class Decoder(nn.Module):
    """ids (n, 16) -> logits (n * 16, 64)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(_CLASSES, width), nn.Linear(width, _CLASSES)
        self.places = nn.Parameter(torch.zeros(_LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embedding(ids) + self.places
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits.flatten(0, 1)


def _network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)),
    )


def _perceptron() -> nn.Module:
    inner = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()
    return nn.Sequential(*inner, nn.Linear(64, 4))


def _permuted(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    follows = torch.randperm(_CLASSES, generator=torch.Generator().manual_seed(3))
    ids = [torch.randint(_CLASSES, (16,), generator=generator)]
    for _ in range(_LENGTH):
        other = torch.randint(_CLASSES, (16,), generator=generator)
        is_noise = torch.rand(16, generator=generator) < _NOISE
        ids.append(torch.where(is_noise, other, follows[ids[-1]]))
    rows = torch.stack(ids, 1)
    return rows[:, :-1], rows[:, 1:].flatten()


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    plain = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(5))
    labels = torch.randint(8, (32,), generator=generator)
    return plain[labels] + 3 * torch.randn(32, 1, 12, 12, generator=generator), labels


def _function(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    fixed = torch.Generator().manual_seed(7)
    inward, outward = torch.randn(16, 32, generator=fixed), torch.randn(32, 4, generator=fixed)
    x = torch.randn(32, 16, generator=generator)
    noise = 0.3 * torch.randn(32, 4, generator=generator)
    return x, torch.tanh(x @ inward / 4) @ outward / 5 + noise


_adamw = partial(torch.optim.AdamW, lr=1e-3)
_sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
TRAININGS = {
    "decoder, AdamW": Case(Decoder, _permuted, functional.cross_entropy, _adamw),
    "convolutions, AdamW": Case(_network, _images, functional.cross_entropy, _adamw),
    "convolutions, SGD": Case(_network, _images, functional.cross_entropy, _sgd),
    "perceptron, AdamW": Case(_perceptron, _function, functional.mse_loss, _adamw),
}


def losses(case: Case, settings: Mapping[str, Scalar]) -> Tensor:
    """Return the loss of each step."""
    torch.manual_seed(0)
    model = case.model()
    payloads = {SETTING: {"optimizers": [""]}}
    plan = ResolvedPlan(Plan(32, settings=settings), payloads, load_strategies(["optimizer"]))
    recipe, device = Recipe(criterion=case.criterion), torch.device("cpu")
    generator = torch.Generator().manual_seed(1)
    with Training(model, case.optimizer(model.parameters()), recipe, plan, device=device) as live:
        found = []
        for _ in range(STEPS):
            with live.context():
                loss = case.criterion(*_output_and_target(live.model, case.batch(generator)))
            live.backward(loss)
            live.optimizer_step()
            found.append(loss.detach())
    return torch.stack(found)


def _output_and_target(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


def apart(one: Tensor, other: Tensor) -> float:
    """Return by how much their mean losses differ at most, relative to the second's."""
    first, second = (each.unfold(0, WINDOW, 1).mean(1) for each in (one, other))
    return float(((first - second) / second).abs().max())


def main() -> None:
    """Print how far the losses are apart."""
    torch.set_num_threads(1)
    print(f"| training | loss of the last {WINDOW} steps | with bfloat16 | most apart |")
    print("|---|---|---|---|")
    for name, case in TRAININGS.items():
        plain, rounded = losses(case, {}), losses(case, {SETTING: "bfloat16"})
        ends = f"{plain[-WINDOW:].mean():.5f} | {rounded[-WINDOW:].mean():.5f}"
        print(f"| {name} | {ends} | {apart(rounded, plain):.3%} |")


if __name__ == "__main__":
    main()
