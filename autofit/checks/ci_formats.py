"""Verdicts as JUnit XML, and as Markdown for the summary page of a CI job."""

from __future__ import annotations

import re
import traceback
from xml.etree import ElementTree

from autofit.checks.regression import Regression
from autofit.checks.verdict import METHODS, Verdict
from autofit.units import format_bytes


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
    rows = {
        "required": verdict.required_bytes,
        "margin": verdict.margin_bytes or None,
        "VRAM budget": verdict.vram_budget_bytes,
        "headroom": verdict.headroom_bytes,
        **(verdict.breakdown or {}),
    }
    shown = " ".join(name.split()).replace("`", "'")  # in one line of code, whatever it holds
    lines = [f"### autofit check: `{shown}` {word}", "", str(verdict), ""]
    if regression is not None:
        lines += [f"Against the earlier one: {regression}", ""]
    lines += ["| | |", "|---|---:|"]
    lines += [f"| method | {METHODS.get(verdict.method, verdict.method)} |"]
    lines += [f"| {label} | {format_bytes(size)} |" for label, size in rows.items() if size]
    return "\n".join(lines) + "\n"
