"""Logits that nobody has read yet, so that a loss can take them a few rows at a time.

In: a linear head and rows of logits to hold at once. While `deferred` is entered, the head returns
`DeferredLogits`: they remember the head's input and weights. Views, slices of rows and casts of
them are remembered too; `cross_entropy` of them computes the loss and its gradients by chunks of
rows, in the three matrix products that plain training takes. Whatever else uses them gets the
logits that the head would have returned, made once.

To autograd they are the head's output: a node with the backward of `linear` returned them, and
views of them are views. So gradients also reach the head from what sees no torch function, such as
an `autograd.Function`, a backward hook of a module, `vmap` or a scripted loss.

The chunks follow Liger Kernel's fused linear cross entropy (Hsu et al., "Liger Kernel: Efficient
Triton Kernels for LLM Training", 2024), without kernels and without a line of the model's.

Torch's own `linear_cross_entropy` does not stand in for them: with 2.13 it adds up the losses and
the gradients of chunks in bfloat16 where that is the type (128 chunks of 16 rows: a loss 6% off),
autocast does not cast what it is given, and with smoothed labels it makes all logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils import _pytree as pytree

from autofit.errors import Unsupported

_LESS = 2.0**-5
"""Of the input, in products that add up rows: a class that most of 2,048 rows have adds up to more
than float16 holds (65,504) where the input is 32. A power of two, so that no other type rounds."""


class LogitsLost(Unsupported, RuntimeError):
    """Something is asked for that only logits in memory have."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: set head_loss.rows=0, which keeps the logits")


@dataclass(eq=False)
class Run:
    """One run of a head, while gradients are on.

    Attributes:
        hidden: what it was given, (..., width).
        weight, bias: its parameters, (classes, width) and (classes) or None.
        rows: of logits to hold at once.
        dtype: in which the head multiplies, autocast's where that is on.
        versions: of hidden, weight and bias, when the head ran.
        logits: (..., classes), without a graph, once something has asked for them.
        chunked_rows: how many rows a loss took by chunks; 0: none has.
        is_watched: whether something uses the gradient of the logits, which chunks do not give.
        derives: whether what operators make of the logits is deferred, too.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: int
    dtype: torch.dtype
    versions: list[int]
    logits: Tensor | None = None
    chunked_rows: int = 0
    is_watched: bool = False
    derives: bool = False

    def check_unchanged(self) -> None:
        """Refuse to compute with what the head was not given.

        Raises:
            LogitsLost: its input or a parameter has been changed in place since it ran.
        """
        if self.versions != _versions((self.hidden, self.weight, self.bias)):
            raise LogitsLost(
                "logits are used after the input, weight or bias of their head was changed in place"
            )

    @property
    def logits_bytes(self) -> int:
        """The bytes that all logits take."""
        return self.hidden.shape[:-1].numel() * len(self.weight) * self.dtype.itemsize

    def watch(self) -> None:
        """Have the logits made where a loss takes them, since their gradient is used.

        Raises:
            LogitsLost: a loss has taken them by chunks.
        """
        if self.chunked_rows:
            raise LogitsLost("the gradient of logits is asked for after a loss was computed")
        self.is_watched = True

    def values(self) -> Tensor:
        """Return the logits, without a graph.

        Raises:
            LogitsLost: they can no longer be made.
        """
        if self.logits is None:
            self.check_unchanged()
            with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
                self.logits = functional.linear(self.hidden.to(self.dtype), *self.cast())
        return self.logits

    def cast(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as the head multiplies by them, without a graph."""
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        return self.weight.detach().to(self.dtype), bias


@contextmanager
def deferred(
    heads: Sequence[nn.Linear], rows: int, on_run: Callable[[Run], object] | None = None
) -> Iterator[None]:
    """Have these heads return deferred logits.

    Where nothing has gradients, or a compiler or a transform of `torch.func` follows the head, it
    returns its logits as before.

    Args:
        heads: modules that compute as `nn.Linear` does.
        rows: of logits to hold at once.
        on_run: called with each run of a head.
    """
    live = set(heads)

    def forward(self: nn.Linear, hidden: Tensor) -> Tensor:
        if self in live:
            return _run(self, rows, on_run, hidden)
        return nn.Linear.forward(self, hidden)  # a copy of a head, which may outlast this

    with ExitStack() as stack:
        stack.callback(live.clear)
        for head in heads:
            stack.callback(vars(head).pop, "forward")
            head.forward = MethodType(forward, head)  # type: ignore[method-assign]  # undone
        yield


