"""A tracer that sees the buffers of compiled code too.

torch.compile takes other tracers for a reason not to compile, and the code that inductor writes
for a CPU makes its buffers by a function of its own (`torch._C._dynamo.guards._empty_strided_cpu`),
past any dispatch mode. `CompiledMemoryTracer` lets code be compiled and stands in for that
function: a buffer is allocated when it is made and released when it is collected, as any storage.
What kernels keep on their stacks is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.memory.tracer import MemoryTracer

_ALLOCATES = "empty_strided_cpu"
"""The name of that function in the modules that inductor writes."""


class CompiledMemoryTracer(MemoryTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """A tracer of a CPU's tensors under which compiled code runs compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: it is left while code is compiled, and in force while that runs."""
        return True

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Enter the tracer, and see what compiled code allocates inside."""
        guards: Any = torch._C._dynamo.guards
        allocate = guards._empty_strided_cpu

        def counted(*args: Any) -> torch.Tensor:
            return self.allocate(allocate(*args))

        guards._empty_strided_cpu = counted
        _replace(allocate, counted)
        try:
            with self:
                yield
        finally:
            guards._empty_strided_cpu = allocate
            _replace(counted, allocate)


def _replace(before: Any, after: Any) -> None:
    """Have the modules that inductor has written call the one in place of the other."""
    cache = sys.modules.get("torch._inductor.codecache")
    for module in () if cache is None else cache.PyCodeCache.modules:
        if vars(module).get(_ALLOCATES) is before:
            setattr(module, _ALLOCATES, after)
