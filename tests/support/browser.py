"""A real Chromium without a window, driven over its DevTools protocol: through a pair of pipes, so that nothing else is needed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEADLINE_S = 60.0  # far more than anything takes; reached only when something hangs
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
KEYS = {"Enter": (13, "\r"), "Tab": (9, "\t"), "Escape": (27, "")}


class BrowserError(Exception):
    """What the browser, or a script in a page, said went wrong."""


def find_chromium() -> str:
    """$CHROMIUM, or the first of the usual names."""
    chosen = os.environ.get("CHROMIUM")
    found = chosen or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise BrowserError(
            "These tests need Chromium: `apt-get install -y chromium`, or name a Chrome with CHROMIUM=path."
        )
    return found


def _moved(descriptor: int) -> int:
    """The same under a number that is not 3 or 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


class Browser:
    """One browser process; each page gets a profile of its own. Nothing is left when the block ends."""

    def __init__(self, profile: Path) -> None:
        to_read, self._to_browser = os.pipe()
        self._from_browser, to_write = os.pipe()
        words = [find_chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # The browser reads commands from descriptor 3 and writes to 4.
        to_read, to_write = _moved(to_read), _moved(to_write)
        script = f'exec "$@" 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
            start_new_session=True,
            env={**os.environ, "HOME": str(profile)},
        )
        os.close(to_read)
        os.close(to_write)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._listeners: dict[str, Callable[[dict[str, Any]], None]] = {}  # by session
        self._num_calls = 0
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="browser")
        self._reader.start()

    def call(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """The result of one command; BrowserError if it is refused."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            self._answers[number] = answer
            message = {"id": number, "method": method, "params": parameters or {}}
            os.write(
                self._to_browser, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
            )
        try:
            given = answer.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise BrowserError(f"{method} was not answered: {parameters}") from None
        if "error" in given:
            raise BrowserError(f"{method}: {given['error']['message']}")
        result: dict[str, Any] = given["result"]
        return result

    @contextlib.contextmanager
    def page(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, trusts_all: bool = False
    ) -> Iterator[Page]:
        """A page as a person opens it; with `trusts_all` one who accepts any certificate. Errors of its scripts fail the block at its
        end."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        try:
            target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
            session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
            page = Page(self, session)
            self._listeners[session] = page.hear
            page.prepare(width, height, dark)
            if trusts_all:
                self.call("Security.setIgnoreCertificateErrors", {"ignore": True}, session)
            page.open(url)
            yield page
            assert not page.complaints, page.complaints
        finally:
            self.call("Target.disposeBrowserContext", {"browserContextId": context})

    def close(self) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(DEADLINE_S)
        os.close(self._to_browser)
        os.close(self._from_browser)

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._from_browser, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif (listener := self._listeners.get(message.get("sessionId", ""))) is not None:
                    listener(message)
        for answer in list(self._answers.values()):
            answer.put({"error": {"message": "the browser has ended"}})


class Page:
    """One tab: what a person does in it, and what a script in it sees."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []  # errors of scripts, and what the content policy refused
        self.posted: list[tuple[str, str]] = []  # path and body of each POST

    def prepare(self, width: int, height: int, dark: bool) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self._call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        self.run("window.isOld = true")
        self._call("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, or of its promise."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return result["result"].get("value")

    def wait(self, claim: str) -> Any:
        """The value of the expression once it is true."""
        look = f"const value = ({claim}); if (value) done(value); else setTimeout(look, 20);"
        stop = f"setTimeout(() => fail(new Error('never true')), {DEADLINE_S * 500});"
        script = f"new Promise((done, fail) => {{ {stop} const look = () => {{ {look} }}; look(); }})"
        while True:
            try:
                return self.run(script)
            except BrowserError as error:
                if "context was destroyed" in str(error) or "navigated or closed" in str(error):
                    continue  # the page was loaded meanwhile
                state = self.run("document.body.innerText")
                raise BrowserError(f"{claim}: {error}\n{state}") from None

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is seen of it."""
        where = self.run(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.scrollIntoView({{block: 'center'}});"
            " const r = it.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text.strip("\t") else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def accessible_nodes(self) -> list[dict[str, str]]:
        """Role and name of what a screen reader is told of."""
        self._call("Accessibility.enable")
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
            for node in nodes
            if not node.get("ignored")
        ]

    def hear(self, message: dict[str, Any]) -> None:
        values = message["params"]
        match message["method"]:
            case "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if values["entry"]["level"] == "error" and values["entry"]["source"] != "network":
                self.complaints.append(values["entry"]["text"])
            case "Network.requestWillBeSent" if values["request"]["method"] == "POST":
                self.posted.append((values["request"]["url"], values["request"].get("postData", "")))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)
