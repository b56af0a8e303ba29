"""Have a training loop with an `accelerate.Accelerator` run a plan.

    accelerator = Accelerator(**autofit.integrations.accelerate.arguments(report))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with autofit.integrations.accelerate.applied(report, accelerator, model, optimizer):
        ...  # your loop, with accelerator.accumulate(model) and accelerator.backward(loss)

The loader makes micro-batches of `report.plan.micro_batch` samples. One device.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from autofit.errors import InvalidArgument
from autofit.integrations.applied import Applied, Division, divide, on_model, replaced
from autofit.report.report import Report
from autofit.strategy import Strategy

_MIXED = {"bfloat16": "bf16", "float16": "fp16"}


def arguments(
    report: Report, *, strategies: Iterable[str | Strategy] | None = None
) -> dict[str, Any]:
    """Return arguments of an Accelerator that run a report's best plan.

    Args:
        report: of a search.
        strategies: as for `Report.apply`.

    Returns:
        gradient_accumulation_steps, and mixed_precision where the plan has one.

    Raises:
        InvalidArgument: a trainer cannot run the plan.
    """
    division = divide(report, lambda term, value: term == "autocast", strategies)
    found: dict[str, Any] = {"gradient_accumulation_steps": division.plan.accumulation_steps}
    if "autocast" in division.arguments:
        found["mixed_precision"] = _MIXED[str(division.arguments["autocast"])]
    return found


@contextmanager
def applied(
    report: Report,
    accelerator: Any,
    model: Any,
    optimizer: Any,
    *,
    strategies: Iterable[str | Strategy] | None = None,
) -> Iterator[Applied]:
    """Apply a report's best plan to a training, for as long as this is entered.

    The Accelerator gets the accumulation. Its mixed precision is fixed where it is made, so it must
    be that of `arguments`. All else is applied to model and optimizer.

    Args:
        report: of a search of this training.
        accelerator: an `accelerate.Accelerator` on one device.
        model: before or after `accelerator.prepare`.
        optimizer: before or after `accelerator.prepare`.
        strategies: as for `Report.apply`.

    Yields:
        What was set, to be printed.

    Raises:
        InvalidArgument: the Accelerator has several processes, another mixed precision than the
            plan, or cannot run it.

    Warns:
        UserWarning: the Accelerator has mixed precision, and the plan has none; or, while the
            loop runs, a step whose gradients are not those of the mean over its samples.
    """
    if accelerator.num_processes > 1:
        raise InvalidArgument(
            f"this Accelerator has {accelerator.num_processes} processes, but the plan "
            "is for one device: start a single process"
        )
    has = accelerator.mixed_precision
    division = divide(
        report, lambda term, value: term == "autocast" and _MIXED[str(value)] == has, strategies
    )
    _check_precision(division, has)
    steps, before = division.plan.accumulation_steps, accelerator.gradient_accumulation_steps
    lines = [
        f"gradient_accumulation_steps={steps} (was {before})",
        f"the DataLoader should have batch_size={division.plan.micro_batch}"
        + f"; {division.whole_steps}" * (steps > 1),
        *division.lines("an Accelerator"),
    ]
    with ExitStack() as stack:
        stack.callback(setattr, accelerator, "gradient_accumulation_steps", before)
        accelerator.gradient_accumulation_steps = steps
        stack.enter_context(_steps_watched(division, accelerator))
        unwrapped = accelerator.unwrap_model(model)
        own = getattr(optimizer, "optimizer", optimizer)  # without accelerate's wrapper
        stack.enter_context(on_model(division.rest, unwrapped, own))
        yield Applied(tuple(lines), stack)


@contextmanager
def _steps_watched(division: Division, accelerator: Any) -> Iterator[None]:
    """Warn of a step that ends with the loader and has other gradients than a whole one."""
    backward, ran = accelerator.backward, itertools.count(1)

    def watched(loss: Any, **given: Any) -> None:
        nonlocal ran
        micro_batches = next(ran)
        state = accelerator.gradient_state
        if accelerator.sync_gradients:
            ran = itertools.count(1)
            left = state.remainder % division.plan.micro_batch if state.remainder > 0 else 0
            last = left if state.end_of_dataloader and left else division.plan.micro_batch
            if words := division.misweighed(micro_batches, last):
                warnings.warn(words, stacklevel=3)
        backward(loss, **given)

    with replaced(accelerator, "backward", watched):
        yield


def _check_precision(division: Division, has: str) -> None:
    """Refuse or warn of mixed precision that is not the plan's."""
    if "autocast" in division.terms_of_rest:
        raise InvalidArgument(
            f"this Accelerator has mixed_precision={has!r}, but the plan needs "
            "another: create it with "
            "Accelerator(**autofit.integrations.accelerate.arguments(report))"
        )
    if has != "no" and "autocast" not in division.arguments:
        warnings.warn(
            (
                f"this Accelerator has mixed_precision={has!r}, but the plan was measured "
                "without, unless the loss of the search had it"
            ),
            stacklevel=5,
        )
