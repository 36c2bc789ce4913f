"""Headless Chromium, driven through its DevTools protocol over a pipe: no package beside the browser is needed."""

import base64
import fcntl
import json
import os
import select
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Debian's name first.
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",  # it refuses to run as root otherwise, as in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
]
TIMEOUT = 60.0

Json = dict[str, Any]


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. errors: what its console and its policies complained of, and exceptions that nobody caught."""

    def __init__(self, reading: int, writing: int):
        self.errors: list[str] = []
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until its scripts have run. A width below 500 stands for a phone."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size: Json = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited. Raises AssertionError for an exception."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = TIMEOUT) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"it never came true: {expression}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40, " ": 32}
        event: Json = {"key": key, "code": "Space" if key == " " else key, "modifiers": 8 * shift}
        event["windowsVirtualKeyCode"] = codes[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **params: Any) -> Json:
        """A command of the DevTools protocol and its result."""
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writing, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> Json:
        while b"\0" not in self._buffer:
            assert select.select([self._reading], [], [], TIMEOUT)[0], "the browser does not answer"
            data = os.read(self._reading, 2**16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: Json) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))


@contextmanager
def browsing(program: str) -> Iterator[Browser]:
    """A browser without a past, which is gone after the block."""
    profile = tempfile.mkdtemp(prefix="chromium-")
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    # The browser wants them as 3 and 4. Copies out of the way first, so that neither overwrites the other.
    commands, answers = (
        fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read_commands, write_answers)
    )
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    pipes = [(os.POSIX_SPAWN_DUP2, commands, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
    process = os.posix_spawn(
        program,
        [program, *FLAGS, f"--user-data-dir={profile}"],
        {**os.environ, "HOME": profile},
        file_actions=[*quiet, *pipes],
    )
    for end in (read_commands, write_answers, commands, answers):
        os.close(end)
    try:
        yield Browser(read_answers, write_commands)
    finally:
        os.close(write_commands)  # the end of its commands is the end of the browser
        os.close(read_answers)
        os.waitpid(process, 0)
        shutil.rmtree(profile, ignore_errors=True)  # its last helper may still be writing
