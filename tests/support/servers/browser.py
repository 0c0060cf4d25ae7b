"""A headless Chromium of its own, driven over the DevTools protocol: it opens a page and tells what it drew, asked for,
and complained of."""

import base64
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil
from websockets.sync.client import connect

START_S = 60.0
ANSWER_S = 30.0
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
    ),
    *(
        "--disable-sync",
        "--disable-extensions",
        "--remote-debugging-port=0",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
    ),
)


class Browser:
    """One browser with one page."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium")
        assert program, (
            "chromium is not installed; it is a Debian package: run `make setup` as root, or apt-get install chromium"
        )
        command = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.asked: list[str] = []
        """Addresses of everything that the page asked for."""
        self.errors: list[str] = []
        """What stood in its console as an error, uncaught exceptions included."""
        self._ends = ExitStack()
        self._number = 0
        self._loaded = False
        try:
            self._socket = self._ends.enter_context(
                connect(self._address(), max_size=None, open_timeout=ANSWER_S, compression=None)
            )
            target = next(
                each for each in self.call("Target.getTargets", session=False)["targetInfos"] if each["type"] == "page"
            )
            self._session = self.call(
                "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}, session=False
            )["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.put(line)

    def _address(self) -> str:
        """Of its DevTools, which it prints when they listen."""
        while True:
            line = self._lines.get(timeout=START_S)
            if "DevTools listening on " in line:
                return line.partition("DevTools listening on ")[2].strip()

    def call(self, method: str, parameters: Mapping[str, object] | None = None, session: bool = True) -> dict[str, Any]:
        """The result of a DevTools method; events that come before it are taken note of."""
        self._number += 1
        number = self._number
        self._socket.send(
            json.dumps(
                {
                    "id": number,
                    "method": method,
                    "params": parameters or {},
                    **({"sessionId": self._session} if session else {}),
                }
            )
        )
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=ANSWER_S))
        told, given = message.get("method"), message.get("params", {})
        if told == "Network.requestWillBeSent":
            self.asked.append(given["request"]["url"])
        elif told == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(given["exceptionDetails"]))
        elif told == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
            self.errors.append(json.dumps(given["args"]))
        elif told == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])
        elif told == "Page.loadEventFired":
            self._loaded = True
        return message

    def open(self, address: str, width: int, height: int = 900, phone: bool = False) -> None:
        """Load a page in a window of this size, until its load event."""
        window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", window)
        self.call("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        self._loaded = False
        self.call("Page.navigate", {"url": address})
        while not self._loaded:
            self._receive()

    def value(self, expression: str) -> Any:
        """What an expression comes to in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", {"captureBeyondViewport": True})["data"])

    def close(self) -> None:
        """End it with all that it started."""
        self._ends.close()
        family = (
            [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
            if self._process.poll() is None
            else []
        )
        for process in family:
            if process.is_running():
                process.kill()
        psutil.wait_procs(family, timeout=ANSWER_S)
        self._process.wait(ANSWER_S)
        self._reader.join(ANSWER_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
