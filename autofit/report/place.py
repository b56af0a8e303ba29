"""Where a result is shown, which decides what commands it gives and what it calls arguments."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

FLAGS = frozenset({
    "allow_accumulation_change", "allow_stand_in_loss", "device", "dtype", "effort",
    "epoch_samples", "eval_batch", "global_batch", "gpu", "lora_rank", "max_micro_batch",
    "max_probes", "max_regression", "micro_batch", "numerics", "planned_steps", "price_per_hour",
    "profile", "ranks", "seed", "strategies", "study", "timeout", "vram_budget",
})  # fmt: skip
"""Arguments that the shell has too, as a flag: the name with hyphens."""

# Names without an underscore are words as well: they are arguments where "=" follows.
_WORDS = "|".join(sorted(name for name in {*FLAGS, "plan"} if "_" not in name))
_NAMES = "|".join(sorted((name for name in FLAGS if "_" in name), key=len, reverse=True))
_ARGUMENT = re.compile(
    rf"(?<![\w.(\['\"/-])(?:(?P<name>{_NAMES})(?![\w-])|(?P<word>{_WORDS})(?==))"
    r"(?:=(?:True\b|(?P<quote>['\"])(?P<text>[^'\"]*)(?P=quote)|(?P<value>\w[\w.:/-]*\b)?))?"
)

_OPTION = re.compile(r"options=SearchOptions\((\w+=\w+)\)")


def in_shell_words(text: str) -> str:
    """Return a message with arguments as flags: "pass --global-batch", "use --device cpu"."""

    def flag(match: re.Match[str]) -> str:
        name = (match["name"] or match["word"]).replace("_", "-")
        name = "plan-from" if name == "plan" else name  # in the shell it takes reports alone
        value = shlex.quote(match["text"]) if match["text"] else match["value"]
        return f"--{name} {value}" if value else f"--{name}"

    return _ARGUMENT.sub(flag, _OPTION.sub(r"\1", text))


@dataclass(frozen=True)
class Place:
    """Where a result is shown, which decides what can be run there.

    Attributes:
        path: the JSON file that holds the report; None: none does, and it is a Python variable.
        program: how the shell calls autofit; None: the result is shown in Python.
        has_functions: whether the report itself holds the functions of the search.
    """

    path: str | None = None
    program: str | None = None
    has_functions: bool = False

    @property
    def report(self) -> str:
        """The report, in Python."""
        path = json.dumps(self.path, ensure_ascii=False)
        return f"autofit.load({path})" if self.is_shell else "report"

    @property
    def more(self) -> str:
        """What shows all of the report."""
        in_python = "print(report.to_text(verbose=True))"
        return f"{self._command} -v" if self.is_shell else in_python

    @property
    def page(self) -> str:
        """What writes the page with the charts."""
        in_python = 'report.save("report.html")'
        return f"{self._command} --out report.html" if self.is_shell else in_python

    @property
    def is_shell(self) -> bool:
        """Whether a shell is there, and a file that holds the report."""
        return self.program is not None and self.path is not None

    def words(self, text: str) -> str:
        """Return a message with arguments as they are written there."""
        return in_shell_words(text) if self.is_shell else text

    @property
    def _command(self) -> str:
        return f"{self.program} report {shlex.quote(self.path or '')}"


IN_PYTHON = Place()
"""A report that was loaded, and is the variable `report`."""