def _run(
    head: nn.Linear, rows: int, on_run: Callable[[Run], object] | None, hidden: Tensor
) -> Tensor:
    operands = hidden, head.weight, head.bias
    if hidden.dim() < 2 or not _can_wait(operands):
        return functional.linear(*operands)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if _is_cast(hidden) else hidden.dtype
    run = Run(*operands, rows, dtype, _versions(operands))
    if on_run is not None:
        on_run(run)
    if "torch._dynamo" in sys.modules:
        _keep_out_of_compiled_code()
    logits: DeferredLogits = _Head.apply(*operands, run)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return logits


def _versions(operands: Iterable[Tensor | None]) -> list[int]:
    return [tensor._version for tensor in operands if tensor is not None]


def _can_wait(operands: Sequence[Tensor | None]) -> bool:
    """Return whether the product of this input, weight and bias may be computed later."""
    tensors = [tensor for tensor in operands if tensor is not None]
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_transformed(tensors):
        return False
    if not all(type(each) in (Tensor, nn.Parameter) for each in tensors):
        return False
    types_agree = _is_cast(tensors[0]) or len({each.dtype for each in tensors}) == 1
    has_versions = not any(each.is_inference() for each in tensors)
    return types_agree and has_versions and any(each.requires_grad for each in tensors)


