"""Captions by a model, as the Data tab orders them: processes that wait for a device, that stop and go on, and send nothing unasked."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from kohya_like import app, tools
from kohya_like.context import Context
from kohya_like.data_room import jobs
from kohya_like.data_room import room as rooms
from kohya_like.supervisor import JobSupervisor
from kohya_like.tabs.train import TrainTab
from sd_scripts.families import TOOLS
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.toy import worlds
from tests import small_captioners, small_raters, small_segmenters
from tests.caption_server import Server, answer
from tests.ui.standin_runs import SCRIPT, command, options, until

COUNT = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of the toy worlds; the first has a caption."""
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    for number, scene in enumerate(worlds.scenes()[: 23 * COUNT : 23]):
        worlds.draw(scene, 64, 64, worlds.rng_for(3, number)).save(folder / ("deep" if number % 2 else "") / f"{number}.png")
    (folder / "0.txt").write_text("there before")
    return folder


def desk_of(context: Context, folder: Path, **values: str | bool) -> jobs.Desk:
    texts = {"pretrained_model_name_or_path": "toy", "train_data_dir": str(folder), "resolution": "64", "min_bucket_reso": "32", **values}
    kept = rooms.Rooms(context.output_dir)
    page = list(kept.open(TrainTab(context).options([{"run": "sdxl/network", "values": texts}])))[-1]
    return jobs.Desk(tools.ToolBench(context.output_dir, context.roots), kept.find(page["room"]), context)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made = app.make_context(tmp_path / "output", [], is_private=True)
    made.supervisor.close()
    # Whatever run waits in the folder is begun by it, too.
    context = replace(made, supervisor=JobSupervisor(made.output_dir, command("quick")))
    yield context
    bench = tools.ToolBench(context.output_dir, context.roots)
    for each in bench._all():
        bench.cancel(each)
    context.supervisor.close()
    context.predictions.close()


def order(**texts: Any) -> dict[str, Any]:
    return {"tool": "caption", "texts": {"caption_model": "toy", **texts}}


def ended(desk: jobs.Desk, name: str) -> tools.Started:
    until(lambda: desk.bench.find(name).state in tools.ENDED, 120.0)
    return desk.bench.find(name)


def texts(folder: Path) -> dict[str, str]:
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.txt"))}


def test_captions_arrive_on_the_page_and_undo_takes_them_back(context: Context, folder: Path) -> None:
    desk = desk_of(context, folder)
    known = rooms.as_page(desk.room)["news"]
    shown = [index for index, path in enumerate(desk.room.paths) if Path(path).stem != "2"]
    started = jobs.start(desk, order(trigger_word="zwx") | {"indices": shown})["run"]
    assert ended(desk, started["name"]).state == "finished"
    said = rooms.news(desk.room, known)
    scenes = worlds.scenes()[: 23 * COUNT : 23]
    after = texts(folder)
    assert after == {"0": "there before"} | {
        str(n): f"zwx, a {scene.color} {scene.shape} at the {scene.place}" for n, scene in enumerate(scenes) if n not in (0, 2)
    }
    names = [Path(path).stem for path in desk.room.paths]
    assert {names[index]: text for index, text in said["texts"].items()} == {name: text for name, text in after.items() if name != "0"}
    assert rooms.news(desk.room, said["news"])["texts"] == {}
    # Somebody has begun the history anew, or put something else in its place.
    history = desk.room.book.history
    kept = history.read_bytes()
    history.unlink()
    assert rooms.news(desk.room, said["news"]).items() >= {"news": 0, "texts": {}}.items()
    history.mkdir()
    with pytest.raises(OptionError, match="cannot be read"):
        rooms.news(desk.room, 1)
    history.rmdir()
    history.write_bytes(kept)
    assert rooms.news(desk.room, len(kept) + 1).items() >= {"news": len(kept), "texts": said["texts"]}.items()
    assert tools.detail(desk.bench.find(started["name"]), -1)["report"]["written"] == COUNT - 2
    # It belongs to this data set, and is nothing of the Tools tab.
    assert [row["name"] for row in jobs.forms(desk, {})["runs"]] == [started["name"]] and desk.bench.recent() == []
    assert "caption" not in {tool["name"] for tool in tools.specification(context.output_dir)["tools"]}
    with pytest.raises(OptionError, match="no tool caption"):
        desk.bench.start("caption", {})
    assert rooms.undo(desk.room)["count"] == COUNT - 2 and texts(folder) == {"0": "there before"}


