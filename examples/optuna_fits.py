"""Tune width, depth and batch with Optuna, and never train what does not fit into 24 GiB.

A dry run says before a trial trains how many bytes it lacks: a constraint, from which the sampler
learns, and a filter. No GPU is needed. Optuna comes with autofit; else: pip install "optuna>=5".

What a trial would reach stands in for a training here: the scaling law of Hoffmann et al., Training
compute-optimal large language models, 2022 (their third approach), with a step's tokens.
"""

import optuna
import torch
from torch import nn

import autofit

GPU, BUDGET = "RTX 4090", 0.95  # of its memory: 22.3 of what is sold as 24 GB
VOCABULARY, TOKENS, STEPS = 32_000, 512, 20_000
TRIALS = 12


def build_model(width: int, depth: int) -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, width), blocks, nn.Linear(width, VOCABULARY))


def next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def excess_bytes(width: int, depth: int, batch: int) -> int:
    """Bytes that a training lacks; at most 0 where it fits. Nothing is allocated for it."""
    with torch.device("meta"):
        model, ids = build_model(width, depth), torch.zeros(batch, TOKENS, dtype=torch.long)
    plan = autofit.Plan(batch, settings={"precision.dtype": "bfloat16"})
    needs = autofit.predict(model, ids, loss_fn=next_token_loss, plan=plan, gpu=GPU)
    return needs.excess_bytes(BUDGET)


def expected_loss(width: int, depth: int, batch: int) -> float:
    parameters = 12 * depth * width**2 + 2 * VOCABULARY * width
    tokens = batch * TOKENS * STEPS
    return float(1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28)


def suggest(trial: optuna.Trial) -> tuple[int, int, int]:
    width = trial.suggest_categorical("width", [512, 1024, 2048, 4096])
    depth = trial.suggest_int("depth", 2, 8, step=2)
    return width, depth, trial.suggest_int("batch", 4, 64, step=4)


def constrained(trial: optuna.Trial) -> float:
    sizes = suggest(trial)
    excess = excess_bytes(*sizes)
    trial.set_constraint("vram", excess / 2**30)  # feasible where it is at most zero
    if excess > 0:
        raise optuna.TrialPruned  # nothing was trained, and nothing went out of memory
    return expected_loss(*sizes)  # train here


def unconstrained(trial: optuna.Trial) -> float:
    return expected_loss(*suggest(trial))


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for name, objective in (("unconstrained", unconstrained), ("constrained", constrained)):
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        study.optimize(objective, n_trials=TRIALS)
        too_large = sum(excess_bytes(**trial.params) > 0 for trial in study.trials)
        print(f"{name}: {too_large} of {TRIALS} proposals do not fit, by the dry run")
    spare = -excess_bytes(**study.best_params)
    print(f"best that fits: {study.best_params}, {spare / 2**30:.1f} GiB to spare")
