"""What a search found beside its answer, in sentences, and the shape of it in a report file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from autofit.codec import Amount, Count, Number, from_json
from autofit.measurement import spread_of
from autofit.plan import BOUNDS, Plan
from autofit.units import format_bytes, format_rate

if TYPE_CHECKING:
    from autofit.report.record import Record

_BOTTLENECKS = {
    "device": "the device is the bottleneck",
    "loader": "the loader, not the device, is the bottleneck",
    "cores": "the loader alone would keep up, but takes the host's cores from the training",
}


class _LoaderSettings(TypedDict):
    batch_size: Count
    num_workers: Amount
    pin_memory: bool
    prefetch_factor: Count | None


class _Delivered(TypedDict):
    settings: _LoaderSettings
    samples_per_second: Number


class _EndToEnd(_Delivered):
    warnings: list[str]


class _Loader(TypedDict):
    failed: NotRequired[str]
    settings: _LoaderSettings | None
    own_settings: _LoaderSettings
    bottleneck: Literal["device", "loader", "cores"] | None
    consumed_samples_per_second: Number
    host_bytes: Amount | None
    most_workers: Amount | None
    keeps_workers: NotRequired[bool]
    delivered: list[_Delivered]
    end_to_end: list[_EndToEnd]


class _Bounds(TypedDict, total=False):
    failed: str
    trace: str
    best: dict[str, Number] | None
    baseline: dict[str, Number] | None


class _State(TypedDict, total=False):
    failed: str
    optimizer: str
    parameter_bytes: Amount
    state_bytes: Amount
    bytes_in_8_bits: Amount
    adafactor_bytes: Amount
    lion_bytes: Amount


class _Allocator(TypedDict, total=False):
    failed: str
    setting: str
    recommended: bool
    probes: Count
    lowers_required_bytes: bool
    held_bytes: Amount | None
    held_bytes_with: Amount | None
    plan_without_retries: Plan | None


class Findings(TypedDict, total=False):
    """The findings of a report as JSON."""

    loader: _Loader
    bounds: _Bounds
    state: _State
    allocator: _Allocator


_IN_WORDS = {
    "arithmetic": "arithmetic (products, convolutions, attention)",
    "memory traffic": "memory traffic (all other operators)",
    "launches": "launches (Python, dispatch, an idle device)",
    "optimizer": "the optimizer's update",
}
_UNSEEN = "the profiler saw no operator on the device"


def findings_lines(record: Record) -> Iterator[str]:
    """Yield a line about each finding: the loader, what bounds a step, the state, the allocator."""
    found = record.findings
    if "loader" in found:
        yield loader_line(found["loader"], spread_of(*record.speed_range(record.best)))
    if "bounds" in found:
        yield bounds_line(record)
    if (state := found.get("state", {})).get("state_bytes") or "failed" in state:
        yield state_line(state)
    if "allocator" in found:
        yield allocator_line(found["allocator"])


def loader_line(loader: Mapping[str, Any], spread: float) -> str:
    """Return what the loader delivers, what bounds the training, and what to set.

    Args:
        loader: the finding.
        spread: of the plan's speed to either side, as a share of it.
    """
    consumed, own = loader["consumed_samples_per_second"], loader["own_settings"]

    def rate(speed: float | None) -> str:
        return format_rate(speed, spread * (speed or 0.0))

    parts = [_end_to_end(loader, rate)] if loader["settings"] is not None else []
    if not parts:
        most = max((each["samples_per_second"] for each in loader["delivered"]), default=None)
        alone = "" if most is None else f" and the loader alone delivers {rate(most)}"
        parts.append(f"the plan consumes {rate(consumed)}{alone}")
    elif (before := _speed(loader, own)) is not None and own != loader["settings"]:
        parts.append(f"with {_settings(own)} it is {rate(before)}")
    if loader.get("keeps_workers"):
        parts.append(
            f"num_workers stays {own['num_workers']}, since each worker has its own copy of an "
            "IterableDataset, and only you know whether they share its samples out "
            "(torch.utils.data.get_worker_info)"
        )
    if loader["host_bytes"]:
        parts.append(f"it takes {format_bytes(loader['host_bytes'])} of host memory")
    warned = [text for each in loader["end_to_end"] for text in each["warnings"]]
    parts += dict.fromkeys(warned)
    if "failed" in loader:
        parts.append(f"not measured to the end: {_line_of(loader['failed'])}")
    return f"Loader: {'; '.join(parts)}"


def _end_to_end(loader: Mapping[str, Any], rate: Callable[[float | None], str]) -> str:
    """Return the recommended settings, the speed with them and what bounds it."""
    settings, consumed = loader["settings"], loader["consumed_samples_per_second"]
    speed = _speed(loader, settings)
    words = (
        f"{_settings(settings)}: {rate(speed)} end to end, where the plan consumes "
        f"{rate(consumed)} by itself: {_BOTTLENECKS[loader['bottleneck']]}"
    )
    if loader["bottleneck"] != "device" and speed is not None and consumed > 0:
        words += f" ({1 - speed / consumed:.0%} of the plan's speed is lost)"
    if loader["bottleneck"] == "loader" and settings["num_workers"] == loader["most_workers"]:
        words += "; more workers were not tried"
    return words


def _speed(loader: Mapping[str, Any], settings: Mapping[str, Any]) -> float | None:
    """Return the samples/s end to end with these settings; None: not measured."""
    speeds = [
        each["samples_per_second"] for each in loader["end_to_end"] if each["settings"] == settings
    ]
    return speeds[0] if speeds else None


def bounds_line(record: Record) -> str:
    """Return the shares of a step, what takes most of it, and which settings address that."""
    bounds = record.findings["bounds"]
    best, baseline = bounds.get("best"), bounds.get("baseline")
    if not best:
        return f"What bounds a step is not known: {_line_of(bounds.get('failed', _UNSEEN))}"
    words = f"A step of the best plan: {_shares(best)}"
    if baseline and baseline != best:
        words += f"; of the baseline: {_shares(baseline)}"
    largest = max(BOUNDS, key=lambda name: best.get(name, 0.0))
    words += f". Most of it goes to {_IN_WORDS[largest]}"
    settings = {**record.plain_settings, **record.best.plan.settings}
    addressing = [name for name, d in record.dimensions.items() if largest in d.addresses]
    if not addressing:
        return f"{words}; no setting of this search addresses that"
    used = " and ".join(f"{name} (in the best plan {settings[name]})" for name in addressing)
    return f"{words}, which is addressed by {used}"


def state_line(state: Mapping[str, Any]) -> str:
    """Return what the optimizer's state takes, and what it would take in other forms."""
    if "failed" in state:
        return f"What the optimizer's state takes is not known: {_line_of(state['failed'])}"
    return (
        f"Optimizer: the state of {state['optimizer']} takes {format_bytes(state['state_bytes'])} "
        f"beside {format_bytes(state['parameter_bytes'])} of trained parameters; in 8-bit codes it "
        f"would take {format_bytes(state['bytes_in_8_bits'])}. Other algorithms, which train "
        f"differently and are no setting: Adafactor {format_bytes(state['adafactor_bytes'])}, Lion "
        f"{format_bytes(state['lion_bytes'])}"
    )


