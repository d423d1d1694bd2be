"""A headless browser for tests: it opens a page, runs scripts in it, and takes pictures.

It is driven by the DevTools protocol over a pipe: JSON, ended by a zero byte, on descriptors 3 and 4.
Source: https://chromedevtools.github.io/devtools-protocol, and Chromium's `--remote-debugging-pipe`.
"""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from support.waiting import HANG_S, wait_until

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="the page runs in chromium, which is not installed")
_QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
_COMMAND = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars", *_QUIET)


class Browser:
    """A running browser; `close` it, or use it in a `with`. `said`: what the consoles of its pages said."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None, "asked before"
        self.said: list[str] = []
        pipes = (*os.pipe(), *os.pipe())
        # Descriptors 3 and 4 are a shell's to give: until then the pipes have higher numbers.
        commands, self._to, self._from, answers = (fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in pipes)
        for pipe in pipes:
            os.close(pipe)
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', CHROMIUM, *_COMMAND]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._numbers, self._rest = itertools.count(1), b""

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._process.poll() is None:
            self.call("Browser.close")
        self._process.wait(HANG_S)
        os.close(self._to)
        os.close(self._from)

    def open(self, url: str, width: int = 1280, height: int = 900, is_dark: bool = False) -> "Page":
        """Opens a page in a new profile of its own, without cookies and storage of others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        page.call("Runtime.enable")
        page.call("Log.enable")
        page.call("Page.enable")
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        page.wait("document.readyState === 'complete'")
        return page

    def call(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        """Calls a method and returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + HANG_S
        while True:
            answer = self._next(end)
            self._listen(answer)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], max(0, end - time.monotonic()))[0], "the browser does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        raw, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def _listen(self, answer: dict[str, Any]) -> None:
        values = answer.get("params", {})
        if answer.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(values["exceptionDetails"].get("exception", values["exceptionDetails"])))
        elif answer.get("method") == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.said.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")


class Page:
    """An open page."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **values)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int, scale: float = 1, is_phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )

    def run(self, script: str) -> Any:
        """Returns the value of an expression, or of the promise that it gives."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until an expression is true."""
        wait_until(
            lambda: bool(self.run(f"Boolean({condition})")),
            lambda: f"never true: {condition}; the page says: {self.text('body')}",
        )

    def text(self, selector: str) -> str:
        """Returns the text of the first element that a selector finds; nothing if there is none, or it is hidden."""
        found = f"document.querySelector({json.dumps(selector)})"
        return str(self.run(f"{found} && {found}.checkVisibility() ? {found}.innerText : ''"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def write(self, selector: str, text: str) -> None:
        """Focuses a field and types a text."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Presses a key, for example Enter, as a keyboard does."""
        codes: dict[str, dict[str, Any]] = {
            "Enter": {"text": "\r", "windowsVirtualKeyCode": 13},
            "Escape": {"windowsVirtualKeyCode": 27},
        }
        extra = codes.get(key, {})
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
