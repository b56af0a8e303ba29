"""The events that a search reports as they happen: enough for a progress line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from autofit.measurement import Measurement, Trial, TrialKind
from autofit.plan import Plan


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
