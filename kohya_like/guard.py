"""The door of the studio: which requests reach it at all. Pure ASGI, in front of gradio and of our own routes.

What it stops, and why gradio alone does not: a web page that the user visits may post to 127.0.0.1 (cross-site forms and uploads), may
reach it under a name of its own (DNS rebinding), or may guess passwords without end; gradio's login covers neither our own routes nor all
of its own (the heartbeat, which never ends, among them); and JSON that is nested without end is an error of the server to it.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from itertools import accumulate
from urllib.parse import parse_qs, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OWN_ROUTES = "/kl/"
"""Our own JSON routes start like this; all of them need the token."""
OPEN_ROUTES = "/kl/web/"
"""Modules of the page, the same for everybody; they need no token."""
VOTES = "/vote/"
"""Links to vote start like this; each has a token of its own, and needs no login."""
TOKEN_HEADER = "x-kl-token"
SHARE_SUFFIX = ".gradio.live"
"""Where share links lie. Nobody else can point such a name at this computer, so it is no way around the list of names."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
FORWARDED = "x-forwarded-"
"""Beginning of the headers in which a proxy tells who asked it; anybody else can send them too."""
BEFORE_LOGIN = frozenset(
    ("/", "/login", "/logout", "/config", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json", "/pwa_icon")
    # What gradio asks itself when it starts.
    + ("/gradio_api/startup-events",)
)
"""What somebody gets who has not logged in: the page that asks for the password, and with FILES_BEFORE_LOGIN what it is drawn with."""
FILES_BEFORE_LOGIN = ("/assets/", "/static/", "/svelte/", "/pwa_icon/")
MAX_JSON_BYTES = 16 << 20
MAX_JSON_DEPTH = 100
PACE_SECONDS = 2.0
"""Between two attempts to log in once there were many."""
MOST_WAITING = 4

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
    embedded is for a page that stands in a frame of another site and is meant for everybody, such as a Space. With trust_proxy, the
    headers of a proxy in front of the studio are believed. knows tells from a request's cookies whether somebody has logged in; None asks
    for no login.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        names: Iterable[str] = (),
        open_to_network: bool = False,
        share: bool = False,
        embedded: bool = False,
        trust_proxy: bool = False,
        knows: Callable[[Mapping[str, str]], bool] | None = None,
        login_attempts: int = 8,
        login_window_seconds: float = 300.0,
        login_pace_seconds: float = PACE_SECONDS,
    ) -> None:
        self.app = app
        self._token = token.encode()
        self._names = LOCAL_NAMES | {name.lower() for name in names}
        self._open_to_network = open_to_network
        self._share = share
        self._trust_proxy = trust_proxy
        self._knows = knows
        self._destinations = ("document", "iframe") if embedded else ("document",)
        self._headers = _EMBEDDED_HEADERS if embedded else _SECURITY_HEADERS
        self._throttle = Throttle(login_attempts, login_window_seconds, login_pace_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        scope = {**scope, "headers": [(name, value) for name, value in scope["headers"] if self._is_believed(name, value)]}
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is None and _is_login(scope):
            refusal = await self._slowed_down(scope)
        if refusal is None and scope["type"] == "http" and _says_json(scope, headers):
            refusal, receive = await _read_json(receive)
        if refusal is not None and scope["type"] == "http":
            await _refuse(send, *refusal)
        elif refusal is not None:
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self.app(scope, receive, self._watching(scope, send))
        else:
            await self.app(scope, receive, send)

    def _is_believed(self, name: bytes, value: bytes) -> bool:
        """Whether a header may reach the page: those of a proxy only from one, or from the tunnel of a share link."""
        if self._trust_proxy or not name.decode("latin-1").startswith(FORWARDED):
            return True
        return self._share and value.decode("latin-1").endswith((SHARE_SUFFIX, "https"))

    async def _slowed_down(self, scope: Scope) -> tuple[int, str] | None:
        """Lets an attempt to log in wait for its turn, so that the right password gets in even while somebody guesses."""
        seconds = self._throttle.wait(_peer(scope))
        if seconds is None:
            return 429, "Too many attempts to log in. Wait a minute."
        await asyncio.sleep(seconds)
        return None

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
        if self._knows is not None and not _is_open_to_strangers(path) and not self._knows(_cookies(headers)):
            return 401, "Log in first."
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
            # An image or a download link cannot send a header.
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
    """The first attempts in a window are free for each peer, and ten times as many for all together; further ones wait for their turn."""

    def __init__(self, attempts: int, window_seconds: float, pace_seconds: float) -> None:
        self._attempts = attempts
        self._window_seconds = window_seconds
        self._pace_seconds = pace_seconds
        self._seen: deque[tuple[float, str]] = deque()
        """When each attempt has its turn, and whose it is."""

    def wait(self, peer: str) -> float | None:
        """Counts an attempt; seconds until it has its turn, None when too many wait already."""
        now = time.monotonic()
        self._seen = deque(row for row in self._seen if row[0] >= now - self._window_seconds)
        turns = [when for when, name in self._seen if name == peer]
        many = len(turns) >= self._attempts
        everybody = len(self._seen) >= 10 * self._attempts
        last = max((when for when, _ in self._seen), default=0.0) if everybody else max(turns, default=0.0)
        turn = max(now, last + self._pace_seconds) if many or everybody else now
        if turn - now > MOST_WAITING * self._pace_seconds:
            return None
        self._seen.append((turn, peer))
        return turn - now

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


def _is_open_to_strangers(path: str) -> bool:
    return (path.rstrip("/") or "/") in BEFORE_LOGIN or path.startswith((*FILES_BEFORE_LOGIN, VOTES))


def _cookies(headers: Mapping[str, str]) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    except CookieError:
        return {}


def _says_json(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether a request has a body that will be read as JSON. Ours are, whatever they say of themselves."""
    if scope.get("method") not in ("POST", "PUT", "PATCH"):
        return False
    path = str(scope.get("path", ""))
    return "json" in headers.get("content-type", "") or (path.startswith((OWN_ROUTES, VOTES)) and not path.endswith("/upload"))


async def _read_json(receive: Receive) -> tuple[tuple[int, str] | None, Receive]:
    """A refusal for a body that is too long or nested too deeply, and a way to receive the body that was read here once more."""
    messages: deque[Message] = deque()
    body = b""
    while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False)):
        messages.append(await receive())
        body += messages[-1].get("body", b"")
        if len(body) > MAX_JSON_BYTES:
            return (413, f"JSON may have {MAX_JSON_BYTES >> 20} MiB."), receive
    if _depth(body) > MAX_JSON_DEPTH:
        return (400, f"JSON may be nested {MAX_JSON_DEPTH} deep."), receive

    async def again() -> Message:
        return messages.popleft() if messages else await receive()

    return None, again


# Possessive, and a text without an end reaches to the end: one pass, whatever is sent.
_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _depth(body: bytes) -> int:
    """How deep a JSON text is nested."""
    brackets = _TEXTS.sub(b"", body).translate(None, _NO_BRACKETS)
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"detail": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_SECURITY_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
