"""Python processes that begin with torch already imported, because they are forked.

Importing torch and what it imports when it first trains takes about eight seconds of a processor,
many times what a test does in the process. `ForkedPopen` is a `subprocess.Popen` whose
interpreters are forked from a server that has done these imports. They run the same program, are
children of the caller (their end, the end of their parent and signals are the real thing), and
inherit what a spawned process inherits. Tests of how processes are started spawn them.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import inspect
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_MARK = "AUTOFIT_WORKER"
_SERVE = """
import sys
sys.path[0] = sys.argv[2]
from tests.fork_server import serve
del sys.path[0]
serve(int(sys.argv[1]))()
"""
_PYTHON = sys.executable
_WITHOUT_VALUES = {"EMULATED_GPU_VALUES": "0"}  # a process loads them when it is forked

SUPPORTED = sys.platform == "linux" and _CLONE is not None


class ForkServer:
    """A process that has imported what trainings import, and does nothing but fork.

    Its environment has room for a worker's mark, and another order of sets than its parent.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.lock = threading.Lock()
        self._connection = connection
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def connection(self) -> socket.socket:
        """The socket on which it takes orders; it is started when it is first needed."""
        if self._connection is None:
            self._connection, theirs = socket.socketpair()
            self._connection.settimeout(300)
            with theirs:
                self._process = self._start(theirs.fileno())
        return self._connection

    @property
    def serves_here(self) -> bool:
        """Whether it can fork: the kernel ends what it forks with the thread that started it."""
        return self._connection is not None or threading.current_thread() is threading.main_thread()

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        root = Path(__file__).parents[1]
        return subprocess.Popen(
            [sys.executable, "-u", "-c", _SERVE, str(descriptor), str(root)],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,
            env=os.environ | {_MARK: "0" * 32, "PYTHONHASHSEED": "1", **_WITHOUT_VALUES},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def close(self) -> None:
        """End it; the processes that it has forked live on."""
        if self._process is not None:
            self.connection.close()
            self._process.kill()
            self._process.wait()


class ForkedPopen(subprocess.Popen[Any]):
    """Run `python [-u] (-c CODE | -m MODULE | FILE) ...` in a fork of the server.

    Args:
        server: what forks it.
        forks_workers: whether the workers of autofit that it starts are forked in turn, by a
            server that it brings along as one more child.
    """

    def __init__(
        self, *arguments: Any, server: ForkServer, forks_workers: bool = False, **options: Any
    ) -> None:
        self._server = server
        self._forks_workers = forks_workers
        super().__init__(*arguments, **options)

    def _execute_child(self, *arguments: Any) -> None:
        inherited: Callable[..., None] = getattr(super(), "_execute_child")  # noqa: B009  # not in typeshed
        call = inspect.signature(inherited).bind(*arguments).arguments
        command = list(map(os.fspath, call["args"]))
        unsent = call["preexec_fn"] is not None or _is_for_another_driver(call["env"])
        if command[0] != _PYTHON or unsent or not self._server.serves_here:
            inherited(*arguments)
            return
        sys.audit("subprocess.Popen", command[0], command, call["cwd"], call["env"])
        given = (call["p2cread"], call["c2pwrite"], call["errwrite"])
        streams = {n: descriptor if descriptor >= 0 else n for n, descriptor in enumerate(given)}
        sent = streams | {number: number for number in call["pass_fds"]}
        request = {
            "arguments": command[1:],
            "descriptors": list(sent),
            "environment": dict(os.environ if call["env"] is None else call["env"]),
            "folder": os.fspath(call["cwd"] or os.getcwd()),
            "session": call["start_new_session"],
            "forks_workers": self._forks_workers,
        }
        message = json.dumps(request).encode()
        with self._server.lock:
            connection = self._server.connection
            socket.send_fds(connection, [len(message).to_bytes(8)], list(sent.values()))
            connection.sendall(message)
            self.pid = int.from_bytes(connection.recv(4))
        self._child_created = True
        for descriptor in {*given} - {-1}:
            os.close(descriptor)


def _is_for_another_driver(environment: Mapping[str, str] | None) -> bool:
    """Whether it needs libraries that the server has not loaded.

    An emulated driver reads its settings when it is first used, and the server does not use it.
    """
    given = os.environ if environment is None else environment
    return any(given.get(name) != os.environ.get(name) for name in ("LD_PRELOAD", "PYTHONPATH"))


def forked_subprocess(server: ForkServer) -> types.SimpleNamespace:
    """Return what a module that has imported `subprocess` may have in its place."""

    def popen(*arguments: Any, **options: Any) -> ForkedPopen:
        return ForkedPopen(*arguments, server=server, **options)

    return types.SimpleNamespace(**vars(subprocess) | {"Popen": popen})


# In the server, and in what it forks.


def serve(descriptor: int) -> Callable[[], object]:
    """Fork until the other end is closed; return what this process, perhaps a fork, runs next."""
    import torch._dynamo  # noqa: F401  # imported when an optimizer is made

    import autofit.cli.main
    import autofit.probing.worker
    import autofit.searching.search  # noqa: F401

    _mark_address()
    gc.collect()
    gc.freeze()  # pages that no collection writes to stay shared
    atexit.register(gc.unfreeze)  # libraries complain at the end of what was not collected
    assert len(os.listdir("/proc/self/task")) == 1, "only what has one thread can be forked"
    return _serve(socket.socket(fileno=descriptor))


def _serve(connection: socket.socket) -> Callable[[], object]:
    with connection:
        while (received := _receive(connection)) is not None:
            request, descriptors = received
            if _fork_sibling() == 0:
                return _become(connection, request, descriptors)
            for each in descriptors:
                os.close(each)
    return lambda: None


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    header, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
    if not header:
        return None
    left, parts = int.from_bytes(header), []
    while left:
        parts.append(connection.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), descriptors


def _fork_sibling() -> int:
    """Fork a child of this process's parent, who can wait for it as for any other."""
    libc = ctypes.PyDLL(None)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = libc.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _become(
    connection: socket.socket, request: Mapping[str, Any], descriptors: list[int]
) -> Callable[[], object]:
    if request["session"]:
        os.setsid()
    _set_environment(request["environment"])
    connection.sendall(os.getpid().to_bytes(4))  # from here on its parent can end it
    connection.close()
    _place(descriptors, request["descriptors"])
    os.chdir(request["folder"])
    if request["forks_workers"]:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            return _serve_apart(theirs)
        theirs.close()
        _fork_workers(ours)
    _load_values()
    return functools.partial(_run, _program(request["arguments"]))


def _run(program: Callable[[], object]) -> None:
    """Run it, and end as an interpreter does but for freeing all modules, which takes a second."""
    status = 0
    try:
        program()
    except KeyboardInterrupt:
        raise  # an interpreter ends of the signal
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if not isinstance(left.code, int | None):
            print(left.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter calls, too
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # either may be closed
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, as where a pipe is broken
            status = status or 120
    os._exit(status & 0xFF)


def _set_environment(environment: Mapping[str, str]) -> None:
    """Also where /proc shows it, as far as autofit looks there: at a worker's mark."""
    if _MARK in environment:
        ctypes.memmove(_mark_address(), environment[_MARK].encode(), 32)
    os.environ.clear()
    os.environ.update(environment)


def _load_values() -> None:
    """Load the operators' values where an emulated GPU has some, as `import torch` would have."""
    wanted = os.environ.get("EMULATED_GPU_VALUES") == "1"
    if wanted and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        import torch

        torch._import_device_backends()  # type: ignore[no-untyped-call]  # torch left it so


@functools.cache  # first called before any fork takes the variable out of its environment
def _mark_address() -> int:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    return getenv(_MARK.encode())


def _place(descriptors: list[int], wanted: list[int]) -> None:
    """Give each descriptor the number that it has in the parent; close all others."""
    above = max(64, *wanted) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    os.closerange(3, above)
    for source, target in zip(moved, wanted, strict=True):
        os.dup2(source, target)
        os.close(source)


def _serve_apart(connection: socket.socket) -> Callable[[], object]:
    """Serve with nothing of the parent's open."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    number = connection.detach()
    os.closerange(3, number)
    os.closerange(number + 1, 1024)
    return _serve(socket.socket(fileno=number))


def _fork_workers(connection: socket.socket) -> None:
    from autofit.probing import worker_channel

    vars(worker_channel)["subprocess"] = forked_subprocess(ForkServer(connection))


def _program(arguments: list[str]) -> Callable[[], object]:
    """What a new interpreter does with these arguments."""
    while arguments[0] in ("-u", "-P", "-s"):
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        return lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    main = types.ModuleType("__main__")
    vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv[:] = arguments
        file = Path(arguments[0]).resolve()
        sys.path.insert(0, str(file.parent))
        vars(main)["__file__"] = str(file)
        code = compile(file.read_text(), str(file), "exec")
    return lambda: exec(code, vars(main))
