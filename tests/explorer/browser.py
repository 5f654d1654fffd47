"""A headless Chromium, driven over a pipe by the Chrome DevTools protocol: nothing beyond the standard library."""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe", "about:blank",
)  # fmt: skip

READY = "document.documentElement?.dataset.ready !== undefined"
"""How the explorer says that it is ready."""
LOADED = "document.readyState === 'complete' && location.href !== 'about:blank'"
"""How the browser says it of any page."""


def executable() -> str | None:
    """Return the browser that MXREF_BROWSER names; None if it names none or it is not installed."""
    return shutil.which(os.environ.get("MXREF_BROWSER", ""))


class Tab:
    """One page of the browser. What goes wrong in it, and what it loads, is collected."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest = read, write, b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; RuntimeError if the browser refuses it."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        name, what = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif name == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(what["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])

    def show(
        self, address: str, width: int = 1400, height: int = 900, dark: bool = False, ready: str = READY
    ) -> None:
        """Load an address in a window of a size and a colour scheme, and wait until the page is ready.

        Args:
            address: the URL.
            width: of the window.
            height: of the window.
            dark: whether the reader prefers dark pages.
            ready: an expression of JavaScript that is true once the page can be looked at.
        """
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.colours(dark)
        self.command("Page.navigate", url="about:blank")
        self.command("Page.navigate", url=address)
        self.run(
            f"new Promise((done) => {{ const look = () => ({ready}) "
            "? requestAnimationFrame(() => done(true)) : setTimeout(look, 5); look(); })"
        )

    def colours(self, dark: bool) -> None:
        """Set the colour scheme that the reader prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.command("Emulation.setEmulatedMedia", features=[scheme, still])

    def run(self, expression: str) -> Any:
        """Return the JSON value of an expression, awaited; RuntimeError for an exception in it."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "an exception"))
        return answer["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key and let it go."""
        for kind in ("rawKeyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=8 if shift else 0,
                windowsVirtualKeyCode={"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38,
                                       "ArrowRight": 39, "ArrowDown": 40}.get(key, 0),
            )  # fmt: skip

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move, press or release the mouse: `mouseMoved`, `mousePressed`, `mouseReleased`."""
        held = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def screenshot(self, path: Path, tallest: float = math.inf) -> None:
        """Write the page as a PNG, down to `tallest` pixels."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        height = min(size["height"], tallest)
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}
        shot = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def opened(folder: Path) -> Iterator[Tab]:
    """Start the browser with its files in a folder, and end it afterwards.

    Commands go through file descriptor 3, answers come through 4: that is how the browser wants them.
    """
    program = executable()
    assert program is not None
    commands, write = os.pipe()
    read, answers = os.pipe()
    shell = f'exec "$@" 3<&{commands} 4>&{answers}'
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", shell, "browser", program, f"--user-data-dir={folder / 'profile'}", *_FLAGS],
            pass_fds=(commands, answers), stdout=log, stderr=log, env=os.environ | {"HOME": str(folder)},
        )  # fmt: skip
    os.close(commands)
    os.close(answers)
    try:
        tab = Tab(read, write)
        yield tab
        tab._session = None
        tab.command("Browser.close")
    finally:
        os.close(write)
        os.close(read)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
