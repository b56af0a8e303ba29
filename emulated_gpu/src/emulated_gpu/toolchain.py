"""What an emulated GPU is built from: the CUDA build of torch, a compiler, and CUDA's headers."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from emulated_gpu.errors import Unavailable

_PACKAGES = {
    "12": "'nvidia-cuda-runtime-cu12==12.*' 'nvidia-cuda-nvcc-cu12==12.*'",
    "13": "'nvidia-cuda-runtime==13.*' 'nvidia-cuda-crt==13.*'",
}
"""By major version of CUDA, all that are supported: what has its headers."""
_ARCHITECTURES = re.compile(rb"((?:(?:sm|compute)_\d+[af]? ?){2,})\0")
"""What torch.cuda.get_arch_list() says, in libtorch_python.so."""


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
        f"an emulated GPU needs the CUDA build of torch, for CUDA {' or '.join(_PACKAGES)}: `pip "
        "install torch` from the default index, or with --no-deps, without NVIDIA's libraries, "
        "which are emulated"
    )
    if not cuda:
        raise Unavailable(f"torch {version} was built without CUDA; {advice}")
    if cuda.partition(".")[0] not in _PACKAGES:
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
    headers = cuda_headers(find_cuda_torch())
    return compiler(), headers


def why_unavailable() -> str | None:
    """Return what an emulated GPU lacks here and how to get it; None: nothing. Builds nothing."""
    try:
        toolchain()
    except Unavailable as error:
        return str(error)
    return None


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
            "for: use another version, such as 2.11, whose library does"
        )
    return sorted({int(number) for number in re.findall(rb"_(\d+)", said[1])})


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


def cuda_headers(torch: CudaTorch) -> list[Path]:
    """Return the folders with the headers of torch's CUDA, the one with cuda_runtime_api.h first.

    NVIDIA's package of the runtime's headers may lack crt/host_defines.h, which Triton has.
    """
    site = torch.folder.parent
    major = torch.cuda.partition(".")[0]
    places = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(place) / "include" for place in places if place]
    # The second is that of CUDA 12's packages.
    candidates += [site / "nvidia" / name / "include" for name in (f"cu{major}", "cuda_runtime")]
    candidates += [*sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)]
    candidates += [site / "triton" / "backends" / "nvidia" / "include"]
    main = next((folder for folder in candidates if _header_version(folder) == major), None)
    rest = next((f for f in (main, *candidates) if f and (f / "crt/host_defines.h").exists()), None)
    if main is None or rest is None:
        raise Unavailable(
            f"the headers of CUDA {major} are missing: `pip install {_PACKAGES[major]}`, or set "
            "CUDA_HOME"
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
def compiler() -> str:
    """Return the command of a C++ compiler.

    Raises:
        Unavailable: there is none, or no binutils.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name) and shutil.which("nm") and shutil.which("readelf"):
            return name
    raise Unavailable(
        "an emulated GPU is built from source: install a C++ compiler and binutils "
        "(`apt install g++`), or set CXX"
    )


@cache
def compiler_version() -> str:
    """Return what the compiler says of its version and target."""
    return run_tool(compiler(), "-dumpfullversion", "-dumpmachine")


def run_tool(*command: str | Path) -> str:
    """Run a tool of the build and return what it prints.

    Raises:
        Unavailable: it failed, with what it said.
    """
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    if ran.returncode:
        said = "\n".join((ran.stdout + ran.stderr).splitlines()[:30])
        raise Unavailable(
            f"the emulated GPU could not be built: {Path(command[0]).name} said\n{said}"
        )
    return ran.stdout
