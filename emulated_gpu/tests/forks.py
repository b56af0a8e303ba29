"""Runs programs in forks of one process that has imported torch, which takes seconds elsewhere.

The emulated driver reads its settings when it is first used, and so after the fork. Each request is
a line of JSON on standard input, each answer a line with the exit status.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def serve() -> None:
    import torch  # what this is for
    import torch._dynamo  # noqa: F401  # imported when an optimizer is made

    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run(request)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)


def run(request: dict[str, Any]) -> None:
    """Become the program; does not return."""
    import torch

    status = 1
    for stream, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, stream)
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        torch._import_device_backends()  # type: ignore[no-untyped-call]  # torch; loads the values
        sys.argv[:] = ["-c", *request["arguments"]]
        exec(compile(request["program"], "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
