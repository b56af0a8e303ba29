"""Calls of modules that run compiled code, each by the shapes that it is given.

The modules keep their class, names and parameters: what is compiled is a function that calls them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from autofit.errors import Unsupported, in_one_line
from autofit.strategy import COMPILED_CALL, TrainingView, attributes_kept

from .compiler_notes import Counted, lines_since

# The mode of torch.compile whose calls are CUDA graphs.
_GRAPHS = "reduce-overhead"
_MARKS = "_dynamo"
# Whether the backward is lowered with the forward: before torch 2.10 there is no such setting, and
# what fails then is found as a fault of the plan.
_AT_ONCE = "force_non_lazy_backward_lowering"
# The class of the node of a compiled function in the graph of autograd.
_COMPILED_BACKWARD = "CompiledFunctionBackward"
# Sizes of a batch that have code of their own: the micro-batch and the rest of a batch, in training
# and in evaluation.
_MAX_SIZES = 4
# How deep tensors are looked for in the model's arguments.
_DEPTH = 4


@contextmanager
def compiled(
    training: TrainingView, kinds: Sequence[Sequence[nn.Module]], mode: str, budget: float
) -> Iterator[None]:
    """Have the calls of modules compiled when they first run; leaving it undoes that.

    Args:
        training: of whose model they are.
        kinds: the modules of one sequence share their code.
        mode: of torch.compile.
        budget: share of the activations that may be kept for the backward.
    """
    model = training.model
    with ExitStack() as stack:
        stack.enter_context(_environment_kept())
        not_compiled = list[str]()
        of_one_shape, of_any = _compile_options(mode, budget, not_compiled)
        if mode == _GRAPHS:
            stack.enter_context(_graphs_freed(training.device))
            stack.callback(training.wrap_forward(partial(_not_accumulating, model)))
        notes = partial(lines_since, Counted.now(), with_cuda_graphs=mode == _GRAPHS)
        stack.enter_context(_marks_kept(model))
        for modules in kinds:
            codes = _Codes(of_one_shape, of_any, not_compiled)
            for module in modules:
                stack.enter_context(attributes_kept(module, COMPILED_CALL))
                call = _by_shapes(module, codes, is_block=module is not model)
                vars(module)[COMPILED_CALL] = call
        stack.callback(training.add_notes(notes))
        stack.callback(training.add_notes(partial(iter, not_compiled)))
        yield


def _compile_options(
    mode: str, budget: float, not_compiled: list[str]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what torch.compile is given for code of one shape, and for code that serves any.

    One backend for all modules, by which torch keeps code.

    Inductor gives the input of a convolution another layout and keeps it for the backward, whose
    code has the strides of the first shape alone: with torch 2.13 the backward of the next shape
    fails ("expected size ..., stride ..."). So code that serves any shape leaves layouts as they
    are.

    Args:
        mode, budget: as of `compiled`.
        not_compiled: takes words on each graph that inductor cannot compile for any shape.
    """
    # torch.compile takes a mode or options; the first is what the mode stands for
    options = {"triton.cudagraphs": True} if mode == _GRAPHS else {}
    options_of_one: dict[str, Any] = {"options": options}
    if budget != 1.0:
        from .memory_budget import within_budget  # loads inductor

        options_of_one = {"backend": within_budget(budget, options)}
    as_laid_out = {**options, "layout_optimization": False}
    of_any = partial(_compiled_or_as_written, budget, as_laid_out, not_compiled)
    return {"dynamic": False, **options_of_one}, {"dynamic": None, "backend": of_any}


