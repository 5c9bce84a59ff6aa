"""A server on this machine that speaks the protocol of chat completions."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """Speaks the protocol of chat completions: says what the answers are, remembers what it was sent."""

    def __init__(self, answers: Sequence[tuple[int, Any]]) -> None:
        self.heard: list[tuple[dict[str, str], dict[str, Any]]] = []
        left = list(answers)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.heard.append(({key.lower(): value for key, value in self.headers.items()} | {"path": self.path}, body))
                code, said = left.pop(0) if len(left) > 1 else left[0]
                data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
                self.send_response(code)
                for name, value in (("location", "http://127.0.0.1:1/"), ("content-length", str(len(data)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def answer(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
