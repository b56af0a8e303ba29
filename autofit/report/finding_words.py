"""What a search found beside its answer, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autofit.codec import from_json
from autofit.plan import BOUNDS, Plan
from autofit.report.record import Record
from autofit.units import format_bytes, format_rate

_BOTTLENECKS = {
    "device": "keeps the device busy",
    "loader": "is slower than the device",
    "cores": "takes processor cores from the training",
}
_IN_WORDS = {
    "arithmetic": "arithmetic",
    "memory traffic": "memory traffic",
    "launches": "kernel launches and idle time",
    "optimizer": "the optimizer",
}


def findings_lines(record: Record) -> Iterator[str]:
    """Yield a line about each finding: the loader, what bounds a step, the allocator."""
    found = record.findings
    if "loader" in found:
        yield loader_words(found["loader"])
    if "bounds" in found:
        yield bounds_words(record)
    if "allocator" in found:
        yield from allocator_words(found["allocator"])


def loader_words(loader: Mapping[str, Any]) -> str:
    """Return whether the loader keeps up with the best plan, and with which settings."""
    settings, own = loader["settings"], loader["own_settings"]
    consumed = format_rate(loader["consumed_samples_per_second"])
    if settings is None:
        words = f"The best plan consumes {consumed}"
        if most := max((each["samples_per_second"] for each in loader["delivered"]), default=None):
            words += f", and the loader delivers {format_rate(most)}"
    else:
        verdict = _BOTTLENECKS[loader["bottleneck"]]
        words = (
            f"The loader {verdict}: {format_rate(_speed(loader, settings))} with "
            f"{_settings(settings)}, and the plan consumes {consumed}"
        )
        before = _speed(loader, own)
        if before is not None and own != settings:
            words += f" ({format_rate(before)} with your {_settings(own)})"
        if loader["bottleneck"] == "loader" and settings["num_workers"] == loader["most_workers"]:
            words += "; more workers were not tried"
    parts = [words]
    if loader.get("keeps_workers"):
        parts.append(
            f"num_workers stays {own['num_workers']}: workers of an IterableDataset may repeat "
            "each other's samples"
        )
    if loader["host_bytes"]:
        parts.append(f"it takes {format_bytes(loader['host_bytes'])} of host memory")
    parts += dict.fromkeys(text for each in loader["end_to_end"] for text in each["warnings"])
    if "failed" in loader:
        parts.append(f"not measured to the end: {_line_of(loader['failed'])}")
    return "; ".join(parts)


def _speed(loader: Mapping[str, Any], settings: Mapping[str, Any]) -> float | None:
    """Return the samples/s end to end with these settings; None: not measured."""
    speeds = [
        each["samples_per_second"] for each in loader["end_to_end"] if each["settings"] == settings
    ]
    return speeds[0] if speeds else None


def bounds_words(record: Record) -> str:
    """Return the shares of a step of the best plan and of the baseline."""
    bounds = record.findings["bounds"]
    best, baseline = bounds.get("best"), bounds.get("baseline")
    if not best:
        why = bounds.get("failed", "the profiler saw no operator on the device")
        return f"A step could not be profiled: {_line_of(why)}"
    words = f"A step of the best plan is {_shares(best)}"
    if baseline and baseline != best:
        words += f"; of the baseline {_shares(baseline)}"
    return words


def allocator_words(allocator: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an allocator setting would save, if anything."""
    if "setting" not in allocator:
        why = _line_of(allocator.get("failed", "no reason is known"))
        yield f"Expandable segments of the allocator were not tried: {why}"
    elif allocator.get("lowers_required_bytes"):
        held, before = allocator.get("held_bytes_with"), allocator.get("held_bytes")
        yield (
            f"With {allocator['setting']} the best plan runs in {format_bytes(held)} instead of "
            f"{format_bytes(before)}"
        )
    elif (faster := allocator.get("plan_without_retries")) is not None:
        plan = from_json(faster, Plan, "the plan")
        yield f"With {allocator['setting']} a faster plan fits: {plan}"


def _shares(shares: Mapping[str, float]) -> str:
    ordered = sorted(BOUNDS, key=lambda name: -shares.get(name, 0.0))
    return ", ".join(f"{shares.get(name, 0.0):.0%} {_IN_WORDS[name]}" for name in ordered)


def _settings(settings: Mapping[str, Any]) -> str:
    names = ("num_workers", "prefetch_factor", "pin_memory")
    return ", ".join(f"{name}={settings[name]}" for name in names if settings[name] is not None)


def _line_of(error: str) -> str:
    """Return an error in a line; of a process of a loader torch has the cause in the last one."""
    lines = error.strip().splitlines() or [""]
    return lines[-1 if "DataLoader worker process" in lines[0] else 0]
