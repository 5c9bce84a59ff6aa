"""Runs in a terminal: what is printed is what is on disk, and nothing is started or lost."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kohya_like import cli, desk, queueing
from sd_scripts.runs.events import RunStarted, StepDone, Validated
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.trash import Trash
from tests.ui.runs_on_disk import made, options


def test_runs_are_listed_shown_compared_and_removed(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(order: str, *names: str, status: int = 0) -> Any:
        assert cli.main(["runs", order, *names, "--output_dir", str(tmp_path), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    one = made(tmp_path, options(tmp_path, output_name="one", learning_rate=1e-4))
    two = made(tmp_path, options(tmp_path, output_name="two", learning_rate=3e-4, network_dim=8))
    desk.say(two.path, {"label": {"before": "", "after": "The second"}, "starred": True})
    two.log(RunStarted(steps=40, start_step=0))
    two.log(
        StepDone(
            step=3, epoch=0, loss=0.5, lr=1e-4, step_total=2.0, step_in_session=3, trained_seconds=6.0, paused_seconds=1.5, peak_gib=3.5
        )
    )
    two.log(Validated(step=3, loss=0.25))
    for number, name in enumerate(("later", "sooner")):
        waits = RunDirectory.create(tmp_path, name, options(tmp_path, output_name=name))
        (waits.path / "run.json").write_text(json.dumps({"run_id": "a" * 32, "queued": 9.0 - number}))
    rows = {row["label"] or row["name"]: row for row in said("list")}
    assert len(rows) == 4 and rows["The second"]["starred"] and rows["The second"]["loss"] == 0.5
    assert [row["name"].split("-")[-1] for row in said("queue")] == ["sooner", "later"], "and looking starts nothing"
    later, sooner = (next(tmp_path.glob(f"*-{name}")) for name in ("later", "sooner"))
    queueing.write(later, queueing.Waiting(after=sooner.name))
    queueing.write(sooner, queueing.Waiting(after=one.name))
    assert [row["waits for"] for row in said("queue")] == ["", sooner.name], "one of them has ended"
    (shown,) = said("show", "two")
    assert [shown[name] for name in ("step", "steps", "trained seconds", "peak GiB", "lowest held-out loss")] == [3, 40, 6.0, 3.5, 0.25]
    compared = said("compare", "one", two.name)
    assert compared["runs"] == [one.name, two.name]
    differing = {row["name"]: (row["label"], row["values"]) for row in compared["settings"]}
    assert differing["learning_rate"] == ("Learning rate", [1e-4, 3e-4]) and set(differing) == {"learning_rate", "network_dim"}
    assert cli.main(["runs", "compare", "one", "two", "--output_dir", str(tmp_path)]) == 0
    assert "Learning rate (learning_rate)" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    assert said("rm", "one") == [] and one.path.is_dir()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main(["runs", "rm", "one", "--output_dir", str(tmp_path)]) == 1 and one.path.is_dir()
    assert "give --yes" in capsys.readouterr().err, "nobody can be asked"
    assert said("rm", "one", "--yes")[0]["what"] == one.name
    assert not one.path.exists() and [entry.what for entry in Trash(tmp_path).entries()] == [one.name]
    for wrong in (
        ["show", "one", "sooner2"],
        ["compare", "two"],
        ["compare", "two", two.name],
        ["rm", "sooner", "--yes"],
        ["list", "--output_dir", str(tmp_path / "nowhere")],
    ):
        assert cli.main(["runs", wrong[0], "--output_dir", str(tmp_path), *wrong[1:]]) == 1
    errors = capsys.readouterr().err
    assert "there is no run one, sooner2 here; is sooner meant?" in errors and errors.count("name two runs or more") == 2
    assert "has not ended yet" in errors and "there is no folder" in errors


def test_show_says_each_thing_once_and_nothing_that_nobody_has_said(tmp_path: Path, capsys: Any) -> None:
    run = made(tmp_path, options(tmp_path, output_name="one"))
    run.log(RunStarted(steps=40, start_step=0))
    assert cli.main(["runs", "show", "one", "--output_dir", str(tmp_path)]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["steps"] == "0/40" and lines["size"].endswith(" MiB")
    assert not {"label", "notes", "tags", "starred", "tried", "of steps", "loss"} & set(lines)
    desk.try_out(run.path, desk.Tried((("Network rank", "8"),)))
    assert cli.main(["runs", "show", "one", "--output_dir", str(tmp_path)]) == 0
    assert "label: Network rank 8\n" in (told := capsys.readouterr().out) and "tried" not in told
    desk.say(run.path, {"label": {"before": "", "after": "The first"}, "starred": True})
    assert cli.main(["runs", "show", "one", "--output_dir", str(tmp_path)]) == 0
    assert "label: The first\n" in (shown := capsys.readouterr().out) and "starred: yes\n" in shown
