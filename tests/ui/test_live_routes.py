"""The live routes over real HTTP messages: token, confinement, ranges, and polls that add up to the whole run."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kohya_like import cli, live
from kohya_like.live import inside
from kohya_like.supervisor import JobSupervisor
from sd_scripts.families import RUNS
from sd_scripts.runs.events import FileSaved, Previewed, RunFinished, RunStarted, StepDone, Warned
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.flat import build
from tests.ui.fake_nvml import DRIVER_NOT_LOADED, GIB, Card, FakeNvml
from tests.ui.standin_runs import ROOT, SCRIPT, command, options, until

TOKEN = "a-token-of-the-page"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A finished run with previews, weights, a console, and things that must not be served."""
    needed = {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star", "output_dir": str(tmp_path), "output_name": "cat"}
    run = RunDirectory.create(tmp_path, "cat", build(RUNS["sdxl", "network"], needed))
    run.log(RunStarted(steps=50, start_step=0, pid=999_999_999))
    for step in range(1, 51):
        run.log(StepDone(step=step, loss=1.0 / step, lr=1e-4, step_total=0.1))
    run.samples.mkdir()
    for step in (0, 50):
        name = f"cat-{step:06d}-00.png"
        Image.new("RGB", (700, 500), (step, 99, 99)).save(run.samples / name)
        run.log(Previewed(step=step, index=0, file=f"samples/{name}", prompt="a <b>cat</b>", seed=1))
    run.log(Warned(text="slow"))
    run.log(RunFinished(step=50))
    run.console.write_text("one\ntwo\r 50%\r100%\nthree")
    (run.path / "cat.safetensors").write_bytes(bytes(range(256)) * 40)
    (run.path / "secret.txt").write_text("no")
    (tmp_path / "outside.toml").write_text("no")
    (tmp_path / "outside.png").write_bytes((run.samples / "cat-000000-00.png").read_bytes())
    os.symlink(tmp_path / "outside.toml", run.path / "link.toml")
    os.symlink(tmp_path / "outside.png", run.samples / "link.png")
    return run


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    supervisor = JobSupervisor(tmp_path)
    with TestClient(Starlette(routes=live.routes(supervisor, TOKEN))) as client:
        client.headers["x-kl-token"] = TOKEN
        yield client
    supervisor.close()


def poll(client: TestClient, run: RunDirectory, **query: Any) -> dict[str, Any]:
    response = client.get(f"/kl/run/{run.name}", params=query)
    assert response.status_code == 200
    return response.json()


def test_every_route_needs_the_token(client: TestClient, run: RunDirectory) -> None:
    name = run.name
    of_run = [f"/kl/run/{name}{rest}" for rest in ("", "/machine", "/sample/cat-000000-00.png", "/file/cat.safetensors")]
    ways = [("GET", path) for path in ("/kl/runs", *of_run)]
    ways += [("POST", f"/kl/run/{name}/stop"), ("POST", f"/kl/run/{name}/resume")]
    for method, path in ways:
        for token in ("", "wrong", TOKEN[:-1], TOKEN + "x", "é"):
            assert client.request(method, path, headers={"x-kl-token": token.encode()}).status_code == 401
            assert client.request(method, path, params={"token": token}, headers={"x-kl-token": ""}).status_code == 401
    assert client.get(f"/kl/run/{name}/file/cat.safetensors", params={"token": TOKEN}, headers={"x-kl-token": ""}).status_code == 200
    assert not run.stop_requested()


def test_orders_are_not_taken_by_get(client: TestClient, run: RunDirectory) -> None:
    for what in ("stop", "resume"):
        assert client.get(f"/kl/run/{run.name}/{what}").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "file/..%2foutside.toml",
        "file/..%5coutside.toml",
        "file/%2e%2e/outside.toml",
        "file/link.toml",
        "file/secret.txt",
        "file/run.json",
        "file/events.jsonl",
        "file/samples",
        "file/.cat.safetensors",
        "file/cat.safetensors%00.toml",
        "file/C:%5cx.toml",
        "sample/..%2f..%2foutside.png",
        "sample/link.png",
        "sample/..%2fconfig.toml",
        "sample/missing.png",
    ],
)
def test_only_files_of_the_run_are_served(client: TestClient, run: RunDirectory, path: str) -> None:
    response = client.get(f"/kl/run/{run.name}/{path}")
    assert response.status_code == 404 and response.content != b"no"


