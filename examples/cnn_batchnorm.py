"""A CNN with BatchNorm: splitting a batch changes what BatchNorm sees, and autofit finds that out.

The accumulation stays as it is, the report names the modules, and other settings are searched.
"""

import torch
from torch import nn

import autofit


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def build_model() -> nn.Module:
    body = [convolution(3, 16), convolution(16, 32), convolution(32, 64)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def batch_of(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,))


if __name__ == "__main__":
    report = autofit.search(
        build_model,
        batch_of(32),
        criterion=nn.CrossEntropyLoss(),
        global_batch=64,  # 32 x 2 today
        vram_budget="64MiB",
        device="cpu",  # leave it out on a GPU
        options=autofit.SearchOptions(effort="quick"),
        max_probes=6,
    )
    print(report)
    plan = report.plan
    print(f"micro-batch {plan.micro_batch}, {plan.accumulation_steps} micro-batches in a step")
