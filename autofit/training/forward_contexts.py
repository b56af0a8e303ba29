"""The contexts that strategies have put around the forward passes of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

ForwardContext: TypeAlias = Callable[[], AbstractContextManager[Any]]


class ForwardContexts:
    """Makes and enters what a training's forward passes run under, in the order it was added."""

    def __init__(self) -> None:
        self._added: list[tuple[ForwardContext, bool]] = []
        self._is_forward = False

    def __bool__(self) -> bool:
        return bool(self._added)

    def add(self, context: ForwardContext, *, also_recomputation: bool) -> Callable[[], None]:
        """Add one; return the function that removes it. See `TrainingView.wrap_forward`."""
        entry = (context, also_recomputation)
        self._added.append(entry)
        return lambda: self._added.remove(entry)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enter all of them."""
        before, self._is_forward = self._is_forward, True
        try:
            with ExitStack() as stack:
                for context, _ in self._added:
                    stack.enter_context(context())
                yield
        finally:
            self._is_forward = before

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Enter those that a recomputation needs, unless it runs inside `forward`."""
        with ExitStack() as stack:
            for context, also_recomputation in self._added:
                if also_recomputation and not self._is_forward:
                    stack.enter_context(context())
            yield
