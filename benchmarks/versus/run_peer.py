"""One tool in a process of its own: what it answers, how long that takes, and what it leaves.

    python -m benchmarks.versus.run_peer NAME TASK.json FOLDER

writes FOLDER/found.json.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.versus import peers
from benchmarks.versus.place import compute_alike
from benchmarks.versus.roster import PEERS
from benchmarks.versus.state import changes, state_of
from benchmarks.versus.task import Task


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Return what is installed; None: the package is not."""
    found: dict[str, str | None] = {}
    for package in ("torch", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def main() -> None:
    """Run the tool; whatever it raises is part of what was found."""
    name, task_file, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    task, peer = Task(**json.loads(task_file.read_text())), PEERS[name]
    compute_alike(task.place)
    found: dict[str, Any] = {"versions": versions(peer.packages)}
    model = task.build().train()
    live = peers.Live(model, task.optimizer(model))
    before = state_of(live.model, live.optimizer)
    began = time.perf_counter()
    try:
        found["answer"] = asdict(getattr(peers, peer.tool)(task, live, folder, **peer.options))
    except Exception as error:  # of any kind: it is what its user would meet
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    found["seconds"] = time.perf_counter() - began
    found["changed"] = changes(before, state_of(live.model, live.optimizer))
    (folder / "found.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
