"""A headless Chromium, driven by the standard protocol of its driver (W3C WebDriver: JSON over HTTP)."""

import base64
import json
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_SECONDS = 30.0
START_SECONDS = 170.0  # a browser that was just installed is read from a disk that may be slow
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own name for a reference
ENTER, TAB, ESCAPE = "\ue007", "\ue004", "\ue00c"
# No sandbox: its kernel features are missing in containers. Names that pages make up lead to this machine.
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"),
    "--host-resolver-rules=MAP *.example 127.0.0.1",
)


class Browser:
    """A browser with one window; `close` ends it.

    Args:
        folder: has the links `chromedriver` and `chromium`.
    """

    def __init__(self, folder: Path) -> None:
        self._profile = tempfile.TemporaryDirectory()
        self._driver = subprocess.Popen(
            [str(folder / "chromedriver"), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._driver.stdout is not None
        started = re.compile(r"started successfully on port (\d+)")
        port = next(found[1] for line in self._driver.stdout if (found := started.search(line)))
        self._url = f"http://127.0.0.1:{port}/session"
        chrome = {
            "binary": str((folder / "chromium").resolve()),
            "args": [*_ARGUMENTS, f"--user-data-dir={self._profile.name}"],
        }
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}}, START_SECONDS)
        self._url += "/" + made["sessionId"]

    def close(self) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.communicate()
            self._profile.cleanup()

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns; a promise is awaited. The page's own policy does not hold for it."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text of an element as a user sees it: "" if it is hidden."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector))

    def is_shown(self, selector: str) -> bool:
        return bool(self.run("return document.querySelector(arguments[0]).checkVisibility()", selector))

    def click(self, selector: str) -> None:
        self._send("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Types into an element, where it is empty already."""
        self._send("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, where the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def focused(self) -> str:
        """The id of the element with the focus, or its name."""
        return str(self.run("const e = document.activeElement; return e.id || e.tagName"))

    def emulate(self, command: str, **values: Any) -> None:
        """Sends a command of Chromium's own protocol, about the size of the window for example."""
        self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": values})

    def log(self) -> list[str]:
        """What the console has got since the last call, refused parts of the page among it."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def wait_for(self, condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
        """The first true value of a condition, which is looked at often; fails with the page's text."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, self.text("body")
        return value

    def _find(self, selector: str) -> str:
        return str(self._send("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT])

    def _send(self, method: str, path: str, body: Any = None, seconds: float = WAIT_SECONDS) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()[:2000]}") from error
