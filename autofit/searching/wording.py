"""The events of a search in words, and as records of the logger "autofit"."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress

from autofit.measurement import Measurement, Role
from autofit.plan import Plan, Settings
from autofit.searching.events import (
    Confirming,
    Event,
    MachineBusy,
    OnEvent,
    ProbeFinished,
    ProbeStarted,
    Progress,
    Repeating,
    StageStarted,
    Vetoed,
)
from autofit.units import counted, format_bytes, format_clock

_LOGGER = logging.getLogger("autofit")
_LOGGER.addHandler(logging.NullHandler())  # else Python shows warnings where none is configured


SECONDS_BETWEEN = 30.0
"""The least time between two lines in a log that nobody watches, and before the first."""


def logged(then: OnEvent | None, *, slowly: bool = False) -> OnEvent:
    """Return a function that logs each event as a line, then passes it on.

    The level is INFO; a busy machine, and what is run again, is a WARNING. Nothing is shown unless
    the user's own program has configured logging.

    Args:
        then: what it is passed on to.
        slowly: where logging shows nothing, write to standard error how a long search stands: a
            plain line at most every `SECONDS_BETWEEN`.
    """
    words = EventWords()
    last = time.monotonic()

    def on_event(event: Event) -> None:
        nonlocal last
        words.learn(event)
        if (line := words.plain(event)) is not None:
            doubtful = isinstance(event, MachineBusy | Repeating)
            _LOGGER.log(logging.WARNING if doubtful else logging.INFO, "%s", line)
            is_due = time.monotonic() - last >= SECONDS_BETWEEN
            unseen = sys.stderr is not None and not _LOGGER.isEnabledFor(logging.INFO)
            if slowly and is_due and unseen:
                last = time.monotonic()
                with suppress(OSError):  # a full disk must not end a search
                    print(f"autofit: {line}", file=sys.stderr, flush=True)
        if then is not None:
            then(event)

    return on_event


class EventWords:
    """Events as text; plans without the settings that equal the baseline's."""

    def __init__(self) -> None:
        self._plain: Settings = {}

    def learn(self, event: Event) -> None:
        """Remember the baseline's settings; a resumed search has none, and shows plans in full."""
        if isinstance(event, ProbeStarted) and event.role is Role.BASELINE:
            self._plain = event.plan.settings

    def doing(self, event: Event) -> str:
        """Describe the activity that follows the event."""
        if isinstance(event, ProbeStarted):
            number = event.progress.probes + 1
            return f"probe {number} ({event.role.value}) {self._plan(event.plan)}"
        if isinstance(event, Repeating):
            return f"probe {event.progress.probes + 1} again {self._plan(event.plan)}"
        if isinstance(event, StageStarted):
            return event.stage
        return "confirming the leading plans" if isinstance(event, Confirming) else "choosing"

    def finished(self, event: Event) -> str | None:
        """Describe the result of the event; the live line shows the rest."""
        if isinstance(event, ProbeFinished):
            return f"probe {event.progress.probes} ({event.trial.role.value}) {self._trial(event)}"
        return None if isinstance(event, StageStarted) else self.plain(event)

    def plain(self, event: Event) -> str | None:
        """Return the event as a complete line; None where it adds nothing."""
        progress = event.progress
        if isinstance(event, ProbeFinished):
            standing = [
                best_so_far(progress),
                f"{progress.oom_probes} OOM",
                *limits_left(progress),
            ]
            return (
                f"[{format_clock(progress.elapsed_s)}] probe {progress.probes} "
                f"({event.trial.role.value}) {self._trial(event)} | {', '.join(standing)}"
            )
        if isinstance(event, Vetoed):
            return f"refused before it ran: {self._plan(event.trial.plan)}"
        if isinstance(event, Confirming):
            return f"confirming the leading plans: {event.stopped_because}"
        if isinstance(event, MachineBusy):
            return f"the machine is busy: {event.how}"
        if isinstance(event, StageStarted):
            return f"[{format_clock(progress.elapsed_s)}] {event.stage}"
        if isinstance(event, Repeating):
            ended = event.first.outcome.value
            return f"{self._plan(event.plan)}: {ended}{_why(event.first)}, again in a fresh worker"
        return None

    def _trial(self, event: ProbeFinished) -> str:
        trial, measured = event.trial, event.trial.measurement
        parts = [measured.outcome.value]
        if trial.samples_per_second:
            parts.append(trial.speed_words)
        if measured.held_bytes:
            parts.append(f"held {format_bytes(measured.held_bytes)}")
        return f"{self._plan(trial.plan)}: {', '.join(parts)}{_why(measured)}"

    def _plan(self, plan: Plan) -> str:
        return str(plan.without(self._plain))


def _why(measured: Measurement) -> str:
    """Return the first line of the detail, where the outcome alone is not clear."""
    if measured.ok or measured.outcome.about_memory or not measured.detail:
        return ""
    return f" ({measured.detail.strip().partition(chr(10))[0]})"


def best_so_far(progress: Progress) -> str:
    """Return the speed of the fastest trial that fits, or that there is none."""
    if progress.best is None:
        return "nothing fits yet"
    return f"best {progress.best.speed_words}"


def limits_left(progress: Progress, waited: float = 0.0) -> list[str]:
    """Return the limits on the remaining time and probes, if any."""
    left = []
    if progress.seconds_left is not None:
        left.append(format_clock(max(progress.seconds_left - waited, 0.0)))
    if progress.probes_left is not None:
        left.append(counted(progress.probes_left, "probe"))
    return [f"at most {' or '.join(left)} left"] if left else []
