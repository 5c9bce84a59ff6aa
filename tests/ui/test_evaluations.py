"""The evaluations of a run over real HTTP messages: token, confinement, what a damaged summary leaves, and asking for one now."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from kohya_like import evaluations, live, monitor
from kohya_like.supervisor import JobSupervisor
from sd_scripts.runs.events import RunStopped
from sd_scripts.runs.rundir import RunDirectory
from tests.ui.runs_on_disk import BASELINES, MEASURES, STYLES, evaluated, style_run
from tests.ui.standin_runs import SCRIPT, command, options, until

TOKEN = "a-token-of-the-page"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with three evaluations, and things beside them that must not be served."""
    run = style_run(tmp_path, "styles")
    for epoch in (0, 1):
        evaluated(run, epoch)
    folder = evaluated(run, 1, 15)
    (folder / "notes.txt").write_text("no")
    (tmp_path / "outside.jpg").write_bytes((folder / "grid.jpg").read_bytes())
    os.symlink(tmp_path / "outside.jpg", folder / "link.jpg")
    os.symlink(folder, run.inference / "epoch_0009")
    (run.inference / ".epoch_0002.tmp").mkdir()
    (run.inference / "epoch_3").mkdir()
    run.log(RunStopped(step=30))
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


def test_every_route_of_an_evaluation_needs_the_token(client: TestClient, run: RunDirectory) -> None:
    of_run = f"/kl/run/{run.name}"
    paths = [("GET", "/evaluation/epoch_0001"), ("GET", "/evaluation/epoch_0001/grid.jpg"), ("POST", "/evaluate")]
    for method, path in paths:
        for token in ("", "wrong", TOKEN[:-1], "é"):
            assert client.request(method, of_run + path, headers={"x-kl-token": token.encode()}).status_code == 401
    assert client.get(f"{of_run}/evaluation/epoch_0001/grid.jpg", params={"token": TOKEN}, headers={"x-kl-token": ""}).status_code == 200
    assert client.get(f"{of_run}/evaluate").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "epoch_0001_step_000015/link.jpg",
        "epoch_0001_step_000015/notes.txt",
        "epoch_0001_step_000015/..%2f..%2f..%2foutside.jpg",
        "epoch_0001_step_000015/%2e%2e",
        "epoch_0001/missing.jpg",
        "epoch_0001/summary.json",
        "epoch_0009/grid.jpg",
        "epoch_0009",
        "epoch_0002",
        "epoch_3",
        "%2e%2e/config.toml",
        "..%2fepoch_0001",
    ],
)
def test_only_images_and_tables_of_an_evaluation_of_the_run_are_served(client: TestClient, run: RunDirectory, path: str) -> None:
    assert client.get(f"/kl/run/{run.name}/evaluation/{path}").status_code == 404


def test_a_linked_folder_of_evaluations_is_none(client: TestClient, run: RunDirectory, tmp_path: Path) -> None:
    run.inference.rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", run.inference)
    assert poll(client, run)["evaluations"] == []
    assert client.get(f"/kl/run/{run.name}/evaluation/epoch_0001/grid.jpg").status_code == 404


def test_evaluations_come_in_their_order_with_images_of_both_sizes_and_a_table(client: TestClient, run: RunDirectory) -> None:
    told = poll(client, run)
    assert told["evaluates"] and not told["evaluation_requested"]
    assert [(each["name"], each["epoch"], each["step"]) for each in told["evaluations"]] == [
        ("epoch_0000", 0, None),
        ("epoch_0001", 1, None),
        ("epoch_0001_step_000015", 1, 15),
    ]
    address = f"/kl/run/{run.name}/evaluation/epoch_0001"
    summary = client.get(address).json()
    assert summary["styles"] == list(STYLES) and len(summary["pairs"]) == 9
    (pair,) = [pair for pair in summary["pairs"] if (pair["from"], pair["to"]) == ("flat", "night")]
    assert pair["file"] == "flat_to_night.jpg" and set(pair["measures"]) == set(MEASURES)
    assert set(summary["baselines"]) == set(BASELINES) and set(summary["means"]) == set(MEASURES)
    assert client.get(f"{address}/flat_to_night.jpg").content == (run.inference / "epoch_0001/flat_to_night.jpg").read_bytes()
    assert client.get(f"{address}/flat_to_night.jpg", params={"size": "thumb"}).headers["content-type"] == "image/webp"
    table = client.get(f"{address}/metrics.csv")
    assert table.text == "from,to\n" and "attachment" in table.headers["content-disposition"]


