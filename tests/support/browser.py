"""Control headless Chromium over a pipe: read a page's content, console errors and requests.

with Browser(tmp_path) as browser:
    browser.open(file, width=400, dark=True)
    browser.value("document.title"), browser.complaints, browser.requests
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage "
    "--disable-background-networking --disable-component-update --disable-extensions --hide-scrollbars"
)


class Browser:
    """One page at a time; `complaints` are console messages and violations of a policy, `requests` URLs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.number = 0
        self.session: str | None = None
        self.rest = b""

    def __enter__(self) -> Self:
        # Chromium reads from handle 3 and writes to 4; others of this process may have these numbers.
        theirs, self.commands = os.pipe()
        self.answers, theirs_out = os.pipe()
        handles = [fcntl.fcntl(handle, fcntl.F_DUPFD, 20) for handle in (theirs, theirs_out)]
        os.close(theirs), os.close(theirs_out)
        command = f'exec "$0" {OPTIONS} --user-data-dir="$1" about:blank 3<&{handles[0]} 4>&{handles[1]}'
        words = ["bash", "-c", command, str(CHROMIUM), str(self.folder / "profile")]
        self.process = subprocess.Popen(words, pass_fds=handles, stderr=subprocess.DEVNULL)
        for handle in handles:
            os.close(handle)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands), os.close(self.answers)

    def open(self, file: Path, *, width: int = 1000, dark: bool = False) -> None:
        """Open a file, and return when it is rendered."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.complaints.clear(), self.requests.clear()
        self.ask("Page.navigate", url=file.absolute().as_uri())
        self.wait_for("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        # The page's own policy forbids scripts; what the debugger evaluates is none of the page's.
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Save a screenshot of the whole page or its upper part."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    # ------------------------------------------------------------------------ the protocol

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def wait_for(self, event: str) -> None:
        while self.read().get("method") != event:
            pass

    def read(self) -> dict[str, Any]:
        """Return the next message; record the page's errors and requests."""
        while b"\0" not in self.rest:
            added = os.read(self.answers, 1 << 16)
            assert added, "Chromium has ended"
            self.rest += added
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        method = message.get("method")
        if method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(message["params"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message
