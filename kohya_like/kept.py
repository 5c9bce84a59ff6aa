"""Gradio's own files, kept as they were sent: it reads and compresses each anew for every browser, half the time of a first visit."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PLACES = ("/assets/", "/static/")


class Kept:
    """ASGI middleware. Answers what it has; there are no more answers than files and ways to compress them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._answers: dict[tuple[str, bool, bool], list[Message]] = {}

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
            if said and said[0].get("status") == 200 and not said[-1].get("more_body"):
                self._answers[key] = said
            return
        for message in self._answers[key]:
            await send({**message})