def allocator_line(allocator: Mapping[str, Any]) -> str:
    """Return whether expandable segments help the best plan, and how much they save."""
    if "setting" not in allocator:
        why = _line_of(allocator.get("failed", "no reason is known"))
        return f"Expandable segments of the allocator were not tried: {why}"
    setting = allocator["setting"]
    if allocator.get("lowers_required_bytes"):
        held, before = allocator.get("held_bytes_with"), allocator.get("held_bytes")
        return (
            f"Set {setting}: the best plan then runs in {format_bytes(held)}, and without it does "
            f"not fit in that (it held {format_bytes(before)})"
        )
    faster = allocator.get("plan_without_retries")
    if faster is not None:
        return (
            f"Set {setting}: {from_json(faster, Plan, 'the plan')}, which is faster, then runs "
            "without flushing its cache"
        )
    return f"{setting} does not lower what the best plan requires"


def _shares(shares: Mapping[str, float]) -> str:
    ordered = sorted(BOUNDS, key=lambda name: -shares.get(name, 0.0))
    return ", ".join(f"{shares.get(name, 0.0):.0%} {name}" for name in ordered)


def _settings(settings: Mapping[str, Any]) -> str:
    names = ("num_workers", "prefetch_factor", "pin_memory")
    return ", ".join(f"{name}={settings[name]}" for name in names if settings[name] is not None)


def _line_of(error: str) -> str:
    """Return an error in a line; of a process of a loader torch has the cause in the last one."""
    lines = error.strip().splitlines() or [""]
    return lines[-1 if "DataLoader worker process" in lines[0] else 0]
