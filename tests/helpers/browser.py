"""A real browser for tests: headless Chromium, driven through its debugging pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil


def chromium() -> str | None:
    """Path of the installed browser, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One open page."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int):
        self._process = process
        self._writer = open(to_browser, "wb", buffering=0)  # noqa: SIM115
        self._reader = open(from_browser, "rb", buffering=0)  # noqa: SIM115
        self._held = b""
        self._serial = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._serial += 1
        message: dict[str, Any] = {"id": self._serial, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._serial:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            piece = self._reader.read(65536)
            assert piece, "the browser ended"
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Loads a page."""
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; True for an element."""
        wrapped = f"(value => value instanceof Node || value)({script})"
        answer = self._call("Runtime.evaluate", expression=wrapped, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 300) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, (
                f"{script} stayed {value!r}; page: {self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.05)
        return value

    def type(self, selector: str, text: str) -> None:
        """Puts text into a field as a keyboard would."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self._call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Clicks an element."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path) -> None:
        """Writes a PNG of what is visible."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A fresh browser with one page."""
    program = chromium()
    assert program is not None, "no chromium is installed"
    into_read, into_write = os.pipe()
    out_read, out_write = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--window-size=1200,800",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        # The browser reads commands from descriptor 3 and answers on 4; a shell puts the pipes there.
        command = f'exec "$0" "$@" 3<&{into_read} 4>&{out_write}'
        process = subprocess.Popen(
            ["bash", "-c", command, program, *options],
            pass_fds=(into_read, out_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(into_read)
        os.close(out_write)
        try:
            yield Page(process, into_write, out_read)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the browser and all of its group: what it started outlives it by a moment and writes to its profile."""
    process.terminate()
    process.wait(20)
    end = time.monotonic() + 20
    while running := [other.pid for other in psutil.process_iter() if _runs_in(process.pid, other)]:
        assert time.monotonic() < end, f"processes of the browser go on: {running}"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.01)


def _runs_in(group: int, process: psutil.Process) -> bool:
    """Whether a process of the group can still write; one that waits to be reaped cannot."""
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
