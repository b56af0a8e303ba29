"""GPUs by name: memory, architecture, multiprocessors, and the size of a CUDA context.

Memory is the least total capacity found in public out-of-memory messages; where none was found, the
nominal size less the share that its generation loses. Drivers and error correction change it by a
percent and more: where that matters, give bytes. Architecture and multiprocessor counts are from
NVIDIA's data sheets and CUDA programming guide. Context bytes were measured on the H200 and the
H100 alone (torch 2.11, driver 580); other GPUs have the H200's until a probe measures theirs
(`Calibration`).
Rates are those of the data sheets, without sparsity and with float32 accumulation, times the share
of them that kernels reach on an H200 (`REACHED_...`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
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
FITS = {True: "yes", False: "no", None: "unknown"}
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
        given = most if vram_budget is None else vram_budget
        return budget_bytes(given, total_bytes=most, free_bytes=most)

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
        """The data sheet's dense rate in float16 and bfloat16; None: unknown."""
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


def _gib(number: float) -> int:
    return int(number * GIB)


_TABLE = [
    Gpu("P100-16GB", _gib(15.9), (6, 0), 56),
    Gpu("V100-16GB", _gib(15.77), (7, 0), 80),
    Gpu("V100-32GB", _gib(31.73), (7, 0), 80),
    Gpu("T4", _gib(14.56), (7, 5), 40),
    Gpu("RTX 2060", _gib(5.79), (7, 5), 30),
    Gpu("RTX 2070", _gib(7.79), (7, 5), 36),
    Gpu("RTX 2080", _gib(7.79), (7, 5), 46),
    Gpu("RTX 2080 Ti", _gib(10.75), (7, 5), 68),
    Gpu("A100-40GB", _gib(39.39), (8, 0), 108),
    Gpu("A100-80GB", _gib(79.15), (8, 0), 108),
    Gpu("A30", _gib(23.5), (8, 0), 56),
    Gpu("A2", _gib(14.5), (8, 6), 10),
    Gpu("A10", _gib(22.0), (8, 6), 72),
    Gpu("A10G", _gib(22.0), (8, 6), 80),
    Gpu("A40", _gib(44.35), (8, 6), 84),
    Gpu("A6000", _gib(47.4), (8, 6), 84),
    Gpu("A5000", _gib(23.5), (8, 6), 64),
    Gpu("A4000", _gib(15.6), (8, 6), 48),
    Gpu("RTX 3060", _gib(11.75), (8, 6), 28),
    Gpu("RTX 3060 Ti", _gib(7.79), (8, 6), 38),
    Gpu("RTX 3070", _gib(7.79), (8, 6), 46),
    Gpu("RTX 3070 Ti", _gib(7.79), (8, 6), 48),
    Gpu("RTX 3080", _gib(9.75), (8, 6), 68),
    Gpu("RTX 3080 Ti", _gib(11.75), (8, 6), 80),
    Gpu("RTX 3090", _gib(23.5), (8, 6), 82),
    Gpu("L4", _gib(22.03), (8, 9), 58),
    Gpu("L40", _gib(44.4), (8, 9), 142),
    Gpu("L40S", _gib(44.4), (8, 9), 142),
    Gpu("RTX 6000 Ada", _gib(44.4), (8, 9), 142),
    Gpu("RTX 4060", _gib(7.6), (8, 9), 24),
    Gpu("RTX 4060 Ti", _gib(15.6), (8, 9), 34),
    Gpu("RTX 4070", _gib(11.7), (8, 9), 46),
    Gpu("RTX 4070 Ti", _gib(11.7), (8, 9), 60),
    Gpu("RTX 4080", _gib(15.6), (8, 9), 76),
    Gpu("RTX 4090", _gib(23.5), (8, 9), 128),
    Gpu("H100-PCIe", _gib(79.1), (9, 0), 114),
    # Context: 752 to 764 MiB, the most with cuDNN (benchmarks/results/gpu-h100-2026-11-27.md)
    Gpu("H100", _gib(79.1), (9, 0), 132, 758 * MIB, 6 * MIB),
    Gpu("H100-NVL", _gib(93.0), (9, 0), 132),
    Gpu("GH200", _gib(94.5), (9, 0), 132),
    Gpu("H200", _gib(139.8), (9, 0), 132, context_margin_bytes=0, recorded=True),
    Gpu("B200", _gib(178.4), (10, 0), 148),
    Gpu("RTX 5070", _gib(11.7), (12, 0), 48),
    Gpu("RTX 5080", _gib(15.5), (12, 0), 84),
    Gpu("RTX 5090", _gib(31.4), (12, 0), 170),
    Gpu("RTX PRO 6000", _gib(94.0), (12, 0), 188),
]
# 10^12 operations a second in float16 and bfloat16, TF32 and float32; 10^9 bytes a second.
#
# Without tensor cores for TF32, its rate is that of float32.
_DATA_SHEETS = {
    "P100-16GB": (18.7, 9.3, 9.3, 732),
    "V100-16GB": (125, 15.7, 15.7, 900),
    "V100-32GB": (125, 15.7, 15.7, 900),
    "T4": (65, 8.1, 8.1, 320),
    "RTX 2060": (25.8, 6.5, 6.5, 336),
    "RTX 2070": (29.9, 7.5, 7.5, 448),
    "RTX 2080": (40.3, 10.1, 10.1, 448),
    "RTX 2080 Ti": (53.8, 13.4, 13.4, 616),
    "A100-40GB": (312, 156, 19.5, 1555),
    "A100-80GB": (312, 156, 19.5, 2039),
    "A30": (165, 82, 10.3, 933),
    "A2": (18, 9, 4.5, 200),
    "A10": (125, 62.5, 31.2, 600),
    "A10G": (70, 35, 31.5, 600),
    "A40": (150, 74.8, 37.4, 696),
    "A6000": (155, 77.4, 38.7, 768),
    "A5000": (111, 55.6, 27.8, 768),
    "A4000": (76.7, 38.3, 19.2, 448),
    "RTX 3060": (25.5, 12.7, 12.7, 360),
    "RTX 3060 Ti": (32.4, 16.2, 16.2, 448),
    "RTX 3070": (40.6, 20.3, 20.3, 448),
    "RTX 3070 Ti": (43.5, 21.7, 21.7, 608),
    "RTX 3080": (59.5, 29.8, 29.8, 760),
    "RTX 3080 Ti": (68.2, 34.1, 34.1, 912),
    "RTX 3090": (71, 35.6, 35.6, 936),
    "L4": (121, 60, 30.3, 300),
    "L40": (181, 90.5, 90.5, 864),
    "L40S": (362, 183, 91.6, 864),
    "RTX 6000 Ada": (364, 182, 91.1, 960),
    "RTX 4060": (30.2, 15.1, 15.1, 272),
    "RTX 4060 Ti": (44.1, 22.1, 22.1, 288),
    "RTX 4070": (58.3, 29.1, 29.1, 504),
    "RTX 4070 Ti": (80.2, 40.1, 40.1, 504),
    "RTX 4080": (97.5, 48.7, 48.7, 717),
    "RTX 4090": (165, 82.6, 82.6, 1008),
    "H100-PCIe": (756, 378, 51, 2000),
    "H100": (989, 495, 67, 3350),
    "H100-NVL": (835, 418, 60, 3900),
    "GH200": (989, 495, 67, 4000),
    "H200": (989, 495, 67, 4800),
    "B200": (2250, 1125, 75, 7700),
    "RTX 5070": (61.7, 30.9, 30.9, 672),
    "RTX 5080": (113, 56.3, 56.3, 960),
    "RTX 5090": (210, 105, 105, 1792),
    "RTX PRO 6000": (500, 250, 125, 1792),
}


