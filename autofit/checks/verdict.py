"""The verdict of a check: as a line, a table, JSON, JUnit XML and Markdown. Imports no torch.

It may be compared with an earlier one, the output of `autofit check --json` or the report of a
search. Required bytes are compared if both have the same method, else peak allocated bytes. Bytes
on the CPU and on a GPU are never compared; another plan, GPU or method is named.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from autofit.codec import Amount, from_json, read_json, to_json
from autofit.devices.gpu_catalogue import ASSUMED, NCCL_UNKNOWN, find_gpu
from autofit.errors import InvalidArgument
from autofit.notebook import shown
from autofit.plan import Plan, Settings
from autofit.report.record import Record
from autofit.units import format_bytes, memory_words

METHODS = {"probe": "a probe: run on the device", "predict": "a dry run on torch's meta device"}
"""By its name, how a verdict was found, for a reader."""


@dataclass(frozen=True)
class Verdict:
    """Whether a plan fits. Every None means unknown.

    Attributes:
        fits: True or False.
        plan: the plan that was checked.
        method: "probe" or "predict".
        vram_budget_bytes: the budget.
        peak_allocated_bytes: most bytes in live tensors.
        required_bytes: by prediction, the smallest VRAM budget under which the plan runs without
            an allocator retry in its timed steps; by probe, the bytes it held (peak reserved plus
            non-torch), so that a smaller budget may be enough.
        margin_bytes: added to required bytes before the comparison with the budget.
        breakdown: bytes by kind, if predicted.
        largest_micro_batch: the largest that would fit, if the plan does not.
        parameters: elements of the model's parameters, trained or not; of ranks None.
        evaluation_bytes: what an evaluation beside the training needs, no more than
            `required_bytes`; None: the workload has no eval_step.
        unknown_bytes: the room that a fit leaves for what is not counted; see `Prediction`.
        detail: why `fits` is unknown, or how the probe ended.
        device: "cuda" or "cpu".
        gpu: name of the GPU; None also for a CPU.
        gpu_assumed: whether the GPU is the default because none was named.
        notes: what was assumed or left out; see `Prediction`.
    """

    fits: bool | None
    plan: Plan
    method: str
    vram_budget_bytes: Amount
    required_bytes: Amount | None = None
    margin_bytes: Amount = 0
    breakdown: Mapping[str, Amount] | None = None
    largest_micro_batch: Amount | None = None
    detail: str | None = None
    peak_allocated_bytes: Amount | None = None
    device: str | None = None
    gpu: str | None = None
    gpu_assumed: bool = False
    unknown_bytes: Amount = 0
    parameters: Amount | None = None
    evaluation_bytes: Amount | None = None
    notes: tuple[str, ...] = ()

    @property
    def headroom_bytes(self) -> int | None:
        """Budget minus required bytes; negative if the plan does not fit."""
        if self.required_bytes is None:
            return None
        return self.vram_budget_bytes - self.required_bytes

    def __str__(self) -> str:
        name = self.gpu or self.device
        where = "" if name is None else f" on {name}{ASSUMED * self.gpu_assumed}"
        answer = {True: "fits", False: "does not fit", None: "could not be told"}[self.fits]
        line = f"{self.plan} {answer} in {format_bytes(self.vram_budget_bytes)}{where}"
        if self.required_bytes is not None:
            line += f": {self._needs()}"
        elif self.detail:
            line += f": {self.detail}"
        if self.fits is False and self.largest_micro_batch:
            line += f"; the largest micro-batch that fits is {self.largest_micro_batch}"
        return "; note: ".join([line, *self.notes])

    def _needs(self) -> str:
        how = "measured" if self.method == "probe" else "predicted"
        needs = f"required {format_bytes(self.required_bytes)} ({how})"
        needs += f" + {format_bytes(self.margin_bytes)} margin" if self.margin_bytes else ""
        if self.evaluation_bytes is not None and self.evaluation_bytes == self.required_bytes:
            needs += ", in an evaluation"
        if self.unknown_bytes and self.fits is None:
            room = format_bytes(self.unknown_bytes)
            needs += f" + NCCL, not known: leave {room} for it, or measure on the ranks"
        return needs

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, figure): how it was found, and bytes by kind."""
        sizes: list[tuple[str, int | None]] = [("required", self.required_bytes)]
        sizes += [("margin", self.margin_bytes)] if self.margin_bytes else []
        sizes += [("VRAM budget", self.vram_budget_bytes), ("headroom", self.headroom_bytes)]
        sizes += (self.breakdown or {}).items()
        rows = [(memory_words(name), format_bytes(size)) for name, size in sizes]
        if self.evaluation_bytes is not None:
            rows.append(("evaluation", format_bytes(self.evaluation_bytes)))
        rows += [("NCCL", NCCL_UNKNOWN)] if self.unknown_bytes else []
        return [("method", METHODS.get(self.method, self.method)), *rows]

    def explain(self) -> str:
        """Return the verdict and a table of its bytes, by kind too."""
        lines = [f"  {name:<16}{size:>12}" for name, size in self.rows()]
        return "\n".join([str(self), *lines])

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return shown([str(self)], self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**to_json(self), "headroom_bytes": self.headroom_bytes}


