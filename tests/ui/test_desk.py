"""What people do with runs that are there, on disk: words that nobody loses, the trash, old states."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kohya_like import desk
from kohya_like.supervisor import JobSupervisor
from sd_scripts.runs.resume import RunLock
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.trash import KEPT_SECONDS, Trash
from sd_scripts.schema.errors import OptionError
from tests.ui.runs_on_disk import made, options


def test_two_pages_that_write_lose_nothing(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path)).path
    one, _ = desk.say(run, {"label": {"before": "", "after": "My cat"}, "tags": {"add": ["cat", " a  b "]}, "starred": True})
    assert one == desk.read(run) == desk.Said("My cat", "", True, ("cat", "a b"))
    # The other page has read no name, and knows one tag less.
    two, others = desk.say(
        run, {"label": {"before": "", "after": "A dog"}, "notes": {"before": "", "after": "sharp"}, "tags": {"add": ["dog"]}}
    )
    assert others == ["label"] and two == desk.Said("My cat", "sharp", True, ("cat", "a b", "dog"))
    assert desk.say(run, {"label": {"before": "My cat", "after": "A dog"}, "tags": {"remove": ["a b"]}}) == (
        desk.Said("A dog", "sharp", True, ("cat", "dog")),
        [],
    )
    for wrong in ({"label": {"before": "A dog", "after": "x" * 121}}, {"tags": {"add": ["x" * 41]}}):
        with pytest.raises(OptionError, match="may have"):
            desk.say(run, wrong)
    # Many at once: each tag is there.
    pages = [threading.Thread(target=desk.say, args=(run, {"tags": {"add": [f"t{number}"]}})) for number in range(12)]
    for page in pages:
        page.start()
    for page in pages:
        page.join()
    assert set(desk.read(run).tags) == {"cat", "dog", *(f"t{number}" for number in range(12))}
    (run / desk.FILE).write_text('{"label": 3, "tags": "no", "starred": "yes"')
    os.utime(run / desk.FILE, (1, 1))
    assert desk.read(run) == desk.Said(), "what cannot be read says nothing, and the run is still listed"


def test_what_a_sweep_tries_is_the_name_of_a_run_until_somebody_gives_it_one(tmp_path: Path) -> None:
    run = made(tmp_path, options(tmp_path)).path
    tried = desk.Tried((("Learning rate", "0.0003"), ("DoRA", "on")), own=True)
    desk.try_out(run, tried)
    assert desk.read(run).called == "Learning rate 0.0003, DoRA on (as in the form)"
    desk.say(run, {"label": {"before": "", "after": "A dog"}, "notes": {"before": "", "after": "sharp"}})
    assert desk.read(run) == desk.Said("A dog", "sharp", tried=tried) and desk.read(run).called == "A dog"
    desk.say(run, {"label": {"before": "A dog", "after": ""}})
    assert desk.read(run).called == tried.words
    for wrong in (3, [["a"]], {"settings": 3}, {"settings": [["a", "b", "c"]]}, {"own": True}):
        (run / desk.FILE).write_text(json.dumps({"label": "Learning rate 0.0003", "tried": wrong}))
        assert desk.read(run).called == "Learning rate 0.0003", "as a sweep of 0.1 has named it"
    assert desk.Said(tried=desk.Tried(own=True)).called == ""


def test_a_run_goes_into_the_trash_and_comes_back_but_never_one_at_work(tmp_path: Path) -> None:
    supervisor = JobSupervisor(tmp_path)
    run = made(tmp_path, options(tmp_path), (100, 200))
    files = {file.relative_to(run.path): file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    at_work = made(tmp_path, options(tmp_path, output_name="busy"), (100,))
    lock = RunLock(at_work)
    lock.take()
    busy = supervisor.find(at_work.name)
    assert busy is not None
    with pytest.raises(OptionError, match="is being trained"):
        supervisor.discard(busy)
    with pytest.raises(OptionError, match="is being trained"):
        desk.clean(supervisor, busy, {100}, also_newest=True)
    lock.release()
    queued = RunDirectory.create(tmp_path, "waits", options(tmp_path))
    (queued.path / "run.json").write_text(json.dumps({"run_id": "a" * 32, "queued": 1.0}))
    waiting = supervisor.find(queued.name)
    assert waiting is not None and waiting.state == "queued"
    with pytest.raises(OptionError, match="has not ended"):
        supervisor.discard(waiting)
    job = supervisor.find(run.name)
    assert job is not None
    entry = supervisor.discard(job)
    assert supervisor.find(run.name) is None and not run.path.exists()
    trash = Trash(tmp_path)
    assert [(each.name, each.what, each.paths) for each in trash.entries()] == [(entry.name, run.name, (str(run.path),))]
    assert trash.bytes_of(entry) >= sum(map(len, files.values()))
    run.path.mkdir()
    with pytest.raises(OptionError, match="is taken"):
        trash.restore(entry.name)
    run.path.rmdir()
    trash.restore(entry.name)
    assert {file: (run.path / file).read_bytes() for file in files} == files and not trash.entries()


def test_the_trash_takes_files_too_and_is_emptied_after_its_time(tmp_path: Path) -> None:
    trash, outside = Trash(tmp_path / "output"), tmp_path / "outside.txt"
    first, second = (tmp_path / "output" / folder / "a.safetensors" for folder in ("one", "two"))
    for file in (outside, first, second):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(file))
    for wrong in ([first, outside], [first, first.with_name("none")], [tmp_path / "output" / ".." / outside.name], []):
        with pytest.raises(OptionError, match="Nothing was deleted"):
            trash.put("files", wrong)
    assert first.exists() and outside.exists() and not trash.entries()
    entry = trash.put("two checkpoints", [first, second])
    assert not first.exists() and not second.exists()
    assert trash.empty(older_than_seconds=KEPT_SECONDS) == 0
    trash.restore(entry.name)
    assert first.read_text() == str(first) and second.read_text() == str(second)
    old = trash.put("old", [first])
    new = trash.put("new", [second])
    said = json.loads((trash.folder / old.name / "entry.json").read_text())
    (trash.folder / old.name / "entry.json").write_text(json.dumps({**said, "time": time.time() - KEPT_SECONDS - 1}))
    supervisor = JobSupervisor(tmp_path / "output")
    supervisor.watch()
    end = time.monotonic() + 30
    while len(trash.entries()) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    supervisor.close()
    assert trash.entries() == [new], "the studio empties what is older than 30 days"
    # Written by hand, a way out leads nowhere.
    said = json.loads((trash.folder / new.name / "entry.json").read_text())
    (trash.folder / new.name / "entry.json").write_text(json.dumps({**said, "paths": [str(tmp_path / "elsewhere.txt")]}))
    (trash.folder / new.name / "held" / "0-a.safetensors").rename(trash.folder / new.name / "held" / "0-elsewhere.txt")
    with pytest.raises(OptionError, match="cannot be put back"):
        trash.restore(new.name)
    assert trash.empty(["other"]) == 0 and trash.empty([new.name]) > 0 and not trash.entries()


def test_what_is_shown_to_be_freed_is_freed_and_a_run_can_go_on(tmp_path: Path) -> None:
    supervisor = JobSupervisor(tmp_path)
    run = made(tmp_path, options(tmp_path), (100, 200, 300))
    (run.state / "000100" / "extra.bin").write_bytes(b"x" * 5000)
    client = TestClient(Starlette(routes=desk.routes(supervisor)))

    def post(what: str, **order: object) -> dict[str, object]:
        answer = client.post(f"/kl/desk/{what}", json=order)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    (row,) = post("disk")["runs"]  # type: ignore[misc]
    assert row["steps"] == [100, 200] and row["frees"] > 5000 and row["bytes"] > row["states"] > row["frees"]
    # The newest has the right sizes and wrong bytes: the one before is kept, whatever the page has asked for.
    newest = run.state / "000300" / "state.json"
    newest.write_bytes(bytes(reversed(newest.read_bytes())))
    freed = post("clean", runs={run.name: [100, 200, 300]})["freed"]
    assert isinstance(freed, int) and freed > 5000
    assert sorted(path.name for path in run.state.iterdir()) == ["000200"]
    assert post("clean", runs={run.name: [200]})["freed"] == 0
    assert client.post("/kl/desk/clean", json={"runs": {"../elsewhere": [1]}}).status_code == 409
    assert client.post("/kl/desk/say", json={"run": run.name, "tags": {"add": 3}}).status_code == 400
    assert post("say", run=run.name, starred=True)["starred"] is True
    entry = post("delete", run=run.name)["entry"]
    (thrown,) = post("disk")["trash"]  # type: ignore[misc]
    assert (thrown["name"], thrown["what"]) == (entry, run.name)
    assert post("restore", entry=entry) == {"what": run.name} and desk.read(run.path).starred
    post("delete", run=run.name)
    (thrown,) = post("disk")["trash"]  # type: ignore[misc]
    assert post("empty", entries=[thrown["name"]])["freed"] == thrown["bytes"]
