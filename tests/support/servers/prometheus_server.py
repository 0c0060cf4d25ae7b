"""A real Prometheus server on a free port that scrapes what files of targets name, for as long as a test needs it."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from support.paths import ROOT

RULES = ROOT / "deploy" / "prometheus" / "rules"
START_S = 60.0
SCRAPE_INTERVAL = "1s"
"""Also the deadline of a scrape: one that a loaded machine answers too late takes all values away until the next. So a
test waits for values."""
WAIT_S = 60.0


class PrometheusServer:
    """Started by entering it; killed by leaving it."""

    def __init__(self, folder: Path, targets: Sequence[Path]) -> None:
        """Scrape every target of these files or patterns, which need not exist yet, and evaluate our rules."""
        program = shutil.which("prometheus")
        assert program is not None, (
            "prometheus is not installed: make setup brings it where you are root (Debian: apt-get install prometheus)"
        )
        self._folder, self._program = folder, program
        scraped = [
            {"job_name": "concord", "file_sd_configs": [{"files": list(map(str, targets)), "refresh_interval": "1s"}]}
        ]
        times = {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL, "evaluation_interval": "1s"}
        folder.mkdir(parents=True, exist_ok=True)
        # JSON is YAML.
        (folder / "prometheus.yml").write_text(
            json.dumps({"global": times, "rule_files": [str(RULES / "*.yml")], "scrape_configs": scraped})
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        for _ in range(3):  # the port may be taken between its choice and its use
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{free.getsockname()[1]}"
            with (self._folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        *(
                            self._program,
                            f"--config.file={self._folder / 'prometheus.yml'}",
                            f"--storage.tsdb.path={self._folder / 'data'}",
                        ),
                        *(f"--web.listen-address={address}", "--log.level=error"),
                    ],
                    stdout=log,
                    stderr=log,
                )
            self.url = f"http://{address}"
            if self._becomes_ready():
                return self
            self._end()
        raise AssertionError(f"prometheus did not start: {(self._folder / 'log').read_text()}")

    def __exit__(self, *_: object) -> None:
        self._end()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression; one that does not parse is an error."""
        return self._get("query", query=expression)["result"]

    def value(self, expression: str) -> float | None:
        """Of a query with one result; None without any."""
        found = self.query(expression)
        assert len(found) <= 1, (expression, found)
        return float(found[0]["value"][1]) if found else None

    def series(self, match: str) -> list[dict[str, str]]:
        """All series that were ever scraped."""
        return self._get("series", **{"match[]": match})

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = WAIT_S) -> None:
        """Poll a condition on this server."""
        limit = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < limit, f"waited {deadline_s:g} s for {what}"
            assert not self._ends_within(0.1), f"prometheus ended: {(self._folder / 'log').read_text()}"

    def answered(self, queries: Sequence[str], target: str) -> set[str]:
        """Those with data while all scrapes of one target succeed; asked again and again until none has failed
        meanwhile."""
        found: set[str] = set()

        def asked_undisturbed() -> bool:
            begun = time.monotonic()
            found.update(query for query in queries if query not in found and self.query(query))
            taken_s = int(time.monotonic() - begun) + 3  # a rule's value is as old as its last evaluation
            return self.value(f'min_over_time(up{{instance="{target}"}}[{taken_s}s])') == 1.0

        self.wait_until(asked_undisturbed, f"some seconds in which no scrape of {target} fails")
        return found

    def _get(self, endpoint: str, **parameters: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters)}", timeout=WAIT_S
        ) as answer:
            return json.load(answer)["data"]

    def _becomes_ready(self) -> bool:
        limit = time.monotonic() + START_S
        while time.monotonic() < limit and not self._ends_within(0.05):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5.0):
                return True
        return False

    def _ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)