@dataclass(frozen=True)
class Regression:
    """The memory of a training now and at an earlier time.

    Attributes:
        quantity: name of the compared figure.
        before_bytes: the earlier figure.
        now_bytes: the present figure.
        allowed: largest allowed growth, as a fraction.
        differs: other differences in words, such as another plan.
    """

    quantity: str
    before_bytes: int
    now_bytes: int
    allowed: float
    differs: tuple[str, ...] = ()

    @property
    def growth(self) -> float:
        """Growth as a fraction; negative if the figure fell."""
        return self.now_bytes / self.before_bytes - 1

    @property
    def passed(self) -> bool:
        """Whether the growth is allowed."""
        return self.growth <= self.allowed

    def __str__(self) -> str:
        figures = f"{format_bytes(self.before_bytes)} to {format_bytes(self.now_bytes)}"
        allowed = f"at most {self.allowed:+.1%} allowed"
        differs = f"; other differences: {'; '.join(self.differs)}" if self.differs else ""
        words = f"{self.quantity} {self.growth:+.1%} ({figures}; {allowed}){differs}"
        return words if self.passed else f"grew too much: {words}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        derived = {"growth": self.growth, "passed": self.passed, "differs": list(self.differs)}
        return vars(self) | derived


def compare_with(verdict: Verdict, path: str | os.PathLike[str], allowed: float) -> Regression:
    """Compare a verdict with an earlier one.

    Args:
        verdict: the present one.
        path: output of `autofit check --json`, or a report.
        allowed: largest allowed growth, as a fraction.

    Raises:
        InvalidArgument: the file cannot be read, is neither of the two, or has no figure in common
            with the verdict (one is of the CPU and the other of a GPU, say).
    """
    before, defaults = read_earlier(path)
    if verdict.device and before.device and verdict.device != before.device:
        raise InvalidArgument(
            f"{os.fspath(path)} was made on {before.gpu or before.device}, and this check on "
            f"{verdict.gpu or verdict.device}: memory on a CPU and on a GPU cannot be compared. "
            "Check on the same kind of device"
        )
    alike = [("required bytes", "required_bytes")] * (before.method == verdict.method)
    for quantity, name in (*alike, ("peak allocated bytes", "peak_allocated_bytes")):
        now, then = getattr(verdict, name), getattr(before, name)
        if now is not None and then:
            return Regression(quantity, then, now, allowed, _differences(before, verdict, defaults))
    raise InvalidArgument(
        f"{os.fspath(path)} and the new verdict cannot be compared: the new verdict comes from a "
        f"{verdict.method} and {'fits' if verdict.fits else 'has no measured memory'}"
    )


