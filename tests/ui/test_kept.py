"""Gradio's own files are answered from what was sent before: the same to everybody, and behind the guard. See kohya_like/kept.py."""

from __future__ import annotations

import gzip
import re
import urllib.error
import urllib.request

import pytest

from kohya_like.kept import MOST_BYTES, Kept


def answered(studio, path, **headers):
    request = urllib.request.Request(studio.url + path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, dict(answer.headers.items()), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers.items()), error.read()


@pytest.fixture(scope="module")
def script(studio):
    return re.search(r"assets/index-[\w-]+\.js", answered(studio, "")[2].decode())[0]


def test_a_file_is_the_same_each_time_in_each_way_to_send_it(studio, script):
    plain = [answered(studio, script) for _ in range(2)]
    packed = [answered(studio, script, accept_encoding="gzip") for _ in range(2)]
    for first, second in (plain, packed):
        first[1].pop("date"), second[1].pop("date")
        assert first == second and first[0] == 200
        assert first[1]["x-content-type-options"] == "nosniff"
    assert packed[0][1]["content-encoding"] == "gzip" and "content-encoding" not in plain[0][1]
    assert gzip.decompress(packed[0][2]) == plain[0][2]


def test_what_is_kept_answers_neither_parts_nor_strangers_nor_what_is_not_there(studio, script):
    whole = answered(studio, script)[2]
    status, _, part = answered(studio, script, range="bytes=10-19")
    assert (status, part) == (206, whole[10:20])
    assert answered(studio, script, host="elsewhere.example")[0] == 403
    missing = [answered(studio, "assets/none.js") for _ in range(2)]
    assert [status for status, _, _ in missing] == [404, 404]


def test_many_addresses_of_one_file_fill_no_memory():
    asked = []

    async def app(scope, receive, send):
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(MOST_BYTES // 3)})

    def ask(kept, path):
        said = []

        async def send(message):
            said.append(message)

        # Waits for nothing, and the browser's tests have a loop of their own.
        with pytest.raises(StopIteration):
            kept({"type": "http", "method": "GET", "path": path, "headers": []}, None, send).send(None)
        return len(said[1]["body"])

    kept = Kept(app)
    paths = [f"/assets/{'./' * number}big.js" for number in range(5)]
    for _ in range(2):
        assert {ask(kept, path) for path in paths} == {MOST_BYTES // 3}
    assert asked == paths + paths[3:]
