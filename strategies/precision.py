"""Reduced precision: TF32, bfloat16 and float16, where the device supports them natively.

`precision.dtype` starts at "default". The reduced types run forward and loss under autocast, so
parameters, gradients and optimizer state stay as they are; float16 also scales the loss. A model
whose weights are mostly not float32 keeps the precision it has chosen.

Autocast keeps its casts of weights in a cache, which does not see that a weight was written to (a
reference policy or an average of the weights that is swapped in, for example). So the cache is on
only where it saves something: where a step was seen to cast the same value of a weight twice, and
no weight changed between two casts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autofit.plan import Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView, undone

from .calls import Operators
from .one_setting import OneSetting

SETTING = "precision.dtype"
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_FASTEST_FIRST = ("bfloat16", "float16", "tf32")
"""What an expert turns on: half precision, in the type that needs no scaling of the loss."""
_SAMPLES = 2


class Precision(OneSetting):
    """The data type of matrix products and convolutions."""

    name = "precision"
    setting = SETTING
    phase = Phase.STEP
    numerics = Numerics.REDUCED_PRECISION
    standard_terms = ("autocast", "tf32")

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the types the device supports natively; "default" alone without float32."""
        if not _mostly_float32(context.model):
            return {SETTING: Dimension(["default"])}
        native = context.capabilities
        offered = {
            "tf32": native.tf32 and not _has_tf32(),
            "bfloat16": native.bfloat16,
            "float16": native.float16,
        }
        values = ["default", *(dtype for dtype, is_native in offered.items() if is_native)]
        if not all(map(_can_be_unscaled, context.model.parameters())):
            values = [value for value in values if value != "float16"]
        lever = next((value for value in _FASTEST_FIRST if value in values), None)
        casting = [value for value in values if value in _AUTOCAST]
        if not casting or not _cache_helps(context, _AUTOCAST[casting[0]]):
            return {SETTING: Dimension(values, lever=lever)}
        payloads: dict[Scalar, Any] = {value: {"cache": True} for value in casting}
        return {SETTING: Dimension(values, payloads=payloads, lever=lever)}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Run forward and loss in the chosen type."""
        if value == "tf32":
            return _tf32()
        return _autocast(training, _AUTOCAST[value], cache=_has_cache(payload))

    def in_standard_terms(self, settings: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        """Return the setting in standard terms: autocast in a type, or TF32."""
        dtype = settings.get(SETTING, "default")
        if dtype in _AUTOCAST:
            return {"autocast": dtype}
        return {"tf32": True} if dtype == "tf32" else {}

    def of_standard_terms(self, terms: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        """Return the setting that means these terms, if it is one of autocast's types."""
        dtype = terms.get("autocast")
        return {SETTING: dtype} if dtype in _AUTOCAST else {}

    def lines(self, value: Any, payload: Any) -> list[str]:
        if value == "tf32":
            return [
                "import torch",
                "torch.backends.cuda.matmul.allow_tf32 = True",
                "torch.backends.cudnn.allow_tf32 = True",
            ]
        scaler = [
            "scaler = torch.amp.GradScaler(device_type)",
            "# scaler.scale(loss).backward() in place of loss.backward()",
            "# scaler.step(optimizer); scaler.update() in place of optimizer.step()",
        ]
        how = f"dtype=torch.{value}" + ("" if _has_cache(payload) else ", cache_enabled=False")
        return [
            "import torch",
            "device_type = next(model.parameters()).device.type",
            *(scaler if value == "float16" else ()),
            f"with torch.autocast(device_type, {how}):  # around forward and loss",
        ]


def _has_cache(payload: Any) -> bool:
    return bool(payload and payload.get("cache"))


def _mostly_float32(model: torch.nn.Module) -> bool:
    """Return whether at least half of the floating weights are float32, as autocast needs."""
    floating = [p for p in model.parameters() if p.is_floating_point()]
    float32 = sum(p.numel() for p in floating if p.dtype == torch.float32)
    return float32 > 0 and 2 * float32 >= sum(p.numel() for p in floating)


def _can_be_unscaled(parameter: torch.nn.Parameter) -> bool:
    """Return whether GradScaler takes its gradient, if it has one: no float16, nothing complex."""
    return not parameter.requires_grad or (
        parameter.dtype != torch.float16 and not parameter.is_complex()
    )


def _cache_helps(context: Context, dtype: torch.dtype) -> bool:
    """Return whether a step casts a weight twice, and none that has changed in between."""
    try:
        casts = context.with_training(partial(_casts_of_a_step, dtype), _SAMPLES)
    except Exception as error:  # whatever it is, a probe meets it again and says so
        error.__traceback__ = None  # which keeps the step's tensors
        return False
    return casts.are_repeated and not casts.are_stale


