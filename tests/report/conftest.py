"""A record such as a search leaves behind: a baseline, failures of several kinds, a winner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Dimension, Plan
from autofit.report.record import Record, SearchSummary, Skipped

MIB = 2**20
NOT_RUN = "not run: may hold up to 120 MiB where 64.0 MiB are allowed"
RAISED = "ValueError: level 2 needs\nan even number of tokens"


def measured(milliseconds: float, reserved_mib: int) -> Measurement:
    times = [milliseconds / 1000 * factor for factor in (1.0, 0.99, 1.01, 1.0, 1.0, 1.02, 0.98)]
    return Measurement(
        Outcome.OK,
        step_times_s=times,
        peak_allocated_bytes=(reserved_mib - 1) * MIB,
        peak_reserved_bytes=reserved_mib * MIB,
        non_torch_bytes=2 * MIB,
        allocator_retries=0,
        micro_batches_run=2,
        loss=0.5,
        seconds=1.5,
    )


def plan(micro_batch: int, level: int) -> Plan:
    return Plan.split(32, micro_batch, {"folding.level": level})


@pytest.fixture
def record() -> Record:
    trials = (
        Trial(0, TrialKind.BASELINE, plan(4, 0), measured(400, 24)),
        Trial(
            1,
            TrialKind.SEARCH,
            plan(16, 0),
            Measurement(Outcome.OOM, "CUDA out of memory. " * 20, peak_reserved_bytes=62 * MIB),
            predicted_peak_bytes=60 * MIB,
        ),
        Trial(2, TrialKind.SEARCH, plan(16, 2), Measurement(Outcome.UNSUPPORTED, RAISED)),
        Trial(3, TrialKind.SEARCH, plan(16, 1), measured(191, 42)),
        Trial(4, TrialKind.VETOED, plan(32, 0), Measurement(Outcome.OVER_BUDGET, NOT_RUN)),
        Trial(5, TrialKind.SEARCH, plan(8, 1), measured(260, 20)),
        Trial(
            6, TrialKind.CONFIRMATION, plan(16, 1), measured(190, 42), predicted_peak_bytes=44 * MIB
        ),
        Trial(7, TrialKind.CONFIRMATION, plan(4, 0), measured(400, 24)),
    )
    return Record(
        version="0.1.0",
        created="2026-01-02T03:04:05Z",
        environment={
            "device": "cpu",
            "gpu": None,
            "capability": None,
            "total_bytes": 2**34,
            "driver": None,
            "cuda": None,
            "torch": "2.13.0",
            "python": "3.11.7",
        },
        workload={
            "fingerprint": "f00d",
            "parameters": 36,
            "global_batch": 32,
            "loss": "criterion",
            "given": ["criterion"],
            "clip_grad_norm": 1.0,
            "sample_shapes": {"[0]": "float32[4, 8]", "[1]": "int64[4]"},
            "batched": ["[0]", "[1]"],
        },
        vram_budget_bytes=64 * MIB,
        search=SearchSummary(7, 1, 12.5, "no plan is expected to be 1% faster", 0),
        dimensions={
            "folding.level": Dimension([0, 1, 2], payloads={1: ["blocks.0"], 2: ["blocks"]})
        },
        trials=trials,
        best_number=6,
        baseline_number=0,
        skipped=(Skipped({"folding.level": 2}, "level 1 does not run out of memory"),),
        paste={
            6: [
                "micro_batch = 16  # samples in one forward and backward",
                f"fold(model, {[f'blocks.{number}.attention' for number in range(12)]})",
            ]
        },
        notes=("memory_format left out: nothing to lay out",),
        difference={"loss": 9e-8, "gradient": 3.6e-7, "tolerance": 1e-3, "modules": []},
    )


def compared(record: Record, **blocks_ms: list[float]) -> Record:
    """The record with these steps of blocks in the final comparison: "best", "other", "baseline".

    The first block is trial 6. The best plan holds 44 MiB, the other 22, the baseline 26; trial 5
    is the other's own.
    """
    models = {"best": record.trials[6], "other": record.trials[5], "baseline": record.trials[7]}
    blocks = [
        replace(
            models[name],
            kind=TrialKind.CONFIRMATION,
            measurement=replace(
                models[name].measurement, step_times_s=[ms / 1e3 * f for f in (0.99, 1, 1.01)]
            ),
        )
        for name, steps_ms in blocks_ms.items()
        for ms in steps_ms
    ]
    numbered = [replace(trial, number=6 + at) for at, trial in enumerate(blocks)]
    return replace(record, trials=(*record.trials[:6], *numbered))
