"""GPUs by name: memory, architecture, multiprocessors, and the size of a CUDA context.

Memory is the least total capacity found in public out-of-memory messages, which the column
`memory_from` names; where none was found, the nominal size less what its generation loses. That is
without what the driver reserves, but with what a desktop on the same GPU takes, which no data sheet
says: where a display is attached, or error correction changes the size, give bytes. Architecture
and multiprocessor counts are from NVIDIA's data sheets and CUDA programming guide; those of GeForce
and Quadro GPUs were not all held against the sheets. Context bytes were measured on the H200 and
the H100 alone (torch 2.11, driver 580); other GPUs have the H200's until a probe measures theirs
(`Calibration`).
Rates are those of the data sheets, without sparsity and with float32 accumulation, times the share
of them that kernels reach on an H200 (`REACHED_...`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from autofit.devices.request import budget_bytes
from autofit.errors import InvalidArgument
from autofit.units import GIB, KIB, MIB, check_size, format_bytes, parse_bytes

if TYPE_CHECKING:
    from autofit.devices.base import Environment

# Room to leave for what NCCL holds on each of several ranks: no measurement says how much.
NCCL_BYTES = 2 * GIB
NCCL_UNKNOWN = "unknown, counted as 0"
# Beside the name of a GPU that nobody gave.
ASSUMED = " (assumed: no gpu given)"
FITS = {True: "fits", False: "does not fit", None: "may not fit"}
MEASURED_CONTEXT_BYTES = 620 * MIB
# How far off the context of a GPU may be that was not measured: an assumption, half either way.
CONTEXT_MARGIN_BYTES = MEASURED_CONTEXT_BYTES // 2
# What of a size without a name may be used: the least share of the table, 14.56 of the T4's 16 GiB.
USABLE_OF_A_SIZE = 0.91
REACHED_BY_TENSOR_CORES = 0.65
REACHED_IN_FLOAT32 = 0.7
REACHED_BANDWIDTH = 0.75


@dataclass(frozen=True)
class Rates:
    """How fast a GPU computes and moves data, as kernels reach it.

    Attributes:
        half_flops_per_s: floating-point operations in float16 and bfloat16.
        tf32_flops_per_s: in float32 where TF32 is allowed.
        float32_flops_per_s: in float32.
        bytes_per_s: of its memory.
    """

    half_flops_per_s: float
    tf32_flops_per_s: float
    float32_flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: NVIDIA's name.
        total_bytes: its memory.
        capability: (major, minor) compute capability.
        multiprocessors: their number, by which kernels size their scratch memory.
        context_bytes: bytes of a process outside the allocator.
        context_margin_bytes: how far off that may be.
        recorded: whether trainings were recorded on one, against which predictions were compared.
        rates: None where they are unknown, as of a size that stands for a GPU.
        usable_share: of its memory.
        assumed: what was taken for a GPU of which only the size is known; None: it has a name.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    context_bytes: int = MEASURED_CONTEXT_BYTES
    context_margin_bytes: int = CONTEXT_MARGIN_BYTES
    recorded: bool = False
    rates: Rates | None = None
    usable_share: float = 1.0
    assumed: str | None = None

    @property
    def usable_bytes(self) -> int:
        """The memory that a process can use."""
        return int(self.total_bytes * self.usable_share)

    def budget_bytes(self, vram_budget: str | float | None) -> int:
        """Return a VRAM budget in bytes; a fraction is one of what is usable, and None all of it.

        Raises:
            InvalidArgument: it is no budget, or more than the GPU has.
        """
        is_share = vram_budget is None or isinstance(vram_budget, float)
        most = self.usable_bytes if is_share else self.total_bytes
        budget = most if vram_budget is None else vram_budget
        return budget_bytes(budget, total_bytes=most, free_bytes=most)

    @property
    def native_bfloat16(self) -> bool:
        """Whether bfloat16 is computed in hardware."""
        return self.capability >= (8, 0)

    @property
    def tf32(self) -> bool:
        """Whether matrix products in TF32 are computed in hardware."""
        return self.capability >= (8, 0)

    @property
    def tensor_cores(self) -> bool:
        """Whether products of float16 run on tensor cores."""
        return self.capability >= (7, 0)

    @property
    def peak_flops_per_s(self) -> float | None:
        """The data sheet's dense rate in float16 and bfloat16, or None if unknown."""
        return None if self.rates is None else self.rates.half_flops_per_s / REACHED_BY_TENSOR_CORES

    @property
    def has_flash_attention(self) -> bool:
        """Whether flash attention and cuDNN's attention run there (sdp_utils.cpp)."""
        return self.capability >= (8, 0)

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Whether PyTorch tries cuDNN's attention first there (sdp_utils.cpp)."""
        return self.capability in ((9, 0), (10, 0), (10, 3))

    @property
    def has_wide_cudnn_heads(self) -> bool:
        """Whether cuDNN's attention takes heads of more than 128, up to 256 (sdp_utils.cpp)."""
        return self.capability == (9, 0)

    @property
    def threads_per_multiprocessor(self) -> int:
        """Resident threads of a multiprocessor (CUDA programming guide, compute capabilities)."""
        if self.capability in ((8, 6), (8, 7), (8, 9)) or self.capability[0] == 12:
            return 1536
        return 1024 if self.capability == (7, 5) else 2048

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes that cuBLAS takes for each thread that multiplies matrices.

        `parseChosenWorkspaceSize` of aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on compute
        capability 9.0 and from 10.0 on, elsewhere 8 MiB and 128 KiB.
        """
        large = self.capability == (9, 0) or self.capability[0] >= 10
        return 32 * MIB if large else 8 * MIB + 128 * KIB


class AskedGpu:
    """A GPU that notes each question it was asked, an attribute's name, with the answer.

    What was computed with it holds for every GPU that would have answered the same.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.answers: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        self.answers[name] = answer = getattr(self._gpu, name)
        return answer