@pytest.mark.parametrize("name", ["..", "../x", "%2e%2e", "missing", "samples", ".", "C:"])
def test_only_runs_on_disk_are_found(client: TestClient, run: RunDirectory, name: str) -> None:
    assert client.get(f"/kl/run/{name}").status_code == 404


def test_a_name_of_a_file_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("x")
    assert inside(tmp_path, "a.toml", live.DOWNLOADS) == tmp_path / "a.toml"
    for name in ("", ".", "..", "/a.toml", "./a.toml", "x/../a.toml", "a.toml\0", "\\a.toml", "A", str(tmp_path / "a.toml")):
        assert inside(tmp_path, name, live.DOWNLOADS) is None


def test_downloads_come_whole_in_ranges_and_as_attachments(client: TestClient, run: RunDirectory) -> None:
    path, content = f"/kl/run/{run.name}/file/cat.safetensors", (run.path / "cat.safetensors").read_bytes()
    whole = client.get(path)
    assert whole.content == content and "attachment" in whole.headers["content-disposition"]
    part = client.get(path, headers={"range": "bytes=100-199"})
    assert part.status_code == 206 and part.content == content[100:200]
    assert client.get(path, headers={"range": f"bytes={len(content) + 5}-"}).status_code == 416


def test_what_a_profile_and_a_broken_loss_have_left_is_listed_after_the_weights_and_comes_down(
    client: TestClient, run: RunDirectory, tmp_path: Path
) -> None:
    wanted = ["profile/top-000004.txt", "profile/trace-000004.json", "nonfinite-000030/report.json", "nonfinite-000030/one.png"]
    unwanted = ["profile/code.py", "samples/report.json", "nonfinite-/report.json", "nonfinite-3x/report.json", "profile/.hidden.json"]
    for name in (*wanted, *unwanted):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text(name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "report.json").write_text("no")
    os.symlink(tmp_path / "elsewhere", run.path / "nonfinite-000001")
    (run.path / "tokenizer.json").write_text("{}")
    (run.path / "run_meta.json").write_text("{}")
    names = [file["name"] for file in poll(client, run)["files"]]
    assert (names[0], set(names[1:3])) == ("cat.safetensors", {"config.toml", "tokenizer.json"})
    assert sorted(names[3:]) == sorted(wanted)
    for name in wanted:
        assert client.get(f"/kl/run/{run.name}/file/{name}").text == name
    for name in (*unwanted, "nonfinite-000001/report.json", "run_meta.json", "profile%2f..%2fconfig.toml", "profile"):
        assert client.get(f"/kl/run/{run.name}/file/{name}").status_code == 404, name


def test_a_saved_file_says_which_step_it_is_from_and_why_it_stays(client: TestClient, run: RunDirectory) -> None:
    (run.path / "cat-best.safetensors").write_bytes(b"b")
    run.log(FileSaved(step=30, what="export", file="cat.safetensors"))
    run.log(FileSaved(step=20, what="best", file="cat-best.safetensors"))
    run.log(FileSaved(step=40, what="best", file="cat-best.safetensors"))
    notes = {file["name"]: file["note"] for file in poll(client, run)["files"]}
    assert notes == {"cat.safetensors": "step 30", "cat-best.safetensors": "lowest validation loss, step 40", "config.toml": ""}


def test_previews_come_small_and_full(client: TestClient, run: RunDirectory) -> None:
    path = f"/kl/run/{run.name}/sample/cat-000000-00.png"
    assert client.get(path).content == (run.samples / "cat-000000-00.png").read_bytes()
    small = client.get(path, params={"size": "thumb"})
    image = Image.open(io.BytesIO(small.content))
    assert small.headers["content-type"] == "image/webp" and max(image.size) == live.THUMBNAIL_PIXELS
    assert image.size[0] / image.size[1] == pytest.approx(700 / 500, rel=0.01)
    (run.samples / "cat-000000-00.png").write_bytes(b"\x89PNG\r\n half")
    assert client.get(path, params={"size": "thumb"}).status_code == 404


def test_the_list_shows_each_run(client: TestClient, run: RunDirectory) -> None:
    (row,) = client.get("/kl/runs").json()["runs"]
    assert (row["name"], row["state"], row["step"], row["steps"], row["terminal"]) == (run.name, "finished", 50, 50, True)


