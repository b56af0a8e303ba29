"""The roofline of a dry run against the recorded grids: does it know which variant is fastest?

    python -m benchmarks.grids.roofline [--write]

With `--write`, every variant of both grids is run on the meta device in place of an H200, at two
micro-batches, and `h200-roofline.json` is written anew. Then, from that file, the predicted
speed of each variant at its fastest recorded micro-batch is compared with the recorded one: the
rank correlation, the error after one scale for the whole model, and how fast the variant that is
predicted to be the fastest is, as a share of the grid's best. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autofit import Plan, Workload, predict
from autofit.plan import VariantKey, variant_key
from autofit.prediction.variant_lines import Line, time_line
from benchmarks.grids.recorded import LEVELS, ROOFLINE, WORKLOADS, GridWorld, grid_world
from benchmarks.traces.models import GPT, Bottleneck, ResNet

MICRO_BATCHES = {"gpt2_small": (4, 16), "resnet50": (64, 256)}
"""Where the dry runs are; the lines are straight to a few percent."""
_LEVEL = "checkpointing.level"
_SHARES = {level: share for share, level in LEVELS.items()}


class Decoder(GPT):
    """The decoder of GPT-2 small's sizes; a share of its blocks recomputes. ids -> loss."""

    def __init__(self, share: float) -> None:
        super().__init__(50257, 768, 12, 12, 1024)
        self.share = share

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]  # the ids are the targets
        return self.loss(_run(list(self.blocks), self.embed(ids), self.share), ids)


class ResNet50(ResNet):
    """ResNet-50; a share of its blocks recomputes. images -> loss, all of class 0."""

    def __init__(self, share: float) -> None:
        super().__init__(1000)
        self.share = share
        blocks, channels = [], 64
        for middle, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for at in range(count):
                blocks.append(Bottleneck(channels, middle, stride if at == 0 else 1))
                channels = 4 * middle
        self.blocks = nn.Sequential(*blocks)

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]  # makes its own targets
        x = self.pool(F.relu(self.norm(self.stem(images)), inplace=True))
        x = _run(list(self.blocks), x, self.share)
        targets = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


def _run(blocks: Sequence[nn.Module], x: Tensor, share: float) -> Tensor:
    """Run the blocks; the first ones, that share of them, recompute in the backward pass."""
    recomputed = round(share * len(blocks))
    for at, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if at < recomputed else block(x)
    return x


def workload(name: str, share: float) -> Workload:
    """Return the workload of a grid, with that share of its blocks checkpointed."""
    if name == "gpt2_small":
        ids = torch.randint(0, 50257, (2, 1024))
        adamw = partial(torch.optim.AdamW, lr=3e-4)
        return Workload(partial(Decoder, share), (ids,), optimizer=adamw)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Workload(partial(ResNet50, share), (torch.randn(2, 3, 224, 224),), optimizer=sgd)


def lines(world: GridWorld) -> Iterator[tuple[VariantKey, Line]]:
    """Yield the time line of each variant, from dry runs at two micro-batches."""
    for variant in world.rows:
        settings = dict(variant)
        trained = workload(world.name, _SHARES[int(settings.pop(_LEVEL))])
        with _plain_float32():
            line = time_line(
                [
                    predict(trained, plan=Plan(size, settings=settings), gpu="H200")
                    for size in MICRO_BATCHES[world.name]
                ]
            )
        assert line is not None, "the rates of the H200 are known"
        yield variant, line


@contextmanager
def _plain_float32() -> Iterator[None]:
    """Forbid TF32, as it was where the grids were recorded; PyTorch allows it in convolutions."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def write(worlds: Iterable[GridWorld]) -> None:
    """Write the lines of these worlds."""
    found: dict[str, Any] = {
        "command": "python -m benchmarks.grids.roofline --write",
        "torch": torch.__version__.partition("+")[0],
        "gpu": "H200",
        "micro_batches": MICRO_BATCHES,
    }
    found["lines"] = {
        world.name: [[dict(variant), list(line)] for variant, line in lines(world)]
        for world in worlds
    }
    ROOFLINE.write_text(json.dumps(found, indent=1) + "\n")


def best_plans(world: GridWorld) -> dict[VariantKey, Plan]:
    """Return each variant's fastest recorded plan."""
    return {
        variant: max(
            (world.space.plan(row.micro_batch, dict(variant)) for row in rows if row.seconds),
            key=world.speed,
        )
        for variant, rows in world.rows.items()
    }


def standing(world: GridWorld, times: Mapping[VariantKey, Line]) -> dict[str, Any]:
    """Compare the predicted speeds of each variant's fastest plan with the recorded ones."""
    plans = best_plans(world)
    recorded = [world.speed(plan) for plan in plans.values()]
    predicted = [
        plan.micro_batch / (times[variant][0] + times[variant][1] * plan.micro_batch)
        for variant, plan in plans.items()
    ]
    ratios = [math.log(p / r) for p, r in zip(predicted, recorded, strict=True)]
    scale = statistics.mean(ratios)
    errors = sorted(abs(math.expm1(ratio - scale)) for ratio in ratios)
    first = max(range(len(plans)), key=predicted.__getitem__)
    return {
        "variants": len(plans),
        "rank_correlation": statistics.correlation(_ranks(predicted), _ranks(recorded)),
        "error_median": statistics.median(errors),
        "error_90th": statistics.quantiles(errors, n=10, method="inclusive")[-1],
        "scale": math.exp(scale),
        "first": dict(list(plans)[first]),
        "share_of_best": recorded[first] / max(recorded),
    }


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def composed(world: GridWorld, times: Mapping[VariantKey, Line]) -> dict[VariantKey, Line]:
    """Return lines of all variants, composed of those that a search predicts.

    It predicts the plain variant and those with one other value; the effects multiply.
    """
    plain = world.space.plain_settings
    base = times[variant_key(plain)]
    found = {}
    for variant in times:
        fixed, per_sample = base
        for name, value in variant:
            alone = times[variant_key({**plain, name: value})]
            fixed, per_sample = fixed * alone[0] / base[0], per_sample * alone[1] / base[1]
        found[variant] = fixed, per_sample
    return found


def table(worlds: Iterable[GridWorld]) -> Iterator[str]:
    """Yield the comparison as lines of Markdown."""
    yield "| grid | lines | variants | rank correlation | error: median | 90th | first | is |"
    yield "|---|---|---:|---:|---:|---:|---|---:|"
    for world in worlds:
        times = world.spec(times=True).predicted_times
        for how, its in (("each", times), ("composed", composed(world, times))):
            found = standing(world, its)
            first = ", ".join(str(value) for value in found["first"].values())
            yield (
                f"| {world.name} | {how} | {found['variants']} | {found['rank_correlation']:.3f} | "
                f"{found['error_median']:.1%} | {found['error_90th']:.1%} | {first} | "
                f"{found['share_of_best']:.3f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="run the dry runs anew")
    worlds = [grid_world(name) for name in WORKLOADS]
    if parser.parse_args().write:
        write(worlds)
    for line in table(worlds):
        print(line)


if __name__ == "__main__":
    main()