def test_nothing_is_sent_before_the_page_has_said_what_and_a_key_is_kept_nowhere(context: Context, folder: Path) -> None:
    server = Server([(200, answer("a star")), (200, answer("a star")), (401, "no"), (200, answer("a star"))])
    try:
        desk = desk_of(context, folder)
        asked = order(caption_model="theirs:7b", endpoint=server.url, instruction="What is it?") | {"key": "secret-key"}
        said = jobs.start(desk, asked)
        told = "\n".join(said["leaving"])
        for words in (server.url, f"{COUNT - 1} images", "What is it?", "name: theirs:7b.", "key that you have typed", "Not sent"):
            assert words in told
        # Another question needs another yes.
        assert "leaving" in jobs.start(desk, asked | {"known": said["known"], "texts": asked["texts"] | {"instruction": "Who?"}})
        assert "leaving" in jobs.start(desk, asked | {"known": said["known"], "indices": [0, 1]})
        assert server.heard == [] and desk.bench.recent(about=str(folder)) == []
        started = jobs.start(desk, asked | {"known": said["known"]})["run"]
        assert ended(desk, started["name"]).state == "failed" and len(texts(folder)) == 3
        (why,) = tools.detail(desk.bench.find(started["name"]), -1)["why"]
        assert why.startswith("endpoint: ") and "CAPTION_API_KEY" in why
        jobs.resume(desk, {"name": started["name"], "key": "other-key"})
        assert ended(desk, started["name"]).state == "finished" and len(texts(folder)) == COUNT
        keys = [headers["authorization"] for headers, _ in server.heard]
        assert keys == ["Bearer secret-key"] * 3 + ["Bearer other-key"] * (COUNT - 3), "what was written is not sent again"
        assert {body["model"] for _, body in server.heard} == {"theirs:7b"}, "a name, and no path of this machine"
        assert rooms.undo(desk.room)["count"] == COUNT - 1
        for file in [*context.output_dir.rglob("*"), *folder.rglob("*")]:
            assert file.is_dir() or not any(key in file.read_bytes() for key in (b"secret-key", b"other-key"))
        with pytest.raises(OptionError, match="nothing to go on with"):
            jobs.resume(desk, {"name": started["name"]})
    finally:
        server.close()


def test_what_cannot_be_done_is_refused_with_a_sentence(context: Context, folder: Path, tmp_path: Path) -> None:
    desk = desk_of(context, folder)
    for wrong, sentence in (
        (order(caption_model=""), "caption_model"),
        (order(endpoint="nowhere"), "endpoint"),
        (order(caption_model=str(tmp_path / "nowhere")), "caption_model: there is no file or folder"),
        (order(replace_words="a man"), "replace_words"),
        (order() | {"indices": []}, "No image is shown"),
        (order() | {"indices": [99]}, "No image is shown"),
        ({"tool": "merge_lora", "texts": {}}, "not an order"),
    ):
        with pytest.raises(OptionError, match=sentence):
            jobs.start(desk, wrong)
    shared = replace(desk, context=replace(context, is_private=False), bench=tools.ToolBench(context.output_dir, (context.output_dir,)))
    with pytest.raises(OptionError, match=r"endpoint: 127\.0\.0\.1 lies inside this network"):
        jobs.start(shared, order(caption_model="theirs", endpoint="http://127.0.0.1:9/v1"))
    for outside in ("/etc", "/nowhere"):
        with pytest.raises(OptionError, match=f"caption_model: {outside} is outside") as refused:
            jobs.start(shared, order(caption_model=outside))
        assert len(refused.value.problems) == 1, "nothing is told of what is there"
    named = shared.bench.options(TOOLS["caption"], {"caption_model": "owner/name"}, {"image_dir": "."})
    assert flat.flatten(named)["caption_model"] == "owner/name"
    listed = tmp_path / "captions.json"
    listed.write_text(json.dumps({"0": {"caption": "listed"}, "2": {"caption": "too"}}))
    with pytest.raises(OptionError, match=r"captions\.json"):
        jobs.start(desk_of(context, folder, in_json=str(listed)), order())
    assert desk.bench.recent(about=str(folder)) == []


