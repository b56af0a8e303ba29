"""Where a search runs its plans: on one device, on several of this machine, or at an executor.

Promises: the devices are alike, so that their times can be compared, and each may be filled as far
as the one with the least memory. A thread of its own uses each prober, since a worker ends with the
thread that started it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autofit.devices.request import device_names
from autofit.errors import InvalidArgument
from autofit.probing.messages import OnStage
from autofit.probing.prober import Prober
from autofit.probing.session import Session
from autofit.searching.options import SearchOptions
from autofit.searching.runner import Place, Runner


@dataclass(frozen=True)
class Places:
    """Where plans run.

    Attributes:
        devices: the name of each place's device; None: cuda where there is one.
        executor: in whose processes the places are; None: on this machine.
        threads: that torch computes with in a worker; None: as many as here.
    """

    devices: Sequence[str | None]
    executor: Executor | None = None
    threads: int | None = None

    @classmethod
    def asked(cls, device: Any, options: SearchOptions, *, ranks: int) -> Places:
        """Return the places that a search's arguments mean.

        Raises:
            InvalidArgument: they name several devices and what can use only one.
        """
        devices = device_names(device)
        if options.executor is not None:
            if len(devices) > 1:
                raise InvalidArgument(
                    f"device names {len(devices)} devices, but each process of the executor uses "
                    "one: name the device that they all use"
                )
            devices = devices * options.workers
        is_one = len(devices) == 1 and options.executor is None
        if not is_one and ranks > 1:
            raise InvalidArgument(
                f"{ranks} ranks train one model together and use all devices: leave the executor "
                "out, and name one kind of device"
            )
        share_cores = options.executor is None and len(devices) > 1 and devices[0] == "cpu"
        threads = max(1, torch.get_num_threads() // len(devices)) if share_cores else None
        return cls(devices, options.executor, threads)


@contextmanager
def open_runner(
    prober: Prober, places: Places, open_at: Callable[[int], Prober], on_stage: OnStage
) -> Iterator[Runner]:
    """Open a prober at each further place, and yield the runner of all.

    Args:
        prober: of the first place; its budget becomes the least of all.
        places: all of them.
        open_at: number of a place -> a prober there.
        on_stage: see `Runner`.

    Raises:
        InvalidArgument: the devices differ.
        Exception: as of `open_at`.
    """
    others = places.devices[1:]
    if not others:
        yield Runner([Place(prober)], on_stage)
        return
    on_stage(f"starting workers on {len(others)} more")
    with ExitStack() as held:
        threads = [held.enter_context(ThreadPoolExecutor(1)) for _ in places.devices]
        opening = [thread.submit(open_at, at) for at, thread in enumerate(threads) if at]
        probers = [prober, *_all_opened(opening, held)]
        _check_alike(probers, places.devices)
        prober.vram_budget_bytes = min(each.vram_budget_bytes for each in probers)
        yield Runner(list(map(Place, probers, threads)), on_stage)


def _all_opened(opening: Sequence[Future[Prober]], held: ExitStack) -> list[Prober]:
    """Return the probers once all are open; those beside one that failed are closed too."""
    wait(opening)
    for future in opening:
        if future.exception() is None:
            held.enter_context(future.result())
    return [future.result() for future in opening]


def _check_alike(probers: Sequence[Prober], names: Sequence[str | None]) -> None:
    facts = [each.run(_facts) for each in probers]
    for name, own in zip(names, facts, strict=True):
        if own != facts[0]:
            raise InvalidArgument(
                f"device {name or 'of a worker'} is {own} and the first one is {facts[0]}: times "
                "of unlike devices cannot be compared, so search on devices of one kind"
            )


def _facts(session: Session) -> str:
    """Return what decides how fast a device is, in words."""
    found = session.builder.device.environment
    return f"{found.gpu or found.device}, driver {found.driver}, torch {found.torch}"
