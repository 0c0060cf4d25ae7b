"""A push brings a Grafana to what the repository says, changes nothing the second time, and tells apart what it
meets."""

import json
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.grafana_server import TOKEN, GrafanaServer

from orchestrator.commands.dashboards_push import DASHBOARDS, FOLDER_UID, SOURCE_NAME, WAITS_S, Grafana, push
from rollout.errors import UserError

PROMETHEUS = "http://127.0.0.1:9090"
FILES = sorted(DASHBOARDS.glob("concord-*.json"))


@pytest.fixture
def server() -> Iterator[GrafanaServer]:
    with GrafanaServer() as started:
        yield started


class Pushes:
    """Pushes to one server without waiting between tries, and keeps how long it would have waited."""

    def __init__(self, url: str, token: str = TOKEN) -> None:
        self.slept: list[float] = []
        self._grafana = Grafana(url, token, self.slept.append)

    def __call__(self, prometheus: str = PROMETHEUS) -> Counter[str]:
        return Counter(str(change.became) for change in push(self._grafana, prometheus))


def test_the_first_push_makes_everything_and_the_second_changes_nothing(server: GrafanaServer):
    pushes = Pushes(server.url)
    assert pushes() == {"created": 2 + len(FILES)}
    assert {board["folder"] for board in server.dashboards.values()} == {FOLDER_UID}
    stored = {
        uid: {k: v for k, v in each["board"].items() if k not in ("id", "version")}
        for uid, each in server.dashboards.items()
    }
    assert stored == {file.stem: json.loads(file.read_text()) for file in FILES}
    written = len(server.writes)
    assert pushes() == {"unchanged": 2 + len(FILES)}
    assert len(server.writes) == written


def test_what_somebody_changed_is_put_back_and_reported(server: GrafanaServer):
    pushes = Pushes(server.url)
    pushes()
    server.folders[FOLDER_UID]["title"] = "Other"
    server.dashboards["concord-fleet"]["board"]["title"] = "Mine"
    server.dashboards["concord-overview"]["folder"] = ""
    assert pushes("http://prometheus:9090") == {"updated": 4, "unchanged": len(FILES) - 2}
    assert server.sources[SOURCE_NAME]["url"] == "http://prometheus:9090"
    assert server.dashboards["concord-fleet"]["board"]["title"] == "Concord: rollout fleet"


def test_a_dashboard_that_moves_meanwhile_is_read_again(server: GrafanaServer):
    pushes = Pushes(server.url)
    pushes()
    server.dashboards["concord-fleet"]["board"]["title"] = "Mine"

    def somebody_else(uid: str) -> None:
        server.before_save = lambda uid: None
        server.dashboards[uid]["board"]["version"] += 1

    server.before_save = somebody_else
    assert pushes()["updated"] == 1
    assert server.dashboards["concord-fleet"]["board"]["title"] == "Concord: rollout fleet"


def test_a_dashboard_that_never_stands_still_is_reported(server: GrafanaServer):
    pushes = Pushes(server.url)
    pushes()
    server.dashboards["concord-fleet"]["board"]["title"] = "Mine"

    def somebody_else(uid: str) -> None:
        server.dashboards[uid]["board"]["version"] += 1

    server.before_save = somebody_else
    with pytest.raises(UserError, match="changed by somebody else 3 times while it was pushed"):
        pushes()


def test_a_dashboard_of_somebody_else_with_the_same_title_is_reported(server: GrafanaServer):
    server.dashboards["theirs"] = {
        "folder": FOLDER_UID,
        "board": {"uid": "theirs", "title": "Concord: rollout fleet", "id": 1, "version": 1},
    }
    with pytest.raises(
        UserError, match="another dashboard in folder Concord is called 'Concord: rollout fleet'; rename or move it"
    ):
        Pushes(server.url)()


def test_a_server_that_fails_for_a_moment_is_asked_again(server: GrafanaServer):
    server.fail_next = len(WAITS_S)
    pushes = Pushes(server.url)
    assert pushes() == {"created": 2 + len(FILES)}
    assert pushes.slept == list(WAITS_S)


def test_a_server_that_goes_on_failing_is_reported(server: GrafanaServer):
    server.fail_next = 1000
    with pytest.raises(UserError, match=r"answered with status 503: .*the database is locked \(5 tries\)"):
        Pushes(server.url)()
    assert len(server.requests) == 1 + len(WAITS_S)


@pytest.mark.parametrize(("token", "role", "status"), [("wrong", "Admin", 401), (TOKEN, "Viewer", 403)])
def test_a_token_that_is_not_accepted_is_reported_at_once(server: GrafanaServer, token: str, role: str, status: int):
    server.role = role
    pushes = Pushes(server.url, token)
    with pytest.raises(UserError, match=f"does not accept the token .status {status}.*role Admin"):
        pushes()
    assert pushes.slept == []
    assert server.writes == []


def test_an_old_grafana_is_refused_before_anything_is_written(server: GrafanaServer):
    server.version = "9.5.2"
    with pytest.raises(UserError, match=r"is version 9\.5\.2; the dashboards need 11 or newer"):
        Pushes(server.url)()
    assert server.writes == []


def test_a_grafana_that_cannot_be_reached_is_reported_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UserError, match=f"Grafana at {address} cannot be reached"):
        Pushes(address)()


NO_ADDRESSES = ["127.0.0.1:3000", "ftp://host", "http://", "http://host:port"]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(UserError, match=r"got --url .*expected Grafana's address"):
        Grafana(url, TOKEN)


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_a_prometheus_that_is_no_address_is_refused_before_anything_is_asked(server: GrafanaServer, url: str):
    with pytest.raises(UserError, match=r"got --prometheus .*expected Prometheus' address"):
        Pushes(server.url)(url)
    assert server.requests == []


def test_an_address_with_a_wrong_path_is_reported(server: GrafanaServer):
    with pytest.raises(
        UserError, match=r"/nowhere/api/health names no version; is it Grafana's address, with its path\?"
    ):
        Pushes(f"{server.url}/nowhere")()
    assert server.writes == []


def test_what_was_changed_before_a_push_ends_early_is_reported(server: GrafanaServer):
    pushes = push(Grafana(server.url, TOKEN, lambda seconds: None), PROMETHEUS)
    assert [next(pushes).became for _ in range(3)] == ["created", "created", "created"]
    server.fail_next = 1000
    with pytest.raises(UserError, match="answered with status 503"):
        next(pushes)
    assert (len(server.folders), len(server.sources), len(server.dashboards)) == (1, 1, 1)


def test_a_folder_without_dashboards_is_reported(server: GrafanaServer, tmp_path: Path):
    with pytest.raises(UserError, match="there are no dashboards in"):
        list(push(Grafana(server.url, TOKEN), PROMETHEUS, tmp_path))
