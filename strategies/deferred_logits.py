"""Logits that nobody has looked at, so that a loss can take them a few rows at a time.

In: a linear head and rows of logits to hold at once. While `deferred` is entered, the head returns
`DeferredLogits`: they remember the head's input and weights. Views, slices of rows and casts of
them are remembered too; `cross_entropy` of them computes the loss and its gradients by chunks of
rows, in the three matrix products that plain training takes. Whatever else uses them gets the
logits that the head would have returned, made once.

The chunks follow Liger Kernel's fused linear cross entropy (Hsu et al., "Liger Kernel: Efficient
Triton Kernels for LLM Training", 2024), without kernels and without a line of the model's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)
_LESS = 2.0**-5
"""Of the input, in products that add up rows: a class that most of 2,048 rows have adds up to more
than float16 holds (65,504) where the input is 32. A power of two, so that no other type rounds."""


@dataclass(eq=False)
class Run:
    """One run of a head, while gradients are on.

    Attributes:
        hidden: what it was given, (..., width).
        weight, bias: its parameters, (classes, width) and (classes) or None.
        rows: of logits to hold at once.
        dtype: in which the head multiplies, autocast's where that is on.
        version: of the weight, when the head ran.
        logits: (..., classes), once something has asked for them.
        chunked_rows: how many rows a loss took by chunks; 0: none has.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: int
    dtype: torch.dtype
    version: int
    logits: Tensor | None = None
    chunked_rows: int = 0

    def made(self) -> Tensor:
        """Return the logits, with the graph of plain training.

        Raises:
            RuntimeError: the weight has changed since the head ran.
        """
        if self.logits is None:
            if self.weight._version != self.version:
                raise RuntimeError(
                    "logits are asked for after the head's weight has changed, and head_loss.rows "
                    "keeps none: look at them before the optimizer steps, or set head_loss.rows=0"
                )
            with torch.enable_grad(), torch.autocast(self.hidden.device.type, enabled=False):
                self.logits = functional.linear(*self.cast())
        return self.logits

    def cast(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return input, weight and bias as the head multiplies them."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.hidden.to(self.dtype), self.weight.to(self.dtype), bias


@contextmanager
def deferred(
    heads: Sequence[nn.Linear], rows: int, on_run: Callable[[Run], object] | None = None
) -> Iterator[None]:
    """Have these heads return deferred logits.

    Where gradients are off, or a compiler traces the model, a head returns its logits as before.

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
    device = hidden.device.type
    weight, bias = head.weight, head.bias
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or hidden.dim() < 2:
        return functional.linear(hidden, weight, bias)
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else hidden.dtype
    run = Run(hidden, weight, bias, rows, dtype, weight._version)
    if on_run is not None:
        on_run(run)
    return DeferredLogits(run, _Rows(hidden, (*hidden.shape[:-1], weight.shape[0]), dtype))


@dataclass(frozen=True, eq=False)
class _Rows:
    """Which logits they are.

    Attributes:
        hidden: the rows of the head's input that they belong to, (..., width).
        shape, dtype: of the logits.
        is_transposed: whether the classes lie in dimension 1 of three.
    """

    hidden: Tensor
    shape: Sequence[int]
    dtype: torch.dtype
    is_transposed: bool = False


class DeferredLogits(Tensor):
    """Logits (..., classes), or (n, classes, m) transposed, that have no memory of their own.

    Attributes:
        run: of the head.
        rows: which logits they are.
        change: the logits that these were made from, by which function, and its other arguments;
            None: they are the head's own.
    """

    run: Run
    rows: _Rows
    change: _Change | None
    _logits: Tensor | None

    @staticmethod
    def __new__(cls, run: Run, rows: _Rows, change: _Change | None = None) -> DeferredLogits:
        """Return deferred logits; see the class for the arguments."""
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls,
            tuple(rows.shape),
            dtype=rows.dtype,
            device=rows.hidden.device,
            requires_grad=True,
        )
        made.run, made.rows, made.change, made._logits = run, rows, change, None
        return made

    def made(self) -> Tensor:
        """Return the logits, made once; views of the head's, where these are such views."""
        if self._logits is None and self.change is None:
            self._logits = self.run.made()
        elif self._logits is None and self.change is not None:
            before, function, args, kwargs = self.change
            self._logits = function(before.made(), *args, **kwargs)
        assert self._logits is not None
        return self._logits

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer for shapes and types, remember views, take a loss by chunks; else be made."""
        kwargs = kwargs or {}
        if func in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's own hook
        logits = args[0] if args else None
        if isinstance(logits, cls) and logits.run.logits is None:
            if func in _VIEWS:
                rows = None
                with suppress(TypeError):  # given by another name: those logits are made
                    rows = _VIEWS[func](logits.rows, *args[1:], **kwargs)
                if rows is not None:
                    return cls(logits.run, rows, (logits, func, args[1:], kwargs))
            if func is functional.cross_entropy:
                loss = _loss(logits, _CROSS_ENTROPY.bind(*args, **kwargs))
                if loss is not None:
                    return loss
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as a static method
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Compute with the logits, for what calls an operator directly."""
        return func(*_made(args), **_made(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # a tensor's has an option
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


_Change = tuple[DeferredLogits, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


def _made(values: Any) -> Any:
    """Return a function's arguments with the logits made, also those in lists."""
    if isinstance(values, DeferredLogits):
        return values.made()
    if type(values) in (list, tuple):
        return type(values)(map(_made, values))
    if type(values) is dict:
        return {name: _made(value) for name, value in values.items()}
    return values


# What functions that change no value make of rows; None: not of rows alone.


def _shaped(rows: _Rows, *to: Any) -> _Rows | None:
    """`view` and `reshape`, where a row stays a row."""
    sizes = to[0] if len(to) == 1 and isinstance(to[0], Sequence) else to
    if rows.is_transposed or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    classes = rows.shape[-1]
    if sizes[-1] not in (classes, -1):
        return None
    hidden = rows.hidden
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * hidden.shape[-1] != hidden.numel():
        return None  # the last dimension would not be the classes
    hidden = hidden.reshape(*sizes[:-1], hidden.shape[-1])
    return replace(rows, hidden=hidden, shape=(*hidden.shape[:-1], classes))


def _flattened(rows: _Rows, start_dim: int = 0, end_dim: int = -1) -> _Rows | None:
    dims = len(rows.shape)
    if rows.is_transposed or end_dim % dims == dims - 1:
        return None
    hidden = rows.hidden.flatten(start_dim % dims, end_dim % dims)
    return replace(rows, hidden=hidden, shape=(*hidden.shape[:-1], rows.shape[-1]))


def _sliced(rows: _Rows, index: Any) -> _Rows | None:
    """Slices of rows, such as `logits[..., :-1, :]`."""
    dims = len(rows.shape)
    index = index if isinstance(index, tuple) else (index,)
    if rows.is_transposed or not all(isinstance(each, slice) or each is ... for each in index):
        return None
    if ... in index:
        at = index.index(...)
        index = (*index[:at], *[slice(None)] * (dims + 1 - len(index)), *index[at + 1 :])
    if len(index) == dims and index[-1] != slice(None):
        return None
    hidden = rows.hidden[index[: dims - 1]]
    return replace(rows, hidden=hidden, shape=(*hidden.shape[:-1], rows.shape[-1]))


def _cast(rows: _Rows, *to: Any, **others: Any) -> _Rows | None:
    """`to(dtype)`; other conversions need the logits."""
    if others or len(to) != 1 or not isinstance(to[0], torch.dtype) or not to[0].is_floating_point:
        return None
    return replace(rows, dtype=to[0])


def _transposed(rows: _Rows, *dims: Any) -> _Rows | None:
    """What puts the classes of (n, m, classes) into dimension 1."""
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if rows.is_transposed or len(rows.shape) != 3 or not all(isinstance(d, int) for d in order):
        return None
    if [dim % 3 for dim in order] not in ([0, 2, 1], [1, 2], [2, 1]):
        return None
    samples, length, classes = rows.shape
    return replace(rows, shape=(samples, classes, length), is_transposed=True)


_VIEWS: Mapping[Callable[..., Any], Callable[..., _Rows | None]] = {
    Tensor.view: _shaped,
    Tensor.reshape: _shaped,
    torch.reshape: _shaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.__getitem__: _sliced,
    Tensor.contiguous: lambda rows: rows,
    Tensor.float: lambda rows: replace(rows, dtype=torch.float32),
    Tensor.to: _cast,
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    Tensor.permute: _transposed,
    torch.permute: _transposed,
}
_FACTS = {
    Tensor.size,
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
}
"""What needs no values."""


def _loss(logits: DeferredLogits, given: inspect.BoundArguments) -> Tensor | None:
    """Return the cross entropy of deferred logits; None: it is not taken by chunks.

    It is where the targets are classes and the losses of the rows are added up.
    """
    given.apply_defaults()
    target, weight, reduction = (given.arguments[n] for n in ("target", "weight", "reduction"))
    is_old = given.arguments["size_average"] is not None or given.arguments["reduce"] is not None
    has_classes = logits.dim() == 2 or logits.rows.is_transposed
    if not (has_classes and isinstance(target, Tensor) and target.dtype == torch.long):
        return None
    if is_old or reduction not in ("mean", "sum") or target.dim() != logits.dim() - 1:
        return None
    run, ignored = logits.run, given.arguments["ignore_index"]
    hidden = logits.rows.hidden.reshape(-1, logits.rows.hidden.shape[-1])
    target = target.reshape(-1)
    run.chunked_rows = len(target)
    rule = _Rule(run.rows, run.dtype, weight, ignored, given.arguments["label_smoothing"])
    loss: Tensor = _Chunked.apply(hidden, run.weight, run.bias, target, rule)  # type: ignore[no-untyped-call]  # torch does not annotate it
    if reduction == "mean":
        counted = target != ignored
        if weight is None:
            loss = loss / counted.sum()
        else:
            loss = loss / (weight[torch.where(counted, target, 0)] * counted).sum()
    is_cast = torch.is_autocast_enabled(hidden.device.type)
    return loss if is_cast else loss.to(logits.dtype)


@dataclass(frozen=True, eq=False)
class _Rule:
    """How a loss is computed.

    Attributes:
        rows: of logits to hold at once.
        dtype: in which the head multiplies.
        weight: of each class; None: 1.
        ignored: the target that is left out.
        smoothing: of the targets, 0 to 1.
    """

    rows: int
    dtype: torch.dtype
    weight: Tensor | None
    ignored: int
    smoothing: float

    def chunk(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Any:
        """Return the sum of the losses of these rows, and its gradient by their logits."""
        with torch.enable_grad():
            logits = functional.linear(hidden, weight, bias).requires_grad_()
            is_half = logits.dtype in (torch.float16, torch.bfloat16)
            loss = functional.cross_entropy(
                logits.float() if is_half else logits,
                target,
                self.weight,
                ignore_index=self.ignored,
                reduction="sum",
                label_smoothing=self.smoothing,
            )
            (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient


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
        rule: _Rule,
    ) -> Tensor:
        """Return the sum, in float32 or wider.

        Args:
            ctx: keeps the gradients.
            hidden: (rows, width).
            weight, bias: (classes, width), and (classes) or None.
            target: (rows), classes.
            rule: how the loss is computed.
        """
        wanted = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
        wide = torch.promote_types(torch.float32, hidden.dtype)  # many chunks are added up in it
        gradients = [
            torch.zeros_like(tensor, dtype=None if tensor is hidden else wide)
            if want and tensor is not None
            else None
            for want, tensor in zip(wanted, (hidden, weight, bias), strict=True)
        ]
        of_hidden, of_weight, of_bias = gradients
        total = hidden.new_zeros((), dtype=wide)
        with torch.autocast(hidden.device.type, enabled=False):
            cast, its_bias = weight.detach().to(rule.dtype), bias
            if bias is not None:
                its_bias = bias.detach().to(rule.dtype)
            for at in range(0, len(hidden), rule.rows):
                part = hidden[at : at + rule.rows].detach().to(rule.dtype)
                loss, gradient = rule.chunk(part, cast, its_bias, target[at : at + rule.rows])
                total += loss
                if of_hidden is not None:
                    of_hidden[at : at + rule.rows] = gradient @ cast
                if of_weight is not None:
                    of_weight.add_(gradient.t() @ (part * _LESS), alpha=1 / _LESS)
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        its_type = wide if weight.dtype == torch.float16 else weight.dtype  # which sums outgrow
        types = (hidden.dtype, its_type, its_type)
        ctx.gradients = [
            None if each is None else each.to(dtype)
            for each, dtype in zip(gradients, types, strict=True)
        ]
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, scaled by that of the sum."""
        if ctx.gradients is None or torch.is_grad_enabled():  # which create_graph=True does
            raise RuntimeError(
                "a loss of deferred logits can be differentiated once: pass head_loss.rows=0 to "
                "keep its graph"
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if each is None else each.mul_(outer[0]) for each in gradients]
        return (*scaled, None, None)
