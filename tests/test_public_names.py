"""The names that `autofit` offers, and the signatures that its users write against.

`public_api.txt` is the snapshot; a change that is meant is written to it with
`python tests/test_public_names.py`.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import autofit
from autofit.integrations import accelerate, lightning, transformers
from autofit.report import report

SNAPSHOT = Path(__file__).with_name("public_api.txt")
CALLED_BY_USERS: list[Callable[..., Any]] = [
    autofit.search,
    autofit.find_batch_size,
    autofit.checkpoint_to_budget,
    autofit.from_loader,
    autofit.probe,
    autofit.soak,
    autofit.predict,
    autofit.Prediction.fits,
    autofit.Prediction.excess_bytes,
    autofit.check,
    autofit.load,
    autofit.Workload,
    autofit.Lengths,
    autofit.Plan,
    autofit.Plan.split,
    autofit.Dimension,
    autofit.CostHint,
    autofit.Report.apply,
    autofit.Report.save,
    autofit.Report.plot,
    autofit.Report.with_costs,
    autofit.Report.export,
    autofit.Report.to_text,
    autofit.Report.to_html,
    autofit.Report.to_markdown,
    autofit.Report.to_dict,
    autofit.Report.to_dataframe,
    transformers.workload,
    transformers.search,
    transformers.predict,
    transformers.check,
    transformers.apply,
    lightning.workload,
    lightning.search,
    lightning.predict,
    lightning.check,
    lightning.arguments,
    accelerate.arguments,
    accelerate.applied,
]


def public_api() -> str:
    """Return the exported names, then a line for each thing that users call."""
    return "\n".join([*sorted(autofit.__all__), "", *map(_signature, CALLED_BY_USERS), ""])


def _signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    shown = signature.replace(
        parameters=[_bare(parameter) for parameter in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    is_exported = getattr(autofit, function.__qualname__, None) is function
    home = "" if is_exported else function.__module__.partition("autofit.integrations.")[2]
    return f"{home}.{function.__qualname__}{shown}".lstrip(".")


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return it without annotation, and with the name of a class in place of the class."""
    default = parameter.default
    if isinstance(default, type) and default is not parameter.empty:
        default = type("Shown", (), {"__repr__": lambda _, name=default.__name__: name})()
    return parameter.replace(annotation=parameter.empty, default=default)


def test_the_public_api_is_that_of_the_snapshot() -> None:
    assert public_api() == SNAPSHOT.read_text()


@pytest.mark.parametrize("name", autofit.__all__)
def test_every_public_name_is_there_and_explains_itself(name: str) -> None:
    assert callable(getattr(autofit, name))
    assert inspect.getdoc(getattr(autofit, name))
    assert name in dir(autofit)


OF_A_REPORT = ["plan", "best", "baseline", "is_decided", "speedup", "notes", "warnings", "trials",
               "frontier"]  # fmt: skip


@pytest.mark.parametrize("name", OF_A_REPORT)
def test_what_users_ask_of_a_report_is_typed_and_explained(name: str) -> None:
    found = inspect.getattr_static(autofit.Report, name)
    assert isinstance(found, property)
    assert inspect.getdoc(found)
    assert get_type_hints(found.fget, {**vars(report), "Trial": autofit.Trial})["return"]


def test_no_example_reaches_into_the_record_of_a_report() -> None:
    root = Path(__file__).parent.parent
    shown = [root / "README.md", *root.glob("docs/*.md"), *root.glob("examples/**/*.py")]
    assert len(shown) > 20
    assert [path.name for path in shown if ".record" in path.read_text()] == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'serach'"):
        autofit.serach  # noqa: B018  # looking it up is what is tested


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert autofit.__version__ == project["project"]["version"]


def test_what_a_search_says_of_the_training_a_workload_says_alike() -> None:
    search = inspect.signature(autofit.search).parameters
    workload = inspect.signature(autofit.Workload).parameters
    shared = {"criterion", "loss_fn", "optimizer", "global_batch"}
    assert set(workload) & set(search) == shared | {"model", "sample_batch"}
    assert all(workload[name].default == search[name].default for name in shared)


def test_a_search_has_at_most_18_arguments() -> None:
    assert len(inspect.signature(autofit.search).parameters) <= 18


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api())