def answers_alike(gpu: Gpu, answers: Mapping[str, object]) -> bool:
    """Return whether a GPU gives these answers too."""
    return all(getattr(gpu, name) == answer for name, answer in answers.items())


def _rates(half: float, tf32: float, float32: float, bandwidth: float) -> Rates:
    return Rates(
        half * 1e12 * REACHED_BY_TENSOR_CORES,
        tf32 * 1e12 * (REACHED_BY_TENSOR_CORES if tf32 > float32 else REACHED_IN_FLOAT32),
        float32 * 1e12 * REACHED_IN_FLOAT32,
        bandwidth * 1e9 * REACHED_BANDWIDTH,
    )


def _of_row(row: Mapping[str, str]) -> Gpu:
    major, _, minor = row["capability"].partition(".")
    gpu = Gpu(
        row["name"],
        int(float(row["memory_gib"]) * GIB),
        (int(major), int(minor)),
        int(row["multiprocessors"]),
        recorded=row["recorded"] == "yes",
        rates=_rates(*(float(row[rate]) for rate in ("half", "tf32", "float32", "bandwidth"))),
    )
    if not row["context_mib"]:
        return gpu
    context, margin = (int(row[size]) * MIB for size in ("context_mib", "context_margin_mib"))
    return replace(gpu, context_bytes=context, context_margin_bytes=margin)


_FORM_FACTORS = re.compile(r"sxm\d?\b|hbm\de?\b|sxm\d(?=\d)")


