"""A hub on this machine, as far as huggingface_hub's own client asks one for models: what there is, files in pieces, gates and faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_" + "y" * 34


class ModelHub(ThreadingHTTPServer):
    """Has one model. breaks_after: it sends no more bytes of a file than these; num_stalls: so often it then says nothing, to its end."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], name: str = "someone/model", licence: str = "apache-2.0") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.name, self.licence = files, name, licence
        self.is_gated = False
        self.breaks_after: int | None = None
        self.num_stalls = 0
        self.ended = threading.Event()
        self.damages = False
        self.ranges: list[str] = []
        self.sent: dict[str, int] = {}
        self.tokens: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def variables(self, cache: Any) -> dict[str, str]:
        """Of a process that asks this hub."""
        named = {"HF_ENDPOINT": self.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_CACHE": str(cache)}
        return {**named, "HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "2", "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}


class Handler(BaseHTTPRequestHandler):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _answer(self, content: Any, code: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        if token := self.headers.get("Authorization"):
            hub.tokens.add(token)
        if not path.removeprefix("/api/models").startswith(f"/{hub.name}"):
            self._answer({"error": "Repository not found"}, 401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif path.startswith("/api/models/") and "/tree/" in path:
            self._answer([self._entry(name) for name in hub.files])
        elif path.startswith("/api/models/"):
            self._answer(self._info())
        else:
            self._file(path.removeprefix(f"/{hub.name}/resolve/").partition("/")[2])

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.server.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest()}

    def _info(self) -> dict[str, Any]:
        hub = self.server
        siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
        card = {"license": hub.licence}
        told = {"id": hub.name, "modelId": hub.name, "sha": COMMIT, "siblings": siblings, "cardData": card, "private": False}
        return {**told, "gated": "manual" if hub.is_gated else False, "tags": [], "downloads": 0, "likes": 0}

    def _file(self, name: str) -> None:
        hub = self.server
        data = hub.files.get(name)
        if data is None:
            self._answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        if hub.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            has_token = self.headers.get("Authorization") is not None
            message = "Access to model is restricted"
            self._answer({"error": message}, 403 if has_token else 401, X_Error_Code="GatedRepo", X_Error_Message=message)
            return
        start = 0
        if found := re.match(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(found[1])
            hub.ranges.append(f"{name}:{start}")
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command != "HEAD":
            self._send(name, data[start:])

    def _send(self, name: str, data: bytes) -> None:
        hub = self.server
        if hub.damages:
            data = data[:-1] + bytes([data[-1] ^ 1])
        most = len(data) if hub.breaks_after is None else min(len(data), max(0, hub.breaks_after - hub.sent.get(name, 0)))
        self.wfile.write(data[:most])
        self.wfile.flush()
        hub.sent[name] = hub.sent.get(name, 0) + most
        if most < len(data):
            if hub.num_stalls:
                hub.num_stalls -= 1
                hub.ended.wait(60)
            self.close_connection = True


def _etag(data: bytes) -> str:
    """As the hub names files: large ones by their SHA-256."""
    return (hashlib.sha256(data) if len(data) > 10_000 else hashlib.sha1(data, usedforsecurity=False)).hexdigest()


@contextmanager
def serving(files: dict[str, bytes], **about: Any) -> Iterator[ModelHub]:
    server = ModelHub(files, **about)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()
