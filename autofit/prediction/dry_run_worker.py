"""The worker process in which `predict` and `check` run their dry runs.

A dry run replaces functions of torch for its whole process, so it runs in a process of its own, and
nothing of the caller's is replaced. The worker is one of those that run probes. The first
prediction starts it, and it stays for later ones. Parameters, buffers and optimizer state are sent
as shapes, so a large model costs nothing to send. An equal question is answered without the worker.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import re
import sys
import sysconfig
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from autofit.errors import InvalidArgument, mark_users
from autofit.prediction.dry_run import refuse_compiled, sendable
from autofit.probing.fork_server import surroundings
from autofit.probing.prober import Deadlines, Prober
from autofit.probing.requests import STILL_RUNNING
from autofit.probing.serialization import dumps, unreachable_by_value
from autofit.probing.worker_channel import WorkerChannel
from autofit.snapshot.snapshot import attributes_of
from autofit.torch_flags import computing
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from autofit.probing.session import Session

Progress = Callable[[str], object]
# A table of many GPUs and variants may take hours; Ctrl-C ends it at any time.
MAX_SECONDS = 24 * 3600.0
_Result = TypeVar("_Result")

MAX_KNOWN = 1024
"""Answers that are kept, of a few kilobytes each: more than a hyperparameter search asks for."""
_known: OrderedDict[bytes, tuple[bytes, Mapping[str, int]]] = OrderedDict()


def in_worker(
    function: Callable[..., _Result],
    workload: Workload,
    *arguments: Any,
    progress: Progress | None = None,
) -> _Result:
    """Return `function(workload, *arguments)`, called in the worker with a copy of the workload.

    An equal question about a model that was passed is answered as it was before. Questions are
    equal where model (but for its weights), functions, shapes, the integers of the batch, torch's
    flags and the user's modules are. A function that builds the model is called each time: it may
    read other files.

    Args:
        function: of a module.
        workload: the workload.
        arguments: further arguments, which can be pickled.
        progress: called here with each line that the function says; None: it gets no `progress=`.

    Raises:
        InvalidArgument: the workload cannot be sent.
        PredictionUnavailable: a part of the model is compiled.
        WorkerFailed: the worker died twice.
        Exception: raised by the function, or by the user's code in it.
    """
    call, around = _written(function, workload, arguments), _surroundings()
    key = hashlib.sha256(pickle.dumps(around) + call).digest()
    with _shared.lock:
        if key in _known and not _is_outdated(_known[key][1]):
            _known.move_to_end(key)
            known: _Result = pickle.loads(_known[key][0])  # what a caller edits is its own
            return known
        prober = _shared.prober(around)
        _shared.progress = progress  # which is not told of the worker's start
        try:
            run = partial(_run, call, progress is not None)
            answer: tuple[_Result, dict[str, int]] = prober.run(run, expected_seconds=MAX_SECONDS)
        except BaseException:  # of a module, perhaps, that is edited next
            _shared.close()
            raise
        finally:
            _shared.progress = None
        result, _shared.read = answer
        if isinstance(workload.model, torch.nn.Module):
            _known[key] = pickle.dumps(result), _shared.read
        if len(_known) > MAX_KNOWN:
            _known.popitem(last=False)
    return result


def _written(function: Callable[..., Any], workload: Workload, arguments: tuple[Any, ...]) -> bytes:
    if isinstance(workload.model, torch.nn.Module):
        refuse_compiled(workload.model)
    sent, without_data = sendable(workload)
    try:
        with unreachable_by_value():
            return dumps((function, sent, arguments), reduced=partial(_reduced, without_data))
    except MemoryError:
        raise
    except SystemExit as end:  # how an object is pickled may be the user's own code
        mark_users(end)
        raise
    except Exception as error:  # likewise
        raise InvalidArgument(
            f"the workload cannot be sent to the worker process that predicts "
            f"({type(error).__name__}: {error}): pass a function that builds the model instead of "
            "the model"
        ) from error


def _reduced(without_data: Mapping[int, torch.Tensor], obj: Any) -> Any:
    """Return what pickles a tensor as the one without values; a parameter with its attributes."""
    if (shape := without_data.get(id(obj))) is None:
        return NotImplemented
    if not isinstance(obj, torch.nn.Parameter):
        return shape.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]  # torch
    bare = torch.nn.Parameter(shape.detach(), shape.requires_grad)
    rebuild, arguments = bare.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]  # torch
    # As state, attributes are pickled after the parameter is memoized: one may be itself
    return rebuild, arguments, attributes_of(obj), None, None, _set_attributes


def _set_attributes(parameter: torch.nn.Parameter, attributes: dict[str, object]) -> None:
    vars(parameter).update(attributes)


@dataclass
class _Shared:
    """The worker of this process.

    Attributes:
        lock: held by who asks.
        progress: told what the worker says.
        opened: who asks the worker.
        around: what the worker found around it when it started.
        read: the user's modules that it has imported since.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    progress: Progress | None = None
    opened: Prober | None = None
    around: tuple[Any, ...] = ()
    read: Mapping[str, int] = field(default_factory=dict)

    def prober(self, around: tuple[Any, ...]) -> Prober:
        """Return a prober whose worker has this environment, and has read no older file."""
        if around != self.around or _is_outdated(self.read):
            self.close()
        if self.opened is None:
            self.around, self.read = around, {}
            nothing = Workload(torch.nn.Identity(), torch.zeros(1))  # workloads come with each call
            self.opened = Prober(
                WorkerChannel(nothing, device="cpu"),
                nothing,
                deadlines=Deadlines(patience=1.0),
                on_stage=self._tell,
            )
        return self.opened

    def close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.close()

    def _tell(self, stage: str) -> None:
        if self.progress is not None and stage != STILL_RUNNING:
            self.progress(stage)


_shared = _Shared()
# Kept, so that a forked process does not end the worker of its parent by forgetting it.
_of_parents: list[_Shared] = []


def _begin_anew() -> None:
    global _shared
    _of_parents.append(_shared)
    _shared = _Shared()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _shared.close())


def _surroundings() -> tuple[Any, ...]:
    """Return what code may depend on in its process besides its arguments."""
    folder = None
    with suppress(OSError):  # it may have been removed
        folder = os.getcwd()
    files = sorted(_users_modules().items())
    return [*sys.path], surroundings(), folder, computing(), files


_INSTALLED = re.compile("site-packages|dist-packages")
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))


def _users_modules() -> dict[str, int]:
    """Return the files of the user's own modules, which are in no library or installed package."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {
        file: _written_at(file)
        for file in files
        if isinstance(file, str) and not file.startswith(_LIBRARIES) and not _INSTALLED.search(file)
    }


def _is_outdated(read: Mapping[str, int]) -> bool:
    """Return whether one of the files was written since it was read."""
    return any(_written_at(file) != at for file, at in read.items())


def _written_at(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


# In the worker.


def _run(call: bytes, tells: bool, session: Session) -> tuple[Any, dict[str, int]]:
    """Return what is asked, and the user's modules that are imported here."""
    function, workload, arguments = pickle.loads(call)
    named = {"progress": session.on_stage} if tells else {}
    return function(workload, *arguments, **named), _users_modules()
