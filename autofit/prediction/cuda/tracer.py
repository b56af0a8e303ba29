"""A tracer of the meta device that allocates what CUDA would.

Beyond the tensors that operators return, which `MemoryTracer` sees, it stands for the memory that
CUDA's kernels and libraries take: scratch buffers, and the workspaces of cuBLAS, which each thread
that multiplies matrices gets once and keeps. It also stands in for operators that the meta device
lacks, and says no to those that need a tensor's values (see `autofit.prediction.cuda.unsupported`).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from autofit.memory.allocator import CachingAllocator
from autofit.memory.blocks import Block
from autofit.memory.tracer import MemoryTracer
from autofit.prediction.cuda.convolutions import (
    Direction,
    copied_operands,
    in_layout_of_cudnn,
    of_backward,
    of_forward,
    workspace_bytes,
)
from autofit.prediction.cuda.known_values import KnownValues
from autofit.prediction.cuda.operators import (
    ctc_loss,
    ctc_loss_backward,
    grouped_product,
    in_memory_of_all,
    is_in_place,
)
from autofit.prediction.cuda.rnn import (
    cudnn_rnn,
    cudnn_rnn_backward,
    fused_gru_cell,
    fused_gru_cell_backward,
    fused_lstm_cell,
)
from autofit.prediction.cuda.scratch import scratch_bytes
from autofit.prediction.cuda.shape_cache import Shapes
from autofit.prediction.cuda.unsupported import Lack, NeedsValues, asked_by_an_optimizer, is_lack
from autofit.prediction.gpus import Gpu
from autofit.units import MIB

CUBLASLT_WORKSPACE_BYTES = 1 * MIB
_HOST = torch.device("cpu")
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv"})
_VALUES = {
    "_local_scalar_dense": "a tensor is read as a number (by .item(), float(), an if or the like)",
    "nonzero": "how many elements of a tensor are not zero",
    "masked_select": "how many elements a mask selects",
    "equal": "whether two tensors are equal",
    "unique_dim": "how many elements of a tensor differ",
    "_unique2": "how many elements of a tensor differ",
    "unique_consecutive": "how many elements of a tensor differ from those before",
    "bincount": "how large the elements of a tensor are",
    "repeat_interleave": "how often elements are repeated",
}
"""What each operator asks of a tensor's values."""
_ON_LISTS_IN_PLACE = re.compile(r"_(foreach|fused|amp_foreach)_\w+_")
"""Operators of foreach and fused optimizers and of gradient scaling that return nothing."""
# fmt: off
_IN_PLACE = frozenset(
    (
        "add_", "addcdiv_", "addcmul_", "bernoulli_", "clamp_", "copy_", "div_",
        "exponential_", "fill_", "lerp_", "masked_fill_", "mul_", "neg_", "normal_",
        "random_", "relu_", "sqrt_", "sub_", "uniform_", "zero_",
    )
)
# fmt: on
"""They change values alone, and there are none: nothing is to be done, and quickly so."""
_STAND_INS = {
    "_grouped_mm": grouped_product,
    "_cudnn_rnn": cudnn_rnn,
    "_cudnn_rnn_backward": cudnn_rnn_backward,
    "_ctc_loss": ctc_loss,
    "_ctc_loss_backward": ctc_loss_backward,
    "_thnn_fused_lstm_cell": fused_lstm_cell,
    "_thnn_fused_gru_cell": fused_gru_cell,
    "_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
}


