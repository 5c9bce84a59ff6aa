"""Tells an address that somebody gave (ntfy, or a webhook) that a run has ended. What is sent names no run, no folder and no person, and is
sent beside everything else: nothing waits for an address that does not answer.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from starlette.routing import Route

from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.outside import object_in

from .answers import orders
from .context import Context
from .supervisor import ENDED, Job

FILE = ".notices.json"
"""In the output folder."""
TIMEOUT_SECONDS = 10.0
GRACE_SECONDS = 10.0
"""A look takes a while."""
MOST_WAITING = 100
MAX_ADDRESS = 500
KINDS = ("ntfy", "webhook")
"""A text with a title as ntfy takes it; or JSON as Slack ("text") and Discord ("content") take it."""
WORDS = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed", "died": "has ended without a word"}
TITLE = "kohya_like"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where notices go; nowhere while url is empty."""

    url: str = ""
    kind: str = "ntfy"


class Notices:
    """Keeps the address, notices which runs end, and sends."""

    def __init__(self, output_dir: Path, is_private: bool) -> None:
        """is_private: only somebody at this computer can open the page, and may name addresses of their own network."""
        self._file = output_dir / FILE
        self._is_private = is_private
        self._known: dict[Path, str] | None = None
        self._looked = 0.0
        self._waiting: queue.Queue[str] = queue.Queue(MOST_WAITING)
        self._sender: threading.Thread | None = None

    def address(self) -> Address:
        known = object_in(self._file)
        if known.get("kind") not in KINDS or not isinstance(known.get("url"), str):
            return Address()
        return Address(known["url"], known["kind"])

    def keep(self, url: str, kind: str) -> Address:
        """Checks an address and keeps it; an empty one ends the notices. Raises OptionError."""
        address = Address(url.strip(), kind)
        if kind not in KINDS:
            raise OptionError(f"kind: {kind} is none of {', '.join(KINDS)}")
        if address.url:
            check(address.url, self._is_private)
        try:
            write_atomically(self._file, json.dumps(asdict(address), indent=1))
            # Whoever knows the address can write to it.
            self._file.chmod(0o600)
        except OSError as err:
            raise OptionError(f"{self._file} could not be written: {err.strerror or err}") from err
        return address

    def see(self, jobs: Sequence[Job]) -> None:
        """Takes a look at all runs, and tells of those that have ended since the last one. Never waits."""
        before, self._known = self._known, {job.path: job.state for job in jobs}
        since, self._looked = self._looked - GRACE_SECONDS, time.time()
        for job in jobs:
            if before is None or job.state not in WORDS:
                continue
            # One that began and ended between two looks was never seen at work; one that comes out of the trash is old.
            news = before[job.path] not in ENDED if job.path in before else job.summary.last_time >= since
            if news and self.address().url:
                self._send_later(f"A run {WORDS[job.state]} after {job.summary.step:,} of {job.summary.steps or job.summary.step:,} steps.")

    def _send_later(self, text: str) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name="notices", daemon=True)
            self._sender.start()
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            log.warning("a notice was left out: the address takes too long to answer")

    def _send_all(self) -> None:
        while True:
            try:
                self.send(self._waiting.get())
            except OptionError as err:
                log.warning("a notice was not sent: %s", err)

    def send(self, text: str) -> None:
        """Sends a notice now. Raises OptionError where it does not arrive; the sentence does not name the address."""
        address = self.address()
        if not address.url:
            raise OptionError("address: give one first")
        check(address.url, self._is_private)
        if address.kind == "ntfy":
            data, headers = text.encode(), {"title": TITLE, "content-type": "text/plain; charset=utf-8"}
        else:
            told = f"{TITLE}: {text}"
            data, headers = json.dumps({"text": told, "content": told}).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(address.url, data, {**headers, "user-agent": TITLE}, method="POST")
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_SECONDS):
                pass
        except urllib.error.HTTPError as err:
            err.close()
            raise OptionError(f"address: it answered {err.code}; look whether it is written as the service gave it") from err
        except (OSError, ValueError) as err:
            reason = getattr(err, "reason", None) or err
            raise OptionError(f"address: it cannot be reached ({type(reason).__name__}); look at its spelling and the network") from err


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Where an address sends us on to is not what was checked."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def check(url: str, is_private: bool) -> None:
    """Raises OptionError for what is no address of the web, and for places inside a network where others can open the page."""
    if len(url) > MAX_ADDRESS or any(ord(character) <= 32 or ord(character) > 126 for character in url):
        raise OptionError(f"address: it has spaces, other characters than an address, or more than {MAX_ADDRESS} of them")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as err:
        raise OptionError(f"address: {err}") from err
    if parts.scheme not in ("http", "https") or not host or not parts.path.strip("/"):
        raise OptionError("address: give a whole one, such as https://ntfy.sh/a-name-that-nobody-guesses")
    if parts.username or parts.password:
        raise OptionError("address: without user and password; take a token in the address, as the service gives it")
    check_host(host, port or parts.scheme, is_private, "address")


def check_host(host: str, port: int | str, is_private: bool, option: str) -> None:
    """Raises OptionError for a host that is not known, and for one inside this network where others can open the page."""
    try:
        found = {str(item[4][0]) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as err:
        raise OptionError(Problem(option, f"{option}: {host} is not known; look at its spelling and the network")) from err
    for each in map(ipaddress.ip_address, found):
        own = cast(Any, each).ipv4_mapped or each if isinstance(each, ipaddress.IPv6Address) else each
        if own.is_link_local or own.is_multicast or own.is_unspecified or not (own.is_global or is_private):
            raise OptionError(Problem(option, f"{option}: {host} lies inside this network, which a page that others can open may not ask"))


def routes(context: Context, notices: Notices) -> list[Route]:
    """The guard asks all of them for the token of the page."""

    def known(_order: Mapping[str, Any]) -> dict[str, Any]:
        return {**asdict(notices.address()), "kinds": KINDS}

    def keep(order: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(notices.keep(str(order.get("url") or ""), str(order.get("kind") or "")))

    def test(_order: Mapping[str, Any]) -> dict[str, Any]:
        notices.send("This is a test. It looks like this when a run ends.")
        return {}

    work: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"known": known, "keep": keep, "test": test}

    context.supervisor.listeners.append(notices.see)
    return [orders("/kl/notices/{what}", work)]
