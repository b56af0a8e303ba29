"""The state of this process that other people's code changes: flags, random states, hooks.

`take` reads it, `restore` writes back what has changed since, and only that. A flag that this
build of torch does not have, or that cannot be read (two ways of setting TF32 were mixed), is left
alone. The random states of CUDA devices belong to it once CUDA is initialized.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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


def take() -> Mapping[str, Any]:
    """Every flag's value now."""
    return {flag.name: flag.value() for flag in _flags()}


def restore(values: Mapping[str, Any]) -> None:
    """Write back every flag that differs from `values`, all of them even if one fails.

    Raises:
        ExceptionGroup: flags that could not be written back.
    """
    failures: list[Exception] = []
    for flag in _flags():
        try:
            flag.put_back(values.get(flag.name, UNREADABLE))
        except Exception as error:  # whatever it is, the other flags must still be written
            failures.append(error)
    if failures:
        raise ExceptionGroup("some of the process's state could not be put back", failures)


def random_states() -> Mapping[str, Any]:
    """Return the states of Python's, numpy's and torch's own random number generators."""
    return {flag.name: flag.value() for flag in _random_states()}


def computing() -> Mapping[str, Any]:
    """What decides how torch computes, now: a worker computes as its parent would."""
    return {flag.name: flag.value() for flag in _computing_flags()}


def _flags() -> Iterator[Flag]:
    yield from _computing_flags()
    yield from _torch_modes()
    yield from _autocast_flags()
    yield from _random_states()
    yield from _hooks_of_all_modules()
    yield Flag("os.environ", lambda: dict(sorted(os.environ.items())), _write_environment)
    yield Flag("cwd", os.getcwd, os.chdir)


def _computing_flags() -> Iterator[Flag]:
    # The old name of matmul precision comes first: writing it rewrites the new ones.
    yield Flag(
        "torch.float32_matmul_precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    )
    yield from (_attribute(path) for path in _ATTRIBUTES)
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


def _attribute(path: str) -> Flag:
    first, *middle, last = path.split(".")

    def owner() -> Any:
        found: Any = sys.modules[first]
        for name in middle:
            found = getattr(found, name)
        return found

    return Flag(path, lambda: getattr(owner(), last), lambda value: setattr(owner(), last, value))


def _torch_modes() -> Iterator[Flag]:
    yield Flag("torch.grad_mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield Flag(  # the CPU is the default where none is set; setting it costs every call a little
        "torch.default_device",
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    )
    yield _attribute("torch.distributions.Distribution._validate_args")
    yield Flag(
        "torch.anomaly_mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    )
    if _cuda_is_initialized():
        yield Flag("torch.cuda.current_device", torch.cuda.current_device, torch.cuda.set_device)


def _autocast_flags() -> Iterator[Flag]:
    for device_type in ("cpu", "cuda"):
        yield Flag(
            f"autocast.{device_type}",
            partial(torch.is_autocast_enabled, device_type),
            partial(torch.set_autocast_enabled, device_type),
        )
        yield Flag(
            f"autocast.{device_type}.dtype",
            partial(torch.get_autocast_dtype, device_type),
            partial(torch.set_autocast_dtype, device_type),
        )
    yield Flag("autocast.cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)


def _random_states() -> Iterator[Flag]:
    yield Flag("random", random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield Flag(
            "numpy.random",
            lambda: pickle.dumps(numpy.random.get_state(legacy=False)),
            lambda value: numpy.random.set_state(pickle.loads(value)),
        )
    yield _generator("torch.random", torch.default_generator)
    if _cuda_is_initialized():
        for index, generator in enumerate(torch.cuda.default_generators):
            yield _generator(f"torch.cuda.random.{index}", generator)


def _cuda_is_initialized() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch left it so


def _generator(name: str, generator: torch.Generator) -> Flag:
    return Flag(
        name,
        lambda: bytes(generator.get_state().tolist()),
        lambda value: generator.set_state(torch.tensor(list(value), dtype=torch.uint8)),
    )


def _hooks_of_all_modules() -> Iterator[Flag]:
    for name, hooks in sorted(vars(torch.nn.modules.module).items()):
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield Flag(f"torch.nn.{name}", partial(dict, hooks), partial(_replace_entries, hooks))


def _replace_entries(live: dict[Any, Any], entries: dict[Any, Any]) -> None:
    live.clear()
    live.update(entries)


def _write_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
