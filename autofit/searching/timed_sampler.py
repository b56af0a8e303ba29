"""A sampler of the user's that ends with the timeout of the search."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autofit.errors import SearchTimedOut

_LEAST_S = 1.0
"""For a method that is called when the time is over, as to be told of the last trial."""


class TimedSampler(BaseSampler):
    """Asks another sampler in a thread, which is left alone where it takes longer than is left.

    Nothing can end code of the user's in the thread that waits for it.

    Args:
        sampler: the user's.
        seconds_left: returns the seconds until the search ends; None: nothing ends it.

    Raises:
        SearchTimedOut: by each method, once the time is over.
    """

    def __init__(self, sampler: BaseSampler, seconds_left: Callable[[], float | None]) -> None:
        self._sampler, self._seconds_left = sampler, seconds_left
        self._is_left_alone = False

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return what the sampler does, as all methods here."""
        found: dict[str, BaseDistribution] = self._asked(
            self._sampler.infer_relative_search_space, study, trial
        )
        return found

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """See above."""
        found: dict[str, Any] = self._asked(
            self._sampler.sample_relative, study, trial, search_space
        )
        return found

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """See above."""
        return self._asked(
            self._sampler.sample_independent, study, trial, param_name, param_distribution
        )

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """See above."""
        self._asked(self._sampler.before_trial, study, trial)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """See above; what ends after the time was over is not told to a sampler that hangs."""
        if not self._is_left_alone:
            self._asked(self._sampler.after_trial, study, trial, state, values)

    def _asked(self, method: Callable[..., Any], *given: Any) -> Any:
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(method(*given))
            except BaseException as error:
                answer.set_exception(error)

        # Of an executor the interpreter would wait for the thread at its end.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        left = self._seconds_left()
        thread.join(None if left is None else max(_LEAST_S, left))
        if thread.is_alive():
            self._is_left_alone = True
            raise SearchTimedOut(
                f"{type(self._sampler).__name__}.{method.__name__} had not returned when the time "
                "of the search was over"
            )
        return answer.result()
