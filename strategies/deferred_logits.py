"""Logits that nobody has looked at, so that a loss can take them a few rows at a time.

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
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from autofit.errors import Unsupported

_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)
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
        logits: (..., classes), without a graph, once something has asked for them.
        chunked_rows: how many rows a loss took by chunks; 0: none has.
        is_watched: whether something uses the gradient of the logits, which chunks do not give.
        derives: whether what operators make of the logits is deferred, too.
        versions: of hidden, weight and bias, when the head ran.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: int
    dtype: torch.dtype
    logits: Tensor | None = None
    chunked_rows: int = 0
    is_watched: bool = False
    derives: bool = False
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        given = (self.hidden, self.weight, self.bias)
        return [tensor._version for tensor in given if tensor is not None]

    def check_unchanged(self) -> None:
        """Refuse to compute with what the head was not given.

        Raises:
            LogitsLost: its input or a parameter has been changed in place since it ran.
        """
        if self.versions != self._versions_now():
            raise LogitsLost(
                "logits are used after the input, weight or bias of their head was changed in place"
            )

    def watch(self) -> None:
        """Have the logits made where a loss takes them, since their gradient is used.

        Raises:
            LogitsLost: a loss has taken them by chunks.
        """
        if self.chunked_rows:
            raise LogitsLost("the gradient of logits is asked for after a loss was computed")
        self.is_watched = True

    def made(self) -> Tensor:
        """Return the logits, without a graph.

        Raises:
            LogitsLost: they can no longer be made.
        """
        if self.logits is None:
            self.check_unchanged()
            with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
                self.logits = functional.linear(*self._cast())
        return self.logits

    def _cast(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return input, weight and bias as the head multiplies them."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.hidden.to(self.dtype), self.weight.to(self.dtype), bias


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
    given = hidden, head.weight, head.bias
    if hidden.dim() < 2 or not _can_wait(given):
        return functional.linear(*given)
    device = hidden.device.type
    run = Run(*given, rows, torch.get_autocast_dtype(device) if _is_cast(hidden) else hidden.dtype)
    if on_run is not None:
        on_run(run)
    if "torch._dynamo" in sys.modules:
        _keep_out_of_compiled_code()
    logits: DeferredLogits = _Head.apply(*given, run)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return logits


def _can_wait(given: Sequence[Tensor | None]) -> bool:
    """Return whether the product of this input, weight and bias may be computed later."""
    tensors = [tensor for tensor in given if tensor is not None]
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
        ctx.types = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        logits = DeferredLogits(run, (*hidden.shape[:-1], len(weight)), run.dtype)
        logits.rows = _Rows(run.hidden)
        return logits

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        (gradient,), (hidden, weight) = outer, ctx.saved_tensors
        of_hidden = of_weight = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            rows = gradient.flatten(0, -2)
            if weight is not None:
                of_hidden = (gradient @ weight.to(rows.dtype)).to(ctx.types[0])
            if hidden is not None:
                of_weight = (rows.t() @ hidden.flatten(0, -2).to(rows.dtype)).to(ctx.types[1])
            if ctx.needs_input_grad[2]:
                of_bias = rows.sum(0).to(ctx.types[2])
        return of_hidden, of_weight, of_bias, None


@dataclass(frozen=True, eq=False)
class _Rows:
    """Which logits of a run they are.

    Attributes:
        hidden: the rows of the head's input that they belong to, (..., width).
        is_transposed: whether the classes lie in dimension 1 of three.
    """

    hidden: Tensor
    is_transposed: bool = False


class DeferredLogits(Tensor):
    """Logits (..., classes), or (n, classes, m) transposed, that have no memory of their own.

    Attributes:
        run: of the head.
        rows: which logits they are.
        change: the logits that these are made from, by which operator, and its other arguments;
            None: they are the head's own.
    """

    run: Run
    rows: _Rows
    change: _Change | None
    _logits: Tensor | None

    @staticmethod
    def __new__(
        cls,
        run: Run,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        storage_offset: int | None = None,
        change: _Change | None = None,
    ) -> DeferredLogits:
        """Return deferred logits; without strides they are contiguous. See the class."""
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls,
            tuple(shape),
            strides=strides,
            storage_offset=storage_offset,
            dtype=dtype,
            device=run.hidden.device,
        )
        made.run, made.change, made._logits = run, change, None
        return made

    def made(self) -> Tensor:
        """Return the logits without a graph, made once; views of the head's, as these are views.

        Raises:
            LogitsLost: what they are made from has changed.
        """
        if self._logits is None and self.change is None:
            self._logits = self.run.made()
        elif self._logits is None and self.change is not None:
            before, operator, others, kwargs = self.change
            if before._version != self._version:  # which views share
                raise LogitsLost("logits were changed in place before a copy of them was used")
            with torch.no_grad():
                self._logits = operator(before.made(), *others, **kwargs)
        assert self._logits is not None
        return self._logits

    def plain(self) -> Tensor:
        """Return a view of these that is a tensor as any other."""
        self.made()  # here, where dispatch modes see it
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
        """Answer for shapes and types, remember views, take a loss by chunks; else be made."""
        return cls._answer(func, args, kwargs or {})

    @staticmethod
    def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in _OF_GRADIENTS:
            _replaced((args, kwargs), DeferredLogits._watched)
        if func in _NATIVE or func in _OF_GRADIENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = args[0] if args else None
        if isinstance(logits, DeferredLogits) and logits._can_be_chunked():
            if func in _VIEWS and torch.is_grad_enabled():
                derived = logits._derived(func, args[1:], kwargs)
                if derived is not None:
                    return derived
            if func is functional.cross_entropy:
                loss = _loss(logits, _CROSS_ENTROPY.bind(*args, **kwargs))
                if loss is not None:
                    return loss
        plain = _replaced(args, DeferredLogits.plain)
        result = func(*plain, **_replaced(kwargs, DeferredLogits.plain))
        return logits if plain and result is plain[0] else result  # what changes it in place

    def _watched(self) -> Tensor:
        self.run.watch()
        return self

    def _can_be_chunked(self) -> bool:
        is_open = self.run.logits is None and not self.run.is_watched
        return is_open and self.requires_grad and not _is_transformed([])

    def _derived(
        self, func: Callable[..., Any], others: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Return the rows that such a function makes of these, deferred; None: not rows alone."""
        rows = None
        with suppress(TypeError, RuntimeError):  # given by another name, or of a wrong shape
            rows = _VIEWS[func](self, *others, **kwargs)
        if rows is None:
            return None
        self.run.derives = True
        try:
            with (
                torch._C.DisableTorchFunctionSubclass(),
                torch.utils._python_dispatch._disable_current_modes(),  # nothing is computed
            ):
                derived: Tensor = func(self, *others, **kwargs)
        finally:
            self.run.derives = False
        if isinstance(derived, DeferredLogits):
            derived.rows = rows
        return derived

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as a static method
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Compute with the logits; while rows are derived, return what stands for the result."""
        kwargs = kwargs or {}
        logits = args[0] if args else None
        if not (isinstance(logits, cls) and logits.run.derives):
            return func(*_replaced(args, cls.made), **_replaced(kwargs, cls.made))
        alike = torch.empty_strided(
            logits.shape, logits.stride(), dtype=logits.dtype, device="meta"
        )
        made = func(alike, *args[1:], **kwargs)
        change = (logits, func, args[1:], kwargs)
        return cls(logits.run, made.shape, made.dtype, made.stride(), made.storage_offset(), change)

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


def _replaced(values: Any, by: Callable[[DeferredLogits], Tensor]) -> Any:
    """Return a function's arguments with others in place of deferred logits, also in lists."""
    if isinstance(values, DeferredLogits):
        return by(values)
    if type(values) in (list, tuple):
        return type(values)(_replaced(value, by) for value in values)
    if type(values) is dict:
        return {name: _replaced(value, by) for name, value in values.items()}
    return values


