"""The study of a search: its specification and its trials, kept where the user chose.

Promises: a finished trial is stored before the next is asked for; a study that is opened again has
the same specification and every finished trial; a study that belongs to another search, or that
another search is using, is refused; trials of a process that died do not stay unfinished.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal, Self

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler
from optuna.trial import TrialState

from autofit.codec import Number, from_json, without_controls
from autofit.errors import StudyError
from autofit.measurement import Trial, TrialKind
from autofit.plan import Plan
from autofit.planning.search_spec import Effort, SearchSpec
from autofit.searching import trial_codec
from autofit.searching.storage import (
    AskTellStudy,
    Claim,
    cause_of,
    checked,
    errors_of_storages,
    name_of,
    open_study,
)

_ENDED, _ENDED_AT = "autofit_ended", "autofit_ended_at"  # the reason, and the effort of that search
_SESSIONS = "autofit_session_seconds"
_Reason: Any = str | None
COSTLY = "costly settings"
"""The part of an identity that names them; `planned_steps=0` leaves them out."""


def _difference(part: str, stored: str | None, here: str | None) -> str:
    """Return in words how a part of a search's identity differs."""
    if part == "workload" and stored and here:
        from autofit.training.fingerprint import differing_parts  # few studies differ

        if names := differing_parts(stored, here):
            return f"another workload: its {', '.join(names)} differ"
    return f"{part}: {stored or 'none'} there, {here or 'none'} here"


