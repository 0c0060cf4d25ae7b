"""`concord dashboards push`: brings folder, data source and dashboards of a Grafana to what `deploy/grafana` says, and
says what changed.

Idempotent: what is as it should be is left alone. A dashboard that somebody else changes meanwhile is read again, never
written over unseen.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from rollout.errors import UserError

DASHBOARDS = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
FOLDER_UID, FOLDER_TITLE = "concord", "Concord"
SOURCE_UID, SOURCE_NAME = "concord-prometheus", "Concord Prometheus"
OLDEST_GRAFANA = 11
TIMEOUT_S = 10.0
WAITS_S = (0.5, 1.0, 2.0, 4.0)
"""Between tries of a request that the server could not answer."""
CONFLICTS = 3
"""Times that a dashboard is read again because somebody else has changed it."""
Body = Mapping[str, Any]


class Became(StrEnum):
    """What a push did."""

    CREATED = "created"
    """It was not there."""
    UPDATED = "updated"
    """It was there, and different."""
    UNCHANGED = "unchanged"
    """It was as it should be."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """What a push did to one thing in Grafana."""

    became: Became
    what: str


class _RefusedError(Exception):
    """Grafana's answer to one request: a status of 400 to 499."""

    def __init__(self, status: int, message: str, kind: str) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class Grafana:
    """Requests to one server through grafana-api, with retries and errors that say what to do."""

    def __init__(self, url: str, token: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """Only looks at the address.

        Raises:
            UserError: it is none, or grafana-api is not installed.
        """
        parts = _address(url, "--url", "Grafana's address, such as http://127.0.0.1:3000")
        try:
            from grafana_api import grafana_api, grafana_face
        except ImportError as cause:
            raise UserError(
                "the package grafana-api is not installed; install it with: pip install 'concord-rl[grafana]'"
            ) from cause
        library: Any = grafana_face
        self._errors: Any = grafana_api
        prefix = parts.path.strip("/")
        self._url, self._sleep = url, sleep
        self.face: Any = library.GrafanaFace(
            auth=token,
            host=parts.hostname,
            port=parts.port,
            protocol=parts.scheme,
            timeout=TIMEOUT_S,
            url_path_prefix=f"{prefix}/" if prefix else "",
        )

    def ask(self, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - JSON
        """The answer to one request. A server error, or none at all, is tried again.

        Raises:
            UserError: the server cannot be reached, is not Grafana, goes on failing, or does not accept the token.
            _RefusedError: another refusal.
        """
        import requests

        trouble = ""
        for wait_s in (*WAITS_S, None):
            try:
                return call()
            except self._errors.GrafanaServerError as error:
                trouble = f"answered with status {error.status_code}: {error.message}"
            except self._errors.GrafanaClientError as error:
                raise self._refusal(error) from error
            except requests.exceptions.JSONDecodeError as error:
                raise UserError(
                    f"{self._url} answered with something else than JSON: is it Grafana's address, with its path?"
                ) from error
            except requests.RequestException as error:
                trouble = f"cannot be reached: {error}"
            except TypeError as error:
                raise UserError(
                    f"{self._url} answered with an error that is not Grafana's; is it Grafana's address, with its path?"
                ) from error
            if wait_s is not None:
                self._sleep(wait_s)
        raise UserError(
            f"Grafana at {self._url} {trouble} ({len(WAITS_S) + 1} tries); check the address and the server's log, and "
            "push again"
        )

    def _refusal(self, error: Any) -> UserError | _RefusedError:  # noqa: ANN401 - of grafana-api, which has no types
        if error.status_code in (401, 403):
            return UserError(
                f"Grafana at {self._url} does not accept the token (status {error.status_code}: {error.message}); give "
                "--token of a service account with the role Admin, made under Administration > Service accounts"
            )
        return _RefusedError(error.status_code, str(error.message), str(_fields(error.response).get("status", "")))

    def found(self, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - JSON
        """The answer, or None where there is no such thing."""
        try:
            return self.ask(call)
        except _RefusedError as error:
            if error.status == 404:
                return None
            raise

    def version(self) -> str:
        """The server's version.

        Raises:
            UserError: older than the dashboards need.
        """
        version = str(_fields(self.found(lambda: self.face.api.GET("/health"))).get("version", ""))
        major = version.partition(".")[0]
        if not major.isdigit():
            raise UserError(f"{self._url}/api/health names no version; is it Grafana's address, with its path?")
        if int(major) < OLDEST_GRAFANA:
            raise UserError(
                f"Grafana at {self._url} is version {version}; the dashboards need {OLDEST_GRAFANA} or newer: upgrade "
                "it, or push elsewhere"
            )
        return version


def _address(url: str, option: str, expected: str) -> SplitResult:
    parts = urlsplit(url)
    try:
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        right = False
    if not right:
        raise UserError(f"got {option} {url!r}; expected {expected}")
    return parts


def _fields(answer: object) -> Body:
    """The fields of an answer that should be an object; none where it is not."""
    return cast("Body", answer) if isinstance(answer, Mapping) else {}


def push(grafana: Grafana, prometheus_url: str, source: Path = DASHBOARDS) -> Iterator[PushResult]:
    """Bring folder, data source and all dashboards to what they should be, in this order; each change is yielded when
    it is made.

    Raises:
        UserError: an address, the server, the token or the files are not what they should be; what was done before
            stays.
    """
    _address(prometheus_url, "--prometheus", "Prometheus' address as Grafana reaches it, such as http://127.0.0.1:9090")
    files = sorted(source.glob("concord-*.json"))
    if not files:
        raise UserError(
            f"there are no dashboards in {source}; push from a checkout of Concord, or write them with "
            "deploy/grafana/generate.py"
        )
    grafana.version()
    try:
        yield _folder(grafana)
        yield _source(grafana, prometheus_url)
        for file in files:
            yield _dashboard(grafana, json.loads(file.read_text()))
    except _RefusedError as error:
        raise UserError(f"Grafana refused a request with status {error.status}: {error.message}") from error


def _folder(grafana: Grafana) -> PushResult:
    folders, what = grafana.face.folder, f"folder {FOLDER_TITLE}"
    there = grafana.found(lambda: folders.get_folder(FOLDER_UID))
    if there is None:
        grafana.ask(lambda: folders.create_folder(FOLDER_TITLE, uid=FOLDER_UID))
        return PushResult(Became.CREATED, what)
    if there["title"] == FOLDER_TITLE:
        return PushResult(Became.UNCHANGED, what)
    grafana.ask(lambda: folders.update_folder(FOLDER_UID, FOLDER_TITLE, version=there["version"]))
    return PushResult(Became.UPDATED, what)


def _source(grafana: Grafana, url: str) -> PushResult:
    sources, what = grafana.face.datasource, f"data source {SOURCE_NAME} ({url})"
    wanted = {"name": SOURCE_NAME, "uid": SOURCE_UID, "type": "prometheus", "access": "proxy", "url": url}
    there = grafana.found(lambda: sources.get_datasource_by_name(SOURCE_NAME))
    if there is None:
        grafana.ask(lambda: sources.create_datasource(wanted))
        return PushResult(Became.CREATED, what)
    if all(there.get(key) == value for key, value in wanted.items()):
        return PushResult(Became.UNCHANGED, what)
    grafana.ask(lambda: sources.update_datasource(there["id"], {**there, **wanted}))
    return PushResult(Became.UPDATED, what)


def _dashboard(grafana: Grafana, wanted: Body) -> PushResult:
    """A dashboard whose version moved between reading and writing is read again: 412 is the server's word for it.

    Raises:
        UserError: it keeps moving, or another dashboard has its title.
    """
    boards, what = grafana.face.dashboard, f"dashboard {wanted['title']}"
    for _ in range(CONFLICTS):
        there = grafana.found(lambda: boards.get_dashboard(wanted["uid"]))
        if there is not None and _same(there, wanted):
            return PushResult(Became.UNCHANGED, what)
        # Without `overwrite` the server refuses what was not made from its newest version.
        known = {} if there is None else {"id": there["dashboard"]["id"], "version": there["dashboard"]["version"]}
        document = {
            "dashboard": {**wanted, **known},
            "folderUid": FOLDER_UID,
            "overwrite": False,
            "message": "concord dashboards push",
        }
        try:
            grafana.ask(lambda document=document: boards.update_dashboard(document))
            return PushResult(Became.CREATED if there is None else Became.UPDATED, what)
        except _RefusedError as error:
            if error.status != 412:
                raise
            if error.kind == "name-exists":
                raise UserError(
                    f"another dashboard in folder {FOLDER_TITLE} is called {wanted['title']!r}; rename or move it, and "
                    "push again"
                ) from error
    raise UserError(
        f"{what} was changed by somebody else {CONFLICTS} times while it was pushed (status 412); push again when they "
        "are done"
    )


def _same(there: Body, wanted: Body) -> bool:
    stored = {key: value for key, value in there["dashboard"].items() if key not in ("id", "version")}
    return stored == wanted and there["meta"].get("folderUid") == FOLDER_UID
