"""The door of the studio: which requests reach it at all. Pure ASGI, in front of gradio and of our own routes.

What it stops, and why gradio alone does not: a web page that the user visits may post to 127.0.0.1 (cross-site forms and uploads), may
reach it under a name of its own (DNS rebinding), or may guess passwords without end; our own JSON routes are not covered by gradio's login.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import time
from collections import deque
from collections.abc import Iterable
from urllib.parse import parse_qs, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OWN_ROUTES = "/kl/"
"""Our own JSON routes start like this; all of them need the token."""
OPEN_ROUTES = "/kl/assets/"
"""Scripts of the page, the same for everybody; they need no token."""
TOKEN_HEADER = "x-kl-token"
SHARE_SUFFIX = ".gradio.live"
"""Where share links lie. Nobody else can point such a name at this computer, so it is no way around the list of names."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

_FRAMES = (b"x-frame-options", b"DENY")
_NO_FRAMES = "frame-ancestors 'none'"
_POLICY = "; ".join(
    (
        "default-src 'self'",
        # Gradio builds its components' scripts from text.
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self' data: blob:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
    )
)
_SECURITY_HEADERS = (
    (b"content-security-policy", f"{_POLICY}; {_NO_FRAMES}".encode()),
    (b"x-content-type-options", b"nosniff"),
    _FRAMES,
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=(), browsing-topics=()"),
)
_EMBEDDED_HEADERS = tuple(
    (name, _POLICY.encode() if name == b"content-security-policy" else value) for name, value in _SECURITY_HEADERS if name != _FRAMES[0]
)


class Guard:
    """ASGI middleware. names are the host names under which the studio may be reached besides this computer's own loopback names.

    With open_to_network, every literal IP address is a good host as well: DNS rebinding needs a name. With share, so are share links.
    embedded is for a page that stands in a frame of another site and is meant for everybody, such as a Space.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        names: Iterable[str] = (),
        open_to_network: bool = False,
        share: bool = False,
        embedded: bool = False,
        login_attempts: int = 8,
        login_window_seconds: float = 300.0,
    ) -> None:
        self.app = app
        self._token = token.encode()
        self._names = LOCAL_NAMES | {name.lower() for name in names}
        self._open_to_network = open_to_network
        self._share = share
        self._destinations = ("document", "iframe") if embedded else ("document",)
        self._headers = _EMBEDDED_HEADERS if embedded else _SECURITY_HEADERS
        self._throttle = Throttle(login_attempts, login_window_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None and scope["type"] == "http":
            await _refuse(send, *refusal)
        elif refusal is not None:
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self.app(scope, receive, self._watching(scope, send))
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Status and sentence for a request that must not pass, or None."""
        host = headers.get("host", "")
        if not self._good_host(hostname(host)):
            return 403, f"This studio does not answer to the name {host[:80]!r}. Start it with --allowed_host to add a name."
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, "Requests from other web sites are refused."
        if headers.get("sec-fetch-site") == "cross-site" and not self._is_navigation(scope, headers):
            return 403, "Requests from other web sites are refused."
        path = scope.get("path", "")
        if path.startswith(OWN_ROUTES) and not path.startswith(OPEN_ROUTES) and not self._has_token(scope, headers):
            return 401, "This route needs the token of the page. Reload the page."
        if _is_login(scope) and not self._throttle.admit(_peer(scope)):
            return 429, "Too many attempts to log in. Wait five minutes."
        return None

    def _good_host(self, name: str) -> bool:
        if name in self._names:
            return True
        if self._share and name.endswith(SHARE_SUFFIX):
            return True
        if not self._open_to_network:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_navigation(self, scope: Scope, headers: dict[str, str]) -> bool:
        """A person following a link to the studio, which is fine; the page itself then talks from its own site."""
        is_page = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") in self._destinations
        return scope.get("method") == "GET" and is_page

    def _has_token(self, scope: Scope, headers: dict[str, str]) -> bool:
        given = headers.get(TOKEN_HEADER, "")
        if not given:
            # A picture or a download link cannot send a header.
            given = (parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token") or [""])[0]
        return hmac.compare_digest(given.encode(), self._token)

    def _watching(self, scope: Scope, send: Send) -> Send:
        """Adds the security headers to the answer, and forgets the attempts of somebody who logged in."""

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message.get("headers", [])}
                message["headers"] = [*message.get("headers", []), *(pair for pair in self._headers if pair[0] not in present)]
                if _is_login(scope) and message["status"] == 200:
                    self._throttle.forget(_peer(scope))
            await send(message)

        return add


class Throttle:
    """At most so many attempts in a window for each peer, and ten times as many for all peers together."""

    def __init__(self, attempts: int, window_seconds: float) -> None:
        self._attempts = attempts
        self._window_seconds = window_seconds
        self._seen: deque[tuple[float, str]] = deque()

    def admit(self, peer: str) -> bool:
        """Counts an attempt; False when it is one too many."""
        now = time.monotonic()
        while self._seen and self._seen[0][0] < now - self._window_seconds:
            self._seen.popleft()
        of_peer = sum(1 for _, name in self._seen if name == peer)
        if of_peer >= self._attempts or len(self._seen) >= 10 * self._attempts:
            return False
        self._seen.append((now, peer))
        return True

    def forget(self, peer: str) -> None:
        """Takes a peer's attempts back, after a good one."""
        self._seen = deque((when, name) for when, name in self._seen if name != peer)


def hostname(host: str) -> str:
    """The name in a Host header, without port, in lower case; of `[::1]:7860` it is `::1`. Empty for what is not a host."""
    if "@" in host or "/" in host:
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_login(scope: Scope) -> bool:
    return scope.get("method") == "POST" and str(scope.get("path", "")).rstrip("/").endswith("/login")


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"detail": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_SECURITY_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
