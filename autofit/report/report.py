"""The report: what a search found, to be read, saved, loaded and put to use.

It imports no torch until `apply` is called, so a saved report opens on any machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidRequest
from autofit.measurement import Trial
from autofit.report import apply
from autofit.report.record import Record, frontier
from autofit.report.text import WIDTH, headline, render

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from autofit.checks.soak import Endurance
    from autofit.strategy import Strategy
    from autofit.training.training import Training
    from autofit.training.workload import Workload


@dataclass(frozen=True, repr=False)
class Report:
    """A view of a record.

    Attributes:
        record: everything it shows, as plain data.
        strategies: the strategy objects that the search was given; empty in a loaded report,
            which finds the installed ones by name.
        workload: what was searched, with the functions that it was given; None in a loaded report.
    """

    record: Record
    strategies: Sequence[Strategy] = ()
    workload: Workload | None = None

    @property
    def best(self) -> Trial:
        """The trial of the plan to train with: `.plan`, `.samples_per_second`, `.measurement`."""
        return self.record.best

    @property
    def baseline(self) -> Trial:
        """The trial of the user's own plan: every setting plain, the sample batch's own size."""
        return self.record.trial(self.record.baseline_number)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every trial, in order, failures included."""
        return self.record.trials

    @property
    def calibration(self) -> Mapping[str, Any]:
        """What the baseline's probe taught of the GPU, for `autofit.predict`; {} where nothing."""
        return self.record.calibration

    @property
    def frontier(self) -> tuple[Trial, ...]:
        """Trials worth choosing between by speed and memory, the fastest first."""
        return frontier(self.record.trials)

    @property
    def speedup(self) -> float | None:
        """The best plan's samples per second over the baseline's; None where that did not fit."""
        baseline = self.record.baseline_beside_best
        if not baseline.ok or not baseline.samples_per_second or not self.best.samples_per_second:
            return None
        return self.best.samples_per_second / baseline.samples_per_second

    def to_dict(self) -> dict[str, Any]:
        """The content of the report file."""
        return self.record.to_dict()

    def to_dataframe(self) -> pd.DataFrame:
        """One row a trial; settings, plan and measurement as columns, under their JSON names."""
        import pandas as pd

        rows = []
        for trial in self.to_dict()["trials"]:
            plan = trial.pop("plan")
            settings = plan.pop("settings")
            rows.append(trial | plan | settings)
        return pd.DataFrame(rows)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report; the suffix chooses the form: .json, .txt or .csv.

        Raises:
            InvalidRequest: another suffix, or the file cannot be written.
        """
        target = Path(path)
        forms: dict[str, Callable[[], str]] = {
            ".json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
            ".txt": lambda: render(self.record),
            ".csv": lambda: self.to_dataframe().to_csv(index=False),
        }
        if target.suffix not in forms:
            raise InvalidRequest(f"{target}: a report is written as {', '.join(forms)}")
        try:
            _write_whole(target, forms[target.suffix]())
        except OSError as error:
            raise InvalidRequest(f"cannot write the report to {target}: {error}") from error
        return target

    def apply(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        loss_fn: Callable[..., Any] | None = None,
        criterion: Callable[..., Any] | None = None,
        loss_weight: Callable[..., Any] | None = None,
        before_step: Callable[..., Any] | None = None,
        train_step: Callable[..., Any] | None = None,
        strategies: Iterable[str | Strategy] | None = None,
    ) -> Training:
        """The best plan on the user's own model and optimizer, in this process.

        Args:
            model: on the device it trains on.
            optimizer: over its parameters; a mapping of them with train_step.
            loss_fn, criterion, loss_weight, before_step, train_step: what the search was given,
                unless it is said anew here; a loaded report has to be told.
            strategies: names or Strategy objects for the plan's settings, where those of the search
                are not known or not meant; the others are looked up among the installed ones.

        Returns:
            A training that is also a context manager: leaving it gives model and optimizer back
            as they were.

        Raises:
            InvalidRequest: the model holds no tensor, the optimizer cannot step, a loaded report is
                not told how the loss is computed, or a strategy of the plan is not installed here.

        Warns:
            UserWarning: the model has another number of parameters than the one that was searched,
                or no loss was given.
        """
        said = {
            "loss_fn": loss_fn,
            "criterion": criterion,
            "loss_weight": loss_weight,
            "before_step": before_step,
            "train_step": train_step,
        }
        return apply.apply(
            self.record,
            model,
            optimizer,
            said,
            strategies=strategies,
            remembered=self.strategies,
            workload=self.workload,
        )

    def soak(
        self,
        workload: Workload | None = None,
        *,
        steps: int = 200,
        device: str | None = None,
        isolation: str = "process",
    ) -> Endurance:
        """Train the best plan for longer and say whether peak, speed and loss stayed the same.

        Args:
            workload: what was searched; a loaded report has to be told.
            steps, device, isolation, and what is raised: as for `autofit.checks.soak.soak`.
        """
        from autofit.checks.soak import soak

        trained = workload or self.workload
        if trained is None:
            raise InvalidRequest(
                "a loaded report holds no workload: pass the one that was searched"
            )
        return soak(
            self.record,
            trained,
            steps=steps,
            device=device,
            isolation=isolation,
            strategies=self.strategies,
        )

    def to_text(self, *, width: int = WIDTH) -> str:
        """The report as text: the best plan first, then every trial, then what was skipped."""
        return render(self.record, width)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Report of {len(self.trials)} trials. {headline(self.record)}>"


def load(path: str | os.PathLike[str]) -> Report:
    """The report in a JSON file that `Report.save` wrote.

    Raises:
        InvalidRequest: the file cannot be read, or holds no report.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise InvalidRequest(f"cannot read the report {os.fspath(path)}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{os.fspath(path)} is no JSON report: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"{os.fspath(path)} is no report: it holds a {type(data).__name__}")
    return Report(Record.from_dict(data))


def _write_whole(target: Path, text: str) -> None:
    """The whole text or the file as it was: a full disk must not cost an earlier report."""
    part = target.with_name(f".{target.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
