"""Private names of torch stand in one table: the source uses no other, and each is there."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit import torch_private
from autofit.errors import PredictionUnavailable
from autofit.measurement import Outcome
from autofit.probing.faults import fault_of
from autofit.registry import load_strategies
from autofit.training.workload import Workload
from tests.classifier import CROSS_ENTROPY, classifier, labelled, session_of
from tests.probing.test_survey import _survey_of
from tests.test_arrows import nodes_of

ROOT = Path(__file__).parents[1]
STAND_INS = {newer.stand_in for newer in torch_private.NEWER.values() if newer.stand_in}
TABLE = STAND_INS | {name for use in torch_private.USES.values() for name in use.names}
NOT_OF_TORCH = {
    "_args_from_interpreter_flags",  # of subprocess
    "_exit",  # of os
    "_getframe",  # of sys
    "_class_setstate",  # of cloudpickle
    "_dataloaders",  # of accelerate
    "_reset_state",  # likewise
    "_prepare_inputs",  # of transformers
    "_train_batch_size",  # of transformers
    "_make",  # of namedtuple
}
OWN = ("self", "cls", "super")
HAS_SUCH_NAMES_ITSELF = {"_opt_called": "set on an optimizer by a scheduler, and copied if present"}


def sources() -> list[Path]:
    core = [path for path in (ROOT / "autofit").rglob("*.py") if "emulation" not in path.parts]
    return sorted(set(core) | set((ROOT / "strategies").rglob("*.py")))


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def own_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the private names that the project gives to attributes, functions and fields."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
    return found


def dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def imported_from_torch(nodes: list[ast.AST]) -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield (the name here, the name in torch, the statement)."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    whole = alias.asname is not None
                    yield alias.asname or "torch", alias.name if whole else "torch", node
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}", node


def private_uses(nodes: list[ast.AST], own: set[str]) -> Iterator[tuple[int, str, ast.AST]]:
    """Yield (line, a private name of torch, its node): with its path where that shows."""
    bound = {}
    for here, there, statement in imported_from_torch(nodes):
        bound[here] = there
        if any(map(is_private, there.split("."))):
            yield statement.lineno, there, statement
    others = own | NOT_OF_TORCH
    for node in nodes:
        if not isinstance(node, ast.Attribute):
            continue
        first, _, rest = (dotted(node) or "").partition(".")
        if first in bound:
            name = f"{bound[first]}.{rest}"
            if any(map(is_private, name.split("."))):
                yield node.lineno, name, node
        elif is_private(node.attr) and not (first in OWN or node.attr in others):
            yield node.lineno, node.attr, node


def is_in_table(name: str) -> bool:
    """Return whether the table has a name, what has it, or what it has; of some: how it ends."""
    if "." not in name:
        return any(known.endswith(f".{name}") for known in TABLE)
    return any(
        f"{name}.".startswith(f"{known}.") or known.startswith(f"{name}.") for known in TABLE
    )


def test_the_source_uses_no_private_name_of_torch_but_those_of_the_table() -> None:
    own = own_names(chain.from_iterable(map(nodes_of, sources())))
    own -= {known.rpartition(".")[2] for known in TABLE}
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources()
        if path.name != "torch_private.py"
        for line, name, _ in private_uses(nodes_of(path), own | set(HAS_SUCH_NAMES_ITSELF))
        if not is_in_table(name)
    ]
    assert unknown == []


@pytest.mark.parametrize("need", torch_private.USES)
def test_this_torch_has_them(need: str) -> None:
    if need == "CUDA device" and torch.version.cuda is None:
        assert "_cuda_clearCublasWorkspaces" in str(torch_private.missing(need))
        return
    assert torch_private.missing(need) is None


@pytest.mark.parametrize("path", torch_private.NEWER)
def test_a_name_is_there_from_its_version_on(path: str) -> None:
    newer = torch_private.NEWER[path]
    try:
        torch_private.find(path)
    except (ImportError, AttributeError):
        assert torch.__version__ < newer.since
        if newer.stand_in is not None:
            torch_private.find(newer.stand_in)
    else:
        assert torch.__version__ >= newer.since


def test_a_name_that_is_newer_than_this_torch_is_missed_with_its_stand_in_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need, path = "segments of the allocator that grow", "torch._C._accelerator_setAllocatorSettings"
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.8.0"))
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        remove(path, monkeypatch)
    assert torch_private.missing(need) is None
    remove("torch.cuda.memory._set_allocator_settings", monkeypatch)
    assert path in str(torch_private.missing(need))


class _Without:
    """What has everything that another object has, but for one name."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(f"{self._whole} has no {name}", name=name)
        return getattr(self._whole, name)


class _Gone:
    """An attribute that its class, and each instance, no longer has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError(f"{owner} has no {self._name}", name=self._name)

    def __set__(self, instance: Any, value: Any) -> None: ...


def remove(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a private name away from what has it: a package, a class, or an object."""
    above, _, name = path.rpartition(".")
    if path in sys.modules or above in sys.modules:
        monkeypatch.setitem(sys.modules, path, None)
        monkeypatch.delattr(sys.modules[above], name, raising=False)
        return
    parent = torch_private.find(above)
    if isinstance(parent, torch.nn.Module):
        parent = type(parent)
    if isinstance(parent, type):
        monkeypatch.setattr(parent, name, _Gone(name), raising=False)
    else:
        further, _, last = above.rpartition(".")
        monkeypatch.setattr(torch_private.find(further), last, _Without(parent, name))


NAMES = [(need, path) for need, use in torch_private.USES.items() for path in use.names]


@pytest.mark.parametrize(("need", "path"), NAMES)
def test_what_is_gone_is_said_with_what_cannot_be_done(
    need: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path in torch_private.NEWER and torch.__version__ < torch_private.NEWER[path].since:
        pytest.skip("this torch is older than the name")
    if torch_private.missing(need) is None:
        remove(path, monkeypatch)
    with pytest.raises((AttributeError, ImportError)) as raised:
        torch_private.find(path)
    said: Any = torch_private.missing(need)
    assert path in said
    assert torch_private.USES[need].lost in said
    assert said in str(torch_private.gone_in(raised.value))
    assert fault_of(raised.value).outcome is Outcome.UNSUPPORTED
    with pytest.raises(PredictionUnavailable, match=re.escape(path)):
        torch_private.check(need)


def test_an_error_of_the_users_own_is_none_of_a_name_that_is_gone() -> None:
    with pytest.raises(AttributeError) as raised:
        _ = object()._version  # type: ignore[attr-defined]
    assert torch_private.gone_in(raised.value) is None
    assert fault_of(raised.value).outcome is Outcome.USER_ERROR


@pytest.mark.slow
def test_a_strategy_whose_name_is_gone_is_left_out_with_the_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = Workload(classifier(torch.nn.Tanh()), labelled(), criterion=CROSS_ENTROPY)
    session = session_of(lambda: workload, strategies=load_strategies(["checkpointing"]))
    lost = torch_private.USES["saved tensors that are made again"].lost
    assert lost not in str(_survey_of(session).notes)
    remove("torch._C._current_graph_task_id", monkeypatch)
    assert lost in str(_survey_of(session).notes)
