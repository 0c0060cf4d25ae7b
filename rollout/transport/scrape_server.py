"""A small HTTP server that answers scrapes with a text: in threads of its own, bounded in number and in time. It knows
no metric.

A client that says nothing, or does not take its answer, is cut off after `IDLE_S`; of more than `MAX_CONNECTIONS` the
oldest gives way, so a new scrape is always heard.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from rollout.errors import ConcordError, boundary

IDLE_S = 5.0
"""How long the next bytes of a request, or the taking of an answer, may need."""
CLOSING_S = 0.1
"""Interval at which the server looks whether it has been closed."""
MAX_CONNECTIONS = 8
"""Served at a time; Prometheus needs one."""
PATHS = ("/metrics", "/")
_ANY_ADDRESS = ("0.0.0.0", "::", "")


class ScrapeServer:
    """Listens from its making until `close`."""

    def __init__(self, host: str, port: int, text: Callable[[], bytes], idle_s: float = IDLE_S) -> None:
        """Answer scrapes of `port` of `host` with what `text` says then; 0 takes a free port.

        Raises:
            OSError: the port is taken, or the host is no address of this machine.
        """
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        self.asked = False
        """Whether a scrape has come so far."""
        self._scrapes, self._scraped = 0, threading.Condition()

        def counted() -> bytes:
            self.asked = True
            return text()

        self._server = _Server((str(address[0]), port), family, counted, idle_s, self._answered)
        self._host = host
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(CLOSING_S,), name="scrape server", daemon=True)
        self._thread.start()

    def wait_for_scrapes(self, number: int, deadline_s: float) -> bool:
        """Whether so many more scrapes were answered before the deadline."""
        with self._scraped:
            wanted = self._scrapes + number
            return self._scraped.wait_for(lambda: self._scrapes >= wanted, deadline_s)

    def _answered(self) -> None:
        with self._scraped:
            self._scrapes += 1
            self._scraped.notify_all()

    def target(self, own_name: Callable[[], str]) -> str:
        """host:port, for Prometheus; `own_name` says how others reach this machine where it listens on all its
        addresses."""
        host = own_name() if self._host in _ANY_ADDRESS else self._host
        return f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop listening, and cut off who is being served."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut_all()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """A thread a connection; each connection is known, in the order of arrival."""

    request_queue_size = 64  # of a full queue the system drops who knocks, who then waits a second or three

    def __init__(
        self,
        address: tuple[str, int],
        family: int,
        text: Callable[[], bytes],
        idle_s: float,
        answered: Callable[[], None],
    ) -> None:
        self.address_family, self.text, self.idle_s, self.answered = family, text, idle_s, answered
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without the look-up of the host's full name, which may take long."""
        TCPServer.server_bind(self)
        self.server_port = int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as socketserver has it
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _cut(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """A client that went away or was cut off is nobody's trouble; a text that cannot be made is an answer of its
        own."""

    def cut_all(self) -> None:
        with self._lock:
            for request in self._open:
                _cut(request)


def _cut(request: socket.socket) -> None:
    """Whoever reads or writes here is woken, and ends."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request a connection, answered in plain text."""

    # Headers and body are two writes: the second would wait 40 ms for the client's acknowledgement.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Every read and write of the connection has the server's deadline."""
        assert isinstance(self.server, _Server)
        super().setup()
        self._text, self._scrape_answered = self.server.text, self.server.answered
        self.connection.settimeout(self.server.idle_s)

    def do_GET(self) -> None:
        """The text, uncompressed: packing it would cost more than sending it to a machine nearby."""
        if self.path.partition("?")[0] not in PATHS:
            self._answer(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
            return
        try:
            with boundary(ConcordError, "metrics cannot be shown"):
                text = self._text()
        except ConcordError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode())
            return
        self._answer(HTTPStatus.OK, text)
        self._scrape_answered()

    def _answer(self, status: HTTPStatus, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal belongs to the run."""
