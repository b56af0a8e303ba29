"""Targets of `predict` and `check` without a script: `hf:ORG/MODEL`, or a folder with a config.

The module that reads them is imported only for such a target.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autofit.cli.console import say
from autofit.cli.options import given_plan, load_target
from autofit.errors import InvalidArgument
from autofit.plan import settings_of
from autofit.registry import load_strategies
from autofit.report.report import Report

if TYPE_CHECKING:
    from autofit.checks.precisions import PrecisionTable
    from autofit.integrations.hugging_face import FineTune
    from autofit.training.workload import Workload

_HUB = "hf:"

ModelOrTarget = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="a Workload, or a function that returns one: path/to/file.py:name or "
        "package.module:name; or a model of transformers: hf:ORG/MODEL or a folder with a "
        "config.json",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="samples of hf:ORG/MODEL; default: 1"),
]
SampleLength = Annotated[
    int | None,
    typer.Option(
        "--sequence",
        metavar="N",
        min=1,
        help="tokens of a sample of hf:ORG/MODEL; default: 2048, or all that it has positions for",
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="train LoRA adapters of this rank of hf:ORG/MODEL"),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="of the weights of hf:ORG/MODEL: float32, bfloat16 or float16; default: predict tells "
        "of each, check takes the config's",
    ),
]


def read_model(target: str, dtype: str | None, **asked: int | None) -> FineTune | None:
    """Return the fine-tune that a target names; None: it names Python code.

    Args:
        target: as on the command line.
        dtype: of the weights.
        asked: `batch`, `sequence` and `lora_rank`; None: not given.

    Raises:
        InvalidArgument: options of a model are given for Python code; or as of `FineTune.read`.
        PredictionUnavailable: the hub cannot be reached.
    """
    if target.startswith(_HUB) or os.path.isdir(target):
        from autofit.integrations.hugging_face import FineTune, check_dtype

        if dtype is not None:
            check_dtype(dtype)
        return FineTune.read(target, **asked)
    given = [name for name, value in {**asked, "dtype": dtype}.items() if value is not None]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise InvalidArgument(
            f"{option} is for hf:ORG/MODEL and folders with a config.json: a Workload in Python "
            "says it itself"
        )
    return None


def workload_of(
    model: FineTune | None, target: str, dtype: str | None, settings: Sequence[str] | None
) -> tuple[Workload, tuple[str, ...]]:
    """Return the workload of a target, and a note on what it is where nobody wrote it."""
    if model is None:
        return load_target(target), ()
    chosen = dtype or ("float32" if sets_precision(settings) else model.own_dtype)
    return model.workload(chosen), (f"{model}, weights in {chosen}",)


def sets_precision(settings: Sequence[str] | None) -> bool:
    """Return whether a setting is of a strategy of autocast."""
    names = {text.partition("=")[0]: 0 for text in settings or ()}
    of_autocast = (
        each for each in load_strategies() if "autocast" in getattr(each, "standard_terms", ())
    )
    return any(settings_of(strategy.name, names) for strategy in of_autocast)


def predict_in_each_precision(
    model: FineTune,
    gpus: Sequence[Any],
    dtype: str | None,
    micro_batch: int | None,
    global_batch: int | None,
    settings: Sequence[str] | None,
    ranks: int | None,
) -> PrecisionTable:
    """Predict a fine-tune on GPUs, in each precision of weights of this type; None: of any."""
    from autofit.checks.precisions import predict_precisions

    workload = model.workload(dtype or "float32")  # of which the plan alone is used
    plan = given_plan(workload, micro_batch, global_batch, settings, None, ranks)
    assert not isinstance(plan, Report)  # which --plan-from gives alone
    return predict_precisions(
        str(model),
        model.workload,
        workload.plan() if plan is None else plan,
        gpus,
        weights=dtype,
        frozen=model.lora_rank is not None,
        ranks=ranks,
        progress=lambda line: say(f"predicting {line}"),
    )