def _compiled_or_as_written(
    budget: float,
    options: dict[str, Any],
    not_compiled: list[str],
    graph: Any,
    inputs: Sequence[Any],
) -> Callable[..., Any]:
    """Return what runs a graph: code of inductor's, or where that fails, torch as it was called.

    For a size that follows from another inductor may lack code. Dynamo's `suppress_errors` would
    run a frame as it is written, for all that the process compiles.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import InductorError

    from .memory_budget import within_budget

    whole = partial(compile_fx, config_patches=options)
    inductor: Any = whole if budget == 1.0 else within_budget(budget, options)
    as_written = torch.fx.GraphModule(graph, deepcopy(graph.graph))  # passes change the graph
    try:
        # A backward of several lengths that fails would else fail where it first runs
        with config.patch({_AT_ONCE: True} if hasattr(config, _AT_ONCE) else {}):
            code: Callable[..., Any] = inductor(graph, inputs)
            return code
    except InductorError as error:
        if isinstance(error.inner_exception, torch.OutOfMemoryError):
            raise
        not_compiled.append(
            "compile: a graph that inductor cannot compile for any length runs as it is written: "
            f"{in_one_line(error)}"
        )
        return as_written.forward


class _Codes:
    """The code objects of modules that are alike, by the shapes that they are compiled for.

    What is compiled, and how often, is counted by code object.
    """

    def __init__(
        self, options: Mapping[str, Any], options_of_any: Mapping[str, Any], not_compiled: list[str]
    ) -> None:
        self._options, self._options_of_any = options, options_of_any
        self._not_compiled, self._is_of_any = not_compiled, True
        self._of_shapes: dict[Any, CodeType] = {}
        self._of_any = _new_code()

    def of_any_shape(self, module: nn.Module) -> Callable[..., Any]:
        """Return the compiled call of a module that serves any shape.

        Once a part of it could not be compiled, all of it runs as it is written: torch would try
        again for each shape.
        """
        compiled = self._compiled(module, self._of_any, self._options_of_any)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_of_any:
                return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's
            failed = len(self._not_compiled)
            output = compiled(*args, **kwargs)
            self._is_of_any = len(self._not_compiled) == failed
            return output

        return call

    def of(self, module: nn.Module, shapes: Any) -> Callable[..., Any] | None:
        """Return its call for these shapes, or None if there is code for as many others already."""
        if shapes not in self._of_shapes and len(self._of_shapes) >= _MAX_SIZES:
            return None
        code = self._of_shapes.setdefault(shapes, _new_code())
        return self._compiled(module, code, self._options)

    def _compiled(
        self, module: nn.Module, code: CodeType, options: Mapping[str, Any]
    ) -> Callable[..., Any]:
        template = _calling(module)
        call = FunctionType(code, _globals(module), "call", None, template.__closure__)
        compiled_call: Callable[..., Any] = torch.compile(call, **options)
        return compiled_call


def _new_code() -> CodeType:
    return _calling(nn.Identity()).__code__.replace()


def _hooks_within(module: nn.Module) -> list[Mapping[int, Any]]:
    """Return the hooks of a module and of its parts by kind, those to come too."""
    return [
        hooks
        for part in module.modules()
        for hooks in (
            part._forward_hooks,
            part._forward_pre_hooks,
            part._backward_hooks,
            part._backward_pre_hooks,
        )
    ]


def _by_shapes(module: nn.Module, codes: _Codes, *, is_block: bool) -> Callable[..., Any]:
    """Return the compiled call of a module; a block runs as it is written while it has hooks.

    Dynamo takes hooks in and does not guard on them, so that code that blocks share would run the
    hooks of another block, or none.

    Code for given shapes is the fastest, and torch compiles one function that often and no oftener
    (`recompile_limit`): from then on it would run as it is written.
    """
    calls: dict[Any, Callable[..., Any]] = {}
    lengths: set[Any] = set()
    any_shape = codes.of_any_shape(module)
    hooks = _hooks_within(module) if is_block else []

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]  # torch
            raise Unsupported(
                "compile.mode: hooks of all modules (register_module_forward_hook and the like) "
                "do not run in compiled code: remove them, or use compile.mode=off"
            )
        shapes = tuple(_shapes((args, kwargs)))
        if any(hooks) or None in shapes:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        lengths.add(tuple(shape[1:] for shape in shapes if shape is not None))
        has_lengths = len(lengths) > 1
        if not has_lengths and shapes not in calls and (code := codes.of(module, shapes)):
            calls[shapes] = code
        output = (any_shape if has_lengths else calls.get(shapes, any_shape))(*args, **kwargs)
        if is_block:
            _refuse_second_derivatives(output)
        return output

    return call


def _refuse_second_derivatives(output: Any) -> None:
    """Refuse to differentiate a backward through a compiled block.

    Torch refuses the second backward, where the first one gets that far: with compiled code behind
    the block too, it fails at once, with an error that names no cause.
    """
    for each in output if isinstance(output, tuple | list) else [output]:
        node: Any = getattr(each, "grad_fn", None)
        if type(node).__name__ == _COMPILED_BACKWARD:
            node.register_prehook(_check_first)


def _check_first(gradients: Any) -> None:
    if torch.is_grad_enabled():  # in a backward: with create_graph
        raise Unsupported(
            "compile.region=blocks: torch.compile does not support double backward "
            "(create_graph=True): use compile.mode=off"
        )


def _shapes(value: Any, depth: int = _DEPTH) -> Iterator[torch.Size | None]:
    """Yield the shapes of the tensors in containers, and in the attributes of other objects.

    None of a nested tensor of the strided layout, which has no shape and which dynamo does not
    take: a `TransformerEncoder` makes one in evaluation.
    """
    if isinstance(value, torch.Tensor):
        has_shape = not value.is_nested or value.layout is not torch.strided
        yield value.shape if has_shape else None
    elif depth and not isinstance(value, type | nn.Module):
        if not isinstance(value, tuple | list):
            inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            value = inner.values()
        for each in value:
            yield from _shapes(each, depth - 1)


def _calling(module: nn.Module) -> FunctionType:
    """Return a function that calls the module.

    The frame that is compiled: of a frame of torch's own, as `Module.compile` takes it, nothing is
    compiled where the module's class is torch's too.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's

    return call  # type: ignore[return-value]  # it is a plain function


