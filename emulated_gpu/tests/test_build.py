"""What is said where an emulated GPU cannot be built, and that it is built once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from emulated_gpu.build import SOURCES
from emulated_gpu.toolchain import CudaTorch, cuda_headers

Run = Callable[..., str]

FIND = "from emulated_gpu.toolchain import find_cuda_torch; print(find_cuda_torch())"
BUILD = "from emulated_gpu.build import build_driver; print(build_driver())"


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "LD_PRELOAD")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )


def torch_of(folder: Path, version: str) -> dict[str, str]:
    """Lay a package there that says of itself what an installed torch does."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: not found')")
    (folder / "torch" / "version.py").write_text(version)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def test_a_cpu_build_of_torch_is_named_with_what_to_do(tmp_path: Path) -> None:
    variables = torch_of(tmp_path, "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    said = run(FIND, **variables).stderr
    assert "torch 2.13.0+cpu was built without CUDA" in said
    assert "pip install torch" in said


def test_a_torch_of_another_cuda_is_named(tmp_path: Path) -> None:
    variables = torch_of(tmp_path, "__version__ = '2.6.0+cu118'\ncuda = '11.8'\n")
    assert "torch 2.6.0+cu118 was built for CUDA 11.8" in run(FIND, **variables).stderr


@pytest.mark.parametrize(("version", "cuda"), [("2.8.0+cu128", "12.8"), ("2.11.0+cu130", "13.0")])
def test_a_torch_that_cannot_be_imported_is_found(tmp_path: Path, version: str, cuda: str) -> None:
    variables = torch_of(tmp_path, f"__version__ = '{version}'\ncuda = '{cuda}'\n")
    ran = run(FIND, **variables)
    assert f"version='{version}', cuda='{cuda}'" in ran.stdout, ran.stderr


def test_headers_of_another_cuda_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)

    def lay(folder: str, version: int) -> Path:
        place = tmp_path / folder
        (place / "crt").mkdir(parents=True)
        (place / "cuda.h").touch()
        (place / "crt" / "host_defines.h").touch()
        (place / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
        return place

    thirteen = lay("nvidia/cu13/include", 13000)
    twelve = lay("nvidia/cuda_runtime/include", 12080)
    for cuda, expected in (("12.8", twelve), ("13.0", thirteen)):
        torch = CudaTorch(tmp_path / "torch", "of a test", cuda, 91900)
        assert cuda_headers(torch) == [expected]


@pytest.mark.emulated
def test_kernels_are_of_the_architectures_that_torch_names(run_on: Run) -> None:
    program = """
import torch
from emulated_gpu.toolchain import find_cuda_torch, kernel_architectures
named = [int(name.partition("_")[2].rstrip("af")) for name in torch.cuda.get_arch_list()]
print(sorted(set(named)) == kernel_architectures(find_cuda_torch()))
"""
    assert run_on(program) == "True\n"


@pytest.mark.emulated
def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    said = run(BUILD, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)).stderr
    assert "install a C++ compiler" in said


@pytest.mark.emulated
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = -dumpfullversion ] && exit 0\necho no space left; exit 1"
    )
    compiler.chmod(0o755)
    said = run(BUILD, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path)).stderr
    assert "could not be built: broken said\nno space left" in said
    assert list((tmp_path / "emulated-gpu").glob("driver*/")) == []


@pytest.mark.emulated
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "emulated-gpu").write_text("not a folder")
    said = run(BUILD, XDG_CACHE_HOME=str(tmp_path)).stderr
    assert "Unavailable: the emulated GPU cannot be kept in" in said
    assert "set XDG_CACHE_HOME" in said


@pytest.mark.emulated
def test_processes_that_build_at_once_get_one_build_after_one_was_killed(tmp_path: Path) -> None:
    compiler = tmp_path / "quick"  # compiles no source: other tests use what the real one makes
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -c "*) for out; do :; done\n'
        'here="$(dirname "$0")"; echo "$out" >> "$here/compiled"\n'
        'while [ -e "$here/wait" ]; do sleep 0.1; done\n'
        'exec g++ -x c++ -c /dev/null -o "$out";; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    (tmp_path / "wait").touch()
    killed = subprocess.Popen([sys.executable, "-c", BUILD], env=environment)
    while not (tmp_path / "compiled").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    (tmp_path / "wait").unlink()
    time.sleep(0.5)  # for what the killed one had started
    (tmp_path / "compiled").unlink()
    both = [
        subprocess.Popen([sys.executable, "-c", BUILD], env=environment, **pipes)  # type: ignore[call-overload]  # pipes
        for _ in range(2)
    ]
    said = [process.communicate(timeout=240) for process in both]
    (first, second) = (out for out, _ in said)
    assert first == second, said
    assert (Path(first.strip()) / "libemulated_gpu.so").exists()
    compiled = [Path(line).stem for line in (tmp_path / "compiled").read_text().splitlines()]
    assert sorted(compiled) == sorted(
        [*(path.stem for path in (SOURCES / "driver").glob("*.cpp")), "generated"]
    )
    left = [path.name for path in Path(first.strip()).parent.iterdir() if path.name[0] == "."]
    assert left == []
