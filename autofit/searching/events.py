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

    def learn(self, event: Event) -> None:
        """Remember the baseline's settings, and how long probes take.

        A resumed search runs no baseline, and shows plans in full.
        """
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
        clock = format_clock(event.progress.elapsed_s)
        return " | ".join([f"[{clock}] {said}", *self.standing(event.progress)])

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
        done = counted(progress.probes, "probe")
        if progress.probes_left is not None:
            done = f"probe {progress.probes} of {progress.probes + progress.probes_left}"
        oom = f", {progress.oom_probes} out of memory" if progress.oom_probes else ""
        left = self._left(progress, waited_s)
        return [best, f"{done}{oom}", *([left] if left else [])]

    def _left(self, progress: Progress, waited_s: float) -> str | None:
        """Return the time left, by the timeout or by how long probes took so far.

        Without `max_probes` by how many probes are usual; None: none of that is known.
        """
        probes, at_most_s = self._probes_left(progress), progress.seconds_left
        if probes is not None and self._finished and self._probing_since is not None:
            took_s = (progress.elapsed_s - self._probing_since) / self._finished
            fewest, most = probes
            # Usual counts only: later probes may be slower, by less the more have run
            longer = 1 + 1 / self._finished if most > fewest else 1.0
            fewest_s, most_s = (
                max(took_s * each - waited_s, 0.0) for each in (fewest, longer * most)
            )
            if at_most_s is None or most_s + waited_s < at_most_s:
                return _about(fewest_s, most_s, progress)
        if at_most_s is None:
            return None
        if at_most_s - waited_s < 1:
            return "the time is over"
        return f"at most {format_clock(at_most_s - waited_s)} left"

    def _probes_left(self, progress: Progress) -> tuple[int, int] | None:
        """Return the fewest and the most probes that are left; None: unknown."""
        if progress.probes_left is not None:
            return progress.probes_left, progress.probes_left
        if progress.usual_probes is None or progress.probes >= progress.usual_probes[1]:
            return None
        fewest, most = progress.usual_probes
        return max(fewest - progress.probes, 0), most - progress.probes

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


def _about(fewest_s: float, most_s: float, progress: Progress) -> str | None:
    """Return the time left; None: no time that is worth a clock.

    A search that has run as many probes as are usual may end after any: no clock tells when.
    """
    if fewest_s < 1 and progress.probes_left is None and progress.usual_probes is not None:
        return f"usually {progress.usual_probes[0]} to {progress.usual_probes[1]} probes"
    if most_s < 1:
        return None
    clocks = dict.fromkeys([format_clock(fewest_s), format_clock(most_s)])
    return f"about {' to '.join(clocks)} left"


def _why(measured: Measurement) -> str:
    """Return the first line of the detail, where the outcome alone is not clear."""
    if measured.ok or measured.outcome.about_memory or not measured.detail:
        return ""
    return f" ({measured.detail.strip().partition(chr(10))[0]})"
