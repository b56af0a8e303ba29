"""The catalogue of faults: how each is recognized in an exception, and its outcome.

Types come before codes and codes before text; within each, rows are tried from the top. An
exception that matches no row is an error of the user's code. Text is matched only where a message
begins (or after "SomethingError: " and the like, as TorchScript, compilers and loaders quote it),
so a sentence that merely mentions a fault does not match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from autofit.measurement import Outcome

_QUOTED = r"(?:^|Error: |with error: |raised:\s)"
_DEVICE_CALL = (
    _QUOTED + r"(?:(?:CUDA|HIP)(?: driver)? error(?: in [^:\n]*)?: |Triton Error \[\w+\]: )"
)


def _text(*beginnings: str, after: str = _QUOTED) -> re.Pattern[str]:
    return re.compile(after + f"(?:{'|'.join(beginnings)})", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One kind of fault.

    Attributes:
        name: its name in docs and details.
        outcome: its outcome where no reading of the device contradicts.
        types: qualified names of exception classes, subclasses included.
        codes: values of `error_code` (cudaError_t) of a `torch.AcceleratorError`.
        text: beginning of the message.
        otherwise: the outcome if memory was not short when it happened; None: the same.
        kills_context: the process must be replaced, whatever a health check says.
        is_consequence: of ranks that train together, another one is to blame if it names a cause.
    """

    name: str
    outcome: Outcome
    types: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    text: re.Pattern[str] | None = field(default=None, repr=False)
    otherwise: Outcome | None = None
    kills_context: bool = False
    is_consequence: bool = False


OTHER_COUNT = "the ranks ran different numbers of forwards"
_MISMATCH = (
    r"Received data size doesn't match expected size"  # gloo
    r"|Detected mismatch between collectives on ranks"  # torch, with TORCH_DISTRIBUTED_DEBUG=DETAIL
)

