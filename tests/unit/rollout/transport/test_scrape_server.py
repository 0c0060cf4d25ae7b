"""Whoever else is connected and whatever they do, a scrape is answered; nobody holds a thread for long."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import pytest

from rollout.transport.scrape_server import MAX_CONNECTIONS, ScrapeServer

DEADLINE_S = 20.0


@contextmanager
def serving(text: Callable[[], bytes] = lambda: b"up 1\n", idle_s: float = DEADLINE_S) -> Generator[ScrapeServer]:
    server = ScrapeServer("127.0.0.1", 0, text, idle_s)
    try:
        yield server
    finally:
        server.close()


def target_of(server: ScrapeServer) -> str:
    return server.target(lambda: "this-host")


def connect(server: ScrapeServer) -> socket.socket:
    host, _, port = target_of(server).rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def get(server: ScrapeServer, path: str = "/metrics") -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://{target_of(server)}{path}", timeout=DEADLINE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def handlers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def no_thread_stays() -> bool:
    for thread in handlers():
        thread.join(DEADLINE_S)
    return not handlers()


def test_a_scrape_gets_the_text_of_its_moment():
    with serving(iter((b"step 1\n", b"step 2\n")).__next__) as server:
        assert [get(server), get(server, "/?name=x")] == [(200, b"step 1\n"), (200, b"step 2\n")]


def test_clients_that_connect_and_say_nothing_keep_no_scrape_from_its_answer():
    with serving() as server, ExitStack() as silent:
        clients = [silent.enter_context(connect(server)) for _ in range(3 * MAX_CONNECTIONS)]
        assert get(server) == (200, b"up 1\n")
        assert clients[0].recv(1) == b"", "the oldest gave way"


def test_a_client_that_says_nothing_is_cut_off():
    with serving(idle_s=0.05) as server, connect(server) as silent:
        assert silent.recv(1) == b""
        assert no_thread_stays()


def test_a_client_that_does_not_take_its_answer_is_cut_off():
    with serving(lambda: b"x" * 2**26, idle_s=0.05) as server, connect(server) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert deaf.recv(5) == b"HTTP/"
        assert no_thread_stays()


def test_closing_cuts_off_whoever_is_connected():
    with serving() as server, connect(server) as silent:
        assert get(server)[0] == 200, "whoever came before has a thread by now"
        assert handlers()
        server.close()
        assert silent.recv(1) == b""
        assert no_thread_stays()


def test_a_text_that_cannot_be_made_is_answered_with_the_reason():
    def failing() -> bytes:
        raise ValueError("no such label")

    with serving(failing) as server:
        assert get(server) == (500, b"metrics cannot be shown: ValueError: no such label\n")


def test_another_path_is_told_where_the_metrics_are():
    with serving() as server:
        assert get(server, "/status") == (404, b"metrics are at /metrics\n")


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "this-host"), ("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_target_is_what_others_can_reach(host: str, shown: str):
    try:
        server = ScrapeServer(host, 0, lambda: b"")
    except OSError:
        assert host == "::1", "IPv6 may be off"
        pytest.skip("no IPv6 here")
    server.close()
    assert server.target(lambda: "this-host").rpartition(":")[0] == shown
