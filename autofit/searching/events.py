"""The events of a search as they happen, in words, and as records of the logger "autofit"."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan, Settings
from autofit.units import counted, format_bytes, format_clock

# The least time between two lines in a log that nobody watches.
SECONDS_BETWEEN = 30.0

_LOGGER = logging.getLogger("autofit")
_LOGGER.addHandler(logging.NullHandler())  # else Python shows warnings where none is configured


@dataclass(frozen=True)
class Progress:
    """The state of the search.

    Attributes:
        probes: probes finished so far, those of earlier runs of the study included.
        oom_probes: how many of them ran out of memory.
        best: the fastest trial so far that fits; None: none yet.
        elapsed_s: seconds since this run began.
        seconds_left: until the timeout; None: unlimited.
        probes_left: until `max_probes`; None: unlimited.
        usual_probes: the fewest and the most that such a search usually takes in all; None:
            unknown, or not begun.
    """

    probes: int
    oom_probes: int
    best: Trial | None
    elapsed_s: float
    seconds_left: float | None
    probes_left: int | None
    usual_probes: tuple[int, int] | None = None


@dataclass(frozen=True)
class StageStarted:
    """Something other than a probe has begun.

    Attributes:
        stage: what, in words, such as "starting a worker".
    """

    stage: str
    progress: Progress


@dataclass(frozen=True)
class MachineBusy:
    """Others use the device, so that what is measured is uncertain.

    Attributes:
        how: in words, such as "load 5.1 on 2 cores".
    """

    how: str
    progress: Progress


@dataclass(frozen=True)
class Repeating:
    """A probe ended by what may be a transient failure; its plan runs again, in a fresh worker.

    Attributes:
        first: how it ended; not stored.
    """

    plan: Plan
    first: Measurement
    progress: Progress


@dataclass(frozen=True)
class ProbeStarted:
    """A plan is about to run."""

    plan: Plan
    kind: TrialKind
    predicted_peak_bytes: int | None
    progress: Progress


@dataclass(frozen=True)
class ProbeFinished:
    """A plan has run, and its trial is stored."""

    trial: Trial
    progress: Progress


@dataclass(frozen=True)
class Vetoed:
    """A proposal was refused before it ran; the detail of its trial is the reason."""

    trial: Trial
    progress: Progress


@dataclass(frozen=True)
class Confirming:
    """The search itself has ended; the finalists are measured again in a fresh worker.

    Attributes:
        stopped_because: why the search ended.
    """

    stopped_because: str
    progress: Progress


# Any event.
Event: TypeAlias = (
    StageStarted | MachineBusy | ProbeStarted | Repeating | ProbeFinished | Vetoed | Confirming
)

# Called in the thread of the search; an exception it raises ends the search.
OnEvent: TypeAlias = Callable[[Event], None]


def logged(then: OnEvent | None, *, slowly: bool = False) -> OnEvent:
    """Return a function that logs each event as a line, then passes it on.

    The level is INFO; a busy machine, and what is run again, is a WARNING. Nothing is shown unless
    the user's own program has configured logging.

    Args:
        then: what it is passed on to.
        slowly: where logging shows nothing, write to standard error how a long search stands: a
            line at most every `SECONDS_BETWEEN`.
    """
    words = EventWords()
    last = time.monotonic()

    def on_event(event: Event) -> None:
        nonlocal last
        words.learn(event)
        if (line := words.line(event)) is not None:
            _LOGGER.log(logging.WARNING if is_warning(event) else logging.INFO, "%s", line)
            is_due = time.monotonic() - last >= SECONDS_BETWEEN
            if slowly and is_due and not _LOGGER.isEnabledFor(logging.INFO):
                last = time.monotonic()
                from autofit.streams import complain  # few searches are so long

                complain(f"autofit: {line}")
        if then is not None:
            then(event)

    return on_event


def is_warning(event: Event) -> bool:
    """Return whether an event puts what is measured in doubt."""
    return isinstance(event, MachineBusy | Repeating)


class EventWords:
    """Events as text; plans without the settings that equal the baseline's."""

    def __init__(self) -> None:
        self._plain: Settings = {}
        self._probing_since: float | None = None
        self._finished = 0
        self._best: Trial | None = None
        self._why_slower = ""

    def learn(self, event: Event) -> None:
        """Remember the baseline's settings, the best plan, and how long probes take.

        A resumed search runs no baseline, and shows plans in full.
        """
        self._follow(event.progress.best)
        if isinstance(event, ProbeStarted):
            if event.kind is TrialKind.BASELINE:
                self._plain = event.plan.settings
            if self._probing_since is None:
                self._probing_since = event.progress.elapsed_s
        if isinstance(event, ProbeFinished):
            self._finished += 1
            if event.trial.kind is TrialKind.BASELINE:  # it may begin before settings are known
                self._plain = event.trial.plan.settings

    def doing(self, event: Event) -> str:
        """Describe what runs after the event."""
        match event:
            case ProbeStarted():
                return f"running {self._plan(event.plan)}"
            case Repeating():
                return f"running {self._plan(event.plan)} again"
            case StageStarted():
                return event.stage
            case Confirming():
                return "comparing the fastest plans"
        return "choosing the next plan"

    def line(self, event: Event) -> str | None:
        """Return the event as a complete line; None where it adds nothing."""
        said = self._said(event)
        if said is None:
            return None
        return " | ".join([clock(event.progress.elapsed_s) + said, *self.standing(event.progress)])

    def _said(self, event: Event) -> str | None:
        match event:
            case ProbeStarted():
                return None
            case ProbeFinished():
                return self._result(event)
            case Vetoed():
                return f"{self._plan(event.trial.plan)}: not run, it would not fit"
            case Confirming():
                return f"{self.doing(event)}: {event.stopped_because}"
            case MachineBusy():
                return f"the machine is busy ({event.how}): speeds will be uncertain"
            case Repeating():
                ended = f"{event.first.outcome.value}{_why(event.first)}"
                return f"{self._plan(event.plan)}: {ended}, running it again"
            case StageStarted():
                return event.stage

    def standing(self, progress: Progress, waited_s: float = 0.0) -> list[str]:
        """Return the best so far, the probes done and the time left, as far as there are any.

        Args:
            progress: at some event.
            waited_s: seconds since that.
        """
        if not progress.probes:
            return []
        best = "nothing fits yet" if progress.best is None else f"best {progress.best.speed_words}"
        oom = f", {progress.oom_probes} out of memory" if progress.oom_probes else ""
        left = self._left(progress, waited_s)
        return [best + self._why_slower, f"{_done(progress)}{oom}", *([left] if left else [])]

    def _follow(self, best: Trial | None) -> None:
        """Remember the best plan so far, and why its speed is below that of the best before."""
        if best is None or best == self._best:
            return
        before, self._best = self._best, best
        speeds = [each.samples_per_second or 0.0 for each in (before, best) if each is not None]
        self._why_slower = ""
        if before is not None and speeds[1] < speeds[0]:
            whose = "it" if before.plan == best.plan else "the one before"
            self._why_slower = f" ({whose} was slower when measured again)"

    def _left(self, progress: Progress, waited_s: float) -> str | None:
        """Return the time left: by the timeout, or by how long the probes of `max_probes` take."""
        probes, at_most_s = progress.probes_left, progress.seconds_left
        if probes and self._finished and self._probing_since is not None:
            took_s = (progress.elapsed_s - self._probing_since) / self._finished
            left_s = took_s * probes - waited_s
            if at_most_s is None or left_s + waited_s < at_most_s:
                return f"about {format_clock(left_s)} left" if left_s >= 1 else None
        if at_most_s is None:
            return None
        if at_most_s - waited_s < 1:
            return "the time is over"
        return f"at most {format_clock(at_most_s - waited_s)} left"

    def _result(self, event: ProbeFinished) -> str:
        trial, measured = event.trial, event.trial.measurement
        parts = [trial.speed_words] if measured.ok else [measured.outcome.value.replace("_", " ")]
        if measured.outcome is Outcome.OOM:
            parts = ["out of memory" + " in its evaluation" * measured.is_of_evaluation]
        if measured.held_bytes:
            parts.append(format_bytes(measured.held_bytes))
        return f"{self._plan(trial.plan)}: {', '.join(parts)}{_why(measured)}"

    def _plan(self, plan: Plan) -> str:
        return str(plan.without(self._plain))


def clock(elapsed_s: float) -> str:
    """Return the time that a line begins with; none in the first second."""
    return f"[{format_clock(elapsed_s)}] " if elapsed_s >= 1 else ""


def _done(progress: Progress) -> str:
    """Return the probes done: "probe 14 of usually 13 to 30", or of at most `max_probes`."""
    usual = progress.usual_probes
    if progress.probes_left is not None:
        return f"probe {progress.probes} of {progress.probes + progress.probes_left}"
    if usual is not None and progress.probes <= usual[1]:
        return f"probe {progress.probes} of usually {usual[0]} to {usual[1]}"
    return counted(progress.probes, "probe")


def _why(measured: Measurement) -> str:
    """Return the first line of the detail, where the outcome alone is not clear."""
    if measured.ok or measured.outcome.about_memory or not measured.detail:
        return ""
    return f" ({measured.detail.strip().partition(chr(10))[0]})"