def _fixed(plan: Plan) -> BaseSampler:
    """Return a sampler that proposes the plan: the planner decides without a trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return PartialFixedSampler(trial_codec.params_of(plan), RandomSampler())


class Store(AbstractContextManager["Store"]):
    """An open study; a context manager that closes it.

    Attributes:
        study: the Optuna study; its `stopped` is true once a sampler has nothing else to propose.
        name: of the study in messages.
        spec: the specification that the study was made for; None until `begin`.
        trials: every finished trial, in order, but those in which the workload itself failed. Read
            once: this search is the study's only writer.
    """

    def __init__(
        self,
        study: AskTellStudy,
        name: str,
        claim: Claim | None,
        held: ExitStack,
        began: float | None = None,
    ) -> None:
        self.study, self.name = study, name
        self._claim, self._held = claim, held
        self._began = time.monotonic() if began is None else began
        self.trials: tuple[Trial, ...] = ()
        with self._access("read"):
            attrs = study.user_attrs
            self._earlier_seconds = from_json(
                attrs.get(_SESSIONS, []), list[Number], "the earlier searches' seconds"
            )
            self.spec = trial_codec.spec_of(study) if trial_codec.SPEC in attrs else None

    @classmethod
    def open(
        cls,
        study: str | os.PathLike[str] | None,
        identity: Mapping[str, str],
        began: float | None = None,
        planned_steps: int | None = None,
    ) -> Self:
        """Open a study for the search that `identity` describes, part by part.

        Args:
            study: a file path, an Optuna storage URL, or None for memory.
            identity: as in `SearchSpec`; compared with the stored one, if there is one.
            began: when the session began, by `time.monotonic`; None: now.
            planned_steps: as the caller asked, for the error where it decides which settings there
                are.

        Raises:
            StudyError: it belongs to another search, is in use, or cannot be read or written.
        """
        with ExitStack() as held:
            opened, claim = open_study(study, held)
            store = cls(opened, name_of(study), claim, held, began)
            if store.spec is not None:
                store._check_identity(store.spec, identity, planned_steps)
            store.abandon()
            store._read_trials()
            store._held = held.pop_all()
        return store

    def begin(self, spec: SearchSpec) -> None:
        """Write the specification of a new study; else it must have this one.

        Another effort or length of the training replaces the stored one; costly values may pay in
        another length, so that a search which had ended goes on.

        Raises:
            StudyError: the study has another specification, or cannot be written.
        """
        stored = self.spec
        if stored is not None:
            # What a resumed search may change is as it is now
            same = replace(stored, effort=spec.effort, planned_samples=spec.planned_samples)
            if same.to_json() != spec.to_json():
                raise StudyError(
                    f"the study {self.name} was made with another space, budget or seed: search "
                    "with those, or use another study"
                )
        with self._access("write"):
            if stored is None or stored.to_json() != spec.to_json():
                self.study.set_user_attr(trial_codec.SPEC, spec.to_json())
            if stored is not None and stored.planned_samples != spec.planned_samples:
                self.study.set_user_attr(_ENDED, None)
        self.spec = spec

    @property
    def session_seconds(self) -> tuple[float, ...]:
        """Seconds that each search took on this study, the present one last."""
        return (*self._earlier_seconds, time.monotonic() - self._began)

    @property
    def ended(self) -> str | None:
        """Why an earlier run had nothing left to try; None if cut short, or of less effort."""
        with self._access("read"):
            attrs = self.study.user_attrs
            at = from_json(attrs.get(_ENDED_AT, "normal"), Effort, "the earlier search's effort")
            reason: str | None = from_json(attrs.get(_ENDED), _Reason, "the earlier search's end")
        is_enough = self.spec is None or at.covers(self.spec.effort)
        return without_controls(reason) if is_enough else None

    def compare_anew(self) -> None:
        """Take the trials of an earlier final comparison for those of the search.

        The machine may have become faster or slower since, and a comparison takes turns.
        """
        if any(trial.kind is TrialKind.CONFIRMATION for trial in self.trials):
            compared_from = self.trials[-1].number + 1
            with self._access("write"):
                self.study.set_user_attr(trial_codec.COMPARED_FROM, compared_from)
            self.trials = trial_codec.compared_before(self.trials, compared_from)

    def mark_ended(self, reason: str) -> None:
        """Store that the search ended because nothing was left to try."""
        with self._access("write"):
            if self.spec is not None:
                self.study.set_user_attr(_ENDED_AT, self.spec.effort.value)
            self.study.set_user_attr(_ENDED, reason)

    def ask(self, choice: Plan | BaseSampler) -> optuna.Trial:
        """Return a new trial of a plan, or of a sampler's choice; `record` or `abandon` ends it."""
        assert self.spec is not None, "begin() comes before the first trial"
        with self._access("read"):  # damage shows here, and not as an error of the sampler
            self.study.get_trials(deepcopy=False)
        with self._access("write", is_checked=False):
            self.study.sampler = _fixed(choice) if isinstance(choice, Plan) else choice
            if self._claim is not None:
                self._claim.renew()
            asked = self.study.ask(trial_codec.distributions(self.spec.space))
        if any(asked.number == trial.number for trial in self.trials):
            raise StudyError(
                f"the study {self.name} has lost trials while this search was running: another "
                "program cut or replaced it"
            )
        return asked

    def abandon(self) -> None:
        """End every trial that has no result as FAIL; one that was recorded counts in any state."""
        with self._access("write"):
            if self._claim is not None:
                self._claim.renew()  # raises where the trials are another search's by now
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                self.study.tell(trial.number, state=TrialState.FAIL)

    def record(self, asked: optuna.Trial, trial: Trial) -> None:
        """Store a finished trial.

        Args:
            asked: the Optuna trial that it finishes.
            trial: has its number.
        """
        assert self.spec is not None, "begin() comes before the first trial"
        with self._access("write"):
            trial_codec.record(self.study, asked, trial, self.spec)
            # With every trial, so that a killed session counts up to that.
            self.study.set_user_attr(_SESSIONS, list(self.session_seconds))
        if not trial.blames_workload:
            # Of several pending plans the one that was asked for last may end first
            self.trials = tuple(sorted((*self.trials, trial), key=lambda each: each.number))

    def close(self) -> None:
        """Let other searches use the study; every trial is in it, or its refusal was raised."""
        with suppress(StudyError), self._access("write"):
            self._held.close()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_identity(
        self, spec: SearchSpec, here: Mapping[str, str], planned_steps: int | None
    ) -> None:
        stored = spec.identity
        parts = sorted(part for part in {*stored, *here} if stored.get(part) != here.get(part))
        if parts:
            differences = [_difference(part, stored.get(part), here.get(part)) for part in parts]
            if COSTLY in parts:
                samples, each = spec.planned_samples, spec.space.baseline.samples_per_step
                there = (samples // each if samples else None) if COSTLY in stored else 0
                if 0 in (there, planned_steps):
                    differences.insert(0, f"planned_steps={there} there, {planned_steps} here")
            changes = "; ".join(dict.fromkeys(differences))
            raise StudyError(
                f"the study {self.name} belongs to another search ({changes}): use another study, "
                "or repeat the earlier search"
            )

    def _read_trials(self) -> None:
        with self._access("read"):
            frozen = self.study.get_trials(deepcopy=False)
            compared_from = self.study.user_attrs.get(trial_codec.COMPARED_FROM, 0)
            self.trials = trial_codec.trials_in(frozen, compared_from)
            if self.spec is not None:  # the file may be anybody's
                trial_codec.check_words(self.spec, self.trials)

    @contextmanager
    def _access(
        self, doing: Literal["read", "write"], *, is_checked: bool = True
    ) -> Iterator[None]:
        """Raise what a storage refuses, or a damaged study, as a `StudyError`.

        Args:
            doing: what is done with the study.
            is_checked: whether any error inside is one of the study; not where code of a user's is.
        """
        try:
            with checked(self.name) if is_checked else nullcontext():
                yield
        except UpdateFinishedTrialError as error:
            if self._claim is not None:
                self._claim.renew()  # raises where another search has the study now
            raise StudyError(
                f"another program has ended a trial of the study {self.name} that this search was "
                "running: use a study in only one search at a time"
            ) from error
        except errors_of_storages() as error:
            kept = (
                f"; the {len(self.trials)} finished trials in it stay readable, and the search can "
                "be resumed from them"
            )
            raise StudyError(
                f"cannot {doing} the study {self.name}: {cause_of(error)}"
                f"{kept if doing == 'write' else ''}"
            ) from error
