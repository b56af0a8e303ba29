"""Which search may use a study that others can open at the same time, told in the study itself.

A storage URL has no lock. Each search writes a claim of its own and only then looks for those of
others, so of two that begin in the same instant at least one sees the other (the flags of Dekker's
algorithm; Dijkstra, "Cooperating Sequential Processes", 1965). Where both do, both let go, and try
again after a pause that chance makes longer for one of them.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from typing import Any

import optuna

from autofit.errors import StudyRefused
from autofit.searching.owner import Owner
from autofit.units import format_seconds

_PREFIX = "autofit_claim_"
_SILENT_S = 3600.0  # a search on another host that asked for nothing in so long has ended
_TRIES = 4
_PAUSE_S = 0.5


class Claim:
    """One search's claim on a study.

    Args:
        study: the study.
        name: what it is called in messages.
    """

    def __init__(self, study: optuna.Study, name: str) -> None:
        self._study, self._name = study, name
        self._key = f"{_PREFIX}{uuid.uuid4().hex}"
        self._owner = Owner.current()
        self._written = False

    def take(self) -> None:
        """Have the study for this search alone.

        Raises:
            StudyRefused: another search that lives has it.
        """
        for _ in range(_TRIES):
            rival = self._rival()
            if rival is not None:  # it was first: it is not to be disturbed
                break
            self.renew()
            rival = self._rival()
            if rival is None:
                return
            self.give_up()
            time.sleep(random.SystemRandom().uniform(0.0, _PAUSE_S))
        assert rival is not None
        raise StudyRefused(
            f"{Owner.from_dict(rival)} is using the study {self._name} (last seen "
            f"{format_seconds(_silence_s(rival))} ago): wait for it to end, or give this search a "
            "study of its own"
        )

    def renew(self) -> None:
        """Show that this search lives."""
        self._written = True
        self._study.set_user_attr(self._key, self._owner.to_dict() | {"seen": time.time()})

    def give_up(self) -> None:
        """Let other searches have the study; nothing where it was not claimed."""
        if self._written:
            self._study.set_user_attr(self._key, None)
            self._written = False

    def _rival(self) -> Mapping[str, Any] | None:
        """The claim of another search that lives; None: there is none."""
        return next(
            (
                claim
                for key, claim in self._study.user_attrs.items()
                if key.startswith(_PREFIX) and key != self._key
                if claim is not None and _lives(claim)
            ),
            None,
        )


def _lives(claim: Mapping[str, Any]) -> bool:
    alive = Owner.from_dict(claim).alive
    return alive if alive is not None else _silence_s(claim) < _SILENT_S


def _silence_s(claim: Mapping[str, Any]) -> float:
    seen: float = claim["seen"]
    return time.time() - seen
