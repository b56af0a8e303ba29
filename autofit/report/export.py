"""A report's recommended plan as a script of plain PyTorch."""

from __future__ import annotations

from textwrap import wrap

from autofit.errors import InvalidArgument
from autofit.report.place import Place
from autofit.report.record import Record
from autofit.report.summary import one_line


def exported(record: Record, stack: str, place: Place) -> str:
    """Return a training loop around `report.apply`.

    Args:
        record: of the search.
        stack: "pytorch".
        place: where the report is shown.

    Raises:
        InvalidArgument: another stack.
    """
    if stack != "pytorch":
        raise InvalidArgument(
            f"there is no export {stack!r}, only 'pytorch': trainers take the report itself, see "
            "autofit.integrations"
        )
    return "\n".join((*_about(record), *_loop(record, place))) + "\n"


def _about(record: Record) -> list[str]:
    return [f"# {line}" for said in one_line(record).splitlines() for line in wrap(said, 97)]


def _loop(record: Record, place: Place) -> list[str]:
    needed = list(record.functions_given)
    if record.lacks_loss:
        needed = ["loss_fn", *needed]
    report = place.report
    if report == "report":  # of a variable; the script needs a file
        report = 'autofit.load("report.json")  # as report.save wrote it'
    given = ", ".join(("model", "optimizer", *(f"{name}={name}" for name in needed)))
    return [
        "import autofit",
        "",
        f"report = {report}",
        "",
        "",
        f"def train({', '.join(('model', 'optimizer', 'batches', *needed))}):",
        '    """Yield the loss of each step; a batch has '
        f'{record.recommended.plan.samples_per_step} samples."""',
        f"    with report.apply({given}) as training:",
        "        for batch in batches:",
        "            yield training.step(batch)",
    ]
