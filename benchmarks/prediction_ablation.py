"""The contribution of each rule of a prediction, on the recorded trainings.

Each row switches one rule off and predicts the 30 trainings of `benchmarks/traces` again, as
`benchmarks.prediction_accuracy` does. A rule that changes no figure has to be justified by code
that cannot be predicted at all without it, or by memory that other models may spend there. The last
rows add the error of one plan's peak, as a probe would measure it, to the predictions of the other
plans of its model.

    python -m benchmarks.prediction_ablation [ROW ...]

Prints a Markdown table; ROW selects rows by a part of their name.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby, permutations
from typing import Any

import torch

from autofit.memory.replay import Recording, replay
from autofit.prediction.cuda import attention, autocast, rnn, scratch, tracer
from autofit.prediction.cuda.attention import Kernel
from autofit.prediction.cuda.tracer import ShapeCache
from autofit.prediction.cuda.values import KnownValues
from benchmarks import prediction_accuracy as accuracy
from benchmarks.prediction_accuracy import Comparison
from benchmarks.traces.recorded import RecordedTraining, recorded_trainings


@dataclass(frozen=True)
class Ablation:
    """A rule that is switched off.

    Attributes:
        off: a context inside which it is.
        only: trainings without an operator whose name begins so are not predicted again.
    """

    off: Callable[[], AbstractContextManager[None]]
    only: str = ""


def without(*replacements: tuple[Any, str, Any]) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which attributes of objects have other values."""

    @contextmanager
    def context() -> Iterator[None]:
        before = [(target, name, getattr(target, name)) for target, name, _ in replacements]
        for target, name, value in replacements:
            setattr(target, name, value)
        try:
            yield
        finally:
            for target, name, value in before:
                setattr(target, name, value)

    return context


def _without_rules(dropped: Callable[[str], bool]) -> Callable[[], AbstractContextManager[None]]:
    kept = {name: rule for name, rule in scratch.RULES.items() if not dropped(name)}
    return without((scratch, "RULES", kept))


def _unrolled(name: str, data: Any, batch_sizes: Any, *rest: Any) -> Any:
    return getattr(torch.ops.aten, name).input(data, *rest)


