"""One tool in a process of its own: what it answers, and how long that takes.

    python -m benchmarks.versus.run_peer NAME TASK.json FOLDER

writes FOLDER/found.json.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.versus import peers
from benchmarks.versus.place import compute_alike
from benchmarks.versus.roster import PEERS
from benchmarks.versus.task import Task


def main() -> None:
    """Run the tool; whatever it raises is part of what was found."""
    name, task_file, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    task, peer = Task(**json.loads(task_file.read_text())), PEERS[name]
    compute_alike(task.place)
    versions = {}
    for package in ("torch", *peer.packages):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    found: dict[str, Any] = {"versions": versions}
    model = task.build().train()
    live = peers.Live(model, task.optimizer(model))
    began = time.perf_counter()
    try:
        answer = getattr(peers, peer.tool)(task, live, folder, **peer.options)
        found["answer"] = asdict(answer.keeping(task.global_batch))
    except Exception as error:  # of any kind: it is what its user would meet
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    found["seconds"] = round(time.perf_counter() - began, 2)
    (folder / "found.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