def test_a_first_poll_tells_everything_and_the_next_only_what_is_new(client: TestClient, run: RunDirectory) -> None:
    first = poll(client, run)
    assert first["complete"] and first["first"] == 0 and [row[0] for row in first["points"]] == list(range(1, 51))
    assert first["phase"] == "finished" and first["fraction"] == 1.0 and first["eta_seconds"] is None
    assert [sample["file"] for sample in first["samples"]] == ["cat-000000-00.png", "cat-000050-00.png"]
    assert [file["name"] for file in first["files"]] == ["cat.safetensors", "config.toml"] and first["warnings"] == [["slow", 1]]
    assert first["console"]["lines"] == ["one", "100%"] and first["console"]["open"] == "three"
    known = {"generation": first["generation"], "points": 50, "console": first["console"]["offset"], "version": first["version"]}
    second = poll(client, run, **known)
    assert second["first"] == 49 and len(second["points"]) == 1 and "samples" not in second and second["console"]["lines"] == []
    assert len(json.dumps(second)) < 1500
    with run.console.open("a") as console:
        console.write(" more\nfour\n")
    run.log(StepDone(step=51, loss=0.5, lr=1e-4, step_total=0.1))
    third = poll(client, run, **known)
    assert [row[0] for row in third["points"]] == [50, 51] and third["console"]["lines"] == ["three more", "four"]


def test_a_page_that_reads_along_draws_the_same_curve_as_one_that_comes_late(client: TestClient, run: RunDirectory) -> None:
    drawn: list[list[float]] = []
    generation = ""
    for begin in range(60, 9000, 700):
        for step in range(begin, begin + 700):
            run.log(StepDone(step=step, loss=1 / step, lr=0.0, step_total=0.1))
        answer = poll(client, run, generation=generation, points=len(drawn))
        drawn = (drawn[: answer["first"]] if answer["generation"] == generation else []) + answer["points"]
        generation = answer["generation"]
    assert drawn == poll(client, run)["points"] and len(drawn) < 4000


def test_a_replaced_log_begins_a_new_curve(client: TestClient, run: RunDirectory) -> None:
    first = poll(client, run)
    run.events_file.write_text('{"kind": "step", "step": 1, "loss": 2.0, "time": 1.0}\n')
    second = poll(client, run, generation=first["generation"], points=50)
    assert second["generation"] != first["generation"] and second["first"] == 0 and len(second["points"]) == 1


def test_a_nonsense_poll_is_refused_without_a_traceback(client: TestClient, run: RunDirectory) -> None:
    assert client.get(f"/kl/run/{run.name}", params={"points": "many"}).status_code == 400
    assert poll(client, run, points=-5, console=-99, generation="x" * 500)["first"] == 0
    assert poll(client, run, points=10**9, console=10**15)["first"] == 0


def test_a_failed_run_says_why_with_its_last_lines(client: TestClient, run: RunDirectory) -> None:
    run.events_file.write_text(
        '{"kind": "started", "steps": 9, "time": 1.0}\n{"kind": "failed", "step": 3, "text": "It broke.", "advice": "Mend it."}\n'
    )
    cause = poll(client, run)["cause"]
    assert (cause["text"], cause["advice"]) == ("It broke.", "Mend it.") and cause["lines"][-1] == "three"


def test_a_run_that_cannot_be_resumed_says_so(client: TestClient, run: RunDirectory) -> None:
    run.config.write_text("[output]\noutput_dir = 5\n")
    response = client.post(f"/kl/run/{run.name}/resume")
    assert response.status_code == 409 and len(response.json()["detail"]) > 20


# The machine


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A driver of four GPUs."""
    fake = FakeNvml([Card(uuid=f"GPU-{index}") for index in range(4)])
    fake.install(monkeypatch.setattr)
    return fake


@pytest.fixture
def working(tmp_path: Path, cards: FakeNvml) -> Iterator[RunDirectory]:
    """A run that is under way on GPUs 1 and 3, with a process that holds memory on GPU 3, and one of somebody else's on GPU 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        supervisor = JobSupervisor(tmp_path, command("slow"))
        job = supervisor.start(SCRIPT, options(tmp_path, output_name="busy"))
    until(lambda: supervisor.find(job.name).summary.step > 2)  # type: ignore[union-attr]
    record = json.loads((job.path / "run.json").read_text())
    (job.path / "run.json").write_text(json.dumps({**record, "device": "1, GPU-3"}))
    cards.cards[3].processes = [(process.pid, 2 * GIB) for process in supervisor.members(job)]
    cards.cards[0].processes = [(os.getpid(), GIB)]
    yield job.run
    supervisor.stop(job, grace_seconds=0)
    supervisor.close()