# Which rows of the head's input belong to what functions make of logits that change no value;
# None: not rows alone.


def _shaped(logits: DeferredLogits, *to: Any) -> _Rows | None:
    """`view` and `reshape`, where a row stays a row."""
    sizes = to[0] if len(to) == 1 and isinstance(to[0], Sequence) else to
    rows, classes = logits.rows, logits.shape[-1]
    if rows.is_transposed or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    if sizes[-1] not in (classes, -1):
        return None
    hidden = rows.hidden
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * hidden.shape[-1] != hidden.numel():
        return None  # the last dimension would not be the classes
    return _Rows(hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _flattened(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> _Rows | None:
    dims = logits.dim()
    if logits.rows.is_transposed or end_dim % dims == dims - 1:
        return None
    return _Rows(logits.rows.hidden.flatten(start_dim % dims, end_dim % dims))


def _sliced(logits: DeferredLogits, index: Any) -> _Rows | None:
    """Slices of rows, such as `logits[..., :-1, :]`."""
    dims = logits.dim()
    index = index if isinstance(index, tuple) else (index,)
    if logits.rows.is_transposed or not all(isinstance(i, slice) or i is ... for i in index):
        return None
    if ... in index:
        at = index.index(...)
        index = (*index[:at], *[slice(None)] * (dims + 1 - len(index)), *index[at + 1 :])
    if len(index) == dims and index[-1] != slice(None):
        return None
    return _Rows(logits.rows.hidden[index[: dims - 1]])


def _cast(logits: DeferredLogits, *to: Any, **others: Any) -> _Rows | None:
    """`to(dtype)`; other conversions need the logits."""
    if others or len(to) != 1 or not isinstance(to[0], torch.dtype) or not to[0].is_floating_point:
        return None
    return logits.rows


def _transposed(logits: DeferredLogits, *dims: Any) -> _Rows | None:
    """What puts the classes of (n, m, classes) into dimension 1."""
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    rows = logits.rows
    if rows.is_transposed or logits.dim() != 3 or not all(isinstance(d, int) for d in order):
        return None
    if [dim % 3 for dim in order] not in ([0, 2, 1], [1, 2], [2, 1]):
        return None
    return replace(rows, is_transposed=True)


_VIEWS: Mapping[Callable[..., Any], Callable[..., _Rows | None]] = {
    Tensor.view: _shaped,
    Tensor.reshape: _shaped,
    torch.reshape: _shaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.__getitem__: _sliced,
    Tensor.contiguous: lambda logits: logits.rows,
    Tensor.float: lambda logits: logits.rows,
    Tensor.to: _cast,
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    Tensor.permute: _transposed,
    torch.permute: _transposed,
}
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
    run.check_unchanged()
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
            raise LogitsLost("a loss of deferred logits can be differentiated once")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if each is None else each.mul_(outer[0]) for each in gradients]
        return (*scaled, None, None)
