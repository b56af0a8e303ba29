"""Every row of the catalogue is recognized, and nothing that only talks like one."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.exc import InductorError

from autofit.devices.base import MemoryReading
from autofit.errors import Unsupported
from autofit.measurement import Outcome
from autofit.probing.fault_table import GRAVITY, ROWS
from autofit.probing.faults import (
    fault_of,
    has_moved,
    is_explained,
    memory_was_short,
    spilled,
)
from autofit.units import GIB, MIB


def accelerator_error(code: int | None, text: str = "CUDA error: something") -> Exception:
    error = torch.AcceleratorError(text)
    if code is not None:
        vars(error)["error_code"] = code
    return error


def of_module(module: str, name: str, base: type[Exception] = Exception) -> type[Exception]:
    """A class as that module would define it, for libraries that are not installed here."""
    return type(name, (base,), {"__module__": module})


KNOWN: dict[str, tuple[Outcome, Exception]] = {
    "caching allocator": (
        Outcome.OOM,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    ),
    "caching allocator, as cuda's name": (Outcome.OOM, torch.cuda.OutOfMemoryError("no text")),
    "async allocator": (
        Outcome.OOM,
        torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory. (out of..."),
    ),
    "async allocator in TorchScript": (
        Outcome.OOM,
        RuntimeError(
            "The following operation failed in the TorchScript interpreter.\nTraceback of ...\n"
            "RuntimeError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        ),
    ),
    "CUDA text of old": (Outcome.OOM, RuntimeError("CUDA out of memory. Tried to allocate 20 MiB")),
    "HIP": (Outcome.OOM, RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB (GPU 0;")),
    "HIP call": (Outcome.OOM, RuntimeError("HIP error: out of memory\nHIP kernel errors ...")),
    "MPS": (
        Outcome.OOM,
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: ..."),
    ),
    "error code 2": (Outcome.OOM, accelerator_error(2, "")),
    "device call": (
        Outcome.OOM,
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously ..."),
    ),
    "no kernel": (Outcome.UNSUPPORTED, accelerator_error(209, "")),
    "inductor": (Outcome.UNSUPPORTED, InductorError(ValueError("no such kernel"), None)),
    "compiled code differentiated twice": (
        Outcome.UNSUPPORTED,
        RuntimeError("torch.compile with aot_autograd does not currently support double backward"),
    ),
    "output of a CUDA graph": (
        Outcome.UNSUPPORTED,
        RuntimeError(
            "Error: accessing tensor output of CUDAGraphs that has been overwritten by a "
            "subsequent run. Stack trace: ..."
        ),
    ),
    "settings": (Outcome.UNSUPPORTED, Unsupported("compile.mode=default: no C++ compiler")),
    "no kernel, as text": (
        Outcome.UNSUPPORTED,
        RuntimeError(
            "CUDA error: no kernel image is available for execution on the device\nFor ..."
        ),
    ),
    "driver": (Outcome.OOM, RuntimeError("CUDA driver error: out of memory")),
    "Triton launch": (Outcome.OOM, RuntimeError("Triton Error [CUDA]: out of memory")),
    "NVML assert": (
        Outcome.OOM,
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":'
            "1154, please report a bug to PyTorch. "
        ),
    ),
    "cuBLAS": (
        Outcome.OOM,
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ),
    "cuBLAS handle": (
        Outcome.OOM,
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(h)`"),
    ),
    "cuDNN": (Outcome.OOM, RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    "cuDNN loads": (Outcome.OOM, RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")),
    "cuBLAS kernels": (
        Outcome.OOM,
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"
        ),
    ),
    "cuBLAS runs": (
        Outcome.OOM,
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( h, o`"),
    ),
    "cuDNN runs": (Outcome.OOM, RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")),
    "cuDNN library": (
        Outcome.OOM,
        RuntimeError("cuDNN error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"),
    ),
    "lazy call": (
        Outcome.OOM,
        torch.cuda.DeferredCudaCallError(
            "CUDA call failed lazily at initialization with error: CUDA error: out of memory\n"
            "CUDA call was originally invoked at: ..."
        ),
    ),
    "cuDNN engine": (
        Outcome.OOM,
        RuntimeError("GET was unable to find an engine to execute this computation"),
    ),
    "cuFFT": (Outcome.OOM, RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR")),
    "NCCL": (
        Outcome.OOM,
        torch.distributed.DistBackendError(
            "NCCL error in: ../NCCLUtils.hpp:275, unhandled cuda error\nncclUnhandledCudaError: "
            "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
        ),
    ),
    "a peer that ended": (
        Outcome.TIMEOUT,
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
            "[127.0.0.1]:33500. This is typically caused by a remote worker crashing."
        ),
    ),
    "a peer that did not come": (
        Outcome.TIMEOUT,
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
            "4000ms for recv operation to complete"
        ),
    ),
    "an aborted communicator": (
        Outcome.TIMEOUT,
        torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1."),
    ),
    "collectives that differ": (
        Outcome.USER_ERROR,
        RuntimeError(
            "Detected mismatch between collectives on ranks. Rank 0 is running collective: ..."
        ),
    ),
    "graph capture": (
        Outcome.OOM,
        accelerator_error(901, "CUDA error: operation failed due to a previous error during ..."),
    ),
    "compiler": (
        Outcome.OOM,
        of_module("torch._dynamo.exc", "BackendCompilerFailed", RuntimeError)(
            "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate"
        ),
    ),
    "DataLoader": (
        Outcome.OOM,
        torch.OutOfMemoryError("Caught OutOfMemoryError in DataLoader worker process 0.\nOrig ..."),
    ),
    "MemoryError": (Outcome.HOST_OOM, MemoryError()),
    "errno": (Outcome.HOST_OOM, OSError(12, "Cannot allocate memory")),
    "Windows allocator": (
        Outcome.HOST_OOM,
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you "
            "tried to allocate 8 bytes."
        ),
    ),
    "C++ allocator": (Outcome.HOST_OOM, RuntimeError("std::bad_alloc")),
    "mmap": (Outcome.HOST_OOM, RuntimeError("$ Torch: unable to mmap memory: you tried to mmap")),
    "shm": (
        Outcome.HOST_OOM,
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left"),
    ),
    "DataLoader bus error": (
        Outcome.HOST_OOM,
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is ..."),
    ),
    "cuDNN on the host": (
        Outcome.HOST_OOM,
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    ),
    "Triton resources": (
        Outcome.SIZE_LIMIT,
        of_module("triton.runtime.errors", "OutOfResources")("shared memory"),
    ),
    "inductor resources": (
        Outcome.SIZE_LIMIT,
        RuntimeError(
            "No valid triton configs. OutOfResources: out of resource: shared memory, Required: "
            "147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help."
        ),
    ),
    "Triton grid": (Outcome.SIZE_LIMIT, RuntimeError("Triton Error [CUDA]: invalid argument")),
    "cuDNN size": (
        Outcome.SIZE_LIMIT,
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you ..."),
    ),
    "32-bit check": (
        Outcome.SIZE_LIMIT,
        RuntimeError("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to"),
    ),
    "32-bit padding": (
        Outcome.SIZE_LIMIT,
        RuntimeError("input tensor must fit into 32-bit index math"),
    ),
    "INT_MAX": (
        Outcome.SIZE_LIMIT,
        RuntimeError("upsample2d only supports output tensors with less than INT_MAX elements"),
    ),
    "grid": (
        Outcome.SIZE_LIMIT,
        RuntimeError("CUDA error: invalid configuration argument\nCUDA kernel errors might ..."),
    ),
    "grid code": (Outcome.SIZE_LIMIT, accelerator_error(9)),
    "Metal buffer": (Outcome.SIZE_LIMIT, RuntimeError("Invalid buffer size: 20.00 GB")),
    "assert code": (Outcome.POISONED, accelerator_error(710)),
    "assert text": (
        Outcome.POISONED,
        RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ..."),
    ),
    "illegal access code": (Outcome.POISONED, accelerator_error(700)),
    "illegal access": (
        Outcome.POISONED,
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ),
    "illegal access, Triton": (
        Outcome.POISONED,
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ),
    "launch failure": (Outcome.POISONED, RuntimeError("CUDA error: unspecified launch failure")),
    "HIP launch failure": (Outcome.POISONED, RuntimeError("HIP error: unspecified launch failure")),
    "ECC": (Outcome.POISONED, RuntimeError("CUDA error: uncorrectable ECC error encountered")),
    "broken segment": (
        Outcome.POISONED,
        RuntimeError('!handles_.at(i) INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllo"'),
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_knows(case: str) -> None:
    outcome, error = KNOWN[case]
    assert fault_of(error).outcome is outcome


@pytest.mark.parametrize(
    ("allocate", "outcome"),
    [
        (lambda: torch.empty(2**50), Outcome.HOST_OOM),
        (lambda: bytearray(2**60), Outcome.HOST_OOM),
        (lambda: torch.empty(2**62), Outcome.SIZE_LIMIT),
    ],
    ids=["CPU allocator", "Python", "overflow"],
)
def test_knows_what_this_torch_really_raises(allocate: object, outcome: Outcome) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()  # type: ignore[operator]  # parametrized values have no signature
    assert fault_of(caught.value).outcome is outcome


class RunsOutOfMemory(RuntimeError):
    """A user's own class, with a user's own error_code."""

    error_code = 2


DECOYS: list[BaseException] = [
    ValueError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ValueError("the queue is out of memory"),
    AssertionError("CUDA error: out of memory"),
    KeyError("CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("out of memory"),
    RuntimeError("our guide says what to do about 'CUDA out of memory. Tried to allocate'"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)"),
    RuntimeError("Expected more than 1 value per channel when training"),
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`"),
    accelerator_error(1, "CUDA error: invalid argument"),
    RunsOutOfMemory("CUDA out of memory. Tried to allocate 2.00 GiB"),
    OSError(28, "No space left on device"),
    TypeError("forward() missing 1 required positional argument"),
    KeyboardInterrupt(),
    SystemExit(3),
]


@pytest.mark.parametrize("decoy", DECOYS, ids=repr)
def test_decoys_are_the_users_own_error(decoy: BaseException) -> None:
    assert fault_of(decoy).outcome is Outcome.USER_ERROR


def raised(make: object) -> BaseException:
    try:
        make()  # type: ignore[operator]  # a local function of a test
    except BaseException as error:
        return error
    raise AssertionError("it was to raise")


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_finds_a_cause() -> None:
    def wrapped() -> None:
        try:
            run_out()
        except RuntimeError as error:
            raise ValueError("step failed") from error

    fault = fault_of(raised(wrapped))
    assert fault.outcome is Outcome.OOM
    assert fault.type_names[0] == "torch.OutOfMemoryError"


@pytest.mark.parametrize("hidden", [False, True])
def test_finds_a_context_even_a_hidden_one(hidden: bool) -> None:
    def cleaned_up() -> None:
        try:
            run_out()
        except RuntimeError:
            if hidden:
                raise ValueError("step failed") from None
            raise ValueError("step failed")  # noqa: B904  # the implicit context is what is tested

    assert fault_of(raised(cleaned_up)).outcome is Outcome.OOM


def test_a_dead_context_outweighs_the_rest_of_the_chain() -> None:
    def dies() -> None:
        try:
            run_out()
        except RuntimeError as error:
            raise accelerator_error(700) from error

    fault = fault_of(raised(dies))
    assert fault.outcome is Outcome.POISONED
    assert fault.kills_context


def test_an_interrupt_amid_an_oom_is_no_oom() -> None:
    def interrupted() -> None:
        try:
            run_out()
        except RuntimeError:
            raise KeyboardInterrupt  # noqa: B904  # the implicit context is what is tested

    assert fault_of(raised(interrupted)).outcome is Outcome.USER_ERROR


CUBLAS = KNOWN["cuBLAS"][1]


@pytest.mark.parametrize(
    ("error", "memory_was_short", "outcome"),
    [
        (KNOWN["caching allocator"][1], False, Outcome.OOM),
        (CUBLAS, True, Outcome.OOM),
        (CUBLAS, False, Outcome.SIZE_LIMIT),
        (KNOWN["cuBLAS runs"][1], True, Outcome.OOM),
        (KNOWN["cuBLAS runs"][1], False, Outcome.USER_ERROR),
        (KNOWN["graph capture"][1], False, Outcome.UNSUPPORTED),
        (KNOWN["assert code"][1], False, Outcome.POISONED),
        (ValueError("bug"), True, Outcome.USER_ERROR),
    ],
)
def test_settles_what_the_text_left_open(
    error: Exception, memory_was_short: bool, outcome: Outcome
) -> None:
    assert fault_of(error).outcome_where(memory_was_short=memory_was_short) is outcome


def test_every_row_is_hit_by_a_case() -> None:
    kinds = {fault_of(error).kind for _, error in KNOWN.values()}
    assert kinds == {row.name for row in ROWS}


def test_every_outcome_of_a_row_has_a_gravity() -> None:
    assert {row.outcome for row in ROWS} <= set(GRAVITY)


def reading(
    *, allocated_gib: float = 0, reserved_gib: float = 0, non_torch_gib: float = 0, retries: int = 0
) -> MemoryReading:
    return MemoryReading(
        allocated_bytes=0,
        reserved_bytes=0,
        peak_allocated_bytes=int(allocated_gib * GIB),
        peak_reserved_bytes=int(reserved_gib * GIB),
        non_torch_bytes=int(non_torch_gib * GIB),
        allocator_retries=retries,
    )


@pytest.mark.parametrize(
    ("after", "available_gib", "short"),
    [
        (reading(reserved_gib=5, retries=3), 80, False),
        (reading(reserved_gib=9.5, retries=3), 80, True),
        (reading(reserved_gib=8.6, non_torch_gib=0.6, retries=3), 80, True),
        (reading(reserved_gib=5, retries=3), 5.2, True),
        (reading(reserved_gib=5, retries=4), 80, True),
    ],
)
def test_memory_was_short(after: MemoryReading, available_gib: float, short: bool) -> None:
    before = reading(retries=3)
    told = memory_was_short(
        before, after, vram_budget_bytes=10 * GIB, available_bytes=int(available_gib * GIB)
    )
    assert told is short


@pytest.mark.parametrize(
    ("message", "allocated_gib", "explained"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of", 9, True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of", 7, False),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total", 9.995, True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 9, False),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", 9, False),
    ],
)
def test_an_oom_is_explained_by_live_bytes(
    message: str, allocated_gib: float, explained: bool
) -> None:
    fault = fault_of(torch.OutOfMemoryError(message))
    after = reading(allocated_gib=allocated_gib)
    assert is_explained(fault, after, vram_budget_bytes=10 * GIB) is explained


def test_what_lay_in_host_memory_is_no_fit() -> None:
    assert spilled(10 * GIB, 10 * GIB) is None
    assert "host memory" in (spilled(10 * GIB, 10 * GIB - 1) or "")


@pytest.mark.parametrize(
    ("before", "after", "total", "moved"),
    [
        (0, 0, 80 * GIB, False),
        (GIB, GIB + 100 * MIB, 80 * GIB, False),
        (GIB, 3 * GIB, 80 * GIB, True),
        (3 * GIB, GIB, 80 * GIB, True),
        (0, 65 * MIB, GIB, True),
        (None, GIB, 80 * GIB, False),
        (GIB, None, 80 * GIB, False),
    ],
)
def test_others_have_moved(before: int | None, after: int | None, total: int, moved: bool) -> None:
    assert has_moved(before, after, total_bytes=total) is moved