def _is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Return whether `torch.func` or forward-mode differentiation follows what is computed."""
    if torch._C._are_functorch_transforms_active():
        return True
    unpacked: Any = forward_ad.unpack_dual  # torch does not annotate it
    return any(unpacked(tensor).tangent is not None for tensor in tensors)


def _is_cast(hidden: Tensor) -> bool:
    """Return whether autocast chooses the type in which a head multiplies it."""
    return torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64


class _Head(torch.autograd.Function):
    """A linear head whose product waits; its backward is that of `linear`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: Run) -> Tensor:
        """Return deferred logits, (..., classes).

        Args:
            ctx: keeps what the gradients need.
            hidden: (..., width).
            weight, bias: (classes, width), and (classes) or None.
            run: remembers them.
        """
        of_hidden, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(hidden if of_weight else None, weight if of_hidden else None)
        shape = hidden.shape[:-1]
        with torch.utils._python_dispatch._disable_current_modes():  # on the host, aside
            rows = torch.arange(shape.numel(), device="cpu").view(*shape, 1)
            return DeferredLogits(run, rows.expand(*shape, len(weight)), run.dtype)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias; autograd casts them to their types."""
        (gradient,), (hidden, weight) = outer, ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        with torch.autocast(gradient.device.type, enabled=False):
            return (
                None if weight is None else gradient @ weight.to(rows.dtype),
                None if hidden is None else rows.t() @ hidden.flatten(0, -2).to(rows.dtype),
                rows.sum(0) if ctx.needs_input_grad[2] else None,
                None,
            )


class DeferredLogits(Tensor):
    """Logits (..., classes), or with the classes in another dimension, without memory of their own.

    Attributes:
        run: of the head.
        rows: of each element the row of the head's input that it belongs to, on the host; along the
            classes it has stride 0.
        change: the logits that these are made from, by which operator, and its other arguments;
            None: they are the head's own.
    """

    run: Run
    rows: Tensor
    change: _Change | None
    _logits: Tensor | None

    @staticmethod
    def __new__(
        cls,
        run: Run,
        rows: Tensor,
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        storage_offset: int | None = None,
        change: _Change | None = None,
    ) -> DeferredLogits:
        """Return deferred logits; without strides they are contiguous. See the class."""
        logits: DeferredLogits = Tensor._make_wrapper_subclass(
            cls,
            rows.shape,
            strides=strides,
            storage_offset=storage_offset,
            dtype=dtype,
            device=run.hidden.device,
        )
        logits.run, logits.rows, logits.change, logits._logits = run, rows, change, None
        return logits

    def values(self) -> Tensor:
        """Return the logits without a graph, made once; views of the head's, as these are views.

        Raises:
            LogitsLost: what they are made from has changed.
        """
        if self._logits is None and self.change is None:
            self._logits = self.run.values()
        elif self._logits is None and self.change is not None:
            before, operator, others, kwargs = self.change
            if before._version != self._version:  # which views share
                raise LogitsLost("logits were changed in place before a copy of them was used")
            with torch.no_grad():
                self._logits = operator(before.values(), *others, **kwargs)
        assert self._logits is not None
        return self._logits

    def plain(self) -> Tensor:
        """Return a view of these as an ordinary tensor."""
        self.values()  # here, where dispatch modes see it
        with torch._C.DisableTorchFunctionSubclass():
            return self.view_as(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer for shapes and types, record views, take a loss by chunks, or make the logits."""
        return cls._answer(func, args, kwargs or {})

    @staticmethod
    def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in _OF_GRADIENTS:
            pytree.tree_map_only(DeferredLogits, lambda each: each.run.watch(), (args, kwargs))
        if func in _NATIVE or func in _OF_GRADIENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = args[0] if args else None
        if isinstance(logits, DeferredLogits) and logits._can_be_chunked():
            if func in _VIEWS and torch.is_grad_enabled():
                with suppress(TypeError, RuntimeError):  # not rows alone, or the caller's error
                    return logits._derived(func, args, kwargs)
            if func is functional.cross_entropy:
                loss = _cross_entropy(*args, **kwargs)
                if loss is not None:
                    return loss
        plain = pytree.tree_map_only(DeferredLogits, DeferredLogits.plain, (args, kwargs))
        result = func(*plain[0], **plain[1])
        return logits if args and result is plain[0][0] else result  # what changes it in place

    def _can_be_chunked(self) -> bool:
        is_open = self.run.logits is None and not self.run.is_watched
        return is_open and self.requires_grad and not _is_transformed([])

    def _derived(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what such a function makes of these, deferred.

        Raises:
            RuntimeError: that is not rows of them.
        """
        self.run.derives = True
        try:
            with (
                torch._C.DisableTorchFunctionSubclass(),
                torch.utils._python_dispatch._disable_current_modes(),  # nothing is computed
            ):
                return func(*args, **kwargs)
        finally:
            self.run.derives = False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as a static method
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Compute with the logits; while rows are derived, return what stands for the result."""
        logits = args[0] if args else None
        if isinstance(logits, cls) and logits.run.derives:
            return logits._changed(func, args[1:], kwargs or {})
        args, kwargs = pytree.tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _changed(
        self, operator: Any, others: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DeferredLogits:
        """Return what stands for the result of an operator.

        Raises:
            RuntimeError: that is not rows of these, with all classes of each.
        """
        rows = self._rows_after(operator, others, kwargs)
        stand_in = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        result = operator(stand_in, *others, **kwargs)
        change = (self, operator, others, kwargs)
        changed = type(self)(
            self.run, rows, result.dtype, result.stride(), result.storage_offset(), change
        )
        changed.classes_dim()
        return changed

    def _rows_after(self, operator: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if operator.name() in _VIEW_OPERATORS:
            rows: Tensor = operator(self.rows, *others, **kwargs)
            return rows
        dtype, dim = kwargs.get("dtype", self.dtype), self.classes_dim()
        if operator.name() not in _COPIES or "device" in kwargs or not dtype.is_floating_point:
            raise RuntimeError("not rows alone")
        return self.rows.select(dim, 0).contiguous().unsqueeze(dim).expand(self.shape)

    def classes_dim(self) -> int:
        """Return the dimension of the classes.

        Raises:
            RuntimeError: they lie in none, or some were left out.
        """
        for dim, (size, stride) in enumerate(zip(self.rows.shape, self.rows.stride(), strict=True)):
            if stride == 0 and size == len(self.run.weight):
                return dim
        raise RuntimeError("not rows alone")

    def hidden(self) -> Tensor:
        """Return the input of the head for each of these rows, (rows, width)."""
        hidden = self.run.hidden.flatten(0, -2)
        with torch.utils._python_dispatch._disable_current_modes():  # on the host, aside
            rows = self.rows.select(self.classes_dim(), 0).flatten()
            if torch.equal(rows, torch.arange(len(hidden), device="cpu")):
                return hidden
        return hidden.index_select(0, rows.to(hidden.device))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # a tensor's has an option
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


@cache
def _keep_out_of_compiled_code() -> None:
    """Have compiled code stop where it uses deferred logits, whose values it cannot trace.

    Not before there is a compiler: to import it takes a second.
    """
    disable: Any = torch.compiler.disable  # torch does not annotate it
    DeferredLogits._answer = staticmethod(disable(DeferredLogits._answer))  # type: ignore[method-assign]  # the same


_Change = tuple[DeferredLogits, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


_VIEWS = {
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.flatten,
    torch.flatten,
    Tensor.__getitem__,
    Tensor.contiguous,
    Tensor.float,
    Tensor.to,
    Tensor.transpose,
    torch.transpose,
    Tensor.permute,
    torch.permute,
}
"""What may make nothing but rows of logits."""
_VIEW_OPERATORS = {
    "aten::alias",
    "aten::view",
    "aten::_unsafe_view",
    "aten::slice.Tensor",
    "aten::select.int",
    "aten::unsqueeze",
    "aten::transpose.int",
    "aten::permute",
}
_COPIES = {"aten::clone", "aten::_to_copy"}
_NATIVE = {
    Tensor.size,
    Tensor.stride,
    Tensor.storage_offset,
    Tensor.untyped_storage,
    Tensor.is_contiguous,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.get_device,
    Tensor.__len__,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("grad", "is_leaf", "_version")),
    Tensor.backward,
    torch.autograd.backward,
}
"""What needs no values: facts, and backward passes, which may run where gradients are off."""
_OF_GRADIENTS = {
    Tensor.register_hook,
    Tensor.retain_grad,
    getattr(Tensor, "grad_fn").__get__,  # noqa: B009  # torch annotates it as of a tensor
    torch.autograd.grad,
}
"""What uses the gradient of logits, or their place in the graph."""


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss of deferred logits, given as torch's own is; None: not taken by chunks.

    It is where the targets are classes and the losses of the rows are added up.
    """
    run, is_old = logits.run, size_average is not None or reduce is not None
    has_classes = isinstance(target, Tensor) and target.dtype == torch.long
    if is_old or not has_classes or reduction not in ("mean", "sum"):
        return None
    if logits.classes_dim() != 1 or target.shape != (len(logits), *logits.shape[2:]):
        return None
    run.check_unchanged()
    hidden, target = logits.hidden(), target.reshape(-1)
    run.chunked_rows = len(target)
    entropy = partial(
        functional.cross_entropy,
        weight=weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    loss: Tensor = _Chunked.apply(hidden, run.weight, run.bias, target, run, entropy)  # type: ignore[no-untyped-call]  # torch does not annotate it
    if reduction == "mean":
        counted = target != ignore_index
        weights = counted if weight is None else weight[torch.where(counted, target, 0)] * counted
        loss = loss / weights.sum()
    is_cast = torch.is_autocast_enabled(hidden.device.type)
    return loss if is_cast else loss.to(logits.dtype)


class _Chunked(torch.autograd.Function):
    """The summed cross entropy of a linear head, whose logits are held a chunk at a time.

    The gradients are computed along with the loss: `backward` scales them. So nothing is computed
    twice, and no logits stay. A second backward of one loss is refused.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        run: Run,
        entropy: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the sum, in float32 or wider.

        Args:
            ctx: keeps the gradients.
            hidden: (rows, width).
            weight, bias: (classes, width), and (classes) or None.
            target: (rows), classes.
            run: of the head.
            entropy: the summed loss of some rows of logits and their targets.
        """
        wide = torch.promote_types(torch.float32, hidden.dtype)  # many chunks are added up in it
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(each, dtype=None if each is hidden else wide)
            if each is not None and is_needed
            else None
            for each, is_needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        total = hidden.new_zeros((), dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            cast, its_bias = run.cast()
            for at in range(0, len(hidden), run.rows):
                chunk = slice(at, at + run.rows)
                part = hidden[chunk].detach().to(run.dtype)
                loss, gradient = _with_gradient(
                    functional.linear(part, cast, its_bias), target[chunk], entropy
                )
                total += loss
                if of_hidden is not None:
                    of_hidden[chunk] = gradient @ cast
                if of_weight is not None:
                    of_weight.add_(gradient.t() @ (part * _LESS), alpha=1 / _LESS)
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        its_type = wide if weight.dtype == torch.float16 else weight.dtype  # which sums outgrow
        of_parameters = (
            None if sum_ is None else sum_.to(its_type) for sum_ in (of_weight, of_bias)
        )
        ctx.gradients = of_hidden, *of_parameters
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, scaled by that of the sum."""
        if ctx.gradients is None or torch.is_grad_enabled():  # which create_graph=True does
            raise LogitsLost("a loss of deferred logits can be differentiated once")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if each is None else each.mul_(outer[0]) for each in gradients]
        return (*scaled, None, None, None)


def _with_gradient(
    logits: Tensor, target: Tensor, entropy: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of these rows, and its gradient by their logits."""
    is_half = logits.dtype in (torch.float16, torch.bfloat16)
    with torch.enable_grad():
        logits.requires_grad_()
        loss = entropy(logits.float() if is_half else logits, target)
        (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient
