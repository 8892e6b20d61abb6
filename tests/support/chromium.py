"""A real headless Chromium, driven over its own debugging pipe (Chrome DevTools Protocol): no port, no package.

Theory of operation. The browser reads commands from descriptor 3 and writes answers and events to descriptor 4, JSON
closed by a zero byte. A trampoline moves the pipe there and becomes the browser. Everything happens on the test's own
thread: a command reads until its answer is there and keeps the events it meets on the way.

The browser talks to loopback alone: its services are off and every other name resolves to nothing.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ANSWER_S = 30.0
"""A command is answered in so long, on a machine that does other work, too."""
LOOK_S = 0.02
INSTALL_S = 200.0
NOTE = Path(__file__).resolve().parents[2] / ".venv" / ".browser-deps"
"""What `tools/browser_deps.sh` has to say when there is no browser; beside it, its lock."""
LOCK = NOTE.with_name(NOTE.name + ".lock")
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
APPLICATIONS = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-client-side-phishing-detection",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--disable-features=MediaRouter,OptimizationHints,Translate",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--mute-audio",
    "--password-store=basic",
    "--use-mock-keychain",
)
_TRAMPOLINE = """
import os, sys
read, write = int(sys.argv[1]), int(sys.argv[2])
kept = [os.dup(read), os.dup(write)]
while min(kept) < 5:
    kept = [os.dup(each) for each in kept]
for fd, place in zip(kept, (3, 4)):
    os.dup2(fd, place, inheritable=True)
os.execv(sys.argv[3], sys.argv[3:])
"""


class BrowserError(Exception):
    """The browser did not do what it was told; the message has its words."""


def find_chromium() -> str | None:
    """The browser's program: `KVD_TEST_CHROMIUM`, else the first that is installed; None without one."""
    named = os.environ.get("KVD_TEST_CHROMIUM")
    if named:
        return named
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return found or next((path for path in APPLICATIONS if os.access(path, os.X_OK)), None)


def why_not() -> str:
    """Why there is no browser, for a skipped test."""
    told = NOTE.read_text().strip() if NOTE.is_file() else ""
    return f"no Chromium or Chrome found; {told or 'make browser-deps installs one as root on Debian'}"


def installed(*, timeout_s: float = INSTALL_S) -> bool:
    """Whether `tools/browser_deps.sh` is done, which `make test` runs beside the first tests; waits for it.

    While it runs a browser may be there in part, so nobody is to look for one before.
    """
    try:
        lock = LOCK.open("rb")
    except OSError:  # it never ran
        return True
    deadline = time.monotonic() + timeout_s
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(LOOK_S)
            else:
                return True


class Browser:
    """One browser process. Owner: one fixture; used on one thread.

    Args:
        program: its path.
        profile: a private folder, removed by the caller after `close`.
    """

    def __init__(self, program: str, profile: Path) -> None:
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()
        trampoline = [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(child_reads), str(child_writes)]
        self._log = (profile / "log").open("wb")
        self._process = subprocess.Popen(
            [*trampoline, program, *OPTIONS, *sandbox, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(child_reads, child_writes),
            start_new_session=True,  # its helper processes end with it, whatever happens
        )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer = bytearray()
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, params: Mapping[str, object] | None = None, session: str | None = None) -> Any:
        """One command; returns its result.

        Raises:
            BrowserError: it was refused, not answered in time, or the browser is gone.
        """
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": dict(params or {})}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + ANSWER_S
        while True:
            told = self._message(deadline - time.monotonic())
            if told is None:
                raise BrowserError(f"{method} was not answered within {ANSWER_S:g} s")
            if told.get("id") == self._last_id:
                if "error" in told:
                    raise BrowserError(f"{method}: {told['error'].get('message')}")
                return told["result"]
            self.events.append(told)

    def _message(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while (end := self._buffer.find(b"\0")) < 0:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError(f"the browser ended with {self._process.wait()}")
            self._buffer += data
        message: dict[str, Any] = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        return message

    def page(self, *, width: int = 1280, height: int = 900, scale: float = 1.0, dark: bool = False) -> Page:
        """A new, empty page with a cookie jar and storage of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            page.call(f"{domain}.enable")
        page.look(width=width, height=height, scale=scale, dark=dark)
        return page

    def close(self) -> None:
        """End the browser and everything it started."""
        with suppress(BrowserError, BrokenPipeError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._log.close()


class Page:
    """One page. Owner: one test. Made by `Browser.page` only."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context

    def call(self, method: str, **params: object) -> Any:
        """One command to this page."""
        return self._browser.call(method, params, self._session)

    def look(self, *, width: int, height: int, scale: float = 1.0, dark: bool = False, still: bool = False) -> None:
        """The window and what its user prefers.

        Args:
            width: of the window, in CSS pixels.
            height: of it.
            scale: device pixels of one.
            dark: dark colours.
            still: reduced motion.
        """
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Go to an address and wait until it is loaded."""
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url}: {answer['errorText']}")
        self.until("document.readyState === 'complete'", "the page is loaded")

    def run(self, expression: str) -> Any:
        """The value of an expression, awaited.

        Raises:
            BrowserError: it threw.
        """
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def until(self, expression: str, what: str, *, timeout_s: float = ANSWER_S) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}; {self.complaints()}"
            time.sleep(LOOK_S)

    def key(self, key: str) -> None:
        """Press and let go of a key, by its DOM name."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def move(self, x: float, y: float) -> None:
        """Put the pointer there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        """A finger touches there."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """Save what is seen, or the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def complaints(self) -> list[str]:
        """Errors on its console, exceptions, violations of its content security policy, and requests that failed."""
        self.call("Runtime.evaluate", expression="1")  # events up to now are here behind its answer
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    details = params["exceptionDetails"]
                    found.append(str(details.get("exception", {}).get("description") or details["text"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    found.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    found.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
                case "Audits.issueAdded":
                    found.append(json.dumps(params["issue"]))
        return found

    def requested(self) -> list[str]:
        """Addresses that it asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """Close it and forget what it stored."""
        self._browser.call("Target.disposeBrowserContext", {"browserContextId": self._context})


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own; ended at the end."""
    with tempfile.TemporaryDirectory(prefix="kvd-browser-", ignore_cleanup_errors=True) as folder:
        running = Browser(program, Path(folder))
        try:
            yield running
        finally:
            running.close()


__all__: Sequence[str] = ["Browser", "BrowserError", "Page", "browser", "find_chromium", "installed", "why_not"]
