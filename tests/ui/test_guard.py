"""Who may talk to the studio: the door against other web sites, other names, other people; and the arguments of gui.py."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from kohya_like import files, guard, ports
from kohya_like.guard import Guard, Throttle, hostname
from kohya_like.page import folder
from sd_scripts.schema.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]


def ask(studio: Any, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One raw request; a header x_y is sent as x-y."""
    connection = http.client.HTTPConnection("127.0.0.1", studio.port, timeout=120)
    sent = {"Host": f"127.0.0.1:{studio.port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content


def token_of(studio: Any) -> str:
    page = ask(studio, "/")[2].decode()
    return str(json.loads('"' + page.split('"token":')[1].split('"')[1] + '"'))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "192.168.0.7:7860", "x.gradio.live"]
)
def test_another_name_is_refused_so_dns_rebinding_finds_nothing(studio: Any, host: str) -> None:
    assert ask(studio, "/", Host=host)[0] in (400, 403)
    assert ask(studio, "/config", Host=host)[0] in (400, 403)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST"])
def test_the_names_of_this_computer_are_answered(studio: Any, name: str) -> None:
    assert ask(studio, "/", Host=f"{name}:{studio.port}")[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:1", "http://localhost:9999"])
def test_a_request_from_another_site_is_refused(studio: Any, origin: str) -> None:
    boundary = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nx\r\n--b--\r\n'
    upload = ask(studio, "/gradio_api/upload", "POST", boundary, Origin=origin, Content_Type="multipart/form-data; boundary=b")
    assert upload[0] == 403
    joined = ask(studio, "/gradio_api/queue/join", "POST", b"{}", Origin=origin, Content_Type="text/plain")
    assert joined[0] == 403
    preflight = ask(studio, "/gradio_api/queue/join", "OPTIONS", Origin=origin, Access_Control_Request_Method="POST")
    assert preflight[0] == 403
    assert "access-control-allow-origin" not in preflight[1]


def test_a_cross_site_request_without_origin_is_refused_unless_it_is_a_followed_link(studio: Any) -> None:
    assert ask(studio, "/gradio_api/file=x", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="image")[0] == 403
    assert ask(studio, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe")[0] == 403
    assert ask(studio, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document")[0] == 200


def test_our_own_routes_need_the_token(studio: Any) -> None:
    assert ask(studio, "/kl/runs")[0] == 401
    assert ask(studio, "/kl/runs", X_KL_Token="guess")[0] == 401
    assert ask(studio, "/kl/run/x/stop", "POST")[0] == ask(studio, "/kl/run/x/evaluate", "POST")[0] == 401
    assert ask(studio, "/kl/run/x/evaluation/epoch_0001")[0] == ask(studio, "/kl/run/x/evaluation/epoch_0001/grid.jpg")[0] == 401
    assert ask(studio, "/kl/tools")[0] == ask(studio, "/kl/tools/start", "POST")[0] == 401
    for path in ("datasets/begin", "datasets/upload?upload=x", "datasets/finish", "datasets/cancel", "browse"):
        assert ask(studio, f"/kl/{path}", "POST", b"{}")[0] == 401
    assert ask(studio, "/kl/datasets")[0] == 401
    assert ask(studio, "/kl/compare")[0] == ask(studio, "/kl/compare/x/file.html")[0] == ask(studio, "/kl/compare/start", "POST")[0] == 401
    for path, method in (
        ("", "GET"),
        ("/now", "GET"),
        ("/image", "GET"),
        ("/upload", "POST"),
        ("/start", "POST"),
        ("/job/x", "GET"),
        ("/free", "POST"),
    ):
        assert ask(studio, f"/kl/predict{path}", method)[0] == 401
    assert ask(studio, "/kl/tools/run/x", X_KL_Token=token_of(studio))[0] == 404
    assert ask(studio, "/kl/runs", X_KL_Token=token_of(studio))[0] == 200
    assert ask(studio, folder() + "main.js")[0] == 200
    for name in ("..%2fapp.py", "common/common.css", "%2e%2e/%2e%2e/gui.py", "nothing.js", "../../../gui.py"):
        assert ask(studio, folder() + name)[0] in (401, 404)
    # Another version's address would be kept by browsers with this one's content.
    assert ask(studio, "/kl/web/0000000000000000/main.js")[0] == 404


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/environ", "../../../etc/passwd", "gui.py", ".env", "http://127.0.0.1:1/x"])
def test_no_file_of_the_computer_is_served(studio: Any, path: str) -> None:
    (studio.output_dir.parent / ".env").write_text("SECRET=1")
    (studio.output_dir / "weights.safetensors").write_bytes(b"x")
    assert ask(studio, f"/gradio_api/file={path}")[0] in (403, 404)
    assert ask(studio, f"/gradio_api/file={studio.output_dir}/weights.safetensors")[0] in (403, 404)


def test_every_answer_carries_the_security_headers(studio: Any) -> None:
    for path in ("/", "/kl/runs", "/config"):
        headers = ask(studio, path)[1]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "same-origin"


def test_a_password_keeps_the_page_and_its_token_from_strangers_and_guessing_is_slowed_down(studios: Callable[..., Any]) -> None:
    studio = studios("--auth", "ada:correct-horse")
    page = ask(studio, "/")[2].decode()
    assert '"auth_required":true' in page.replace(" ", "")
    assert '"token"' not in page
    assert ask(studio, "/config")[0] == 401
    assert ask(studio, "/kl/runs")[0] == 401
    # Somebody with a link to vote has no password.
    assert ask(studio, "/vote/guess")[0] == 404

    def log_in(password: str, client: str = "") -> int:
        body = urllib.parse.urlencode({"username": "ada", "password": password}).encode()
        said = {"X_Forwarded_For": client} if client else {}
        return ask(studio, "/login", "POST", body, Content_Type="application/x-www-form-urlencoded", **said)[0]

    assert log_in("correct-horse") == 200
    # Whatever a client says of its address, it is the client that is slowed down. Who has to wait for an answer does not do so here.
    statuses: queue.Queue[int] = queue.Queue()

    def guess(number: int) -> None:
        # The studio may end before it answers.
        with contextlib.suppress(OSError, http.client.HTTPException):
            statuses.put(log_in(f"guess {number}", f"10.0.0.{number}"))

    for number in range(16):
        threading.Thread(target=guess, args=(number,), daemon=True).start()
    found = set[int]()
    while found != {400, 429}:
        found.add(statuses.get(timeout=120))


def test_the_right_password_gets_in_while_somebody_guesses() -> None:
    async def login(request: Request) -> Response:
        return Response(status_code=200 if await request.body() == b"correct-horse" else 400)

    guarded = Guard(Starlette(routes=[Route("/login", login, methods=["POST"])]), "t", login_pace_seconds=0.05)
    with TestClient(guarded, "http://127.0.0.1") as client:

        def log_in(password: str) -> int:
            return client.post("/login", content=password).status_code

        with ThreadPoolExecutor(32) as together:
            statuses = list(together.map(lambda number: log_in(f"guess {number}"), range(32)))
        assert set(statuses) == {400, 429} and statuses.count(400) >= 12
        while (found := log_in("correct-horse")) == 429:
            time.sleep(0.01)
        assert found == 200
        assert [log_in("correct-horse") for _ in range(9)] == [200] * 9, "who got in is not slowed down any more"


def test_strangers_get_the_page_that_asks_for_the_password_and_nothing_else(studios: Callable[..., Any]) -> None:
    studio = studios("--auth", "ada:correct-horse")
    paths = (
        "/gradio_api/heartbeat/x",
        folder() + "main.js",
        folder() + "schema.js",
        "/openapi.json",
        "/gradio_api/openapi.json",
        "/kl/runs",
    )
    paths += ("/gradio_api/info", "/gradio_api/runs", "/custom_component/a/b/c/d", "/monitoring", "/nothing")
    assert {path: ask(studio, path)[0] for path in paths} == dict.fromkeys(paths, 401)
    for path in ("/", "/theme.css", "/robots.txt"):
        assert ask(studio, path)[0] == 200
    body = urllib.parse.urlencode({"username": "ada", "password": "correct-horse"}).encode()
    status, headers, _ = ask(studio, "/login", "POST", body, Content_Type="application/x-www-form-urlencoded")
    assert status == 200
    cookie = headers["set-cookie"].partition(";")[0]
    assert ask(studio, folder() + "main.js", Cookie=cookie)[0] == 200
    assert ask(studio, "/kl/runs", Cookie=cookie, X_KL_Token="guess")[0] == 401
    assert ask(studio, folder() + "main.js", Cookie=cookie + "x")[0] == 401


@pytest.mark.parametrize(
    "path", ["/gradio_api/queue/join", "/kl/train/foresight", "/kl/tools/start", "/gradio_api/run/x", "/gradio_api/cancel"]
)
def test_json_without_end_is_refused(studio: Any, path: str) -> None:
    deep = b'{"a":' * 100_000
    assert ask(studio, path, "POST", deep, X_KL_Token=token_of(studio), Content_Type="application/json")[0] == 400
    assert ask(studio, path, "POST", b"[" * 101 + b"]" * 101, X_KL_Token=token_of(studio), Content_Type="application/json")[0] == 400


def test_an_image_whose_kind_no_browser_names_is_taken_whatever_its_bytes_look_like(studio: Any) -> None:
    said = PngInfo()
    said.add_text("note", "[" * 500)
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG", pnginfo=said)
    token = token_of(studio)
    for kind in ({}, {"Content_Type": "application/octet-stream"}, {"Content_Type": "image/png"}):
        status, _, answer = ask(studio, "/kl/predict/upload", "POST", stream.getvalue(), X_KL_Token=token, **kind)
        assert (status, json.loads(answer)["image"]["width"]) == (200, 8), (kind, answer)


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30))
def test_the_depth_of_json_is_told_whatever_its_texts_hold(value: Any) -> None:
    def depth(part: Any) -> int:
        inside = part.values() if isinstance(part, dict) else part if isinstance(part, list) else None
        return 0 if inside is None else 1 + max(map(depth, inside), default=0)

    assert guard._depth(json.dumps(value).encode()) == guard._depth(json.dumps(value, ensure_ascii=False).encode()) == depth(value)


def test_what_a_proxy_would_say_is_believed_only_if_told_to(studio: Any, studios: Callable[..., Any]) -> None:
    said = {"X_Forwarded_Host": "evil.example", "X_Forwarded_Proto": "https"}
    assert b"evil.example" not in ask(studio, "/", **said)[2] and b"evil.example" not in ask(studio, "/config", **said)[2]
    behind = studios("--trust_proxy", "--allowed_host", "trainer.lan")
    assert b"https://trainer.lan" in ask(behind, "/config", X_Forwarded_Host="trainer.lan", X_Forwarded_Proto="https")[2]


@pytest.mark.parametrize("arguments", [["--listen"], ["--listen", "0.0.0.0"], ["--share"], ["--listen", "192.168.0.2"]])
def test_opening_the_studio_to_others_without_a_password_is_refused_in_a_sentence(arguments: list[str], tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, str(ROOT / "gui.py"), *arguments], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert ended.returncode == 2
    assert "--auth user:password" in ended.stderr and "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_wrong_arguments_are_answered_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    wrong = ["--server_port", "99999", "--auth", "nobody", "--output_dir", str(tmp_path / "file"), "--allowed_dir", str(tmp_path / "gone")]
    code = f"import sys, gui; code = gui.main({wrong!r}); print(code, 'gradio' in sys.modules, 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert ended.stdout.split() == ["2", "False", "False"]
    for word in ("99999", "--auth needs", "is a file", "gone"):
        assert word in ended.stderr


def test_a_page_that_is_made_has_no_server_before_it_is_launched(tmp_path: Path) -> None:
    code = f"""
import gc
from pathlib import Path
from kohya_like import app, space, startup
startup.prepare()
context = app.make_context(Path({str(tmp_path)!r}), (), is_private=True)
pages = [app.make_app(context), app.make_inference_app(context)]
menu = space.menu_of("base", [])
pages.append(space.make_page("title", context.token, menu, context.predictions))
from gradio.routes import App
print(sum(isinstance(item, App) for item in gc.get_objects()))
demo, local, _ = app.launch(context, app.Server())
print(sum(isinstance(item, App) for item in gc.get_objects()), local[:16])
demo.close(verbose=False)
context.predictions.close()
context.supervisor.close()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert ended.stdout.split() == ["0", "1", "http://127.0.0.1"], ended.stderr


def test_a_port_that_is_taken_is_told_with_who_has_it_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["--server_port", str(port), "--output_dir", str(tmp_path / "out")]
        code = f"import sys, gui; code = gui.main({arguments!r}); print(code, 'gradio' in sys.modules)"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT)
        assert ended.stdout.split() == ["1", "False"] and not (tmp_path / "out").exists()
        assert f"port {port} is taken by " in ended.stderr and f"(process {os.getpid()}, since " in ended.stderr
        assert "or none for the first free one from 7860" in ended.stderr
    assert ports.problem("127.0.0.1", port) is None
    assert "this computer has no address 192.0.2.77" in (ports.problem("192.0.2.77", port) or "")


def test_a_studio_for_others_answers_to_addresses_and_given_names_and_keeps_to_its_folders(
    studios: Callable[..., Any], tmp_path: Path
) -> None:
    studio = studios("--listen", "0.0.0.0", "--auth", "ada:correct-horse", "--allowed_host", "trainer.lan", "--allowed_dir", str(tmp_path))
    assert ask(studio, "/", Host=f"192.168.7.7:{studio.port}")[0] == 200
    assert ask(studio, "/", Host="trainer.lan")[0] == 200
    assert ask(studio, "/", Host="rebound.example")[0] == 403


def test_confine_keeps_paths_inside_the_roots(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (tmp_path / "root-evil").mkdir()
    outside = tmp_path / "secret.txt"
    outside.write_text("x")
    (root / "link").symlink_to(outside)
    assert files.confine(root / "inner" / ".." / "new.toml", [root]) == root / "new.toml"
    for bad in (
        outside,
        root / ".." / "secret.txt",
        root / "link",
        tmp_path / "root-evil" / "x",
        "",
        "  ",
        "a\0b",
        "\\\\server\\share\\x",
        "//server/share",
        "http://127.0.0.1/x",
        "file:///etc/passwd",
        f"{root}/NUL",
        f"{root}/con.txt",
        f"{root}/COM1.safetensors",
    ):
        with pytest.raises(OptionError):
            files.confine(bad, [root])


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("My preset", "My preset"),
        ("../../etc/passwd", "etc-passwd"),
        ("a/b\\c:d", "a-b-c-d"),
        ("зірка 星", "зірка 星"),
        ("x" * 300, "x" * 80),
    ],
)
def test_safe_names_have_no_way_out(typed: str, name: str) -> None:
    assert files.safe_name(typed) == name


@pytest.mark.parametrize("typed", ["", "   ", "...", "///", "NUL", "com1.txt"])
def test_names_without_anything_usable_are_refused(typed: str) -> None:
    with pytest.raises(OptionError):
        files.safe_name(typed)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1:7860", "127.0.0.1"),
        ("[::1]:7860", "::1"),
        ("LocalHost", "localhost"),
        ("a@localhost", ""),
        ("localhost/x", ""),
        ("[bad", ""),
    ],
)
def test_the_name_in_a_host_header_is_read_strictly(host: str, name: str) -> None:
    assert hostname(host) == name


def test_the_throttle_counts_each_peer_alone_and_all_of_them_together() -> None:
    throttle = Throttle(attempts=3, window_seconds=60, pace_seconds=10)
    assert [throttle.wait("a") for _ in range(3)] == [0, 0, 0]
    waits = [throttle.wait("a") for _ in range(6)]
    assert waits[:4] == [pytest.approx(10 * turn, abs=5) for turn in (1, 2, 3, 4)] and waits[4:] == [None, None]
    assert throttle.wait("b") == 0
    throttle.forget("a")
    assert throttle.wait("a") == 0
    crowd = [throttle.wait(f"peer {number}") for number in range(60)]
    assert crowd[:20] == [0] * 20 and crowd[-1] is None, "many addresses are no way around it"


def test_only_an_embedded_page_may_stand_in_a_frame_of_another_site() -> None:
    framed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe", "host": "space.example"}

    def answer(guard: Guard, method: str = "GET", **more: str) -> tuple[int, dict[str, str]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(name.encode(), value.encode()) for name, value in {**framed, **more}.items()]
        scope = {"type": "http", "method": method, "path": "/", "query_string": b"", "headers": headers, "client": ("1.2.3.4", 5)}
        # In a thread of its own: playwright keeps a loop running in this one.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, guard(scope, never, send)).result()
        return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}

    async def never() -> Any:
        raise AssertionError("no body is read")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert answer(Guard(app, "t", ["space.example"]))[0] == 403
    embedded = Guard(app, "t", ["space.example"], embedded=True)
    status, headers = answer(embedded)
    assert status == 200 and "x-frame-options" not in headers and "frame-ancestors" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert answer(embedded, "POST")[0] == answer(embedded, origin="https://evil.example")[0] == 403


def test_share_links_are_answered_only_when_sharing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("not called")

    assert not Guard(app, "t")._good_host("abc.gradio.live")
    assert Guard(app, "t", share=True)._good_host("abc.gradio.live")
    assert not Guard(app, "t", share=True)._good_host("gradio.live.evil.example")
