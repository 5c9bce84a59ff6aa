"""Blind votes of other people by a link. A link belongs to one grid, lets in the first browser that opens it, and shows images alone: no
names, no prompts, no settings, no paths. Links are kept in memory: they end with the studio, with their grid, and after a day."""

from __future__ import annotations

import hashlib
import hmac
import io
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

from . import page, votes
from .answers import JsonAnswer
from .catalogues import catalogues, compiled
from .comparisons import Comparisons
from .guard import VOTES

MAX_LINKS = 20
MAX_VOTES = 300
"""Of one link."""
LASTS_SECONDS = 24 * 3600.0
PACE_SECONDS = 0.5
"""Between a question and its answer; nobody has looked at two images in less."""
MAX_SIDE = 1024
LOSSLESS_SIDE = 256
COOKIE = "kl-vote"
_SIDES = ("left", "right")
MODULES = frozenset(
    ("inference/guest.js", "common/html.js", "common/language.js", "common/stored.js")
    + ("vendor/htm/htm.module.js", "vendor/preact/preact.module.js")
)
"""What guest.js needs of the page's modules."""


class LinkRefused(Exception):
    """What somebody with a link must not or cannot do: an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass
class _Link:
    """One link. question: row and the columns at the left and the right, with the keys of their images; None before the first one."""

    grid: str
    made: float
    guest: bytes = b""
    """Digest of what the browser has that opened it; empty before that."""
    votes: int = 0
    question: tuple[int, int, int] | None = None
    keys: tuple[str, ...] = ()
    asked: float = 0.0


class VoteLinks:
    """The links of a studio. clock: seconds."""

    def __init__(self, compared: Comparisons, clock: Callable[[], float] = time.monotonic) -> None:
        self._compared, self._clock = compared, clock
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()

    def invite(self, grid: str) -> str:
        """The token of a new link to a grid; the oldest link ends where there are too many. Raises KeyError."""
        self._compared.told(grid)
        token = secrets.token_urlsafe(24)
        with self._lock:
            now = self._clock()
            alive = {name: link for name, link in self._links.items() if now - link.made < LASTS_SECONDS}
            self._links = dict(list(alive.items())[-MAX_LINKS + 1 :]) | {token: _Link(grid, now)}
        return token

    def enter(self, token: str, cookie: str) -> str:
        """Lets a browser in; what it must show from now on. Raises LinkRefused for every other one."""
        with self._lock:
            link = self._link(token)
            if not link.guest:
                cookie = secrets.token_urlsafe(24)
                link.guest = _digest(cookie)
        self._known(token, cookie)
        return cookie

    def question(self, token: str, cookie: str) -> dict[str, Any]:
        """The number of the question at hand, which stays until it is answered, and whether there is one. Raises LinkRefused."""
        with self._lock:
            link = self._known(token, cookie)
            if link.votes >= MAX_VOTES:
                return {"number": link.votes, "there": False}
            if link.question is None or self._keys(link) != link.keys:
                shown = self._shown(link)
                pair = votes.next_pair(shown["there"], self._compared.given_votes(link.grid), f"{link.grid} {token}")
                link.question, link.asked = pair, self._clock()
                link.keys = self._keys(link)
            return {"number": link.votes, "there": link.question is not None}

    def image(self, token: str, cookie: str, number: int, side: str) -> tuple[bytes, str]:
        """Pixels of one side of the question at hand, without the texts of its file, and their media type. Raises LinkRefused."""
        with self._lock:
            link = self._known(token, cookie)
            if link.question is None or number != link.votes or side not in _SIDES:
                raise LinkRefused(404, "This image is not asked about.")
            key = link.keys[_SIDES.index(side)]
        try:
            with Image.open(self._compared.cells / f"{key}.png") as opened:
                pixels = opened.convert("RGB")
        except OSError as err:
            raise LinkRefused(404, "This image is not on disk any more.") from err
        pixels.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        pixels.save(stream, format="WEBP", **({"lossless": True} if max(pixels.size) < LOSSLESS_SIDE else {"quality": 92}))
        return stream.getvalue(), "image/webp"

    def vote(self, token: str, cookie: str, number: object, winner: object) -> None:
        """Keeps an answer. Raises LinkRefused."""
        with self._lock:
            link = self._known(token, cookie)
            if link.question is None or number != link.votes:
                raise LinkRefused(409, "This question was answered already; here is the next one.")
            if self._clock() - link.asked < PACE_SECONDS:
                raise LinkRefused(429, "That was fast. Look at both images first.")
            row, left, right = link.question
            given = votes.told({"row": row, "left": left, "right": right, "winner": winner})
            if given is None:
                raise LinkRefused(400, "An answer is left, right or none.")
            try:
                self._compared.add_vote(link.grid, given, link.keys)
            except KeyError as err:
                raise _gone() from err
            except OptionError as err:
                link.question = None
                raise LinkRefused(409, str(err).removeprefix(": ")) from err
            link.votes, link.question = link.votes + 1, None

    def leads(self, token: str) -> bool:
        """Whether there is such a link."""
        try:
            self._link(token)
        except LinkRefused:
            return False
        return True

    def _link(self, token: str) -> _Link:
        link = self._links.get(token)
        if link is None or self._clock() - link.made >= LASTS_SECONDS:
            raise _gone()
        return link

    def _known(self, token: str, cookie: str) -> _Link:
        """The link, for the browser that opened it."""
        link = self._link(token)
        if not hmac.compare_digest(link.guest, _digest(cookie)):
            raise LinkRefused(403, "This link was opened in another browser already; it opens once. Ask for a link of your own.")
        return link

    def _shown(self, link: _Link) -> dict[str, Any]:
        try:
            return self._compared.one(link.grid)
        except KeyError as err:
            raise _gone() from err

    def _keys(self, link: _Link) -> tuple[str, ...]:
        if link.question is None:
            return ()
        row, *columns = link.question
        keys = self._shown(link)["keys"]
        return tuple(keys[row][column] for column in columns) if row < len(keys) and max(columns) < len(keys[row]) else ()


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()


def _gone() -> LinkRefused:
    return LinkRefused(404, "This link does not lead to a vote any more. Ask for another one.")


def _html(inside: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="robots" content="noindex"><title>Which is better?</title></head><body>{inside}</body></html>\n'
    )


def routes(links: VoteLinks) -> list[Route]:
    """What somebody with a link may ask; there is no other way in without the token of the page. guest.js draws it."""

    def answered(work: Callable[[str, str, Request, Any], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            token, cookie = str(request.path_params["token"]), request.cookies.get(COOKIE, "")
            try:
                given = json_of(await request.body()) if request.method == "POST" else {}
                found = await run_in_threadpool(work, token, cookie, request, given if isinstance(given, dict) else {})
            except LinkRefused as err:
                return JsonAnswer({"detail": str(err)}, err.status, headers=_FRESH)
            except ValueError:
                return JsonAnswer({"detail": "This is not an order of the page."}, 400)
            return found if isinstance(found, Response) else JsonAnswer(found, headers=_FRESH)

        return answer

    def enter(token: str, cookie: str, request: Request, _given: Any) -> Response:
        shown = links.enter(token, cookie)
        answer = JsonAnswer(links.question(token, shown), headers=_FRESH)
        secure = request.url.scheme == "https"
        place = f"{VOTES}{token}"
        answer.set_cookie(COOKIE, shown, int(LASTS_SECONDS), path=place, secure=secure, httponly=True, samesite="strict")
        return answer

    def image(token: str, cookie: str, request: Request, _given: Any) -> Response:
        data, kind = links.image(token, cookie, int(request.path_params["number"]), str(request.path_params["side"]))
        return Response(data, media_type=kind, headers=_FRESH)

    def vote(token: str, cookie: str, _request: Request, given: Any) -> dict[str, Any]:
        links.vote(token, cookie, given.get("number"), given.get("winner"))
        return links.question(token, cookie)

    def shown(request: Request) -> Response:
        # Programs that look at links for people get this page too; it is its script that opens the link.
        token = str(request.path_params["token"])
        if not links.leads(token):
            return HTMLResponse(_html(f"<p>{_gone()}</p>"), 404, headers=_FRESH)
        return HTMLResponse(
            _html(f'<main></main><script type="module" src="{VOTES}{token}/web/inference/guest.js"></script>'), headers=_FRESH
        )

    def module(request: Request) -> Response:
        """What draws the page; strangers without a link get no module of the studio."""
        name = str(request.path_params["name"])
        if not links.leads(str(request.path_params["token"])) or name not in MODULES | catalogues().keys():
            return Response(status_code=404)
        if name in MODULES:
            return Response(page.modules()[name], media_type="text/javascript", headers=_FRESH)
        return Response(compiled(catalogues()[name]), media_type="application/json", headers=_FRESH)

    return [
        Route(f"{VOTES}{{token}}", shown),
        Route(f"{VOTES}{{token}}/web/{{name:path}}", module),
        Route(f"{VOTES}{{token}}/enter", answered(enter), methods=["POST"]),
        Route(f"{VOTES}{{token}}/question", answered(lambda token, cookie, *_: links.question(token, cookie))),
        Route(f"{VOTES}{{token}}/image/{{number:int}}/{{side}}", answered(image)),
        Route(f"{VOTES}{{token}}/answer", answered(vote), methods=["POST"]),
    ]


_FRESH = {"cache-control": "no-store"}
