"""Build the emulated driver for the torch that is installed, once, into the user's cache.

There are two libraries: "driver" (NVIDIA's libraries, emulated) and "values" (what kernels compute,
from the CPU's operators). Each lies in a folder named by what it was built from: torch, Python,
compiler and sources. Builds are atomic, and processes that build the same wait for one another.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from emulated_gpu.errors import Unavailable
from emulated_gpu.toolchain import (
    CudaTorch,
    compiler,
    compiler_version,
    cuda_headers,
    find_cuda_torch,
    kernel_architectures,
    run_tool,
)

SOURCES = Path(__file__).with_name("sources")
DRIVER = "libemulated_gpu.so"
VALUES = "libemulated_gpu_values.so"
LOADER = "emulated_gpu_values"
_FLAGS = ("-O1", "-fPIC", "-fvisibility=hidden", "-w")
_LIBRARIES_OF_TORCH = (
    "c10_cuda",
    "torch_cuda",
    "torch_cuda_linalg",
    "torch_python",
    "torch_nvshmem",
    "caffe2_nvrtc",
    "torch_cpu",
)
_NVIDIA = re.compile(
    "(cu[A-Z]|cuda|__cuda|cublas|cudnn|cusparse|cusolver|cufft|curand|cuFile|cupti|nccl|nvrtc"
    "|nvshmem|nvtx|nvJitLink|cudss|nvml)"
)
_LOOKED_UP = re.compile(  # by name, in the driver and in NVML
    rb"(?:cu(?:Mem|Dev|Logs|Ctx|Stream|Multicast|Green|Tensor|Launch|Func|Module|Lib|Get|Pointer"
    rb"|Link|Occupancy|Init|Driver)|nvml)[A-Za-z0-9]+(?:_v[0-9])?"
)
_ASKS_FOR_SCRATCH = re.compile("_bufferSize|^cufftXtMakePlanMany$")
_MAX_ARGUMENTS = 19  # of those that `sources/driver/scratch_sizes.cpp` knows
_NEEDED = re.compile(r"NEEDED.*\[(lib(?:cu[a-zA-Z]*|nv[a-zA-Z_-]*|nccl)\.so\.[0-9]+)\]")


@dataclass(frozen=True)
class _Library:
    """One of the two libraries.

    Attributes:
        kind: what its folder's name begins with.
        sources: the folder of its sources.
        build: makes it for a torch in a folder, from its C++ files.
        cpu_s: seconds of processor that this takes (gcc 12, torch 2.11).
    """

    kind: str
    sources: Path
    build: Callable[[CudaTorch, Sequence[Path], Path], None]
    cpu_s: int


def build_driver() -> Path:
    """Return the folder with the emulated driver and the names of NVIDIA's libraries.

    Raises:
        Unavailable: the CUDA build of torch, the compiler or CUDA's headers are missing,
            or the sources do not compile.
    """
    return _built(_Library("driver", SOURCES / "driver", _build_driver, cpu_s=11))


def build_values() -> Path:
    """Return the folder with the operators' values, to be put on PYTHONPATH.

    `import torch` then loads them: the folder holds an entry point of the group "torch.backends".

    Raises:
        Unavailable: as for `build_driver`.
    """
    return _built(_Library("values", SOURCES / "values", _build_values, cpu_s=28))


def cache_folder() -> Path:
    """Return where builds are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "emulated-gpu"


