"""A verdict for a CI job: as JUnit XML, and as Markdown for the job's summary page."""

from __future__ import annotations

from xml.etree import ElementTree

from autofit.regression import Regression
from autofit.units import format_bytes
from autofit.verdict import Verdict


def junit_xml(name: str, verdict: Verdict, regression: Regression | None) -> str:
    """One test case, named after the target; a failure, or an error where it could not be told."""
    failed = verdict.fits is False or (regression is not None and not regression.passed)
    unknown = verdict.fits is None
    suite = ElementTree.Element(
        "testsuite",
        name="autofit check",
        tests="1",
        failures=str(int(failed)),
        errors=str(int(unknown)),
    )
    case = ElementTree.SubElement(suite, "testcase", classname="autofit.check", name=name)
    if failed or unknown:
        message = str(regression) if regression and not regression.passed else str(verdict)
        problem = ElementTree.SubElement(case, "error" if unknown else "failure", message=message)
        problem.text = verdict.explain()
    said = "\n".join(str(part) for part in (verdict, regression) if part is not None)
    ElementTree.SubElement(case, "system-out").text = said
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def markdown(name: str, verdict: Verdict, regression: Regression | None) -> str:
    """A heading, the one line, and a table of bytes."""
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
    lines = [f"### autofit check: `{name}` {word}", "", str(verdict), ""]
    if regression is not None:
        lines += [f"Against the earlier one: {regression}", ""]
    lines += ["| | |", "|---|---:|"]
    lines += [f"| {label} | {format_bytes(size)} |" for label, size in rows.items() if size]
    return "\n".join(lines) + "\n"
