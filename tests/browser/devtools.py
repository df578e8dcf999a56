"""A headless Chromium, driven over the DevTools protocol through a pair of pipes: no driver, no sockets.

Messages are JSON objects ended by a NUL byte; the browser reads them from descriptor 3 and writes to 4. Everything
that waits does so for a message of the browser, bounded by `TIMEOUT`.
"""

import base64
import fcntl
import json
import os
import queue
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT = 20.0  # seconds for any one answer; the slowest measured here takes one
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-features=BackForwardCache",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# What a key press needs beside its name: code number and, if it types something, text.
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowUp": (38, ""), "ArrowLeft": (37, "")}
SHIFT = 8
DESKTOP = (1200, 800)  # CSS pixels


def find_browser() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class ProtocolError(Exception):
    """The browser refused a command, or did not answer in time."""


class Browser:
    """A running browser. `profile` is an empty folder of its own."""

    def __init__(self, path: str, profile: Path):
        to_browser, self._input = _pipe()
        self._output, from_browser = _pipe()
        null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        ends = [(os.POSIX_SPAWN_DUP2, to_browser, 3), (os.POSIX_SPAWN_DUP2, from_browser, 4)]
        command = [path, *FLAGS, f"--user-data-dir={profile}"]
        # A group of its own, so that its helper processes end with it.
        self.pid = os.posix_spawn(path, command, os.environ, file_actions=[*null, *ends], setpgroup=0)
        os.close(to_browser)
        os.close(from_browser)
        self._lock, self._next_id = threading.Lock(), 0
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, name="devtools", daemon=True)
        self._reader.start()

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """The result of a command. Raises ProtocolError."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._next_id += 1
            number = self._next_id
            self._answers[number] = answer
            message = {"id": number, "method": method, "params": params or {}}
            _write(self._input, message | ({"sessionId": session} if session else {}))
        try:
            reply = answer.get(timeout=TIMEOUT)
        except queue.Empty:
            raise ProtocolError(f"{method}: no answer within {TIMEOUT:g} s") from None
        finally:
            self._answers.pop(number, None)
        if "error" in reply:
            raise ProtocolError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    @contextmanager
    def page(self, width: int = DESKTOP[0], height: int = DESKTOP[1], scale: float = 1) -> Iterator["Page"]:
        """A page with storage of its own, closed and forgotten at the end of the block."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        try:
            target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
            session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
            page = self._pages[session] = Page(self, session)
            for domain in ("Page", "Runtime", "Log"):
                page.call(f"{domain}.enable")
            page.call("Emulation.setFocusEmulationEnabled", {"enabled": True})
            page.call("Emulation.setTimezoneOverride", {"timezoneId": "UTC"})
            page.call("Emulation.setLocaleOverride", {"locale": "en"})
            page.resize(width, height, scale)
            yield page
        finally:
            self.call("Target.disposeBrowserContext", {"browserContextId": context})

    def close(self) -> None:
        """End the browser and wait for it."""
        try:
            self.call("Browser.close")
        except (ProtocolError, OSError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._reader.join()
        os.close(self._input)
        os.close(self._output)

    def _read(self) -> None:
        rest = b""
        while received := os.read(self._output, 1 << 16):
            *messages, rest = (rest + received).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if answer := self._answers.get(message.get("id")):
                    answer.put(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page.notice(message["method"], message["params"])
        for answer in list(self._answers.values()):
            answer.put({"error": {"message": "the browser is gone"}})


class Page:
    """One tab. `problems` collects what its console counts as an error."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session
        self._loaded = threading.Event()
        self._injected: list[str] = []
        self.problems: list[str] = []

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def notice(self, method: str, params: dict[str, Any]) -> None:
        """Called by the reading thread for each event."""
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            url = params["entry"].get("url", "")
            # Asked for by the browser itself, where an address names no icon.
            if not url.endswith("/favicon.ico"):
                self.problems.append(f"{params['entry']['text']} {url}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(str(params["args"]))

    def open(self, url: str) -> None:
        """Load an address, with its scripts."""
        self._loaded.clear()
        answer = self.call("Page.navigate", {"url": url})
        if "errorText" in answer or not self._loaded.wait(TIMEOUT):
            raise ProtocolError(f"{url}: {answer.get('errorText', 'not loaded in time')}")

    def follow(self, selector: str) -> None:
        """Click a link and wait for its page."""
        self._loaded.clear()
        self.click(selector)
        if not self._loaded.wait(TIMEOUT):
            raise ProtocolError(f"{selector}: its page was not loaded in time")

    def forget(self, url: str) -> None:
        """Leave for an address without scripts and be as new: nothing stored for it, emulated, added, complained of."""
        self.open(url)
        self.run("localStorage.clear(); sessionStorage.clear()")
        for number in self._injected:
            self.call("Page.removeScriptToEvaluateOnNewDocument", {"identifier": number})
        self._injected.clear()
        self.call("Emulation.setEmulatedMedia", {"features": []})
        self.resize(*DESKTOP)
        self.hover(1, 1)
        self.problems = []

    def add_script(self, source: str) -> None:
        """Run a script before those of every page that is loaded from now on."""
        added = self.call("Page.addScriptToEvaluateOnNewDocument", {"source": source})
        self._injected.append(added["identifier"])

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, a promise's once it has one. Raises ProtocolError with its exception."""
        params = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        result = self.call("Runtime.evaluate", params)
        if details := result.get("exceptionDetails"):
            raise ProtocolError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def run(self, body: str, *values: Any) -> Any:
        """What the body of an async function returns; `values` are its arguments a, b, c and so on."""
        names = ", ".join("abcdefgh"[: len(values)])
        return self.evaluate(f"(async ({names}) => {{ {body} }})({', '.join(map(json.dumps, values))})")

    def wait(self, condition: str) -> Any:
        """The value of an expression as soon as it is true. Raises ProtocolError when that takes too long."""
        body = f"""
        const stop = performance.now() + {TIMEOUT * 500};
        for (;;) {{
          const value = {condition};
          if (value) return value;
          if (performance.now() > stop) throw new Error("not true in time: " + a + "\\n" + document.body.innerText);
          await new Promise((done) => setTimeout(done, 10));
        }}"""
        return self.run(body, condition)

    def text(self, selector: str) -> str:
        """The text that an element shows."""
        return self.run("return document.querySelector(a).innerText", selector)

    def texts(self, selector: str) -> list[str]:
        """What each fitting element shows."""
        return self.run("return Array.from(document.querySelectorAll(a), (one) => one.innerText)", selector)

    def attribute(self, selector: str, name: str) -> str | None:
        return self.run("return document.querySelector(a).getAttribute(b)", selector, name)

    def has(self, selector: str) -> bool:
        """Whether an element fits, shown or not."""
        return self.run("return document.querySelector(a) !== null", selector)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a picker; its list is the system's, which headless browsers do not show."""
        body = """const picker = document.querySelector(a);
        picker.value = b;
        for (const kind of ["input", "change"]) picker.dispatchEvent(new Event(kind, { bubbles: true }));"""
        self.run(body, selector, value)

    def fill(self, selector: str, text: str) -> None:
        """Type into a field, in place of what it holds."""
        self.run("const field = document.querySelector(a); field.focus(); field.select()", selector)
        self.call("Input.insertText", {"text": text})

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key."""
        number, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", "text": text, **common})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **common})

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse; it must be what lies there."""
        at = self.run(
            """const element = document.querySelector(a);
            element.scrollIntoView({ block: "nearest" });
            const { x, y, width, height } = element.getBoundingClientRect();
            const at = { x: x + width / 2, y: y + height / 2 };
            const hit = document.elementFromPoint(at.x, at.y);
            if (!element.contains(hit)) throw new Error(`${a} lies under ${hit?.outerHTML.slice(0, 200)}`);
            return at;""",
            selector,
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", {"type": kind, "button": "left", "clickCount": 1, **at})

    def hover(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def resize(self, width: int, height: int, scale: float = 1, *, touch: bool = False) -> None:
        """Give the page the size of a screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", size)
        self.call("Emulation.setTouchEmulationEnabled", {"enabled": touch})

    def prefer(self, scheme: str) -> None:
        """Ask for the scheme "light" or "dark", as a system's settings do."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self) -> bytes:
        """What is visible, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", {"format": "png"})["data"])


def _pipe() -> tuple[int, int]:
    """Both ends above every descriptor that the browser gets."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


def _write(descriptor: int, message: dict[str, Any]) -> None:
    rest = json.dumps(message).encode() + b"\0"
    while rest:
        rest = rest[os.write(descriptor, rest) :]
