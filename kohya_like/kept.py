"""Gradio's own files, kept as they were sent: it reads and compresses each anew for every browser, a tenth of the time of a first visit."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PLACES = ("/assets/", "/static/")
MOST_BYTES = 16 * 2**20
"""Kept in all: what a page needs is half a MiB, but one file may be asked for by many addresses, by strangers too."""


class Kept:
    """ASGI middleware. Answers what it has, and keeps what it has room for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._answers: dict[tuple[str, bool, bool], list[Message]] = {}
        self._room = MOST_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope.get("method") != "GET" or not scope["path"].startswith(PLACES) or b"range" in headers:
            await self.app(scope, receive, send)
            return
        encodings = headers.get(b"accept-encoding", b"")
        key = (scope["path"], b"br" in encodings, b"gzip" in encodings)
        if key not in self._answers:
            said: list[Message] = []

            async def keep(message: Message) -> None:
                said.append({**message})
                await send(message)

            await self.app(scope, receive, keep)
            size = sum(len(message.get("body", b"")) for message in said)
            if said and said[0].get("status") == 200 and not said[-1].get("more_body") and size <= self._room:
                self._answers[key] = said
                self._room -= size
            return
        for message in self._answers[key]:
            await send({**message})
