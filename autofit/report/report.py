"""The report of a search: view it, save it, load it, and train as it recommends.

torch is imported only by `apply`, so a saved report opens on any machine; and what shows a report
only where it is shown.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.codec import in_a_table, read_json
from autofit.errors import InvalidArgument
from autofit.measurement import ACT, Trial
from autofit.plan import Plan, check_count
from autofit.report.record import Record
from autofit.strategy import Strategy
from autofit.units import counted

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from autofit.report.place import Place
    from autofit.training.training import Training
    from autofit.training.workload import Workload


class Drawing(str):
    """An SVG document that a notebook shows."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Report:
    """A view of a record.

    Attributes:
        record: its content, as plain data.
        strategies: the strategy objects of the search; empty in a loaded report, which uses the
            installed ones by name.
        workload: of the search, with its functions; None in a loaded report.
        place: where the report is shown, which decides what commands it gives.
    """

    record: Record
    strategies: Sequence[Strategy] = ()
    workload: Workload | None = None
    place: Place | None = None

    @property
    def best(self) -> Trial:
        """The trial of the plan that measured fastest, or that won a tie with it.

        It is that of `plan` where the search decided: `.plan`, `.samples_per_second`,
        `.measurement`.
        """
        return self.record.best

    @property
    def plan(self) -> Plan:
        """The plan to train with: the best, or the baseline where that was not told from it.

        Where the baseline does not fit it is the best in any case.
        """
        return self.record.recommended.plan

    @property
    def is_decided(self) -> bool:
        """Whether the best plan was told from the baseline, with 95%.

        Else one of `warnings` says why: noise, the timeout, max_probes, Ctrl-C or a failure.
        """
        return self.record.is_decided

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the reader should act on, the weightiest first."""
        from autofit.report.summary import warnings_of

        return tuple(warnings_of(self.record))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks that ask for nothing."""
        return tuple(note for note in self.record.notes if not note.startswith(ACT))

    @property
    def baseline(self) -> Trial:
        """The trial with every setting at its default, at the sample batch's own size."""
        return self.record.baseline

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials in order, failures included."""
        return self.record.trials

    @property
    def calibration(self) -> Mapping[str, Any]:
        """Constants of the GPU, for `autofit.predict`; {} if none were measured."""
        return self.record.calibration

    @property
    def frontier(self) -> tuple[Trial, ...]:
        """Pareto frontier of speed and held bytes, the fastest trial first."""
        return self.record.frontier

    @property
    def speedup(self) -> float | None:
        """Samples per second, best plan over baseline, by the final comparison.

        None if that did not end or decide, or the baseline was not in it.
        """
        return self.record.factor

    def with_costs(
        self, *, epoch_samples: int | None = None, price_per_hour: float | None = None
    ) -> Report:
        """Return the report with the time and cost of an epoch, and the cost of the planned steps.

        Args:
            epoch_samples: samples of an epoch; None: as the report has it.
            price_per_hour: of the device, in any currency; None: as the report has it.

        Raises:
            InvalidArgument: a number of samples below one, or what is no price.
        """
        search = self.record.search
        if epoch_samples is not None:
            search = replace(search, epoch_samples=check_count("epoch_samples", epoch_samples))
        if price_per_hour is not None:
            search = replace(search, price_per_hour=check_price(price_per_hour))
        return replace(self, record=replace(self.record, search=search))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the report file."""
        return self.record.to_dict()

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per trial; the columns have the JSON names."""
        import pandas as pd

        rows = []
        for trial in self.to_dict()["trials"]:
            plan = trial.pop("plan")
            settings = plan.pop("settings")
            rows.append(trial | plan | settings)
        return pd.DataFrame(rows)

    def _to_csv(self) -> str:
        """Return the trials as a table without the code of each plan, which other forms show."""
        trials = self.to_dataframe().drop(columns="paste", errors="ignore")
        text: str = trials.map(in_a_table).to_csv(index=False)
        return text

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report; the suffix of the path chooses the form.

        Args:
            path: .json is what `autofit.load` reads; .html a page with charts, for a browser; .md
                Markdown, for a pull request; .txt what `print(report)` shows; .csv a row for each
                trial; .svg what `plot` draws.

        Raises:
            InvalidArgument: another suffix, or the file cannot be written.
        """
        target = Path(path)
        forms: dict[str, Callable[[], str]] = {
            ".json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
            ".html": self.to_html,
            ".md": self.to_markdown,
            ".txt": self.to_text,
            ".svg": self.plot,
            ".csv": self._to_csv,
        }
        write(target, forms, "a report")
        return target

    def export(self, stack: str, path: str | os.PathLike[str] | None = None) -> str:
        """Return a script that trains with the recommended plan, and write it to a given file.

        Args:
            stack: "pytorch", a training loop around `apply`. Trainers of other libraries take the
                report itself: `autofit.integrations`.
            path: a file of any name.

        Raises:
            InvalidArgument: another stack, or the file cannot be written.
        """
        from autofit.report.export import exported

        text = exported(self.record, stack, self._place)
        if path is not None:
            target = Path(path)
            write(target, {target.suffix: lambda: text}, "an export")
        return text

    def apply(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        loss_fn: Callable[..., Any] | None = None,
        criterion: Callable[..., Any] | None = None,
        loss_weight: Callable[..., Any] | None = None,
        before_step: Callable[..., Any] | None = None,
        training_step: Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        batched: Iterable[str] | None = None,
        strategies: Iterable[str | Strategy] | None = None,
    ) -> Training:
        """Apply the recommended plan to the user's own model and optimizer, in this process.

        Args:
            model: on the device it trains on.
            optimizer: over its parameters; with training_step, a mapping of several. For a plan of
                several ranks, a function of parameters, such as torch.optim.AdamW.
            loss_fn: None: as in the search. A loaded report holds no functions: pass this and the
                next five again, as far as the search had them.
            criterion: likewise.
            loss_weight: likewise.
            before_step: likewise.
            training_step: likewise.
            collate_fn: likewise; steps then take lists of samples.
            batched: names of the batch's tensors that hold samples, and are cut into micro-batches:
                some of the keys of `record.workload["sample_shapes"]`; None: as in the search.
            strategies: names or Strategy objects that apply the plan's settings; None: those of
                the search, or the installed ones.

        Returns:
            A training, which is a context manager: leaving it restores model and optimizer.

        Raises:
            InvalidArgument: the model holds no tensor, the optimizer cannot step, or is live where
                the plan has several ranks, a function of the search is missing, the search had no
                loss and none is given, or a strategy of the plan is not installed.

        Warns:
            UserWarning: the model has another number of parameters than that of the search.
        """
        from autofit.report.apply import apply

        given = {
            "loss_fn": loss_fn,
            "criterion": criterion,
            "loss_weight": loss_weight,
            "before_step": before_step,
            "training_step": training_step,
            "collate_fn": collate_fn,
        }
        return apply(
            self.record,
            model,
            optimizer,
            given,
            batched=batched,
            strategies=strategies,
            remembered=self.strategies,
            workload=self.workload,
        )

    def to_text(self, *, width: int = 100, verbose: bool = False, color: bool = False) -> str:
        """Return the report as text: the answer in at most fifteen lines.

        Args:
            width: columns of a line; only code and commands may be wider.
            verbose: also every trial, all notes, and what was skipped and why.
            color: with the control characters of a terminal.
        """
        from autofit.report.text import render

        return render(self.record, width, verbose=verbose, color=color, place=self._place)

    def to_html(self) -> str:
        """Return the report as an HTML page that loads nothing, charts included."""
        from autofit.report.page import page

        return page(self.record, self._place)

    def plot(self) -> Drawing:
        """Draw speed against memory of every plan that ran, the frontier and the budget.

        Returns:
            An SVG document, which a notebook shows; `report.save("frontier.svg")` writes the same.
            It follows the light or dark scheme of the screen that shows it.
        """
        from autofit.report.charts import frontier_chart, standalone

        return Drawing(standalone(frontier_chart(self.record)))

    def to_markdown(self) -> str:
        """Return the report as GitHub's Markdown, for a pull request."""
        from autofit.report.text import markdown

        return markdown(self.record, self._place)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from autofit.report.page import cell

        return cell(self.record, self._place)

    def __repr__(self) -> str:
        from autofit.report.summary import one_line

        return f"<Report of {counted(len(self.trials), 'trial')}. {one_line(self.record)}>"

    @property
    def _place(self) -> Place:
        from autofit.report.place import Place

        return self.place or Place(has_functions=self.workload is not None)


