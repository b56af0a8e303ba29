"""Have a training loop with an `accelerate.Accelerator` run a plan.

    accelerator = Accelerator(**autofit.integrations.accelerate.arguments(report))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with autofit.integrations.accelerate.applied(report, accelerator, model, optimizer):
        ...  # your loop, with accelerator.accumulate(model) and accelerator.backward(loss)

The loader makes micro-batches of `report.plan.micro_batch` samples. One device.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from autofit.errors import InvalidArgument
from autofit.integrations.applied import (
    Applied,
    Division,
    accelerate_compiles,
    divide,
    library,
    on_model,
    replaced,
)
from autofit.report.report import Report
from autofit.strategy import Strategy

_MIXED = {"bfloat16": "bf16", "float16": "fp16"}
_INDUCTOR = "inductor"


def arguments(
    report: Report, *, strategies: Iterable[str | Strategy] | None = None
) -> dict[str, Any]:
    """Return arguments of an Accelerator that run a report's best plan.

    Args:
        report: of a search.
        strategies: as for `Report.apply`.

    Returns:
        gradient_accumulation_steps, and mixed_precision and dynamo_plugin where the plan has one.

    Raises:
        InvalidArgument: a trainer cannot run the plan.
    """
    compiles = accelerate_compiles(report, strategies, is_mixed=False)
    division = divide(
        report,
        lambda term, value: term == "autocast" or (term == "compilation" and compiles),
        strategies,
    )
    found: dict[str, Any] = {"gradient_accumulation_steps": division.plan.accumulation_steps}
    if "autocast" in division.arguments:
        found["mixed_precision"] = _MIXED[str(division.arguments["autocast"])]
    if "compilation" in division.arguments:
        found["dynamo_plugin"] = _whole_model(str(division.arguments["compilation"]))
    return found


def _whole_model(mode: str) -> Any:
    """Return the plugin that compiles the whole model, whatever the environment asks for."""
    plugin = library("accelerate").utils.TorchDynamoPlugin
    regional = "use_regional_compilation"  # from accelerate 1.6 on; before, no region is compiled
    has_regions = regional in (each.name for each in dataclasses.fields(plugin))
    return plugin(backend=_INDUCTOR, mode=mode, **({regional: False} if has_regions else {}))


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

    The Accelerator gets the accumulation. Its mixed precision and its compilation are fixed where
    it is made, so they must be those of `arguments`. All else is applied to model and optimizer.

    Args:
        report: of a search of this training.
        accelerator: an `accelerate.Accelerator` on one device.
        model: before or after `accelerator.prepare`.
        optimizer: before or after `accelerator.prepare`.
        strategies: as for `Report.apply`.

    Yields:
        What was set, to be printed.

    Raises:
        InvalidArgument: the Accelerator has several processes, compiles in another way or has
            another mixed precision than the plan, or cannot run it.

    Warns:
        UserWarning: the Accelerator has mixed precision or compiles, and the plan does not; or,
            while the loop runs, a step whose gradients are not those of the mean over its samples.
    """
    if accelerator.num_processes > 1:
        raise InvalidArgument(
            f"this Accelerator has {accelerator.num_processes} processes, but the plan "
            "is for one device: start a single process"
        )
    has, mode = accelerator.mixed_precision, _compiled_mode(accelerator)
    division = divide(
        report,
        lambda term, value: (
            (term == "autocast" and _MIXED[str(value)] == has)
            or (term == "compilation" and value == mode)
        ),
        strategies,
    )
    _check_precision(division, has)
    _check_compilation(division, mode)
    steps, before = division.plan.accumulation_steps, accelerator.gradient_accumulation_steps
    lines = [
        f"gradient_accumulation_steps={steps} (was {before})",
        *_of_loaders(division, accelerator),
        *division.lines("an Accelerator"),
    ]
    with ExitStack() as stack:
        stack.callback(setattr, accelerator, "gradient_accumulation_steps", before)
        accelerator.gradient_accumulation_steps = steps
        stack.enter_context(_steps_watched(division, accelerator))
        unwrapped = accelerator.unwrap_model(model)
        unwrapped = getattr(unwrapped, "_orig_mod", unwrapped)  # without torch's own wrapper
        own = getattr(optimizer, "optimizer", optimizer)  # without accelerate's wrapper
        stack.enter_context(on_model(division.rest, unwrapped, own))
        yield Applied(tuple(lines), stack)


def _of_loaders(division: Division, accelerator: Any) -> Iterator[str]:
    """Yield what the loader should have, unless each that the Accelerator prepared has it."""
    plan, loaders = division.plan, accelerator._dataloaders
    sizes = {getattr(each, "total_batch_size", None) for each in loaders}
    samples = [getattr(each, "total_dataset_length", None) or 1 for each in loaders]
    asked = [f"the DataLoader should have batch_size={plan.micro_batch}"]
    asked *= sizes != {plan.micro_batch}
    has_short_step = not samples or any(number % plan.samples_per_step for number in samples)
    asked += [division.whole_steps] * (plan.accumulation_steps > 1 and has_short_step)
    if asked:
        yield "; ".join(asked)


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


def _compiled_mode(accelerator: Any) -> str | None:
    """Return the mode in which an Accelerator compiles whole models.

    None if it does not compile.
    """
    plugin = accelerator.state.dynamo_plugin
    backend = str(getattr(plugin.backend, "value", plugin.backend)).lower()
    if backend == "no":
        return None
    if backend != _INDUCTOR or getattr(plugin, "use_regional_compilation", False):
        return f"{backend}, in a way of its own"
    return str(plugin.mode)


def _check_compilation(division: Division, mode: str | None) -> None:
    """Refuse or warn of compilation that is not the plan's."""
    if mode is None or "compilation" in division.arguments:
        return
    rest = division.rest.strategies
    if any("compilation" in getattr(each, "standard_terms", ()) for each in rest):
        raise InvalidArgument(
            f"this Accelerator compiles ({mode}), and the plan needs another way: create it with "
            "Accelerator(**autofit.integrations.accelerate.arguments(report))"
        )
    warnings.warn(
        f"this Accelerator compiles ({mode}), but the plan was measured without", stacklevel=5
    )
