"""The private names of torch that autofit uses, what needs each, and what is said when it is gone.

Torch promises nothing of these, so a later version may lack one. They stand here and nowhere else
(`tests/test_torch_private.py` reads the source): what `USES` lists is used in place, and what is
needed while a module is imported comes from here. `import autofit` touches none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from autofit.errors import PredictionUnavailable, Unsupported

if TYPE_CHECKING:
    from torch._prims_common import suggest_memory_format as suggest_memory_format
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_FSDP = "torch.distributed.fsdp._fully_shard"


@dataclass(frozen=True)
class Newer:
    """A name that torch 2.8, the oldest supported version, lacks.

    Attributes:
        since: the first version that has it.
        before: what stands in for it in an older one.
        stand_in: the private name that does, where one does.
    """

    since: str
    before: str
    stand_in: str | None = None


@dataclass(frozen=True)
class Use:
    """What uses some private names.

    Attributes:
        names: with the module, or the class or object, that has them.
        lost: what cannot be done in a torch that lacks one.
        optional: less is known without them, and nothing is refused.
    """

    names: tuple[str, ...]
    lost: str
    optional: bool = False


NEWER = {
    "torch.backends.cudnn.conv.fp32_precision": Newer("2.9", "allow_tf32 alone is read and set"),
    "torch.utils._python_dispatch.TorchDispatchMode.ignore_compile_internals": Newer(
        "2.9",
        "a mode calls itself one of torch's own",
        "torch.utils._python_dispatch.TorchDispatchMode.is_infra_mode",
    ),
    "torch._C._accelerator_setAllocatorSettings": Newer(
        "2.10",
        "the options of CUDA's allocator alone are set",
        "torch.cuda.memory._set_allocator_settings",
    ),
    "torch._functorch.config.force_non_lazy_backward_lowering": Newer(
        "2.10", "a backward that inductor cannot compile ends the plan that runs it"
    ),
}
"""The other names that autofit uses are in torch 2.8 already."""

USES = {
    "tensors": Use(
        (
            "torch.utils._pytree",  # torch 2.11 to 2.13 have no public one
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._python_dispatch.TorchDispatchMode.ignore_compile_internals",
            "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type",
            "torch.nn.modules.batchnorm._NormBase",
            "torch.nn.modules.instancenorm._InstanceNorm",
            "torch.autograd._engine_run_backward",
            "torch.nn.Module._apply",
            "torch.nn.Identity()._buffers",
            "torch.nn.Identity()._forward_hooks",
            "torch.nn.Identity()._forward_pre_hooks",
            "torch.nn.Identity()._modules",
            "torch.nn.Identity()._parameters",
            "torch.Tensor._indices",
            "torch.Tensor._values",
            "torch.UntypedStorage._cdata",
        ),
        "nothing can be trained, measured or predicted",
    ),
    "dry run": Use(
        (
            "torch._C.DispatchKey",
            "torch._C.DisableTorchFunction",
            "torch._C.DispatchKeySet",
            "torch._C._ExcludeDispatchKeyGuard",
            "torch._C._IncludeDispatchKeyGuard",
            "torch._C._current_graph_task_id",
            "torch._C._dispatch_get_all_op_names",
            "torch._C._dispatch_has_kernel_for_dispatch_key",
            "torch._C._get_sdp_priority_order",
            "torch._prims_common.suggest_memory_format",
            "torch.utils._device",
            "torch.utils._foreach_utils",
            "torch.utils._foreach_utils._get_foreach_kernels_supported_devices",
            "torch.utils._foreach_utils._get_fused_kernels_supported_devices",
            "torch.optim.optimizer._get_capturable_supported_devices",
            "torch.autograd._engine_run_backward",
            "torch.overrides._get_current_function_mode_stack",
            "torch.cuda._lazy_init",
            "torch.amp.grad_scaler.GradScaler._maybe_opt_step",
            "torch.Tensor._is_view",
            "torch.ops.aten._cudnn_rnn",
            "torch.ops.aten._scaled_dot_product_attention_math",
            "torch.ops.aten._scaled_dot_product_cudnn_attention",
            "torch.ops.aten._scaled_dot_product_efficient_attention",
            "torch.ops.aten._scaled_dot_product_flash_attention",
            "torch.ops.aten._thnn_fused_gru_cell",
            "torch.ops.aten._thnn_fused_lstm_cell",
            "torch.ops.aten.add.Tensor._overloadpacket",
            "torch.ops.aten.add.Tensor._schema",
        ),
        "memory cannot be predicted; probes do not depend on this",
    ),
    "calls of compiled functions": Use(
        ("torch._dynamo.eval_frame._callback_from_stance",),
        "a prediction does not say which functions it ran uncompiled",
        optional=True,
    ),
    "gradients in place": Use(
        (
            "torch.Tensor._use_count",
            "torch._C._storage_Use_Count",
        ),
        "gradients that meet are predicted in memory of their own, which errs on the high side",
        optional=True,
    ),
    "dry run of several ranks": Use(
        (
            "torch.testing._internal.distributed.fake_pg.FakeStore",
            *(
                f"{_FSDP}.{module}._get_device_handle"
                for module in (
                    "_fsdp_collectives",
                    "_fsdp_init",
                    "_fsdp_param_group",
                    "_fsdp_state",
                )
            ),
            f"{_FSDP}._fully_shard._get_device_from_mesh",
            f"{_FSDP}._fsdp_init._move_states_to_device",
            f"{_FSDP}._fsdp_param_group.FSDPParamGroup._validate_no_meta_params",
            "torch.distributed.Reducer._rebuild_buckets",
            "torch.distributed.Logger",
            "torch.distributed.Logger.set_runtime_stats_and_log",
            "torch.distributed.optim.ZeroRedundancyOptimizer._partition_parameters",
            "torch.nn.parallel.distributed.DistributedDataParallel.forward",
            "torch.nn.parallel.distributed._verify_param_shape_across_processes",
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook",
        ),
        "several ranks cannot be predicted; measure on the ranks themselves",
    ),
    "modules with parametrizations, sent to a worker": Use(
        (
            "torch.nn.utils.parametrize._inject_new_class",
            "torch.nn.utils.parametrize._inject_property",
        ),
        "a live model with parametrizations cannot be sent to a worker; give a function that "
        "builds it",
    ),
    "compiled code on the CPU device": Use(
        (
            "torch._C._dynamo",
            "torch._C._dynamo.guards._empty_strided_cpu",
            "torch._inductor.codecache",
        ),
        "the memory of compiled code cannot be counted on the CPU; leave compilation out",
    ),
    "hooks of every optimizer": Use(
        (
            "torch.optim.optimizer._global_optimizer_pre_hooks",
            "torch.optim.optimizer._global_optimizer_post_hooks",
        ),
        "hooks that are registered for every optimizer go unseen: where they use whole gradients, "
        "keep optimizer.when at step",
        optional=True,
    ),
    "CUDA device": Use(
        ("torch._C._cuda_clearCublasWorkspaces",),
        "the workspaces of cuBLAS cannot be returned between probes",
    ),
    "faults of the compiler": Use(
        (
            "torch._dynamo",
            "torch._dynamo.exc.TorchDynamoException",
            "torch._inductor.exc.CppCompileError",
            "torch._inductor.exc.InductorError",
            "torch._inductor.exc.InvalidCxxCompiler",
        ),
        "an error of the compiler counts as the user's",
        optional=True,
    ),
    "flags": Use(
        ("torch.distributions.Distribution._validate_args",),
        "this flag is left as user code leaves it",
        optional=True,
    ),
    "saved tensors that are made again": Use(
        (
            "torch._C._autograd",
            "torch._C._autograd._saved_tensors_hooks_is_enabled",
            "torch._C._current_graph_task_id",
            "torch._C._SetExcludeDispatchKeyGuard",
        ),
        "settings that compute saved tensors again are left out: a transform of torch.func or a "
        "backward pass could not be told from a forward",
        optional=True,
    ),
    "saved tensors that are kept elsewhere": Use(
        ("torch.Tensor._base", "torch.Tensor._version"),
        "settings that keep or make saved tensors elsewhere are left out: a change in place after "
        "saving, or a view of a weight, would go unseen",
        optional=True,
    ),
    "writes to parameters": Use(
        ("torch.Tensor._version",),
        "each probe runs three more steps, by which it compares the parameters",
        optional=True,
    ),
    "updates of many weights at once": Use(
        ("torch._foreach_add_", "torch._foreach_sub_"),
        "strategies are not tried in a training that moves its weights between two passes",
        optional=True,
    ),
    "logits that are held in part": Use(
        (
            "torch.Tensor._make_wrapper_subclass",
            "torch.Tensor._version",
            "torch._C.DisableTorchFunctionSubclass",
            "torch._C._are_functorch_transforms_active",
            "torch.utils._python_dispatch._disable_current_modes",
        ),
        "settings that hold logits in part are left out: a tensor could not stand for them",
        optional=True,
    ),
    "casts of weights": Use(
        ("torch.ops.aten._to_copy", "torch.ops.aten.add.Tensor._schema"),
        "autocast never keeps its casts of weights: whether it may could not be seen",
        optional=True,
    ),
    "segments of the allocator that grow": Use(
        ("torch._C._accelerator_setAllocatorSettings",),
        "the setting is left out: the allocator's options could not be changed in a process",
        optional=True,
    ),
    "compiled modules": Use(
        (
            "torch.nn.modules.module._has_any_global_hook",
            "torch._dynamo.utils.counters",
            "torch._dynamo.utils.get_compilation_metrics",
            "torch.nn.Module._call_impl",
            "torch.nn.Identity()._backward_hooks",
            "torch.nn.Identity()._backward_pre_hooks",
            "torch._functorch.config.force_non_lazy_backward_lowering",
        ),
        "settings that compile are left out: modules could not be compiled one by one and their "
        "compilations not be counted",
        optional=True,
    ),
    "memory budgets of compiled code": Use(
        (
            "torch._functorch.config",
            "torch._functorch.config.activation_memory_budget",
            "torch._inductor.compile_fx.compile_fx",
            "torch._inductor.custom_graph_pass.CustomGraphPass",
        ),
        "compiled plans do not recompute: the budget of the partitioner could not be set",
        optional=True,
    ),
    "CUDA graphs of compiled code": Use(
        ("torch._inductor.cudagraph_trees",),
        "settings that record CUDA graphs are left out: their memory could not be freed",
        optional=True,
    ),
}
_AT_IMPORT = {
    "InstanceNorm": ("tensors", "torch.nn.modules.instancenorm._InstanceNorm"),
    "NormBase": ("tensors", "torch.nn.modules.batchnorm._NormBase"),
    "TorchDispatchMode": ("tensors", "torch.utils._python_dispatch.TorchDispatchMode"),
    "pytree": ("tensors", "torch.utils._pytree"),
    "suggest_memory_format": ("dry run", "torch._prims_common.suggest_memory_format"),
}


def __getattr__(name: str) -> Any:
    """Return what modules need while they are imported.

    Raises:
        Unsupported: this torch lacks it.
    """
    if name not in _AT_IMPORT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need, path = _AT_IMPORT[name]
    try:
        return find(path)
    except (ImportError, AttributeError) as error:
        raise Unsupported(_words(path, need, error)) from error


def check(need: str) -> None:
    """Refuse what needs names that this torch lacks.

    Raises:
        PredictionUnavailable: one is gone; the message names it and what needs it.
    """
    if (gone := missing(need)) is not None:
        raise PredictionUnavailable(gone)


def missing(need: str) -> str | None:
    """Return which name of a use is gone and what cannot be done without it.

    None if all are here.
    """
    for path in USES[need].names:
        if (why := _why_gone(path)) is not None and not _has_stand_in(path):
            return _words(path, need, why)
    return None


def _has_stand_in(path: str) -> bool:
    """Return whether this torch is older than a name, and has what stands in for it."""
    newer = NEWER.get(path)
    if newer is None or import_module("torch").__version__ >= newer.since:
        return False
    return newer.stand_in is None or _why_gone(newer.stand_in) is None


def _why_gone(path: str) -> Exception | None:
    try:
        find(path)
    except (ImportError, AttributeError) as error:
        return error
    return None


def gone_in(error: BaseException) -> str | None:
    """Return what no longer works if an error came from a name that is gone.

    None if it did not.
    """
    if not isinstance(error, (AttributeError, ImportError)):
        return None
    asked = {error.name, getattr(error, "name_from", None)}
    found = [
        _words(path, need, why)
        for need, use in USES.items()
        for path in use.names
        if (path in asked or path.rpartition(".")[2].removesuffix("()") in asked)
        and (why := _why_gone(path)) is not None
    ]
    return "; ".join(found) or None


def find(path: str) -> Any:
    """Return what a name of the table stands for.

    Raises:
        ImportError, AttributeError: it is gone.
    """
    first, *others = path.split(".")
    found: Any = import_module(first)
    reached = first
    for part in others:
        name = part.removesuffix("()")
        reached = f"{reached}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            if type(found) is not type(import_module("torch")):
                raise
            found = _module(reached, found, name)
        if name != part:
            make: Callable[[], Any] = found
            found = make()
    return found


def _module(path: str, parent: Any, name: str) -> Any:
    """Return a module that nobody has imported yet."""
    try:
        return import_module(path)
    except ModuleNotFoundError:
        return getattr(parent, name)  # raises the AttributeError


def _words(path: str, need: str, error: Exception) -> str:
    version = import_module("torch").__version__
    return (
        f"with torch {version} {USES[need].lost}: it has no {path} ({error}), a private name that "
        f"autofit needs ({need})"
    )
