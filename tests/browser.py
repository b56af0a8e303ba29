"""A real browser for tests: headless Chromium, driven over a pair of pipes by its own protocol.

Promises: what a page logs, throws, is refused by its policy and asks the network for is all noted.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM: Any = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_END = b"\0"


class Browser:
    """One tab; `opened` makes it.

    Attributes:
        complaints: what the page logged as an error or a warning, threw, or was refused.
        requests: addresses that the page asked for, its own among them.
    """

    def __init__(self, to_it: int, from_it: int) -> None:
        self._to_it, self._from_it = to_it, from_it
        self._number, self._tab, self._loaded = 0, None, False
        self._unread = b""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._tab = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, path: Path, *, width: int, height: int = 800, phone: bool = False) -> None:
        """Open a file and wait until it is loaded."""
        self.resize(width, height=height, phone=phone)
        self._loaded = False
        self._ask("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._note(self._next())

    def resize(self, width: int, *, height: int = 800, phone: bool = False) -> None:
        """Give the window another size."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, scheme: str) -> None:
        """Prefer "dark" or "light" colours."""
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self._ask("Emulation.setEmulatedMedia", features=[wanted])

    def show_on(self, medium: str) -> None:
        """Show the page as on "screen" or in "print"."""
        self._ask("Emulation.setEmulatedMedia", media=medium)

    def run(self, script: str) -> Any:
        """Return what an expression is, as JSON has it; promises are awaited."""
        answer = self._ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _ask(self, method: str, **given: Any) -> Any:
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": given}
        if self._tab is not None:
            asked["sessionId"] = self._tab
        os.write(self._to_it, json.dumps(asked).encode() + _END)
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _next(self) -> dict[str, Any]:
        while _END not in self._unread:
            read = os.read(self._from_it, 2**20)
            assert read, "the browser has ended"
            self._unread += read
        message, _, self._unread = self._unread.partition(_END)
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                words = [str(part.get("value", part.get("description"))) for part in params["args"]]
                self.complaints.append(f"console.{params['type']}: {' '.join(words)}")
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(str(params["entry"]))
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])


@contextmanager
def opened() -> Iterator[Browser]:
    """Start a browser with a fresh profile; end it afterwards."""
    (read_by_it, to_it), (from_it, written_by_it) = _far_pipe(), _far_pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            # It reads from descriptor 3 and writes to 4.
            ["bash", "-c", f'exec "$0" "$@" 3<&{read_by_it} 4>&{written_by_it}', CHROMIUM, *_FLAGS,
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read_by_it, written_by_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_by_it)
        os.close(written_by_it)
        try:
            yield Browser(to_it, from_it)
        finally:
            process.terminate()
            process.wait(20)
            os.close(to_it)
            os.close(from_it)


def _far_pipe() -> list[int]:
    """Return both ends of a pipe, whose numbers are none that the browser wants."""
    ends = os.pipe()
    far = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return far
