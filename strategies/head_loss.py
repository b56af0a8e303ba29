"""The loss of a large head without its logits.

`head_loss.rows` starts at 0, plain PyTorch. Where a `Linear` head of many classes feeds
`cross_entropy`, as in a language model, the logits and their gradient are the largest tensors of a
step. With another value the loss is computed over this many rows of logits at a time, in the matrix
products that plain training takes (`deferred_logits`).

Which heads do so is found by running the model once with all that might be deferred; the setting is
offered where a step with it agrees with the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from autofit.errors import InvalidArgument, release_exception
from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .calls import look, run_step, saved_bytes
from .one_setting import OneSetting

SETTING = "head_loss.rows"
SLOWER = {2048: 0.05, 256: 0.21}
"""Rows of logits that a chunk has, and by how much longer a training took with them on an H100 than
with all at once (benchmarks/results/gpu-h100-2026-11-27.md). In bfloat16 with 50,000 classes 2,048
hold 1.2 GiB with their gradient and its float32 copies, and 256 hold 150 MiB."""
ROWS = tuple(SLOWER)

MIN_CLASSES = 4096
"""Smaller rows of logits are not worth a probe."""

MIN_SHARE = 0.1
"""Of what a sample holds. So much larger can a micro-batch be at most without its logits, and
samples seldom train faster in one a tenth larger by the 5% that chunks of 2,048 rows cost."""

_SAMPLES = 2
_COPIES = 2  # logits and their gradient
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_OF_HALF_PRECISION = 3e-2
"""Largest difference of loss and gradients, relative to their size, that roundings explain."""


class HeadLoss(OneSetting):
    """Cross entropy over chunks of rows of logits, which are never held whole."""

    name = "head_loss"
    setting, plain = SETTING, 0
    phase = Phase.MODEL
    numerics = Numerics.ROUNDING

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the sizes of chunks where a head feeds cross entropy, and nothing elsewhere.

        Nor where its logits are a small share of what a sample holds.
        """
        if not _candidates(context.model):
            return {}
        heads, share = look(context, SETTING, _heads, _SAMPLES) or ([], None)
        if not heads:
            return {}
        if share is not None and share < MIN_SHARE:
            context.note(f"{SETTING} skipped: logits are only {share:.1%} of a sample's memory")
            return {}
        payload: dict[str, Any] = {"heads": heads}
        dimension = Dimension(
            [0, *ROWS],
            payloads=dict.fromkeys(ROWS, payload),
            hints={} if share is None else _hints(share),
            when={
                "compile.mode": ("off", None),  # compiled heads return their logits
                "parallel.mode": ("ddp", "ddp_view", "zero1", None),  # others free the weight
            },
        )
        why = None if context.device.type == "meta" else self._why_unlike(context, payload)
        if why is not None:
            context.note(f"{SETTING} skipped: {why}")
            return {}
        return {SETTING: dimension}

    def _why_unlike(self, context: Context, payload: Mapping[str, Any]) -> str | None:
        """Return how a step with the setting differs from the plain one; None: by roundings."""
        rows = ROWS[-1]
        comparison = context.compare(
            {SETTING: rows}, {SETTING: payload}, self, micro_batch=_SAMPLES
        )
        types = {p.dtype for p in context.model.parameters() if p.is_floating_point()}
        most = max(_TOLERANCE.get(dtype, _OF_HALF_PRECISION) for dtype in types)
        if max(comparison.loss, comparison.gradient) <= most:
            return None
        what = ", ".join(comparison.differences) or "the gradient"
        return f"a step with it differs from the plain one in {what} (by {comparison.gradient:.1e})"

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Defer the logits of the heads."""
        heads = _candidates(training.model)
        if missing := [name for name in payload["heads"] if name not in heads]:
            raise InvalidArgument(
                f"{SETTING} is for the heads of the model that was searched, and this model has no "
                f"nn.Linear of {MIN_CLASSES} classes or more named "
                f"{', '.join(map(repr, missing))}: apply to that model, or search again"
            )
        from .deferred_logits import deferred  # in the worker alone

        return deferred([heads[name] for name in payload["heads"]], value)

    def lines(self, value: Any, payload: Any) -> list[str]:
        return [
            "from autofit.strategies.deferred_logits import deferred",
            f"heads = [model.get_submodule(name) for name in {payload['heads']}]",
            f"with deferred(heads, rows={value}):  # around the training",
        ]


def _hints(share: float) -> dict[Scalar, CostHint]:
    """Return what chunks hold and take, of this share of the logits in a sample's bytes."""
    return {
        rows: CostHint(bytes_per_sample=max(1 - share, MIN_SHARE), seconds_per_sample=1 + slower)
        for rows, slower in SLOWER.items()
    }


def _candidates(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear modules of many classes that compute as `nn.Linear` does, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and module.out_features >= MIN_CLASSES
    }


def _heads(training: TrainingView, batch: Any) -> tuple[list[str], float | None]:
    """Return the names of the modules whose logits a loss would take by chunks, and their share.

    Without those of one row a sample, as in a classifier: their logits are small beside what the
    model keeps. The share is that of the logits in the bytes that a plain step holds for its
    samples; None: a transform of torch.func hides what is saved for the backward.
    """
    from .deferred_logits import Run, deferred  # in the worker alone

    candidates, runs, kept = _candidates(training.model), list[Run](), None
    with deferred(list(candidates.values()), ROWS[-1], runs.append):
        step = partial(run_step, training, batch)
        try:
            kept = saved_bytes(training.model, step)
        except RuntimeError as error:
            release_exception(error)
            runs.clear()
            step()
    runs_of = {n: [run for run in runs if run.weight is h.weight] for n, h in candidates.items()}
    heads = [
        name
        for name, runs_of_head in runs_of.items()
        if runs_of_head
        and all(run.logits is None and run.chunked_rows > _SAMPLES for run in runs_of_head)
    ]
    logits = _COPIES * sum(run.logits_bytes for name in heads for run in runs_of[name])
    return heads, None if kept is None else logits / max(1, kept + logits)