class CudaTracer(MemoryTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """Traces a rehearsal on the meta device as if it ran on a GPU.

    Args:
        gpu: whose memory use is emulated.
        expandable_segments: as `CachingAllocator`.
        workspace_bytes: what cuBLAS takes a thread; None: what that architecture has.
    """

    def __init__(
        self, gpu: Gpu, *, expandable_segments: bool = False, workspace_bytes: int | None = None
    ) -> None:
        allocator = CachingAllocator(expandable_segments=expandable_segments)
        super().__init__(allocator, device_type="meta", record=True)
        self.gpu = gpu
        self.workspaces: set[int] = set()
        """Numbers of the workspaces in the events."""
        self.forward: set[int] = set()
        """Numbers of what was allocated with gradients to come, outside a backward pass."""
        self.lack: Lack | None = None
        """The first thing that could not be done, whatever the user's code made of the error."""
        self.known = KnownValues()
        """What is known of tensors' values."""
        self._remembered = Shapes()
        self._workspace_bytes = workspace_bytes or gpu.cublas_workspace_bytes
        self._has_workspace: set[tuple[str, bool]] = set()
        self._order: list[int | torch.Tensor | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Devices were translated above; the shape functions of meta are Python, and much faster
        # when nobody listens to what they ask of tensors.
        with torch._C.DisableTorchFunction():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run it on meta tensors, or stand in for it; note the first that can be done neither way.

        Raises:
            NeedsValues: it asks for a tensor's values.
            Exception: whatever it raises itself.
        """
        try:
            return self._compute(func, args, kwargs)
        except Exception as error:
            self.note(error)
            raise

    def note(self, error: Exception) -> None:
        """Keep in mind what could not be done, where it is being raised and is the first."""
        if is_lack(error):
            self.note_lack(Lack.here(error))

    def note_lack(self, lack: Lack) -> None:
        """Keep it in mind where it is the first: then there is no answer."""
        self.lack = self.lack or lack

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = _name(func)
        real = self.known.arguments(func, args, kwargs)
        if real is not None and name == "_to_copy" and kwargs.get("device") == _HOST:
            return func(*real[0], **real[1])
        if name in _VALUES and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if real is not None:
                return self.known.answer(func, real)
            if name == "_local_scalar_dense" and asked_by_an_optimizer():
                return torch.ones((), dtype=args[0].dtype).item()
            raise NeedsValues(_VALUES[name])
        result = self._shapes(name, func, args, kwargs)
        self.known.follow(func, real, args, result)
        return result

    def _shapes(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in _STAND_INS and _on_device(args[0]):
            result, self._order = _STAND_INS[name](args)
            return result
        if _on_device(args[0] if args else None):
            if name in _IN_PLACE or name == "_amp_update_scale_" or is_in_place(name, args):
                return args[0]
            if _ON_LISTS_IN_PLACE.fullmatch(name):
                return None
        result = self._remembered.of(func, args, kwargs, super().compute)
        if name == "convolution":
            return in_layout_of_cudnn(args[0], args[1], (result,))[0]
        if name == "convolution_backward":
            return in_layout_of_cudnn(args[1], args[2], result)
        if name == "log_sigmoid_forward":
            return result[0], result[1].new_empty(0)  # the buffer is the CPU's
        return in_memory_of_all(name, args, result)

    def account(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Workspaces that are needed for the first time, results, and the kernel's scratch."""
        name = _name(func)
        if self._order:
            order, self._order = self._order, []
            self.allocate_in_order(order)
        super().account(func, args, kwargs, result)
        if not _on_device(result):
            return
        if name in _PRODUCTS:
            self._use_workspace("cublas", self._workspace_bytes)
            if name == "addmm" and args[0].dim() == 1:
                self._use_workspace("cublaslt", CUBLASLT_WORKSPACE_BYTES)
        if name in ("convolution", "convolution_backward"):
            self._convolve(name, args, result)
        else:
            self.allocate_in_order(scratch_bytes(name, args, result, self.gpu))

    def _convolve(self, name: str, args: Any, result: Any) -> None:
        """Copies of arguments in another layout, and cuDNN's workspaces."""
        if name == "convolution":
            directions, operands = [Direction.FORWARD], args[:2]
            convolution = of_forward(args, result)
        else:
            convolution, operands = of_backward(args), args[:3]
            wanted = zip((Direction.DATA, Direction.WEIGHT), args[-1], strict=False)
            directions = [direction for direction, wants in wanted if wants]
        self.allocate_in_order(copied_operands(convolution, operands))
        for direction in directions:
            nbytes = workspace_bytes(convolution, direction, self.gpu)
            if nbytes:
                self.allocate_in_order([nbytes], optional_for=(convolution, direction))
        if name == "convolution_backward" and args[-1][2]:
            self.allocate_in_order(scratch_bytes("sum", (args[0],), result[2], self.gpu))

    def _allocate(self, nbytes: int) -> tuple[int, Block | None]:
        number, block = super()._allocate(nbytes)
        if torch.is_grad_enabled() and not in_backward():
            self.forward.add(number)
        return number, block

    def _use_workspace(self, library: str, nbytes: int) -> None:
        """One for the thread of the forward pass, and one for autograd's thread."""
        owner = library, in_backward()
        if owner not in self._has_workspace:
            self._has_workspace.add(owner)
            self.workspaces.add(self.keep(nbytes))


def in_backward() -> bool:
    """Whether autograd is running a backward pass here."""
    return torch._C._current_graph_task_id() != -1


def _on_device(value: Any) -> bool:
    """Whether a value, or the first of several, is a tensor of the meta device."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, torch.Tensor) and first.is_meta


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")
