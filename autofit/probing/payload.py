"""The workload as a file: written by the parent once, read afresh by the worker for each probe.

Tensors are stored once and read through a memory map, so that a large model never lies in host
memory a second time; classes and functions from `__main__`, notebooks and local scopes travel by
value (cloudpickle), importable ones by name.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

import torch

from autofit.batching import map_tensors
from autofit.errors import InvalidRequest, WorkerFailed
from autofit.probing.faults import chain_of
from autofit.probing.pickling import PICKLE, unreachable_by_value
from autofit.restoring import process_state
from autofit.strategy import Strategy
from autofit.workload import Workload

_WAYS_OUT = (
    "Either pass a function that builds the model instead of the model, or use "
    'isolation="inprocess", which runs in this process and cannot survive hangs and device faults'
)


@dataclass(frozen=True)
class Payload:
    """What a worker needs to build trainings.

    Attributes:
        workload: what is trained.
        strategies: those that may have settings in a plan.
        computing: how torch computes in the parent (default dtype, TF32, deterministic algorithms).
    """

    workload: Workload
    strategies: Sequence[Strategy]
    computing: Mapping[str, Any] = field(default_factory=process_state.computing)


def nameless_file() -> IO[bytes]:
    """A file that vanishes with the processes that hold it open, also if they are killed.

    Raises:
        WorkerFailed: there is no folder for temporary files.
    """
    try:
        return cast(IO[bytes], tempfile.TemporaryFile(prefix="autofit-"))
    except OSError as error:
        raise _no_room("a temporary folder", error) from error


def write_payload(payload: Payload, path: Path) -> None:
    """Write the payload.

    Raises:
        InvalidRequest: something in it cannot be pickled; the message names the ways out.
        WorkerFailed: there is no room for the file, or no right to write it.
    """
    workload = payload.workload
    if not workload.makes_batches:
        workload = replace(workload, sample_batch=map_tensors(_own_storage, workload.sample_batch))
    try:
        contents = {
            "workload": workload,
            "strategies": tuple(payload.strategies),
            "computing": payload.computing,
        }
        with path.open("wb") as file, unreachable_by_value():
            torch.save(contents, file, pickle_module=PICKLE)
    except MemoryError:
        raise
    except Exception as error:  # how an object is pickled may be the user's own code
        disk = next((link for link in chain_of(error) if isinstance(link, OSError)), None)
        if disk is not None:  # torch's writer answers a full disk with a RuntimeError of its own
            raise _no_room(path, disk) from error
        raise InvalidRequest(
            f"the workload cannot be sent to a worker process ({_words(error)}). {_WAYS_OUT}"
        ) from error


def _no_room(path: str | os.PathLike[str], error: OSError) -> WorkerFailed:
    """The error for a payload that the file system does not take."""
    return WorkerFailed(
        f"the workload could not be written to {os.fspath(path)} for the worker process "
        f"({error}): it needs about the model's size on disk; set TMPDIR to a folder that has it"
    )


def read_payload(path: Path, device: torch.device | None = None) -> Payload:
    """A fresh copy of what `write_payload` wrote.

    What lay in host memory is mapped from the file until it is moved. What the user had on a GPU
    (a teacher model that the loss reaches, say) comes to `device`; None: to host memory.

    Raises:
        InvalidRequest: something in it cannot be unpickled here; the message names the ways out.
    """

    def place(storage: Any, location: str) -> Any:
        stays = location == "cpu" or device is None or device.type == "cpu"
        return storage if stays else storage.to(device=device)

    try:
        # The file is the parent's own, written a moment ago: it runs only the user's code.
        contents = torch.load(
            path, map_location=place, pickle_module=pickle, weights_only=False, mmap=True
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise InvalidRequest(
            f"the workload cannot be read in the worker process ({_words(error)}). {_WAYS_OUT}"
        ) from error
    parts = ("workload", "strategies", "computing")
    return Payload(*(contents[part] for part in parts))


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, or a small view would ship the whole storage that it looks into."""
    return tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
