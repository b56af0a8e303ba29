"""Who has a study in a database, which has no lock: the claims that searches write into it.

Promises: of two searches of a study at most one goes on; the claim of a search whose
process has ended keeps nobody out.

In: a study, and what a process tells of itself. Out: the study is this search's, or a refusal that
names the process which has it.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from typing import Any

import optuna

from autofit.errors import StudyError
from autofit.probing.process_identity import runs_here, this_process
from autofit.units import format_seconds

_CLAIM_PREFIX = "autofit_claim_"
_CLAIM_TRIES, _CLAIM_PAUSE_S = 4, 0.5
_SILENT_S = 3600.0  # a search on another host that asked for no plan in this time has ended


class Claim:
    """One search's claim on a study in a database, kept in the study itself.

    Each search writes its claim and only then looks for those of others, so of two that start at
    the same instant at least one sees the other (the flags of Dekker's algorithm; Dijkstra,
    "Cooperating Sequential Processes", 1965). If both do, both withdraw and try again after pauses
    of random length.

    Args:
        study: the study.
        name: of the study in messages.
    """

    def __init__(self, study: optuna.Study, name: str) -> None:
        self._study, self._name = study, name
        self._key = f"{_CLAIM_PREFIX}{uuid.uuid4().hex}"
        self._is_written = False

    def take(self) -> None:
        """Keep other searches out of the study.

        Raises:
            StudyError: another search that still runs has it.
        """
        for _ in range(_CLAIM_TRIES):
            rival = self._rival()
            if rival is not None:  # it came first: do not make it withdraw
                break
            self.renew()
            rival = self._rival()
            if rival is None:
                self._clear_abandoned()
                return
            self.give_up()
            time.sleep(random.SystemRandom().uniform(0.0, _CLAIM_PAUSE_S))
        assert rival is not None
        raise StudyError(
            f"process {rival['pid']} on {rival['host']} is using the study {self._name} (last seen "
            f"{format_seconds(_silence_s(rival))} ago): wait for it to end, or use another "
            "study"
        )

    def renew(self) -> None:
        """Show that this search still runs.

        Raises:
            StudyError: another search took it for ended, and has the study now.
        """
        if self._is_written and self._study.user_attrs.get(self._key) is None:
            raise StudyError(
                f"another search has taken over the study {self._name}, because this one did not "
                "respond for too long: resume it when the other has ended"
            )
        self._is_written = True
        claim = this_process() | {"seen": time.time()}
        self._study.set_user_attr(self._key, claim)

    def give_up(self) -> None:
        """Let other searches use the study."""
        if self._is_written:
            self._study.set_user_attr(self._key, None)
            self._is_written = False

    def _rival(self) -> Mapping[str, Any] | None:
        return next((claim for claim in self._others().values() if is_live(claim)), None)

    def _clear_abandoned(self) -> None:
        """Tell searches that were taken for ended, and have not, that they lost the study."""
        for key in self._others():
            self._study.set_user_attr(key, None)

    def _others(self) -> dict[str, Mapping[str, Any]]:
        return {
            key: claim
            for key, claim in self._study.user_attrs.items()
            if key.startswith(_CLAIM_PREFIX) and key != self._key and claim is not None
        }


def is_live(claim: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a claim still runs.

    On another host, or in another container, that is unknown; a claim renewed within the last hour
    then counts as live.
    """
    runs = runs_here(claim)
    return _silence_s(claim) < _SILENT_S if runs is None else runs


def _silence_s(claim: Mapping[str, Any]) -> float:
    seen: float = claim["seen"]
    return max(0.0, time.time() - seen)  # the clock of another host may be ahead