def _globals(module: nn.Module) -> dict[str, Any]:
    """Return the globals of the frame that is compiled.

    Dynamo looks for the globals of what it inlines in the module of their name. A class of a script
    that travelled to a worker has another module of that name there, so that the frame has to have
    the same globals as its forward.
    """
    own_globals: dict[str, Any] = getattr(type(module).forward, "__globals__", globals())
    home = sys.modules.get(own_globals.get("__name__", ""))
    return globals() if home is not None and vars(home) is own_globals else own_globals


@contextmanager
def _graphs_freed(device: torch.device) -> Iterator[None]:
    """Free the CUDA graphs that are recorded inside, and the memory that is theirs.

    An output of a graph holds its function by way of autograd, so that nothing else would free it.
    Those of the caller's own compiled functions are freed with them, so not where there are some.
    """
    from torch._inductor import cudagraph_trees

    before = cudagraph_trees.get_manager(device.index or 0, create_if_none_exists=False)
    try:
        yield
    finally:
        if before is None:
            cudagraph_trees.reset_cudagraph_trees()


@contextmanager
def _not_accumulating(model: nn.Module) -> Iterator[None]:
    """Refuse a forward whose gradients would be added to others.

    Raises:
        Unsupported: there are gradients already.
    """
    if torch.is_grad_enabled() and any(each.grad is not None for each in model.parameters()):
        raise Unsupported(
            f"compile.mode={_GRAPHS}: a CUDA graph writes its gradients over those of its last "
            "replay, so gradients cannot accumulate (pytorch issue 169545): clear the gradients "
            "before each forward, or choose another mode"
        )
    yield


@contextmanager
def _marks_kept(model: nn.Module) -> Iterator[None]:
    """Take away the attributes with which dynamo marks parameters and buffers."""
    before = {tensor: set(vars(tensor)) for tensor in chain(model.parameters(), model.buffers())}
    try:
        yield
    finally:
        for tensor, names in before.items():
            for name in [n for n in vars(tensor) if n.startswith(_MARKS) and n not in names]:
                delattr(tensor, name)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Put the environment variables back that torch's compiler sets for itself."""
    before = _variables_of_compiler()
    try:
        yield
    finally:
        for name in _variables_of_compiler().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _variables_of_compiler() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if "TORCHINDUCTOR" in n or "TRITON" in n}