def _key(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", _FORM_FACTORS.sub("", name.lower()))
    return letters.removeprefix("nvidia").removeprefix("tesla").removeprefix("geforce")


_LINES = files("autofit.devices").joinpath("gpus.csv").read_text(encoding="utf-8").splitlines()
_ROWS = list(csv.DictReader(line for line in _LINES if not line.startswith("#")))
_BY_NAME = {row["name"]: _of_row(row) for row in _ROWS}
_BY_KEY = {_key(name): gpu for name, gpu in _BY_NAME.items()}
_BY_KEY |= {key: _BY_NAME[row["name"]] for row in _ROWS for key in row["also_called"].split()}


def known_gpus() -> list[Gpu]:
    """Return all GPUs of the table."""
    return list(_BY_NAME.values())


def find_gpu(gpu: str | int | Gpu | None) -> Gpu:
    """Return the GPU of that name, or one like the H200 with that much memory.

    Args:
        gpu: a name such as "L4", "RTX 4090" or "A100-80GB", in any case and with or without
            "NVIDIA"; bytes, all of them usable, or a size as it is sold, such as "24GiB", of which
            less is; None: the H200, which is known best.

    Raises:
        InvalidArgument: no such GPU is known, or the memory is less than a context takes.
    """
    if isinstance(gpu, Gpu):
        return gpu
    if gpu is None:
        return _BY_KEY["h200"]
    if isinstance(gpu, bool) or not isinstance(gpu, (str, int)):
        raise InvalidArgument(
            f'gpu must be a name such as "L4", a size such as "24GiB" or whole bytes, got {gpu!r}'
        )
    if isinstance(gpu, int):
        return _of_size(gpu, gpu, 1.0)
    if _key(gpu) in _BY_KEY:
        return _BY_KEY[_key(gpu)]
    if re.fullmatch(r"[\d.]+[kmgt]?i?b?", gpu.strip().lower()):
        return _of_size(parse_bytes(gpu), gpu, 1.0 if gpu.strip().isdigit() else USABLE_OF_A_SIZE)
    if gpu == "all" or "," in gpu:
        raise InvalidArgument(
            f'gpu={gpu!r} names several GPUs: predict takes a list, such as ["L4", "T4"] or '
            '["all"], and check takes one'
        )
    near = get_close_matches(_key(gpu), _BY_KEY, n=3, cutoff=0.5)  # L5: L4
    meant = " or ".join(dict.fromkeys(_BY_KEY[key].name for key in near))
    names = f"(do you mean {meant}?)" if meant else "(--gpu all shows those that are known)"
    raise InvalidArgument(
        f'unknown GPU {gpu!r} {names}: pass a known name, or its memory, such as "24GiB"'
    )


def gpu_of(environment: Environment) -> Gpu | None:
    """Return the GPU of an environment; None if it has none."""
    if environment.gpu is None or environment.capability is None:
        return None
    major, _, minor = environment.capability.partition(".")
    try:
        gpu = find_gpu(environment.gpu)
    except InvalidArgument:
        gpu = replace(find_gpu(environment.total_bytes), name=environment.gpu)
    return replace(gpu, total_bytes=environment.total_bytes, capability=(int(major), int(minor)))


def _of_size(total_bytes: int, size: object, usable_share: float) -> Gpu:
    check_size(total_bytes, size)
    if total_bytes <= MEASURED_CONTEXT_BYTES:
        raise InvalidArgument(
            f"gpu={size!r} is too small: the CUDA context alone takes "
            f'{format_bytes(MEASURED_CONTEXT_BYTES)}. Pass a name such as "L4", or a '
            'size such as "24GiB"'
        )
    name, like = f"GPU of {format_bytes(total_bytes)}", _BY_KEY["h200"]
    usable = format_bytes(int(total_bytes * usable_share)) if usable_share < 1 else "all"
    major, minor = like.capability
    return replace(
        like,
        name=name,
        total_bytes=total_bytes,
        context_margin_bytes=CONTEXT_MARGIN_BYTES,
        recorded=False,
        rates=None,
        usable_share=usable_share,
        assumed=(
            f"{name}: assumed to be an {like.name} in all else (compute capability "
            f"{major}.{minor}, {like.multiprocessors} multiprocessors), with {usable} of it "
            "usable: name the GPU where it is known"
        ),
    )