def test_an_evaluation_that_was_made_again_is_told_as_another_one(client: TestClient, run: RunDirectory) -> None:
    before = poll(client, run)
    assert "evaluations" not in poll(client, run, version=before["version"])
    os.utime(run.inference / "epoch_0001", (1e9, 1e9))
    after = poll(client, run, version=before["version"])
    assert after["evaluations"][1]["time"] == 1e9 != before["evaluations"][1]["time"]
    assert [each["name"] for each in after["evaluations"]] == [each["name"] for each in before["evaluations"]]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"pairs": 3, "styles": [1, "a"], "means": [], "baselines": 4}', '{"pairs": [1, {"from": 2, "swd": "x"}]}']
)
def test_a_damaged_summary_is_told_as_far_as_it_goes(client: TestClient, run: RunDirectory, text: str) -> None:
    (run.inference / "epoch_0001/summary.json").write_text(text)
    response = client.get(f"/kl/run/{run.name}/evaluation/epoch_0001")
    if not text.startswith("{") or text == "{":
        assert response.status_code == 404
        return
    told = response.json()
    assert told["means"] == told["baselines"] == {} and all(isinstance(style, str) for style in told["styles"])
    assert all(pair["measures"] == {} for pair in told["pairs"])


def test_a_summary_that_is_a_link_or_too_large_is_not_read(run: RunDirectory, tmp_path: Path) -> None:
    folder = run.inference / "epoch_0001"
    text = (folder / "summary.json").read_text()
    (tmp_path / "outside.json").write_text(text)
    (folder / "summary.json").unlink()
    os.symlink(tmp_path / "outside.json", folder / "summary.json")
    assert evaluations.summary(folder) is None
    (folder / "summary.json").unlink()
    (folder / "summary.json").write_text(text + " " * evaluations.MAX_SUMMARY_BYTES)
    assert evaluations.summary(folder) is None


def test_only_a_run_of_style_transfer_that_is_at_work_takes_an_order_to_evaluate(
    client: TestClient, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.post(f"/kl/run/{run.name}/evaluate").status_code == 409 and not run.evaluation_requested()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    supervisor = JobSupervisor(tmp_path, command("endless"))
    lora = supervisor.start(SCRIPT, options(tmp_path, output_name="lora"))
    try:
        until(lambda: supervisor.find(lora.name).state == "running")
        assert client.post(f"/kl/run/{lora.name}/evaluate").status_code == 409
        assert not lora.run.evaluation_requested() and not poll(client, lora.run)["evaluates"]
        # The same process under settings of a style transfer.
        lora.run.config.write_text(run.config.read_text())
        assert client.post(f"/kl/run/{lora.name}/evaluate").json() == {"state": "requested"}
        assert lora.run.evaluation_requested() and poll(client, lora.run)["evaluation_requested"]
    finally:
        supervisor.stop(supervisor.find(lora.name), grace_seconds=0)
        supervisor.close()


def test_parts_of_the_loss_and_measures_are_told_with_their_names(client: TestClient, run: RunDirectory) -> None:
    told = poll(client, run)
    assert told["part_names"] == ["swd", "ssm", "flow"]
    assert told["parts"][3] == pytest.approx([1.0, 0.05, 1.1], rel=1e-5) and len(told["parts"]) == len(told["points"])
    assert told["measure_names"] == list(monitor.MEASURES)
    assert [row[0] for row in told["measures"]] == [0, 10, 15] and told["measures"][1][1:] == pytest.approx([0.5, 0.5, 0.5, 0.5])


def test_neighbours_of_a_curve_keep_the_means_of_their_parts_and_a_run_that_goes_back_forgets_its_evaluations() -> None:
    curve = monitor.Curve(max_points=4)
    for step in range(1, 17):
        curve.add(step, 1.0, 0.0, parts={"a": float(step)} | ({"late": 2.0} if step > 8 else {}))
    assert len(curve.points) <= 8 and curve.part_names == ["a", "late"]
    assert sum(point.parts["a"] * point.count for point in curve.points) == pytest.approx(sum(range(1, 17)))
    assert curve.points[0].part_row(curve.part_names)[1] is None and curve.points[-1].parts["late"] == 2.0

    progress = monitor.Progress()
    told = [{"kind": "evaluation", "step": step, "swd_target": 1.0 / (1 + step), "structure": None} for step in (0, 10, 20)]
    progress.fold([*told, {"kind": "started", "start_step": 10}])
    assert list(progress.evaluations) == [0, 10] and progress.evaluations[10] == {"swd_target": 1 / 11}
    json.dumps(progress.evaluations, allow_nan=False)
