"""Several ranks on this machine, led by a prober of this process: for tests, without torchrun."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from autofit.probing.group import end_meeting
from autofit.probing.meeting import Meeting
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.probing.seat import Seat, device_of_rank
from autofit.strategy import Strategy, World
from autofit.training.workload import Workload


@contextmanager
def local_ranks(
    workload: Workload,
    strategies: Sequence[Strategy],
    size: int = 2,
    *,
    target: Target | None = None,
    deadlines: Deadlines | None = None,
) -> Iterator[Prober]:
    """Yield a prober of `size` ranks, each of which has a worker of its own here.

    Args:
        workload, strategies: of every rank.
        size: how many ranks.
        target, deadlines: as for `open_prober`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no name

    target = target or Target("cpu")
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    name = f"local/{threading.get_ident()}/{socket.gethostname()}"
    meetings = [
        Meeting(World(rank, rank, size), "127.0.0.1", server.port, name) for rank in range(size)
    ]
    others = [
        threading.Thread(
            target=Seat(
                meeting,
                workload,
                strategies,
                device=device_of_rank(target.device, meeting.world),
                seed=target.seed,
            ).serve,
            daemon=True,
        )
        for meeting in meetings[1:]
    ]
    for thread in others:
        thread.start()
    try:
        with open_prober(
            workload, strategies, target, deadlines=deadlines, meeting=meetings[0]
        ) as prober:
            yield prober
    finally:
        with suppress(RuntimeError):
            end_meeting(meetings[0], None)
        for thread in others:
            thread.join(10.0)