def _uncached(cache: ShapeCache, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
    return run(func, args, kwargs)


def _free_reserved(recording: Recording) -> int:
    return replay(recording).peak_reserved_bytes


def _all_indispensable(events: Any, step_ends: Any, optional: Any) -> Recording:
    return Recording(events, step_ends)


_SUMS = ("sum", "mean")
ABLATIONS: Mapping[str, Ablation] = {
    "every scratch rule": Ablation(_without_rules(lambda name: True)),
    "every scratch rule but sums": Ablation(_without_rules(lambda name: name not in _SUMS)),
    **{
        f"scratch of {name}": Ablation(_without_rules(name.__eq__), f"aten.{name}.")
        for name in scratch.RULES
    },
    "gradients added in place": Ablation(without((tracer, "is_in_place", lambda *_: False))),
    "memory of all elements' losses": Ablation(
        without((tracer, "in_memory_of_all_losses", lambda name, args, result: result)),
        "aten.mse_loss",
    ),
    "convolution workspaces": Ablation(
        without((tracer, "workspace_bytes", lambda *_: 0)), "aten.convolution"
    ),
    "convolution workspaces are dispensable": Ablation(
        without((accuracy, "Recording", _all_indispensable)), "aten.convolution"
    ),
    "copies of convolutions' arguments": Ablation(
        without((tracer, "copied_operands", lambda *_: [])), "aten.convolution"
    ),
    "layout of convolutions' results": Ablation(
        without((tracer, "in_layout_of_cudnn", lambda data, weight, results: results)),
        "aten.convolution",
    ),
    "choice of the attention kernel": Ablation(
        without((attention, "chosen_kernel", lambda *_: Kernel.MATH)), "aten._scaled_dot_product"
    ),
    "autocast": Ablation(without((autocast, "is_on", lambda: False)), "aten._to_copy"),
    "recurrent layers as one call (unrolled in float32)": Ablation(
        without((rnn, "_run", _unrolled)), "aten._cudnn_rnn"
    ),
    "cuBLAS workspaces": Ablation(
        without((tracer.CudaTracer, "_use_workspace", lambda *_: None)),
    ),
    "known values": Ablation(without((KnownValues, "learn", lambda *_: None))),
    "shape cache": Ablation(without((ShapeCache, "result", _uncached))),
    "replays under a limit (peak reserved instead)": Ablation(
        without((accuracy, "required_bytes", _free_reserved))
    ),
}


def compared_without(
    ablation: Ablation, trainings: Sequence[RecordedTraining], whole: Mapping[str, Comparison]
) -> list[Comparison]:
    """Return every training's comparison with the rule off; those it cannot concern as they are."""
    with ablation.off():
        return [
            accuracy.compared(training)
            if any(operator.startswith(ablation.only) for operator in training.operators)
            else whole[training.name]
            for training in trainings
        ]


def row(name: str, found: Sequence[Comparison], whole: Mapping[str, Comparison]) -> str:
    """Return a line of the table."""
    figures = accuracy.summary(found)
    changes = [abs(each.required_error - whole[each.name].required_error) for each in found]
    changed = sum(change > 1e-6 for change in changes)
    return (
        f"| {name} | {figures['required_median']:.1%} | {figures['required_90th']:.1%} | "
        f"{figures['wrongly_fits']} | {figures['wasted_mean']:.1%} | "
        f"{figures['allocated_90th']:.2%} | {changed} | {max(changes):.1%} | "
        f"{sum(each.seconds for each in found):.0f} |"
    )


HEADER = (
    "| without | required: median | 90th | wrongly fits | wasted | allocated: 90th | changed "
    "| at most by | dry runs, s |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def residual_rows(
    trainings: Sequence[RecordedTraining], whole: Mapping[str, Comparison]
) -> Iterator[str]:
    """Yield the errors of required bytes with and without another plan's residual.

    The residual is measured less predicted peak allocated, at one plan; it is added to the
    prediction of each other plan of the same model.
    """
    plain, corrected, wrong = [], [], [0, 0]
    for _, group in groupby(trainings, key=lambda training: training.name.partition("_")[0]):
        for probed, other in permutations(group, 2):
            residual = -whole[probed.name].allocated_error * probed.peak_allocated_bytes
            share = residual / other.smallest_limit_bytes
            plain.append(abs(whole[other.name].required_error))
            corrected.append(abs(whole[other.name].required_error + share))
            wrong[0] += whole[other.name].wasted < 0
            wrong[1] += whole[other.name].wasted + share < 0
    yield f"| {len(plain)} pairs of plans of one model | median | mean | 90th | wrongly fits |"
    yield "|---|---:|---:|---:|---:|"
    for name, errors, count in (
        ("as predicted", plain, wrong[0]),
        ("with the residual of the other plan", corrected, wrong[1]),
    ):
        ninetieth = statistics.quantiles(errors, n=10, method="inclusive")[-1]
        yield (
            f"| {name} | {statistics.median(errors):.2%} | {statistics.mean(errors):.2%} | "
            f"{ninetieth:.2%} | {count} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", help="only rows whose name contains one of these")
    chosen = parser.parse_args(arguments).rows
    trainings = list(recorded_trainings())
    whole = {training.name: accuracy.compared(training) for training in trainings}
    print(HEADER)
    print(row("nothing", list(whole.values()), whole), flush=True)
    for name, ablation in ABLATIONS.items():
        if not chosen or any(part in name for part in chosen):
            print(row(name, compared_without(ablation, trainings, whole), whole), flush=True)
    print()
    print("\n".join(residual_rows(trainings, whole)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