def _casts_of_a_step(dtype: torch.dtype, training: TrainingView, batch: Any) -> _Casts:
    device_type = training.device.type
    casts = _Casts(training.model)
    unwrap = training.wrap_forward(
        lambda: casts.in_forward(torch.autocast(device_type, dtype=dtype, cache_enabled=False)),
        also_recomputation=False,
    )
    before = register_optimizer_step_pre_hook(casts.begin_update)
    after = register_optimizer_step_post_hook(casts.end_update)
    with undone(unwrap), undone(before.remove), undone(after.remove), Operators(casts.note):
        training.step(batch)
    return casts


class _Casts:
    """Watches which weights are cast, and whether they change between casts.

    What an optimizer's step changes does not count: the training drops casts after each.

    Attributes:
        are_repeated: the same value of a weight was cast twice in one forward; a recomputation
            casts anew in any case, since autocast drops its cache as the forward ends.
        are_stale: a weight was cast again after it had changed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.are_repeated = self.are_stale = False
        self._weights = {id(parameter): parameter for parameter in model.parameters()}
        self._updates = 0
        self._writes = Counter[int]()
        self._cast: dict[int, tuple[int, int]] = {}
        self._in_forward: set[int] | None = None

    @contextmanager
    def in_forward(self, autocast: AbstractContextManager[Any]) -> Iterator[None]:
        """Count what is cast twice within."""
        self._in_forward = set()
        try:
            with autocast:
                yield
        finally:
            self._in_forward = None

    def begin_update(self, *step: Any) -> None:
        self._updates += 1

    def end_update(self, *step: Any) -> None:
        self._updates -= 1

    def note(self, operator: Any, args: Any) -> None:
        if operator is torch.ops.aten._to_copy.default and id(args[0]) in self._weights:
            self._note_cast(args[0])
        elif operator._schema.is_mutable and not self._updates:
            written = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
            for tensor in filter(torch.is_tensor, written):
                self._writes[tensor.untyped_storage()._cdata] += 1

    def _note_cast(self, weight: torch.Tensor) -> None:
        storage = weight.untyped_storage()._cdata
        now = storage, self._writes[storage]
        before = self._cast.get(id(weight))
        self._cast[id(weight)] = now
        self.are_stale |= before not in (None, now)
        if self._in_forward is not None:
            self.are_repeated |= before == now and id(weight) in self._in_forward
            self._in_forward.add(id(weight))


@contextmanager
def _autocast(training: TrainingView, dtype: torch.dtype, *, cache: bool) -> Iterator[None]:
    device_type = training.device.type
    scaler_before = training.scaler
    unwrap = training.wrap_forward(
        lambda: torch.autocast(device_type, dtype=dtype, cache_enabled=cache),
        also_recomputation=False,  # torch's checkpoint enters the autocast of its forward by itself
    )
    try:
        if dtype == torch.float16:
            training.scaler = torch.amp.GradScaler(device_type)
        yield
    finally:
        training.scaler = scaler_before
        unwrap()


def _parts() -> tuple[Any, ...]:
    """Return the modules that hold torch's precision of float32 products on a GPU.

    None before torch 2.9, which has the older `allow_tf32` alone.
    """
    cudnn: Any = torch.backends.cudnn  # torch does not annotate its parts
    if not hasattr(cudnn, "conv"):
        return ()
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


def _has_tf32() -> bool:
    """Return whether all float32 products on a GPU may be computed in TF32 already."""
    if parts := _parts():
        return all(part.fp32_precision == "tf32" for part in parts)
    return torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32


@contextmanager
def _tf32() -> Iterator[None]:
    """Enable TF32 through both of torch's interfaces, and restore each on leaving.

    torch keeps the older `allow_tf32` along with the newer `fp32_precision` and refuses to read the
    older one where the two disagree, so turning on only one would break the user's own reads.
    """
    before = [(part, "fp32_precision", part.fp32_precision) for part in _parts()]
    olds: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    for part in olds:
        with suppress(RuntimeError):  # torch refuses to read it where only the newer was set
            before.append((part, "allow_tf32", part.allow_tf32))
    try:
        for part, name, _ in reversed(before):
            setattr(part, name, True if name == "allow_tf32" else "tf32")
        yield
    finally:
        for part, name, value in reversed(before):  # the older ones first: they rewrite the newer
            setattr(part, name, value)
