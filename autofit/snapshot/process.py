"""The state of this process that other people's code changes: flags, random states, hooks.

`take` reads it, `restore` writes back what has changed since, and only that. The random states of
CUDA devices belong to it once CUDA is initialized.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from autofit.torch_flags import Flag, attribute, flags, put_back


def take() -> Mapping[str, Any]:
    """Every flag's value now."""
    return {flag.name: flag.value() for flag in _flags()}


def restore(values: Mapping[str, Any]) -> None:
    """Write back every flag that differs from `values`, all of them even if one fails.

    Raises:
        ExceptionGroup: flags that could not be written back.
    """
    put_back(_flags(), values)


def random_states() -> Mapping[str, Any]:
    """Return the states of Python's, numpy's and torch's own random number generators."""
    return {flag.name: flag.value() for flag in _random_states()}


def _flags() -> Iterator[Flag]:
    yield from flags()
    yield from _torch_modes()
    yield from _autocast_flags()
    yield from _random_states()
    yield from _hooks_of_all_modules()
    yield Flag("os.environ", lambda: dict(sorted(os.environ.items())), _write_environment)
    yield Flag("cwd", os.getcwd, os.chdir)


def _torch_modes() -> Iterator[Flag]:
    yield Flag("torch.grad_mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield Flag(  # the CPU is the default where none is set; setting it costs every call a little
        "torch.default_device",
        _default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    )
    yield attribute("torch.distributions.Distribution._validate_args")
    yield Flag(
        "torch.anomaly_mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left it so
        yield Flag("torch.cuda.current_device", torch.cuda.current_device, torch.cuda.set_device)


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # of torch 2.8, once a default was set and unset again
        return torch.device("cpu")


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
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left it so
        for index, generator in enumerate(torch.cuda.default_generators):
            yield _generator(f"torch.cuda.random.{index}", generator)


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
    """Write variables back; another thread that reads one finds it throughout."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
