"""What torch's compiler did: graphs, breaks, repetitions and their reasons, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MAX_REASONS = 3
_LIMIT = "Dynamo recompile limit exceeded"


@dataclass(frozen=True)
class Counted:
    """What the compiler has counted in this process so far.

    Attributes:
        graphs: that were compiled.
        breaks: reason of a graph break -> how many.
        recompilations: the reason of each.
        without_graphs: calls that could not be captured as CUDA graphs.
        limits: code that is compiled no more, since it was as often as torch does.
    """

    graphs: int
    breaks: Counter[str]
    recompilations: Sequence[str]
    without_graphs: int
    limits: int

    @classmethod
    def now(cls) -> Counted:
        """Return the counts of this moment."""
        from torch._dynamo.utils import counters, get_compilation_metrics

        return cls(
            counters["stats"]["unique_graphs"],
            Counter(counters["graph_break"]),
            [each.recompile_reason for each in get_compilation_metrics() if each.recompile_reason],
            counters["inductor"]["cudagraph_skips"],
            sum(n for cause, n in counters["unimplemented"].items() if cause.startswith(_LIMIT)),
        )


def lines_since(before: Counted, *, with_cuda_graphs: bool) -> Iterator[str]:
    """Yield what was compiled since then, and every break and repetition with its reason."""
    now = Counted.now()
    graphs, breaks = now.graphs - before.graphs, now.breaks - before.breaks
    if not graphs:
        yield "compile: nothing was compiled, every call ran eagerly"
        return
    again = now.recompilations[len(before.recompilations) :]
    words = f"compile: {graphs} graphs, {breaks.total()} graph breaks"
    yield f"{words}, {len(again)} recompilations"
    if with_cuda_graphs and (left_out := now.without_graphs - before.without_graphs):
        yield f"compile: {left_out} graphs could not be captured as CUDA graphs, and run as usual"
    if limits := now.limits - before.limits:
        yield (
            f"compile: {limits} x reached torch's recompile_limit: calls that the compiled code "
            "does not fit run eagerly from then on"
        )
    for reason, times in list(breaks.items())[:_MAX_REASONS]:
        yield f"compile: graph break ({times} x): {_line(reason)}"
    for reason, times in _causes(again)[:_MAX_REASONS]:
        yield f"compile: recompiled ({times} x): {_line(reason)}"


def _causes(reasons: Sequence[str]) -> list[tuple[str, int]]:
    """Return the first reason of each cause, and how many have it.

    A counter that a forward keeps is another value, and another reason, each time. They have the
    guard's line of code in common, which dynamo writes behind it, or else all but the numbers.
    """
    groups: dict[str, list[str]] = {}
    for reason in reasons:
        guard, _, line = reason.partition("\n")[0].partition("(HINT")[0].strip().partition("# ")
        groups.setdefault(line or re.sub(r"\d+", "", guard), []).append(reason)
    return [(first, 1 + len(others)) for first, *others in groups.values()]


def _line(reason: str) -> str:
    return " ".join(reason.split())[:200]
