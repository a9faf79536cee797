"""A page in headless Chromium, driven over its debugging pipe: no driver, no port, no network."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT = 300  # seconds; the machine may be busy

# Its own folders and no sandbox, so that it starts in a container too.
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


def find_chromium() -> str | None:
    """Returns the program, None where none is installed."""
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    return None


class Browser:
    """One tab. What the page logged, threw or asked for is in `problems` and `requests`."""

    def __init__(self, program: str):
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-")
        self._last_id = 0
        self._buffer = b""
        self.problems: list[str] = []
        self.requests: list[str] = []

        # Chromium reads commands from descriptor 3 and answers on 4.
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        words = [program, *_OPTIONS, "--remote-debugging-pipe"]
        words += [f"--user-data-dir={self._folder.name}", "about:blank"]
        script = f'exec 3<&{read_commands} 4>&{write_answers}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *words],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._folder.name},
        )
        os.close(read_commands)
        os.close(write_answers)

        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        shutil.rmtree(self._folder.name, ignore_errors=True)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol, and returns its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0, end - time.monotonic()))
            assert ready, f"Chromium says nothing for {TIMEOUT} seconds"
            part = os.read(self._answers, 1 << 16)
            assert part, f"Chromium ended with {self._process.wait()}"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        method = message.get("method")
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path, width: int = 1400, height: int = 1000, scheme: str = "light"):
        """Opens a file in a window of this size."""
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        named = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)
        self.resize(width, height)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, expression: str) -> Any:
        """Returns the value of an expression in the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def count(self, selector: str) -> int:
        """Returns the number of elements that a selector matches."""
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def wait_for(self, expression: str) -> None:
        """Waits until an expression in the page is true."""
        end = time.monotonic() + TIMEOUT
        while not self.run(expression):
            assert time.monotonic() < end, f"{expression} does not become true"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Presses a key, e.g. `ArrowRight`."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        if key == "Enter":
            event["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, selector: str) -> None:
        """Clicks the middle of an element, as a mouse does."""
        point = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **point)

    def hover(self, selector: str) -> dict[str, float]:
        """Moves the mouse to the middle of an element, and returns where it is."""
        # Figures are drawn when they are first seen, which moves what is below them.
        before = None
        box = self._middle_of(selector)
        while box != before:
            before = box
            self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
            box = self._middle_of(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **box)
        return box

    def _middle_of(self, selector: str) -> dict[str, float]:
        return self.run(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            "element.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = element.getBoundingClientRect();"
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
