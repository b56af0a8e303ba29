"""Build the emulated driver for the torch that is installed, once, into the user's cache.

There are two libraries: "driver" (NVIDIA's libraries, emulated) and "values" (what kernels compute,
from the CPU's operators). Each lies in a folder named by what it was built from: torch, Python,
compiler and sources. Builds are atomic, and processes that build the same wait for one another.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from emulated_gpu.errors import Unavailable

SOURCES = Path(__file__).with_name("sources")
DRIVER = "libemulated_gpu.so"
VALUES = "libemulated_gpu_values.so"
LOADER = "emulated_gpu_values"
SUPPORTED_CUDA = "13"
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
_ARCHITECTURES = re.compile(rb"\0((?:(?:sm|compute)_\d+[af]? ?){2,})\0")
"""What torch.cuda.get_arch_list() says, in libtorch_python.so."""
_NEEDED = re.compile(r"NEEDED.*\[(lib(?:cu[a-zA-Z]*|nv[a-zA-Z_-]*|nccl)\.so\.[0-9]+)\]")


@dataclass(frozen=True)
class CudaTorch:
    """A CUDA build of torch.

    Attributes:
        folder: of the package.
        version: such as "2.11.0+cu130".
        cuda: the version of CUDA it was built with.
        cudnn: the version of cuDNN it was built with, as cuDNN gives it: 91900 is 9.19.0.
    """

    folder: Path
    version: str
    cuda: str
    cudnn: int


def find_cuda_torch() -> CudaTorch:
    """Return the CUDA build of torch of this interpreter, without importing it.

    A CUDA build may not be importable here: its libraries ask for NVIDIA's.

    Raises:
        Unavailable: torch is not here, or was built for the CPU or another CUDA.
    """
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        raise Unavailable("torch is not installed here")
    folder = Path(found.origin).parent
    said = _constants(folder / "version.py")
    version, cuda = said.get("__version__") or "of an unknown version", said.get("cuda")
    advice = (
        "an emulated GPU needs the CUDA build of torch, 2.11 or later, for CUDA "
        f"{SUPPORTED_CUDA}: `pip install torch` from the default index, or with --no-deps, "
        "without NVIDIA's libraries, which are emulated"
    )
    if not cuda:
        raise Unavailable(f"torch {version} was built without CUDA; {advice}")
    if cuda.partition(".")[0] != SUPPORTED_CUDA:
        raise Unavailable(f"torch {version} was built for CUDA {cuda}; {advice}")
    return CudaTorch(folder, version, cuda, _cudnn_version())


def _cudnn_version() -> int:
    """Return what torch asks for, or else the version that torch 2.11 was built with."""
    try:
        asked_for = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:  # a torch that was built and not installed
        asked_for = []
    found = re.search(r"nvidia-cudnn-\w+==(\d+)\.(\d+)\.(\d+)", "\n".join(asked_for))
    major, minor, patch = map(int, found.groups()) if found else (9, 19, 0)
    return 10000 * major + 100 * minor + patch


def toolchain() -> tuple[str, list[Path]]:
    """Return the compiler and the folders of CUDA's headers; build nothing.

    Raises:
        Unavailable: the CUDA build of torch, the compiler or CUDA's headers are missing.
    """
    headers = _cuda_headers(find_cuda_torch())
    return _compiler(), headers


def build_driver() -> Path:
    """Return the folder with the emulated driver and the names of NVIDIA's libraries.

    Raises:
        Unavailable: the CUDA build of torch, the compiler or CUDA's headers are missing,
            or the sources do not compile.
    """
    torch = find_cuda_torch()
    sources = sorted(SOURCES.glob("*.cpp"))
    return _built("driver", torch, [*sources, *SOURCES.glob("*.h")], _build_driver, sources)


def build_values() -> Path:
    """Return the folder with the operators' values, to be put on PYTHONPATH.

    `import torch` then loads them: the folder holds an entry point of the group "torch.backends".

    Raises:
        Unavailable: as for `build_driver`.
    """
    torch = find_cuda_torch()
    sources = sorted((SOURCES / "values").glob("*.cpp"))
    headers = (SOURCES / "values").glob("*.h")
    return _built("values", torch, [*sources, *headers], _build_values, sources)


def why_unavailable() -> str | None:
    """Return what an emulated GPU lacks here and how to get it; None: nothing. Builds nothing."""
    try:
        toolchain()
    except Unavailable as error:
        return str(error)
    return None


def cache_folder() -> Path:
    """Return where builds are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "emulated-gpu"


def _constants(path: Path) -> dict[str, str | None]:
    """Return the strings, and None, that a module assigns at its top level."""
    values: dict[str, str | None] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str | None):
            value = node.value.value
            values |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return values