def read_earlier(path: str | os.PathLike[str]) -> tuple[Verdict, Settings]:
    """Return the earlier verdict, or that of a report's recommended plan, and its default settings.

    Raises:
        InvalidArgument: the file cannot be read, or is neither of the two.
    """
    content = read_json(path)
    try:
        if "best" not in content:
            return from_json(content, Verdict, "the verdict"), {}
        record = Record.from_dict(content)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{os.fspath(path)} is neither a report nor output of `autofit check --json`: {error}"
        ) from error

    best = record.recommended
    verdict = Verdict(
        True,
        best.plan,
        "probe",
        record.vram_budget_bytes,
        best.measurement.held_bytes,
        peak_allocated_bytes=best.measurement.peak_allocated_bytes,
        device=record.environment["device"].partition(":")[0],
        gpu=record.environment.get("gpu"),
    )
    return verdict, record.default_settings


def read_fraction(text: str) -> float:
    """Return "5%" or "0.05" as 0.05.

    Raises:
        InvalidArgument: the text is neither, or a number from 1, which could mean percent.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise InvalidArgument(f"cannot read {text!r} as a fraction: write it like 5% or 0.05")
    number, percent = float(match[1]), bool(match[2])
    if number >= 1 and not percent:
        raise InvalidArgument(
            f"{match[1]} could mean {match[1]}% or {100 * number:g}%: write one of them"
        )
    return number / (100 if percent else 1)


def _differences(before: Verdict, now: Verdict, defaults: Settings) -> tuple[str, ...]:
    """Return the differences in plan, GPU and method; older files lack some of these."""
    plans = [str(verdict.plan.without(defaults)) for verdict in (before, now)]
    gpus = [_known_name(verdict.gpu) for verdict in (before, now)]
    methods = [f"by {verdict.method}" for verdict in (before, now)]
    return tuple(
        f"{was} then, {become} now"
        for was, become in (plans, gpus, methods)
        if was and become and was != become
    )


def _known_name(gpu: str | None) -> str | None:
    """Return one name for "NVIDIA H200" and "H200"."""
    try:
        return gpu and find_gpu(gpu).name
    except InvalidArgument:
        return gpu


def junit_xml(name: str, verdict: Verdict, regression: Regression | None) -> str:
    """Return one test case; a failure if the check failed, an error if `fits` is None."""
    output = "\n".join(str(part) for part in (verdict, regression) if part is not None)
    if verdict.fits is None:
        return _suite(name, output, "error", str(verdict), verdict.explain())
    if regression is not None and not regression.passed:
        return _suite(name, output, "failure", str(regression), verdict.explain())
    if not verdict.fits:
        return _suite(name, output, "failure", str(verdict), verdict.explain())
    return _suite(name, output)


def junit_xml_of_error(name: str, error: BaseException) -> str:
    """Return one test case with an error, for a check that raised."""
    text = "".join(traceback.format_exception(error))
    return _suite(name, "", "error", f"{type(error).__name__}: {error}", text)


def _suite(
    name: str, output: str, problem: str | None = None, message: str = "", text: str = ""
) -> str:
    """Return a suite of one case; `problem` is "failure", "error" or None."""
    suite = ElementTree.Element(
        "testsuite",
        name="autofit check",
        tests="1",
        failures=str(int(problem == "failure")),
        errors=str(int(problem == "error")),
    )
    case = ElementTree.SubElement(suite, "testcase", classname="autofit.check", name=_xml(name))
    if problem is not None:
        ElementTree.SubElement(case, problem, message=_xml(message)).text = _xml(text)
    ElementTree.SubElement(case, "system-out").text = _xml(output)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Replace the control characters that XML cannot express."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def markdown(name: str, verdict: Verdict, regression: Regression | None) -> str:
    """Return a heading, the verdict as a line, and a table of bytes."""
    passed = verdict.fits is True and (regression is None or regression.passed)
    word = {True: "fits", False: "does not fit", None: "could not be told"}[verdict.fits]
    if verdict.fits and not passed:
        word = "fits, and needs more than before"
    shown = " ".join(name.split()).replace("`", "'")  # in one line of code, whatever it holds
    lines = [f"### autofit check: `{shown}` {word}", "", str(verdict), ""]
    if regression is not None:
        lines += [f"Against the earlier one: {regression}", ""]
    lines += ["| | |", "|---|---:|", *(f"| {name} | {cell} |" for name, cell in verdict.rows())]
    return "\n".join(lines) + "\n"