def machine(client: TestClient, run: RunDirectory, since: float = 0.0) -> dict[str, Any]:
    response = client.get(f"/kl/run/{run.name}/machine", params={"since": since})
    assert response.status_code == 200
    return response.json()


def test_a_run_sees_all_gpus_its_own_marked_and_its_own_processes_only(client: TestClient, working: RunDirectory) -> None:
    answer = machine(client, working)
    assert answer["gpu"]["numGpus"] == 4 and answer["gpu"]["name"] == "4x NVIDIA GeForce RTX 4090" and answer["problem"] == ""
    assert answer["of_run"] == [1, 3]
    assert [bool(each["processes"]) for each in answer["gpu"]["gpus"]] == [False, False, False, True]
    assert all(each["memory"] == 2.0 for each in answer["gpu"]["gpus"][3]["processes"])


def test_the_history_comes_once_and_then_only_what_is_new(client: TestClient, working: RunDirectory) -> None:
    first = machine(client, working)
    assert first["history"][0][1] == [[90, 25, 64, 310.0]] * 4 and first["history_seconds"] == 300
    last = first["history"][-1][0]
    assert machine(client, working, since=last)["history"] == []
    until(lambda: machine(client, working, since=last)["history"])
    # A second tab, or the same one after a reload, gets all of it.
    assert len(machine(client, working)["history"]) >= 2
    assert client.get(f"/kl/run/{working.name}/machine", params={"since": "now"}).status_code == 400


def test_a_run_that_shall_stop_at_a_step_says_so_and_counts_to_it(
    client: TestClient, working: RunDirectory, tmp_path: Path, capsys: Any
) -> None:
    def told() -> tuple[dict[str, Any], dict[str, Any], str]:
        (row,) = client.get("/kl/runs").json()["runs"]
        assert cli.main(["runs", "list", "--output_dir", str(tmp_path)]) == 0
        return row, poll(client, working), capsys.readouterr().out

    steps = told()[1]["steps"]
    working.orders.stop_after(steps - 1)
    row, answer, line = told()
    assert row["stop_step"] == answer["stop_step"] == steps - 1 and f"/{steps}, stops after {steps - 1}" in line
    assert answer["fraction"] == answer["step"] / (steps - 1), "the bar counts to it too"
    for over in (None, steps):
        working.orders.stop_after(over)
        row, answer, line = told()
        assert row["stop_step"] is None and answer["fraction"] == answer["step"] / steps and "stops" not in line


def test_without_a_gpu_there_is_the_reason_and_what_the_processes_use(client: TestClient, working: RunDirectory, cards: FakeNvml) -> None:
    cards.restart_driver()
    cards.raises = DRIVER_NOT_LOADED
    until(lambda: machine(client, working)["gpu"]["numGpus"] == 0)
    answer = machine(client, working)
    assert "driver" in answer["problem"] and answer["gpu"]["gpus"] == []
    assert 0 < answer["usage"]["memory_gib"] < answer["usage"]["memory_total_gib"]


def test_a_run_that_ended_uses_no_gpu_of_its_processes(client: TestClient, run: RunDirectory, cards: FakeNvml) -> None:
    cards.cards[0].processes = [(999_999_999, GIB)]
    answer = machine(client, run)
    assert answer["of_run"] == [] and answer["gpu"]["gpus"][0]["processes"] == []


def test_sessions_of_a_run_are_told_apart_and_together(client: TestClient, run: RunDirectory) -> None:
    told = {"lr": 1e-4, "loss": 0.5}
    run.log(RunStarted(steps=50, start_step=0))
    run.log(StepDone(step=30, step_in_session=30, trained_seconds=60.0, paused_seconds=4.0, seconds_per_step=2.0, eta_seconds=40.0, **told))
    # Killed, and continued from a state at step 20.
    run.log(RunStarted(steps=50, start_step=20))
    begun = poll(client, run)
    assert begun["session"]["steps"] == 0 and begun["seconds_per_step"] is None and begun["step"] == 20
    run.log(StepDone(step=25, step_in_session=5, trained_seconds=5.0, paused_seconds=0.5, seconds_per_step=1.0, eta_seconds=25.0, **told))
    later = poll(client, run)
    assert later["session"] == {"steps": 5, "trained_seconds": 5.0, "paused_seconds": 0.5} and later["seconds_per_step"] == 1.0
    assert later["total"] == {"steps": 35, "trained_seconds": 65.0, "paused_seconds": 4.5} and later["sessions"] == 2