def _built(
    kind: str,
    torch: CudaTorch,
    files: Iterable[Path],
    build: Callable[[CudaTorch, list[Path], Path], None],
    sources: list[Path],
) -> Path:
    digest = hashlib.sha256(Path(__file__).read_bytes() + _compiler_version().encode())
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_folder() / f"{kind}-torch{torch.version}-{python}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_name(folder.name + ".lock")):
            if not folder.exists():
                _build_in_part(folder, partial(build, torch, sources))
    except OSError as error:
        raise Unavailable(
            f"the emulated GPU cannot be kept in {folder.parent} ({error}): make room, or set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


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


def _build_driver(torch: CudaTorch, sources: list[Path], out: Path) -> None:
    libraries = [torch.folder / "lib" / f"lib{name}.so" for name in _LIBRARIES_OF_TORCH]
    libraries = [path for path in libraries if path.exists()]
    include = [f"-I{folder}" for folder in _cuda_headers(torch)]
    numbers = ",".join(map(str, kernel_architectures(torch)))
    flags = ("-std=c++17", *_FLAGS, *include, f"-DKERNEL_ARCHITECTURES={numbers}")

    def compiled(source: Path) -> Path:
        target = out / f"{source.stem}.o"
        _run(_compiler(), *flags, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    written = {line.split()[-1] for line in _symbols("--defined-only", *objects)}
    names = sorted(_imported(libraries) - written)
    generated = out / "generated.c"
    generated.write_text(
        "int emulated_gpu_not_emulated(const char*);\n"
        + "".join(f'int {n}() {{ return emulated_gpu_not_emulated("{n}"); }}\n' for n in names)
    )
    plain = ("-x", "c", "-O1", "-fPIC", "-w", "-fno-builtin")
    _run(_compiler(), *plain, "-c", generated, "-o", out / "generated.o")
    shared = (_compiler(), "-shared", f"-Wl,-soname,{DRIVER}", "-o", out / DRIVER)
    _run(*shared, *objects, out / "generated.o", "-ldl", "-lpthread")
    for path in (*objects, out / "generated.o"):
        path.unlink()
    # Empty libraries of the names that torch, Triton and NVML's bindings ask for, which lead to it.
    empty = out / "empty.c"
    empty.write_text("")
    for name in sorted({*_needed(libraries), "libcuda.so.1", "libnvidia-ml.so.1"}):
        link = ("-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-o", out / name)
        leads = ("-L", out, f"-l:{DRIVER}", "-Wl,-rpath,$ORIGIN")
        _run(_compiler(), "-x", "c", "-shared", "-fPIC", *link, empty, *leads)


def kernel_architectures(torch: CudaTorch) -> list[int]:
    """Return the architectures that torch has kernels for: 90 is sm_90.

    Raises:
        Unavailable: the library does not say.
    """
    library = torch.folder / "lib" / "libtorch_python.so"
    said = _ARCHITECTURES.search(library.read_bytes()) if library.exists() else None
    if said is None:
        raise Unavailable(
            f"{library} does not name the architectures that torch {torch.version} has kernels "
            "for: use torch 2.11, whose library does"
        )
    return sorted({int(number) for number in re.findall(rb"_(\d+)", said[1])})


def _build_values(torch: CudaTorch, sources: list[Path], out: Path) -> None:
    include = (torch.folder / "include", torch.folder / "include/torch/csrc/api/include")
    flags = ("-std=c++20", "-DAT_PER_OPERATOR_HEADERS", *_FLAGS, *(f"-I{folder}" for folder in include))

    def compiled(source: Path) -> Path:
        target = out / f"{source.stem}.o"
        _run(_compiler(), *flags, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    link = ("-L", torch.folder / "lib", "-lc10", "-ltorch_cpu")
    _run(
        _compiler(),
        "-shared",
        "-o",
        out / VALUES,
        *objects,
        *link,
        "-Wl,--unresolved-symbols=ignore-all",
    )
    for path in objects:
        path.unlink()
    shutil.copy(SOURCES / "values" / "loader.py", out / f"{LOADER}.py")
    information = out / f"{LOADER}-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {LOADER}\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[torch.backends]\n{LOADER} = {LOADER}:load\n")
    (information / "RECORD").write_text("")


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
        for name in _NEEDED.findall(_run("readelf", "-d", path))
    }


def _symbols(*arguments: str | Path) -> list[str]:
    return [line for line in _run("nm", *arguments).splitlines() if len(line.split()) > 1]


def _cuda_headers(torch: CudaTorch) -> list[Path]:
    """Return the folders with the headers of torch's CUDA, the one with cuda_runtime_api.h first.

    NVIDIA's package of the runtime's headers may lack crt/host_defines.h, which Triton has.
    """
    site = torch.folder.parent
    major = torch.cuda.partition(".")[0]
    places = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(place) / "include" for place in places if place]
    candidates += [site / "nvidia" / f"cu{major}" / "include"]
    candidates += [*sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)]
    candidates += [site / "triton" / "backends" / "nvidia" / "include"]
    main = next((folder for folder in candidates if _header_version(folder) == major), None)
    rest = next((f for f in (main, *candidates) if f and (f / "crt/host_defines.h").exists()), None)
    if main is None or rest is None:
        raise Unavailable(
            f"the headers of CUDA {major} are missing: `pip install "
            f"'nvidia-cuda-runtime=={major}.*' 'nvidia-cuda-crt=={major}.*'`, or set CUDA_HOME"
        )
    return list(dict.fromkeys((main, rest)))


def _header_version(folder: Path) -> str | None:
    """Return the major version of CUDA of the headers there."""
    path = folder / "cuda_runtime_api.h"
    if not path.exists() or not (folder / "cuda.h").exists():
        return None
    said = re.search(r"define CUDART_VERSION\s+(\d+)", path.read_text(errors="replace"))
    return str(int(said[1]) // 1000) if said else None


@cache
def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name) and shutil.which("nm") and shutil.which("readelf"):
            return name
    raise Unavailable(
        "an emulated GPU is built from source: install a C++ compiler and binutils "
        "(`apt install g++`), or set CXX"
    )


@cache
def _compiler_version() -> str:
    return _run(_compiler(), "-dumpfullversion", "-dumpmachine")


def _run(*command: str | Path) -> str:
    """Run a tool of the build and return what it prints."""
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    if ran.returncode:
        said = "\n".join((ran.stdout + ran.stderr).splitlines()[:30])
        raise Unavailable(
            f"the emulated GPU could not be built: {Path(command[0]).name} said\n{said}"
        )
    return ran.stdout
