"""Notices of runs that end: what arrives at an address, that nothing waits for it, and which addresses are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kohya_like import notices
from kohya_like.supervisor import JobSupervisor
from sd_scripts.schema.errors import OptionError
from tests.ui.standin_runs import SCRIPT, command, options, until


@dataclass
class Mailbox:
    """A server on this computer that keeps what it is sent."""

    port: int = 0
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    silent: threading.Event = field(default_factory=threading.Event)
    """Clear: it takes a request and does not answer."""
    answer: int = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/secret-topic"


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    box = Mailbox()
    box.silent.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            box.got.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            box.silent.wait(60)
            self.send_response(box.answer)
            if box.answer == 302:
                self.send_header("location", f"http://127.0.0.1:{box.port}/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    box.port = server.server_port
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield box
    box.silent.set()
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSupervisor]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    supervisor = JobSupervisor(tmp_path / "Jane Doe", command("quick"))
    supervisor.root.mkdir()
    yield supervisor
    supervisor.close()


def test_an_address_hears_that_a_run_has_ended_and_nothing_else(supervisor: JobSupervisor, mailbox: Mailbox) -> None:
    told = notices.Notices(supervisor.root, is_private=True)
    told.keep(mailbox.url, "ntfy")
    assert (supervisor.root / notices.FILE).stat().st_mode & 0o077 == 0
    told.see(supervisor.seen())
    supervisor.listeners.append(told.see)
    for number, kind in enumerate(("ntfy", "webhook"), 1):
        told.keep(mailbox.url, kind)
        supervisor.start(SCRIPT, options(supervisor.root, output_name="jane-private"))
        until(lambda number=number: len(mailbox.got) == number)
    (path, headers, text), (_, others, body) = mailbox.got
    assert path == "/secret-topic" and text.decode() == "A run has finished after 5 of 5 steps." and headers["title"] == "kohya_like"
    assert json.loads(body)["text"] == json.loads(body)["content"] == f"kohya_like: {text.decode()}"
    everything = repr(mailbox.got).lower()
    assert "jane" not in everything and str(supervisor.root).lower() not in everything and "authorization" not in {**headers, **others}


def test_runs_and_the_queue_wait_for_no_address(supervisor: JobSupervisor, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the runs take longer than an address is waited for, and the second notice would be on its way.
    monkeypatch.setattr(notices, "TIMEOUT_SECONDS", 600.0)
    mailbox.silent.clear()
    told = notices.Notices(supervisor.root, is_private=True)
    told.keep(mailbox.url, "ntfy")
    told.see(supervisor.seen())
    supervisor.listeners.append(told.see)
    jobs = [supervisor.start(SCRIPT, options(supervisor.root, output_name=name)) for name in ("a", "b", "c")]
    until(lambda: all(supervisor.find(job.name).state == "finished" for job in jobs))
    until(lambda: mailbox.got)
    assert len(mailbox.got) == 1, "the others wait behind it, and nobody for them"


def test_who_was_there_before_is_no_news(supervisor: JobSupervisor, mailbox: Mailbox) -> None:
    job = supervisor.start(SCRIPT, options(supervisor.root, output_name="old"))
    until(lambda: supervisor.find(job.name).state == "finished")
    told = notices.Notices(supervisor.root, is_private=True)
    told.keep(mailbox.url, "ntfy")
    for _ in range(3):
        told.see(supervisor.seen())
    assert told._waiting.empty() and mailbox.got == []


def test_an_address_that_fails_is_said_without_naming_it(tmp_path: Path, mailbox: Mailbox) -> None:
    told = notices.Notices(tmp_path, is_private=True)
    with pytest.raises(OptionError, match="give one first"):
        told.send("x")
    for answer, words in ((404, "answered 404"), (302, "answered 302")):
        mailbox.answer = answer
        told.keep(mailbox.url, "ntfy")
        with pytest.raises(OptionError, match=words) as err:
            told.send("x")
        assert "secret-topic" not in str(err.value)
    assert {path for path, _, _ in mailbox.got} == {"/secret-topic"}, "nobody follows where it leads"
    told.keep(mailbox.url.replace(str(mailbox.port), "9"), "ntfy")
    with pytest.raises(OptionError, match="cannot be reached"):
        told.send("x")
    (tmp_path / notices.FILE).write_text('{"url": 5}')
    assert told.address() == notices.Address()
    told.keep("", "webhook")
    assert told.address().url == ""


@pytest.mark.parametrize(
    "url",
    [
        "ntfy.sh/topic",
        "file:///etc/passwd",
        "ftp://example.org/x",
        "https://",
        "http://127.0.0.1:1/",
        "https://user:word@127.0.0.1/x",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/a\r\nx: y",
        "http://[::1/x",
        "http://127.0.0.1:99999999/x",
        "http://127.0.0.1/" + "x" * 600,
        "http://169.254.169.254/latest",
        "http://0.0.0.0/x",
        "http://no-such-host.invalid/x",
    ],
)
def test_what_is_no_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^address: "):
        notices.Notices(tmp_path, is_private=True).keep(url, "ntfy")
    assert not (tmp_path / notices.FILE).exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.9", "[::1]", "[::ffff:10.0.0.1]", "[fe80::1]", "2130706433"])
def test_a_page_that_others_can_open_asks_nobody_inside_the_network(host: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="inside this network"):
        notices.Notices(tmp_path, is_private=False).keep(f"http://{host}/x", "ntfy")