def _rates(half: float, tf32: float, float32: float, bandwidth: float) -> Rates:
    return Rates(
        half * 1e12 * REACHED_BY_TENSOR_CORES,
        tf32 * 1e12 * (REACHED_BY_TENSOR_CORES if tf32 > float32 else REACHED_IN_FLOAT32),
        float32 * 1e12 * REACHED_IN_FLOAT32,
        bandwidth * 1e9 * REACHED_BANDWIDTH,
    )


# Names in drivers that differ from the table's.
_ALIASES = {
    "p100": "P100-16GB",
    "p100pcie16gb": "P100-16GB",
    "v100": "V100-16GB",
    "v100pcie16gb": "V100-16GB",
    "v100pcie32gb": "V100-32GB",
    "a100": "A100-40GB",
    "a100pcie40gb": "A100-40GB",
    "a10080gbpcie": "A100-80GB",
    "h100sxm": "H100",
    "h10080gb": "H100",
    "gh200480gb": "GH200",
    "h200nvl": "H200",
    "rtxa4000": "A4000",
    "rtxa5000": "A5000",
    "rtxa6000": "A6000",
    "rtx6000adageneration": "RTX 6000 Ada",
}
_FORM_FACTORS = re.compile(r"sxm\d|hbm\de?")


def _key(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    letters = letters.removeprefix("nvidia").removeprefix("tesla").removeprefix("geforce")
    return _FORM_FACTORS.sub("", letters)


_BY_KEY = {
    _key(entry.name): replace(entry, rates=_rates(*_DATA_SHEETS[entry.name])) for entry in _TABLE
}
_BY_KEY |= {alias: _BY_KEY[_key(name)] for alias, name in _ALIASES.items()}


def known_gpus() -> list[Gpu]:
    """Return all GPUs of the table."""
    return [_BY_KEY[_key(entry.name)] for entry in _TABLE]


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
    known = ", ".join(entry.name for entry in _TABLE)
    near = get_close_matches(_key(gpu), _BY_KEY, n=3)
    meant = " or ".join(dict.fromkeys(_BY_KEY[key].name for key in near))
    raise InvalidArgument(
        f"unknown GPU {gpu!r}{f' (do you mean {meant}?)' if meant else ''}; pass its memory, "
        f'such as "24GiB", or one of: {known}'
    )


def gpu_of(environment: Environment) -> Gpu | None:
    """Return the GPU of an environment; None if it has none."""
    if environment.gpu is None or environment.capability is None:
        return None
    major, _, minor = environment.capability.partition(".")
    try:
        known = find_gpu(environment.gpu)
    except InvalidArgument:
        known = replace(find_gpu(environment.total_bytes), name=environment.gpu)
    return replace(known, total_bytes=environment.total_bytes, capability=(int(major), int(minor)))


def _of_size(total_bytes: int, given: object, usable_share: float) -> Gpu:
    check_size(total_bytes, given)
    if total_bytes <= MEASURED_CONTEXT_BYTES:
        raise InvalidArgument(
            f"gpu={given!r} is too small: the CUDA context alone takes "
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