def test_a_model_waits_for_a_device_as_a_run_does_and_runs_wait_for_it(
    context: Context, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    model = small_captioners.tagger(tmp_path / "tagger", np.full((3, 1), 1.0, np.float32), [("a_shape_here", "0")])
    desk = desk_of(context, folder)
    context.supervisor.guests = desk.bench
    root = context.output_dir
    first = JobSupervisor(root, command("endless"))
    try:
        training = first.start(SCRIPT, options(root, output_name="first"))
        first.close()
        name = jobs.start(desk, order(caption_model=str(model)))["run"]["name"]
        dropped = jobs.start(desk, order(caption_model=str(model), overwrite=True))["run"]["name"]
        supervisor = JobSupervisor(root, command("quick"))
        supervisor.guests = tools.ToolBench(root, context.roots)
        later = supervisor.start(SCRIPT, options(root, output_name="later"))
        assert [desk.bench.find(each).state for each in (name, dropped)] == ["queued", "queued"]
        assert supervisor.find(later.name).state == "queued"
        jobs.stop(desk, {"name": dropped})
        assert desk.bench.find(dropped).state == "cancelled" and desk.bench.waiting() == [name]
        first.stop(training, grace_seconds=0)
        assert ended(desk, name).state == "finished", (desk.bench.find(name).path / "console.log").read_text()
        until(lambda: supervisor.find(later.name).summary.started_at, 120.0)
        assert texts(folder)["1"] == "a shape here" and texts(folder)["0"] == "there before"
        exited = (desk.bench.find(name).path / "exit.json").stat().st_mtime
        assert exited <= supervisor.find(later.name).summary.started_at, "two do not compute on one device"
        assert not (desk.bench.find(dropped).path / "console.log").exists()
        supervisor.close()
    finally:
        for job in first.seen():
            first.stop(job, grace_seconds=0)


def test_one_that_was_started_since_somebody_looked_is_stopped(context: Context, folder: Path, tmp_path: Path) -> None:
    """A stop that knew it as waiting wrote that it had no process, so that nobody found the one it had by then."""
    desk = desk_of(context, folder)
    first = JobSupervisor(context.output_dir, command("endless"))
    try:
        training = first.start(SCRIPT, options(context.output_dir, output_name="first"))
        name = jobs.start(
            desk, order(caption_model=str(small_captioners.tagger(tmp_path / "tagger", np.ones((3, 1), np.float32), [("a", "0")])))
        )
        waiting = desk.bench.find(name["run"]["name"])
        assert waiting.state == "queued"
        desk.bench.start_on(waiting.name, "cpu")
        pid = desk.bench.find(waiting.name).order.pid
        desk.bench.cancel(waiting)
        stopped = desk.bench.find(waiting.name)
        assert (stopped.state, stopped.order.pid) == ("cancelled", pid) and pid > 0
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        desk.bench.start_on(waiting.name, "cpu")
        assert desk.bench.find(waiting.name).state == "cancelled", "what was stopped is not started"
    finally:
        first.stop(training, grace_seconds=0)
        first.close()


def test_faces_that_are_cut_are_findings_of_the_images_as_they_are_cut_now(
    context: Context, folder: Path, tmp_path: Path, warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python)
    model = small_segmenters.build("yolos", tmp_path / "yolos", seed=2)
    desk = desk_of(context, folder, resolution="32,128", enable_bucket=False)
    # Random weights know no faces; here everything is one.
    assert jobs.forms(desk, {})["faces"] == {}
    asked = {
        "tool": "faces",
        "texts": {"face_model": str(model), "face_labels": "hat\nface\nhand", "face_threshold": "0", "device": "cpu"},
        "indices": list(range(1, COUNT)),
    }
    started = ended(desk, jobs.start(desk, asked)["run"]["name"])
    told = {row["file"]: row["why"] for row in tools.report(started)["cut"]}
    names = [path.relative_to(folder).as_posix() for path in desk.room.paths]
    found = jobs.forms(desk, {})["faces"]
    assert told and {names[index] for index in found} == set(told) and set(found.values()) <= set(told.values())
    (index, *others) = found
    os.utime(desk.room.paths[index], (time.time() + 60,) * 2)
    assert set(jobs.forms(desk, {})["faces"]) == set(others), "an image that has changed since"
    assert jobs.forms(desk_of(context, folder), {})["faces"] == {}, "cut in another way"


def test_near_duplicates_by_a_model_are_groups_of_the_images_that_have_not_changed_since(
    context: Context, folder: Path, tmp_path: Path, warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python)
    desk = desk_of(context, folder)
    assert jobs.forms(desk, {})["alike"] == []
    # At this distance everything is alike.
    asked = {"image_model": str(small_raters.dino(tmp_path / "dino")), "duplicate_distance": "2", "device": "cpu"}
    started = ended(desk, jobs.start(desk, {"tool": "duplicates", "texts": asked})["run"]["name"])
    (told,) = tools.report(started)["groups"]
    (group,) = jobs.forms(desk, {})["alike"]
    names = [path.relative_to(folder).as_posix() for path in desk.room.paths]
    assert [(names[index], distance) for index, distance in group] == [(row["file"], row["distance"]) for row in told]
    assert len(group) == COUNT and len(list(context.output_dir.rglob("*.vector"))) == COUNT and not list(folder.rglob("*.vector"))
    changed = group[2][0]
    os.utime(desk.room.paths[changed], (time.time() + 60,) * 2)
    (left,) = jobs.forms(desk, {})["alike"]
    assert left == [row for row in group if row[0] != changed]
    for index, _ in group[1:]:
        os.utime(desk.room.paths[index], (time.time() + 60,) * 2)
    assert jobs.forms(desk, {})["alike"] == [], "one image is no group"


def test_an_image_that_training_reads_is_seen_as_training_sees_it(context: Context, tmp_path: Path) -> None:
    folder = tmp_path / "turned"
    folder.mkdir()
    scene = worlds.scenes()[0]
    exif = Image.Exif()
    exif[274] = 6
    worlds.draw(scene, 64, 64, worlds.rng_for(1, 1)).transpose(Image.Transpose.ROTATE_90).save(folder / "a.png", exif=exif)
    desk = desk_of(context, folder)
    ended(desk, jobs.start(desk, order())["run"]["name"])
    assert texts(folder) == {"a": f"a {scene.color} {scene.shape} at the {scene.place}"}
