"""Search the fastest plan for a model of your own, save the report, and train with it."""

import torch
from torch import nn

import autofit


def build_model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Linear(64, 128), *layers, nn.Linear(128, 10))


def batch_of(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 64), torch.randint(0, 10, (samples,))


if __name__ == "__main__":
    report = autofit.search(
        build_model,
        batch_of(16),
        criterion=nn.CrossEntropyLoss(),
        global_batch=64,
        vram_budget="32MiB",
        device="cpu",  # leave it out on a GPU
        options=autofit.SearchOptions(effort="quick"),
        max_probes=8,
    )
    print(report)
    report.save("report.json")

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with report.apply(model, optimizer) as training:
        for step in range(5):
            loss = training.step(batch_of(64))  # 64 samples: one optimizer step
            print(f"step {step}: loss {float(loss):.3f}")
