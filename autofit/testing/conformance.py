"""The suite that every strategy must pass, run on real training; for third parties too.

    from autofit.testing import check_strategy

    def test_my_strategy():
        check_strategy(MyStrategy())

It promises what the strategy contract says: the first values change nothing, to the bit; leaving
gives model, optimizer and process back as they were, also when the training failed; an EXACT
strategy trains with equal losses and gradients, a ROUNDING one within a tolerance; dimensions and
payloads survive JSON; a training script can be told what to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from autofit.registry import load_strategies
from autofit.strategy import Capabilities, Strategy
from autofit.testing.case import Case
from autofit.testing.samples import attention, convolutions
from autofit.workload import Workload


class NotConformant(AssertionError):
    """A strategy breaks its contract; the message lists every way in which it does."""


def check_strategy(
    strategy: Strategy | str,
    *,
    workloads: Sequence[Callable[[], Workload]] = (convolutions, attention),
    device: str | torch.device = "cpu",
    capabilities: Capabilities | None = None,
) -> int:
    """Run the whole suite over the values that the strategy offers for these workloads.

    Args:
        strategy: an object, or the name of an installed one.
        workloads: functions that build what to train, alike each time they are called.
        device: where to train.
        capabilities: what the device can do; None: everything, so that every value is tried
            (on a CPU, slow types are emulated and TF32 changes nothing).

    Returns:
        How many values were tried.

    Raises:
        NotConformant: the strategy breaks its contract, or has nothing to choose for any of the
            workloads, so that nothing could be tried.
        InvalidRequest: it is no strategy at all.
    """
    (checked,) = load_strategies([strategy])
    torch_device = torch.device(device)
    problems: list[str] = []
    tried = changed = 0
    with _one_thread():
        for build in workloads:
            case = Case(checked, build, torch_device, capabilities)
            for settings, payloads in case.variants():
                tried += 1
                changed += not case.is_plain(settings)
                found = case.problems(settings, payloads)
                problems += [f"{build.__name__}, {settings}: {problem}" for problem in found]
    if problems:
        raise NotConformant("\n".join([f"strategy {checked.name!r}:", *problems]))
    if not changed:
        raise NotConformant(
            f"strategy {checked.name!r} offers no value beside the plain one for "
            f"{', '.join(build.__name__ for build in workloads)}, so nothing was tried: pass "
            "workloads=[...], functions that build a Workload it is for"
        )
    return tried


@contextmanager
def _one_thread() -> Iterator[None]:
    """Workloads as small as these only lose by sharing them out between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
