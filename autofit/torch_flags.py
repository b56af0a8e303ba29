"""The flags that decide how torch computes in this process: types, TF32, determinism, threads.

A worker computes as its parent would, so they are read in one and written in the other. A flag that
this build of torch does not have, or that cannot be read (two ways of setting TF32 were mixed), is
left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

UNREADABLE = "<cannot be read>"


@dataclass(frozen=True)
class Flag:
    """One value of the process: how to read it, as something that compares, and how to write it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]

    def value(self) -> Any:
        """What it is now, or UNREADABLE."""
        try:
            return self.read()
        except (RuntimeError, AttributeError, OSError, StopIteration):
            return UNREADABLE

    def put_back(self, value: Any) -> None:
        """Write `value` where it is known and differs from what is there."""
        if value != UNREADABLE and self.value() != value:
            self.write(value)


def computing() -> Mapping[str, Any]:
    """Return what decides how torch computes, now."""
    return {flag.name: flag.value() for flag in flags()}


def compute_as(values: Mapping[str, Any]) -> None:
    """Have torch compute as it did when these values of `computing` were read."""
    put_back(flags(), values)


def put_back(flags: Iterable[Flag], values: Mapping[str, Any]) -> None:
    """Write every flag that differs from `values`, all of them even if one fails.

    Raises:
        ExceptionGroup: flags that could not be written back.
    """
    failures: list[Exception] = []
    for flag in flags:
        try:
            flag.put_back(values.get(flag.name, UNREADABLE))
        except Exception as error:  # whatever it is, the other flags must still be written
            failures.append(error)
    if failures:
        raise ExceptionGroup("some of the process's state could not be put back", failures)


def flags() -> Iterator[Flag]:
    """Yield the flags, in the order in which they are written."""
    # The old name of matmul precision comes first: writing it rewrites the new ones.
    yield Flag(
        "torch.float32_matmul_precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    )
    yield from (attribute(path) for path in _ATTRIBUTES)
    for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"):
        path, backend = f"torch.backends.cuda.{name}", torch.backends.cuda
        yield Flag(path, getattr(backend, f"{name}_enabled"), getattr(backend, f"enable_{name}"))
    yield Flag("torch.default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Flag("torch.num_threads", torch.get_num_threads, torch.set_num_threads)
    yield Flag(
        "torch.deterministic_algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )


_ATTRIBUTES = (
    "torch.backends.cudnn.allow_tf32",  # first, as above; unreadable where the new ones disagree
    "torch.backends.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.benchmark_limit",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.rnn.fp32_precision",
    "torch.backends.mkldnn.enabled",
    "torch.backends.mkldnn.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.mkldnn.conv.fp32_precision",
    "torch.backends.mkldnn.rnn.fp32_precision",
    "torch.backends.opt_einsum.enabled",
    "torch.utils.deterministic.fill_uninitialized_memory",
)


def attribute(path: str) -> Flag:
    """Return the flag that is an attribute, such as "torch.backends.cudnn.enabled"."""
    first, *middle, last = path.split(".")

    def owner() -> Any:
        found: Any = sys.modules[first]
        for name in middle:
            found = getattr(found, name)
        return found

    return Flag(path, lambda: getattr(owner(), last), lambda value: setattr(owner(), last, value))