def check_price(price_per_hour: Any) -> float:
    """Return a price as a float.

    Raises:
        InvalidArgument: it is negative, not finite, or no number.
    """
    is_number = isinstance(price_per_hour, (int, float)) and not isinstance(price_per_hour, bool)
    if not is_number or not 0 <= price_per_hour < math.inf:
        raise InvalidArgument(
            f"price_per_hour must be a number of at least 0, such as 2.5, got {price_per_hour!r}"
        )
    return float(price_per_hour)


def load(path: str | os.PathLike[str]) -> Report:
    """Return the report in a JSON file that `Report.save` wrote.

    Raises:
        InvalidArgument: the file cannot be read, or is not a report.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgument(f"give the path of a report as a string or a Path, got {path!r}")
    data = read_json(path)
    try:
        return Report(Record.from_dict(data))
    except InvalidArgument as error:
        raise InvalidArgument(f"{os.fspath(path)}: {error}") from error


def write(target: Path, forms: Mapping[str, Callable[[], str]], what: str) -> None:
    """Write what the suffix of the path names, all of it or nothing.

    Args:
        target: a file.
        forms: suffix -> what makes the text.
        what: is written, for messages.

    Raises:
        InvalidArgument: another suffix, or the file cannot be written.
    """
    if target.suffix not in forms:
        raise InvalidArgument(f"{target}: the file of {what} must end in {', '.join(forms)}")
    text = forms[target.suffix]()
    check_is_file(target)
    try:
        _write_whole(target, text)
    except (OSError, ValueError) as error:  # a NUL is in the name
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"cannot write {what} to {target}: {why}") from error


def check_is_file(target: Path) -> None:
    """Refuse a folder, a device, and a pipe: opening one that nobody reads would wait for ever.

    Raises:
        InvalidArgument: the path is one, or no path.
    """
    try:
        is_other = target.exists() and not target.is_file()
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL in it
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"cannot write {target}: {why}") from error
    if is_other:
        raise InvalidArgument(f"cannot write {target}: it is not a regular file")


def check_writable(target: Path, given: str) -> None:
    """Refuse before the work what `write` would refuse after it; `given` says how it was asked for.

    Raises:
        InvalidArgument: the path is no file, or its folder is not there or cannot be written.
    """
    try:
        check_is_file(target)
    except InvalidArgument as error:
        raise InvalidArgument(f"{given}: {error}") from error
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InvalidArgument(f"{given}: the folder of {target} must exist and be writable")


def _write_whole(target: Path, text: str) -> None:
    """Write all of the text or nothing: a full disk must not destroy an earlier report."""
    real = Path(os.path.realpath(target))  # what a symbolic link leads to is replaced, not the link
    part = real.with_name(f".{uuid.uuid4().hex}.part")  # of its own: others may write it, too
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        if real.exists():
            shutil.copymode(real, part)
        part.replace(real)
    finally:
        part.unlink(missing_ok=True)
