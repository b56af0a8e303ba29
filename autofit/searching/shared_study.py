"""A study that several workers use at once: numbers, turns, and what each of them publishes.

Promises: no two workers decide from the same knowledge, so that no plan is run twice by accident;
what a worker had recorded outlives it, and what it had not holds nobody up.

The order is that of the bakery algorithm (Lamport, "A new solution of Dijkstra's concurrent
programming problem", 1974), and the storage deals out its tickets: the numbers of trials. A worker
draws a number, waits until every unfinished trial of a lower number has published what it runs or
has ended, looks at the study, and publishes its own plan in one attribute. Who finds nothing to do
at its turn withdraws: its trial is FAIL, without a record. Nobody holds a number while it waits for
anything else, since that would hold up all higher ones.

In: an Optuna study. Out: `Situation`s of `autofit.searching.sharing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from autofit.errors import StudyRefused
from autofit.measurement import Trial
from autofit.plan import Plan
from autofit.planning.search_spec import SearchSpec
from autofit.report.record import Record
from autofit.searching import trial_codec
from autofit.searching.liveness import WORKER, Workers, backend_of
from autofit.searching.publications import PUBLISHED, publication, seen_in
from autofit.searching.sampler import PlannerSampler
from autofit.searching.shared_report import of_all_workers
from autofit.searching.sharing import Run, Situation
from autofit.searching.storage import (
    BEAT_S,
    AskTellStudy,
    decoding,
    replaying,
    unremarked_experiments,
)
from autofit.searching.study import Store
from autofit.shapes import AMOUNT, Maybe, check_shape
from autofit.units import counted

if TYPE_CHECKING:
    from autofit.searching.claim import Claim

_REPORT = "autofit_report"
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0
_IDLE_GRACES = 2  # graces without anything in flight until a confirmer is not waited for


class SharedStore(Store):
    """An open study that other workers may have opened, too."""

    is_shared = True

    def __init__(
        self,
        study: AskTellStudy,
        name: str,
        claim: Claim | None,
        held: ExitStack,
        began: float | None = None,
    ) -> None:
        super().__init__(study, name, claim, held, began)
        self.workers = Workers(study)
        self._turn = ExitStack()
        self._ticket: optuna.Trial | None = None
        self._is_recorded = False
        self._poll_s = _POLL_S
        self._last: Situation | None = None
        self._quiet_since = self._next_stale_s = time.monotonic()

    def _close_abandoned_trials(self) -> None:
        with self._writing():
            self.workers.join()
        self._held.callback(self.workers.leave)
        self._living()

    def begin(self, spec: SearchSpec) -> None:
        """Write the specification of a new study; that of one which has begun holds for all.

        Raises:
            StudyRefused: it is another search's, also where that has begun since it was opened;
                others search it with another effort or length of the training; it cannot be
                written.
        """
        if self.spec is None or _own_wishes(self.spec) != _own_wishes(spec):
            with self.turn():
                while self.look().undecided:
                    self.pause()
                with self._writing(), decoding(self.name):
                    if trial_codec.SPEC in self.study.user_attrs:
                        self.spec = trial_codec.spec_of(self.study)
                self._check_identity(spec.identity)
                self._begin(spec)

    def _begin(self, spec: SearchSpec) -> None:
        stored = self.spec
        if stored is not None:
            entries = self._entries()
            there = set(entries) - self.workers.absent(entries) - {self.workers.key}
            if there and _own_wishes(stored) != _own_wishes(spec):
                raise StudyRefused(
                    f"{counted(len(there), 'other worker')} of the study {self.name} search with "
                    f"effort {stored.effort.value!r} and {stored.train_samples or 'unknown'} "
                    f"training samples, here {spec.effort.value!r} and "
                    f"{spec.train_samples or 'unknown'}: give the same effort and train_steps, or "
                    "wait for them to end"
                )
            effort, train_samples = _own_wishes(spec)
            spec = replace(stored, effort=effort, train_samples=train_samples)
        super().begin(spec)

    def compare_anew(self, trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
        """Return the trials as they are: whose turn it is decides that (`Run.is_anew`)."""
        return trials

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Draw a number, and withdraw at the end unless a trial was recorded under it."""
        with ExitStack() as held:
            held.callback(self._withdraw)
            with self._writing():
                if self._claim is not None:
                    self._claim.renew()
                self._ticket = self._draw()
                self.workers.trial_id = self._ticket._trial_id
                self.workers.beat_trial()
            yield

    def keep_turn(self, turn: ExitStack) -> None:
        """Hold a turn until the report is written, or the study closed."""
        self._turn = turn

    def look(self) -> Situation:
        """Return the situation, after ending the trials of workers that are gone.

        Raises:
            StudyRefused: the study is damaged, or cannot be written.
        """
        frozen, attrs, entries, absent = self._living()
        with decoding(self.name):
            compared_from = attrs.get(trial_codec.COMPARED_FROM, 0)
            trials = trial_codec.trials_in(frozen, compared_from)
            own = None if self._ticket is None else self._ticket.number
            seen = seen_in(frozen, trials, compared_from, me=self.workers.key, own=own)
            last = trials[-1].number if trials else -1
            others = [
                entry
                for key, entry in entries.items()
                if key not in absent and key != self.workers.key
            ]
            situation = replace(
                seen,
                others_search=any(entry["searches"] for entry in others),
                is_closed=_report_in(attrs).get("until") == last,
                ended=self.ended_in(attrs),
            )
        if situation != self._last:
            self._last, self._quiet_since, self._poll_s = situation, time.monotonic(), _POLL_S
        quiet_s = time.monotonic() - self._quiet_since
        is_gone = situation.confirmer in absent or quiet_s > _IDLE_GRACES * self.workers.grace_s
        return replace(situation, is_confirmer_gone=is_gone)

    def pause(self) -> None:
        """Wait a little for a change; the longer, the longer there was none."""
        time.sleep(self._poll_s)
        self._poll_s = min(2 * self._poll_s, _LONGEST_POLL_S)

    def publish(self, step: Run | None) -> bool:
        """Tell the others what this worker runs under its number; None: it writes the report.

        Return False where they took this worker for gone, and ended that trial.
        """
        try:
            self._publish(step)
        except StudyRefused as refused:
            if not isinstance(refused.__cause__, UpdateFinishedTrialError):
                raise
            return False
        return True

    def _publish(self, step: Run | None) -> None:
        ticket = self._drawn()
        assert self.spec is not None, "begin() comes before the first turn"
        with self._writing():
            if step is not None and step.is_anew:
                self.study.set_user_attr(trial_codec.COMPARED_FROM, ticket.number)
            ticket.set_user_attr(PUBLISHED, publication(step))
            if step is None:
                return
            self.study.sampler = PlannerSampler(step.plan)
            for name, each in trial_codec.distributions(self.spec.space).items():
                if isinstance(each, CategoricalDistribution):
                    ticket.suggest_categorical(name, each.choices)
                elif isinstance(each, IntDistribution):
                    ticket.suggest_int(name, each.low, each.high, log=each.log)

    @contextmanager
    def asking(self, choice: Plan | optuna.samplers.BaseSampler) -> Iterator[optuna.Trial]:
        """Yield the trial whose plan was published."""
        yield self._drawn()

    def record(self, asked: optuna.Trial, trial: Trial) -> Trial:
        """Store a finished trial; one that others took for lost is dropped."""
        try:
            stored = super().record(asked, trial)
        except StudyRefused as refused:
            # Ended by others while it was told, or just before it.
            if not isinstance(refused.__cause__, (UpdateFinishedTrialError, ValueError)):
                raise
            stored = replace(trial, number=asked.number)
        self._is_recorded = True
        return stored

    def agreed(self, described: Callable[[], Record]) -> Record:
        """Return the report of all workers: write it where that is this one's part, else read it.

        A worker that left before the end returns its own.
        """
        written = None if self._ticket is not None else self._report()
        if written is not None:
            return Record.from_dict(written)
        record = described()
        with replaying(self.name):
            frozen = self.study.get_trials(deepcopy=False)
        record = of_all_workers(record, frozen, self._entries())
        if self._ticket is None:
            return record
        written = self._report()
        if written is not None:  # another worker took this one for gone, and was first
            return Record.from_dict(written)
        with self._writing():
            until = record.trials[-1].number  # of a worker taken for gone: not the study's last
            self.study.set_user_attr(_REPORT, {"until": until, "report": record.to_dict()})
        self._turn.close()
        return record

    def _report(self) -> Mapping[str, Any] | None:
        """Return the report of the present trials; None: it is not written."""
        with replaying(self.name), decoding(self.name):
            written, trials = _report_in(self.study.user_attrs), self.trials
        until = trials[-1].number if trials else -1
        report: Mapping[str, Any] | None = written.get("report")
        return report if written.get("until") == until else None

    def close(self) -> None:
        """Give up a turn that is held, and say that this worker has left."""
        with suppress(StudyRefused):  # it is ended by the others
            self._turn.close()
        super().close()

    def _note_seconds(self) -> None:
        """Do nothing: what each worker ran tells how long all took."""

    def _drawn(self) -> optuna.Trial:
        assert self._ticket is not None, "turn() comes before what is done at it"
        return self._ticket

    def _draw(self) -> optuna.Trial:
        """Return a new trial that bears its worker's key from the first instant.

        `Study.ask` would write the two one after the other, and a worker may be killed in between.
        """
        study = self.study
        template = create_trial(state=TrialState.RUNNING, user_attrs={WORKER: self.workers.key})
        trial_id = study._storage.create_new_trial(study._study_id, template_trial=template)
        return optuna.Trial(study, trial_id)

    def _withdraw(self) -> None:
        ticket, self._ticket = self._ticket, None
        is_recorded, self._is_recorded = self._is_recorded, False
        self.workers.trial_id = None
        if ticket is not None and not is_recorded:
            self._end(ticket.number, None, TrialState.FAIL)

    def _living(
        self,
    ) -> tuple[
        Sequence[FrozenTrial], Mapping[str, Any], Mapping[str, Mapping[str, Any]], frozenset[str]
    ]:
        """End the trials of workers that are gone.

        Returns:
            The trials; the study's attributes; the workers' entries; the keys of those gone.
        """
        while True:
            with self._writing(), replaying(self.name):
                self._fail_stale_trials()
                # The trials first: a worker joins before it draws a number, and what it says of
                # the comparison is written before its plan.
                frozen = self.study.get_trials(deepcopy=False)
                attrs = self.study.user_attrs
            with decoding(self.name):
                entries = self.workers.entries(attrs)
            absent = self.workers.absent(entries)
            if not self._bury(frozen, {*entries} - absent):
                return frozen, attrs, entries, absent

    def _bury(self, frozen: Sequence[FrozenTrial], present: Collection[str]) -> bool:
        """End what runs and is nobody's that is there; return whether there was any."""
        lost = [
            trial
            for trial in frozen
            if trial.state == TrialState.RUNNING and trial.user_attrs.get(WORKER) not in present
        ]
        for trial in lost:
            with decoding(self.name):
                value, state = trial_codec.end_of(trial)
            self._end(trial.number, value, state)
        return bool(lost)

    def _fail_stale_trials(self) -> None:
        """Let Optuna end those without a heartbeat, where the storage keeps one."""
        if self._next_stale_s > time.monotonic():
            return
        self._next_stale_s = time.monotonic() + BEAT_S
        if isinstance(backend_of(self.study), optuna.storages.RDBStorage):
            with unremarked_experiments():
                optuna.storages.fail_stale_trials(self.study)

    def _end(self, number: int, value: float | None, state: TrialState) -> None:
        # Another worker may have ended it meanwhile: ValueError, where it had before this call.
        with self._writing(), suppress(UpdateFinishedTrialError, ValueError):
            self.study.tell(number, value, state)

    def _entries(self) -> Mapping[str, Mapping[str, Any]]:
        with replaying(self.name):
            attrs = self.study.user_attrs
        with decoding(self.name):
            return self.workers.entries(attrs)


def _own_wishes(spec: SearchSpec) -> tuple[Any, int | None]:
    """Return what a search of a study may choose for itself."""
    return spec.effort, spec.train_samples


def _report_in(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    written = attrs.get(_REPORT, {})
    check_shape(written, {"until?": Maybe(AMOUNT), "report?": {}}, "the report")
    return written  # type: ignore[no-any-return]  # Optuna's attributes have no type