def _built(library: _Library) -> Path:
    torch, files = find_cuda_torch(), sorted(filter(Path.is_file, library.sources.iterdir()))
    digest = hashlib.sha256(Path(__file__).read_bytes() + compiler_version().encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = f"{library.kind}-torch{torch.version}-{python}-{digest.hexdigest()[:16]}"
    folder = cache_folder() / name
    if folder.exists():
        return folder
    build = partial(library.build, torch, [file for file in files if file.suffix == ".cpp"])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_name(f"{name}.lock")):
            if not folder.exists():
                with _said(library, torch):
                    _build_in_part(folder, build)
    except OSError as error:
        raise Unavailable(
            f"the emulated GPU cannot be kept in {folder.parent} ({error}): make room, or set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


@contextmanager
def _said(library: _Library, torch: CudaTorch) -> Iterator[None]:
    """Say that a library is built, and how long that took, on standard error."""
    start = time.monotonic()
    print(
        f"emulated-gpu: building its {library.kind} for torch {torch.version}, once: about "
        f"{library.cpu_s} s of a processor",
        file=sys.stderr,
        flush=True,
    )
    yield
    print(f"emulated-gpu: built in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _build_in_part(folder: Path, build: Callable[[Path], None]) -> None:
    """Build beside the folder, and rename; remove what a build that was killed left."""
    prefix = f".{folder.name}-"
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        build(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_driver(torch: CudaTorch, sources: Sequence[Path], out: Path) -> None:
    libraries = [torch.folder / "lib" / f"lib{name}.so" for name in _LIBRARIES_OF_TORCH]
    libraries = [path for path in libraries if path.exists()]
    numbers = ",".join(map(str, kernel_architectures(torch)))
    flags = ("-std=c++17", f"-DKERNEL_ARCHITECTURES={numbers}")
    with _compiled(sources, cuda_headers(torch), flags) as objects:
        written = {line.split()[-1] for line in _symbols("--defined-only", *objects)}
        rest = _not_emulated(sorted(_imported(libraries) - written), out)
        shared = ("-shared", f"-Wl,-soname,{DRIVER}", "-o", out / DRIVER)
        run_tool(compiler(), *shared, *objects, rest, "-ldl", "-lpthread")
        rest.unlink()
    # Empty libraries of the names that torch, Triton and NVML's bindings ask for, which lead to it.
    empty = out / "empty.c"
    empty.write_text("")
    for name in sorted({*_needed(libraries), "libcuda.so.1", "libnvidia-ml.so.1"}):
        link = ("-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-o", out / name)
        leads = ("-L", out, f"-l:{DRIVER}", "-Wl,-rpath,$ORIGIN")
        run_tool(compiler(), "-x", "c", "-shared", "-fPIC", *link, empty, *leads)
    (out / "libcuda.so").symlink_to("libcuda.so.1")  # which Triton links before 3.5


def _not_emulated(names: Sequence[str], out: Path) -> Path:
    """Compile the functions that no source defines; each hands its name to one that does."""
    generated, target = out / "generated.c", out / "generated.o"
    slots = [f"a{place}" for place in range(_MAX_ARGUMENTS)]
    taken = ", ".join(f"unsigned long long {slot}" for slot in slots)
    given = f"(unsigned long long[]){{{', '.join(slots)}}}"
    lines = ["int emulated_gpu_not_emulated(const char*);"]
    lines += ["int emulated_gpu_scratch_size(const char*, const unsigned long long*);"]
    for name in names:
        if _ASKS_FOR_SCRATCH.search(name):
            lines += [
                f'int {name}({taken}) {{ return emulated_gpu_scratch_size("{name}", {given}); }}'
            ]
        else:
            lines += [f'int {name}() {{ return emulated_gpu_not_emulated("{name}"); }}']
    generated.write_text("\n".join(lines) + "\n")
    plain = ("-x", "c", "-O1", "-fPIC", "-w", "-fno-builtin")
    run_tool(compiler(), *plain, "-c", generated, "-o", target)
    return target


def _build_values(torch: CudaTorch, sources: Sequence[Path], out: Path) -> None:
    include = (torch.folder / "include", torch.folder / "include/torch/csrc/api/include")
    # Of torch's headers only those of the operators that are named: half the time of all.
    flags = ("-std=c++20", "-DAT_PER_OPERATOR_HEADERS")
    torchs = ("-L", torch.folder / "lib", "-lc10", "-ltorch_cpu")
    with _compiled(sources, include, flags) as objects:
        shared = ("-shared", "-Wl,--unresolved-symbols=ignore-all", "-o", out / VALUES)
        run_tool(compiler(), *shared, *objects, *torchs)
    shutil.copy(SOURCES / "values" / "loader.py", out / f"{LOADER}.py")
    information = out / f"{LOADER}-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {LOADER}\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[torch.backends]\n{LOADER} = {LOADER}:load\n")
    (information / "RECORD").write_text("")


@contextmanager
def _compiled(
    sources: Sequence[Path], include: Sequence[Path], flags: Sequence[str]
) -> Iterator[list[Path]]:
    """Compile C++ files, as many at once as there are processors; the objects go at the end."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compiled(source: Path) -> Path:
            target = Path(folder, f"{source.stem}.o")
            places = [f"-I{each}" for each in include]
            run_tool(compiler(), *flags, *_FLAGS, *places, "-c", source, "-o", target)
            return target

        yield list(pool.map(compiled, sources))


def _imported(libraries: list[Path]) -> set[str]:
    """Return the functions of NVIDIA's that torch imports, and those it looks up by name."""
    lines = _symbols("-D", "--undefined-only", *libraries)
    strong = {line.split()[-1].partition("@")[0] for line in lines if " U " in f" {line} "}
    names = {name for name in strong if _NVIDIA.match(name)}
    for path in libraries:
        if path.stem in ("libc10_cuda", "libtorch_cuda", "libcaffe2_nvrtc"):
            strings = re.findall(rb"[\x20-\x7e]{6,}", path.read_bytes())
            names |= {text.decode() for text in strings if _LOOKED_UP.fullmatch(text)}
    return names


def _needed(libraries: list[Path]) -> set[str]:
    return {
        name
        for path in libraries[0].parent.glob("*.so")
        for name in _NEEDED.findall(run_tool("readelf", "-d", path))
    }


def _symbols(*arguments: str | Path) -> list[str]:
    return [line for line in run_tool("nm", *arguments).splitlines() if len(line.split()) > 1]
