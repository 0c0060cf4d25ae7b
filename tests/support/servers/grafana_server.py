"""A small server that speaks the part of Grafana's HTTP API that a push needs, with its refusals, and can be told to
misbehave."""

import socket
import threading
from collections.abc import Callable
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

TOKEN = "a-token"


class GrafanaServer:
    """Holds folders, data sources and dashboards in memory; each stored dashboard gets an id and a version, as in
    Grafana."""

    def __init__(self) -> None:
        self.version = "11.6.0"
        self.folders: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.fail_next = 0
        """So many requests are answered with 503."""
        self.role = "Admin"
        self.before_save: Callable[[str], None] = lambda uid: None
        """Called with a dashboard's uid before it is stored: whoever else may change it."""
        self.requests: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(self._app(), log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @property
    def writes(self) -> list[str]:
        return [request for request in self.requests if not request.startswith("GET")]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
        assert not self._thread.is_alive()

    def save(self, document: dict[str, Any]) -> Response:
        """As POST /api/dashboards/db: `version` must be the stored one unless `overwrite`."""
        board, folder = document["dashboard"], document.get("folderUid", "")
        uid = board["uid"]
        self.before_save(uid)
        there = self.dashboards.get(uid)
        same_title = [
            each
            for key, each in self.dashboards.items()
            if key != uid and each["folder"] == folder and each["board"]["title"] == board["title"]
        ]
        if not document.get("overwrite"):
            if same_title:
                return refusal(412, "A dashboard with the same name in the folder already exists", "name-exists")
            if there is not None and there["board"]["version"] != board.get("version"):
                return refusal(412, "The dashboard has been changed by someone else", "version-mismatch")
        version = 1 if there is None else there["board"]["version"] + 1
        identity = len(self.dashboards) + 1 if there is None else there["board"]["id"]
        self.dashboards[uid] = {"folder": folder, "board": {**board, "id": identity, "version": version}}
        return JSONResponse({"status": "success", "uid": uid, "version": version})

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def guard(request: Request, call_next: Callable[[Request], Any]) -> Response:
            self.requests.append(f"{request.method} {request.url.path}")
            if self.fail_next:
                self.fail_next -= 1
                return refusal(503, "the database is locked")
            if request.url.path != "/api/health":
                if request.headers.get("authorization") != f"Bearer {TOKEN}":
                    return refusal(401, "Invalid API key")
                if self.role != "Admin":
                    return refusal(403, "You'll need additional permissions to perform this action")
            return await call_next(request)

        @app.get("/api/health")
        def health() -> Response:
            return JSONResponse({"database": "ok", "version": self.version})

        @app.get("/api/folders/{uid}")
        def folder(uid: str) -> Response:
            return JSONResponse(self.folders[uid]) if uid in self.folders else refusal(404, "folder not found")

        @app.post("/api/folders")
        async def new_folder(request: Request) -> Response:
            body = await request.json()
            self.folders[body["uid"]] = {**body, "version": 1}
            return JSONResponse(self.folders[body["uid"]])

        @app.put("/api/folders/{uid}")
        async def change_folder(uid: str, request: Request) -> Response:
            body = await request.json()
            if body.get("version") != self.folders[uid]["version"]:
                return refusal(412, "the folder has been changed by someone else", "version-mismatch")
            self.folders[uid] = {"uid": uid, "title": body["title"], "version": body["version"] + 1}
            return JSONResponse(self.folders[uid])

        @app.get("/api/datasources/name/{name}")
        def source(name: str) -> Response:
            return JSONResponse(self.sources[name]) if name in self.sources else refusal(404, "Data source not found")

        @app.post("/api/datasources")
        async def new_source(request: Request) -> Response:
            body = await request.json()
            self.sources[body["name"]] = {**body, "id": len(self.sources) + 1, "readOnly": False}
            return JSONResponse({"message": "Datasource added"})

        @app.put("/api/datasources/{identity}")
        async def change_source(identity: int, request: Request) -> Response:
            body = await request.json()
            self.sources[body["name"]] = {**body, "id": identity}
            return JSONResponse({"message": "Datasource updated"})

        @app.get("/api/dashboards/uid/{uid}")
        def board(uid: str) -> Response:
            there = self.dashboards.get(uid)
            return (
                refusal(404, "Dashboard not found")
                if there is None
                else JSONResponse({"dashboard": there["board"], "meta": {"folderUid": there["folder"]}})
            )

        @app.post("/api/dashboards/db")
        async def save(request: Request) -> Response:
            return self.save(await request.json())

        return app


def refusal(status: int, message: str, kind: str = "") -> Response:
    """Grafana's form of an error."""
    return JSONResponse({"message": message, **({"status": kind} if kind else {})}, status_code=status)