ROWS: tuple[Row, ...] = (
    Row(
        "dead context",
        Outcome.POISONED,
        # cudaError_t whose text in the CUDA runtime manual ends "the process must be terminated
        # and relaunched", and 999, which names no cause at all.
        codes=frozenset(
            {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999}
        ),
        text=_text(
            "an illegal memory access",
            "an illegal instruction",
            "device-side assert triggered",
            "unspecified launch failure",
            "the launch timed out",
            "misaligned address",
            "invalid program counter",
            "hardware stack error",
            "context is destroyed",
            "operation not supported on global/shared address space",
            "uncorrectable ",
            "unknown error",
            after=_DEVICE_CALL,
        ),
        kills_context=True,
    ),
    Row(
        "broken allocator segment",
        Outcome.POISONED,
        # expandable_segments: a mapping that failed half-way leaves its segment unusable.
        text=_text(
            r"!?handles_\.at\(.*INTERNAL ASSERT FAILED",
            r"(?:CUDA|HIP) driver error: device not ready",
        ),
        kills_context=True,
    ),
    Row(
        "mapping of a segment failed",
        Outcome.OOM,
        text=_text(r"(?:CUDA|HIP) driver error: out of memory"),
        kills_context=True,
    ),
    Row("caching allocator", Outcome.OOM, types=frozenset({"torch.OutOfMemoryError"})),
    Row(
        "allocator text",
        Outcome.OOM,
        text=_text(
            r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory(?:\. Tried to allocate| \(|\.?$)",
            r"Allocation on device .* would exceed allowed memory",
        ),
    ),
    Row(
        "device call out of memory",
        Outcome.OOM,
        codes=frozenset({2}),
        text=_text("out of memory", after=_DEVICE_CALL),
        otherwise=Outcome.HOST_OOM,  # pinned memory: torch's allocator has its own exception
    ),
    Row(
        "out of memory behind an NVML assert",
        Outcome.OOM,
        # The allocator asks NVML for its report before it raises; without rights that fails first.
        text=_text(r"NVML_SUCCESS == .*INTERNAL ASSERT FAILED"),
    ),
    Row(
        "library allocation",
        Outcome.OOM,
        text=_text(
            r"(?:\w+ error: )?(?:HIP|ROC|CU|MI)\w+_ALLOC_FAILED",
            r"(?:\w+ error: )?(?:CU|HIP)BLAS_STATUS_NOT_INITIALIZED when calling `\w+Create",
            r"(?:\w+ error: )?miopenStatusAllocFailed",
            r"(?:\w+ error: )?CUDNN_STATUS_INTERNAL_ERROR(?!_HOST)",
            r"cuFFT error: CUFFT_INTERNAL_ERROR",
            r"(?:GET|FIND) was unable to find an engine",
            r"cuDNN Frontend error: .*No (?:valid )?execution plans",
        ),
        otherwise=Outcome.SIZE_LIMIT,
    ),
    Row(
        "library failure",
        Outcome.OOM,
        # cuBLAS and cuDNN report so both a lack of memory for handles, kernels or scratch, and
        # bugs of their own.
        text=_text(
            r"(?:\w+ error: )?(?:CU|HIP)BLAS_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED)\b",
            r"(?:\w+ error: )?CUDNN_STATUS_(?:EXECUTION_FAILED|NOT_INITIALIZED)\b",
            r"(?:\w+ error: )?CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED\b",
        ),
        otherwise=Outcome.USER_ERROR,
    ),
    Row(
        "NCCL allocation",
        Outcome.OOM,
        text=re.compile(r"Cuda failure (?:\d+ )?'out of memory'|^Failed to CUDA calloc", re.M),
        kills_context=True,
    ),
    Row(
        "graph capture broken off",
        Outcome.OOM,
        codes=frozenset(range(900, 909)),
        text=_text(
            "operation not permitted when stream is capturing",
            "operation failed due to a previous error during capture",
            after=_DEVICE_CALL,
        ),
        otherwise=Outcome.UNSUPPORTED,
        kills_context=True,
    ),
    Row(
        "host memory",
        Outcome.HOST_OOM,
        types=frozenset({"MemoryError"}),
        text=_text(
            r"(?:\[enforce fail at .*)?DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"\$ Torch: (?:unable to mmap|not enough) memory",
            r"std::bad_alloc",
            r"bad allocation$",
            r"(?:\w+ error: )?CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        ),
    ),
    Row(
        "shared memory",
        Outcome.HOST_OOM,
        text=_text(
            r"unable to allocate shared memory\(shm\)",
            r"unable to (?:mmap|write|resize) .*(?:Cannot allocate memory|No space left)",
            r"DataLoader worker \(pid.*\) is killed by signal: (?:Bus error|Killed)",
        ),
    ),
    Row(OTHER_COUNT, Outcome.USER_ERROR, text=re.compile(_MISMATCH)),
    Row(
        "another rank ended or did not come",
        Outcome.TIMEOUT,
        text=re.compile(
            r"^\[[^]\n]*/gloo/[^]\n]*\] "  # a connection that broke, or a wait that was too long
            r"|^NCCL (?:error in|communicator was aborted)"
            r"|Watchdog caught collective operation timeout"
        ),
        is_consequence=True,
    ),
    Row(
        "block resources",
        Outcome.SIZE_LIMIT,
        types=frozenset(
            {"triton.runtime.errors.OutOfResources", "triton.runtime.autotuner.OutOfResources"}
        ),
        text=_text(
            r"(?:No valid triton configs\. )?(?:OutOfResources: )?out of resource: .*Hardware limit"
        ),
    ),
    Row(
        "launch limits",
        Outcome.SIZE_LIMIT,
        codes=frozenset({9, 701, 720}),
        text=_text(
            "invalid configuration argument",
            "too many resources requested for launch",
            "too many blocks in cooperative launch",
            after=_DEVICE_CALL,
        ),
    ),
    Row(
        "grid of a Triton kernel",
        Outcome.SIZE_LIMIT,
        # cuLaunchKernel answers a grid beyond 65535 in y or z with "invalid argument".
        text=_text(r"Triton Error \[\w+\]: invalid argument"),
    ),
    Row(
        "no kernel for the GPU",
        Outcome.UNSUPPORTED,
        # Of an extension: where torch has none, the device is refused before anything runs.
        codes=frozenset({98, 209, 222}),
        text=_text(
            "invalid device function",
            "no kernel image is available",
            "the provided PTX was compiled with an unsupported toolchain",
            after=_DEVICE_CALL,
        ),
    ),
    Row(
        "compiler",
        Outcome.UNSUPPORTED,
        # What a user's own code raises while it is compiled has its own class.
        types=frozenset(
            {
                "torch._dynamo.exc.TorchDynamoException",
                "torch._inductor.exc.InductorError",
                "torch._inductor.exc.CppCompileError",
                "torch._inductor.exc.InvalidCxxCompiler",
                "triton.errors.TritonError",
            }
        ),
        # Plain errors: compiled code that is differentiated twice, and an output of a CUDA graph
        # that the step keeps while the graph runs again.
        text=re.compile(
            "^(?:torch.compile with aot_autograd does not currently support double backward"
            "|Error: accessing tensor output of CUDAGraphs that has been overwritten)"
        ),
    ),
    Row(
        "settings that cannot run",
        Outcome.UNSUPPORTED,
        types=frozenset({"autofit.errors.Unsupported"}),
    ),
    Row(
        "library size limit",
        Outcome.SIZE_LIMIT,
        text=_text(
            r"(?:cuDNN error: )?CUDNN_STATUS_NOT_SUPPORTED",
            r"Invalid buffer size: [\d.]+ [KMGT]?i?B",
        ),
    ),
    Row(
        "32-bit index",
        Outcome.SIZE_LIMIT,
        text=re.compile(
            r"canUse32BitIndexMath\(|must fit into 32-bit index math"
            r"|(?:more|less) than INT_MAX elements|less than 2147483647 but got"
            r"|^Storage size calculation overflowed",
            re.MULTILINE,
        ),
    ),
)

# The row of an exception that matches no other.
USER_ROW = Row("the user's own code", Outcome.USER_ERROR)

# Which exception of a chain decides: a dead context first, and a fault before its consequences.
GRAVITY: tuple[Outcome, ...] = (
    Outcome.POISONED,
    Outcome.OOM,
    Outcome.HOST_OOM,
    Outcome.SIZE_LIMIT,
    Outcome.UNSUPPORTED,
    Outcome.TIMEOUT,
    Outcome.USER_ERROR,
)


def row_of(type_names: tuple[str, ...], error_code: int | None, text: str | None) -> Row:
    """Return the row of one exception: by its classes, its code, and its text where given."""
    return next(_candidates(type_names, error_code, text), USER_ROW)


def row_of_output(printed: str) -> Row | None:
    """Return the row of a process that collectives ended, by what it printed; None: another end."""
    ended = (row for row in ROWS if row.name == OTHER_COUNT or row.is_consequence)
    return next((row for row in ended if row.text and row.text.search(printed)), None)


def _candidates(types: tuple[str, ...], code: int | None, text: str | None) -> Iterator[Row]:
    yield from (row for row in ROWS if row.types.intersection(types))
    if code is not None:
        yield from (row for row in ROWS if code in row.codes)
    if text is not None:
        yield from (row for row in ROWS if row.text is not None and row.text.search(text))
