"""Tune settings of your own with autofit's sampler, in an Optuna study of your own.

The objective measures samples per second and what a step keeps in memory, and says by a constraint
whether that fits. Any Optuna sampler can run it; autofit's knows what settings and micro-batches do
to time and memory, runs the default first, and ends the study where no trial is worth its time.
"""

import statistics
import time

import optuna
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from autofit.sampler import Sampler

BUDGET = 16 * 2**20
SETTINGS = {"checkpoint_segments": (1, 2, 4), "fused": (False, True)}


def build_model() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
    return nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 10))


def measure(micro_batch: int, segments: int, fused: bool) -> tuple[float, int]:
    """Return the seconds of a step, and its bytes: model, optimizer, and kept for backward."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    inputs, targets = torch.randn(micro_batch, 64), torch.randint(0, 10, (micro_batch,))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    seconds, held = [], 0
    for step in range(6):
        began = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if segments > 1:
                outputs = checkpoint_sequential(model, segments, inputs, use_reentrant=False)
            else:
                outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        if step == 0:
            held = sum(kept.values()) + 4 * sum(p.nbytes for p in model.parameters())
    return statistics.median(seconds[1:]), held


def objective(trial: optuna.Trial) -> float:
    plan = sampler.suggest(trial)  # asks for the parameters, whatever sampler the study has
    seconds, held = measure(
        plan.micro_batch, int(plan.settings["checkpoint_segments"]), bool(plan.settings["fused"])
    )
    trial.set_constraint("vram", held / BUDGET - 1)  # it fits where this is at most zero
    return plan.micro_batch / seconds


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = Sampler(SETTINGS, sample_batch_size=16, vram_budget=BUDGET, max_micro_batch=4096)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=20)

    for trial in study.trials:
        fits = "" if max(trial.constraints.values()) <= 0 else ", too large"
        print(f"{trial.number:2d} {trial.params} {trial.value:.0f} samples/s{fits}")
    print(
        f"best: {study.best_params}, {study.best_value:.0f} samples/s in {len(study.trials)} trials"
    )
    try:
        figure = optuna.visualization.plot_optimization_history(study)
    except ImportError:
        print("pip install plotly to draw it")
    else:
        figure.write_html("history.html", include_plotlyjs="cdn")
        print("drawn in history.html")
