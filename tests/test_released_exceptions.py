"""After `release_exception`, nothing that a caught exception held is alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from autofit.errors import release_exception


class Step:
    """A step that fails with a tensor in its frame, and remembers that tensor weakly."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[torch.Tensor]] = []

    def fails(self) -> None:
        activation = torch.ones(8)
        self.held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def fails_while_cleaning_up(self) -> None:
        output = torch.ones(8)
        self.held.append(weakref.ref(output))
        try:
            self.fails()
        except RuntimeError as error:
            raise ValueError("step failed") from error

    def fails_in_a_group(self) -> None:
        errors: list[Exception] = []
        for attempt in (self.fails, self.fails_while_cleaning_up):
            try:
                attempt()
            except (RuntimeError, ValueError) as error:
                errors.append(error)
        raise ExceptionGroup("both", errors)

    def fails_in_backward(self) -> None:
        weight = torch.ones(8, requires_grad=True)
        activation = weight.exp()
        self.held += [weakref.ref(weight), weakref.ref(activation)]
        hooked = activation.clone()
        torch.autograd.graph.register_multi_grad_hook([hooked], lambda _: self.fails())
        torch.autograd.backward(hooked.sum())

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.held)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """So that what is freed was freed by `release_exception`, not by a lucky collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    "way", ["fails", "fails_while_cleaning_up", "fails_in_a_group", "fails_in_backward"]
)
def test_frees_the_tensors_of_every_frame(way: str) -> None:
    step = Step()
    kept: list[BaseException] = []
    try:
        getattr(step, way)()
    except Exception as error:
        kept.append(error)
    assert step.alive() > 0
    release_exception(kept[0])
    assert step.alive() == 0


def test_keeps_type_text_and_arguments() -> None:
    kept: list[BaseException] = []
    try:
        Step().fails_while_cleaning_up()
    except ValueError as error:
        kept.append(error)
    release_exception(kept[0])
    assert kept[0].args == ("step failed",)
    assert (kept[0].__traceback__, kept[0].__cause__, kept[0].__context__) == (None, None, None)


def test_leaves_running_frames_alone() -> None:
    def outer() -> str:
        local = "still here"
        try:
            Step().fails()
        except RuntimeError as error:
            release_exception(error)
        return local

    assert outer() == "still here"
