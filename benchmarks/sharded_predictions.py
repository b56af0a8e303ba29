"""Seconds and host memory of predictions of 64 ranks, for a model of 7e9 parameters.

    python -m benchmarks.sharded_predictions

writes benchmarks/results/sharded-predictions-DATE.md; each case has a process of its own.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from torch import nn

PAGE = Path(__file__).parent / "results" / f"sharded-predictions-{time.strftime('%Y-%m-%d')}.md"
RANKS, MICRO_BATCH, TOKENS = 64, 2, 2048
WIDTH, LAYERS, WORDS = 4096, 34, 32_000
MOST_SECONDS, MOST_HOST_GIB = 60.0, 2.0
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A mode, micro-batches of a step, when gradients are shared, and in which type."""

    mode: str
    steps: int
    accumulation: str
    communication: str

    def __str__(self) -> str:
        return f"{self.mode}, k={self.steps} {self.accumulation}, {self.communication}"


CASES = [
    Case("fsdp2", 1, "once", "bfloat16"),
    Case("fsdp2", 4, "once", "bfloat16"),
    Case("fsdp2", 4, "each", "bfloat16"),
    Case("fsdp2", 1, "once", "default"),
    Case("fsdp2_keep", 1, "once", "bfloat16"),
    Case("zero1", 1, "once", "default"),
    Case("ddp", 1, "once", "default"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        heads = self.into(self.first(x)).view(samples, tokens, 3, WIDTH // 128, 128)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        fed: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return fed


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def predicted(case: Case) -> dict[str, Any]:
    """Predict in this process; return bytes, seconds and the host memory that it took."""
    import autofit

    began = time.perf_counter()
    words = torch.zeros(2, MICRO_BATCH, TOKENS, dtype=torch.long)
    workload = autofit.Workload(Gpt, (words[0], words[1]), loss_fn=loss_of)
    settings = {
        "parallel.mode": case.mode,
        "parallel.accumulation": case.accumulation,
        "parallel.communication": case.communication,
    }
    plan = autofit.Plan(MICRO_BATCH, accumulation_steps=case.steps, settings=settings)
    found = autofit.predict(workload, plan=plan, gpu="H100", world_size=RANKS)
    return {
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "required_bytes": found.required_bytes,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time(),
        "host_bytes": getrusage(RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Gpt().parameters())
    rows = []
    for number, case in enumerate(CASES):
        command = [sys.executable, "-m", "benchmarks.sharded_predictions", str(number)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        found = json.loads(ran.stdout.splitlines()[-1])
        rows.append((case, found))
        print(case, found, flush=True)
    PAGE.write_text(page(parameters, rows))


def page(parameters: int, rows: list[tuple[Case, dict[str, Any]]]) -> str:
    slowest = max(found["seconds"] for _, found in rows)
    largest = max(found["host_bytes"] for _, found in rows) / GIB
    holds = {True: "held", False: "missed"}
    lines = [
        "# Predictions of many ranks",
        "",
        f"`python -m benchmarks.sharded_predictions`, {time.strftime('%Y-%m-%d')}: a GPT of "
        f"{parameters / 1e9:.2f}e9 parameters on {RANKS} ranks,",
        f"micro-batch {MICRO_BATCH} of {TOKENS} tokens, AdamW, for an H100. Each row is a process "
        f"of its own. torch {torch.__version__},",
        f"{platform.machine()}, a machine that others used as well. No GPU: the bytes are "
        "predictions, and what NCCL holds is not among them.",
        "",
        "| plan | peak allocated, GiB | required, GiB | seconds | of a core | host memory, GiB |",
        "|---|---|---|---|---|---|",
        *(
            f"| {case} | {found['peak_allocated_bytes'] / GIB:.2f} "
            f"| {found['required_bytes'] / GIB:.2f} | {found['seconds']:.1f} "
            f"| {found['cpu_seconds']:.1f} "
            f"| {found['host_bytes'] / GIB:.2f} |"
            for case, found in rows
        ),
        "",
        f"Wanted: at most {MOST_SECONDS:.0f} s, {holds[slowest <= MOST_SECONDS]} ({slowest:.1f} "
        f"s); at most {MOST_HOST_GIB:.0f} GiB of host memory, {holds[largest <= MOST_HOST_GIB]} "
        f"({largest:.2f} GiB). Host memory is the largest resident size of",
        "the process, torch's own libraries among it; seconds of a core have the imports too.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(predicted(CASES[int(sys.argv[1])])))
    else:
        main()
