"""Does a sweep find better settings than those it was begun with? Toy tasks of three families, judged by the exact reader.

usage: sweeps.py run [folder] [tasks]   does tasks that have no result yet, so many or all; a second call goes on
       sweeps.py table                  the figures so far, as RESULTS.md has them

Everything below was fixed before the first run. A task is the preset of a family with something changed, and a sweep over it as the page
starts one: learning rate times rank, successive halving on the held-out loss, at most three times the steps of one run. Its own settings,
trained to the end, and the winner then draw NUM_JUDGED fresh prompts with the same noise, half of them of the new word and
half of old ones; an image counts when shape, colour and place are all right. One is better where the 95 % interval of the paired
difference excludes 0; all else is a tie. Wanted: better in 15 of 25 tasks at least, worse in none.

The rule by which a sweep chooses was fixed before, too, and has changed three times since, when tasks had become worse: see RULE. Of a
task with several rows the last one counts.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import picks
import torch

from kohya_like import sweeps
from kohya_like.supervisor import JobSupervisor
from sd_scripts import families
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.train.launch import main
from sd_scripts.runs import drawing
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line, flat, toml_files
from sd_scripts.schema.runs import RunOptions
from sd_scripts.toy import measure, worlds
from tests.forked import forked
from tests.runs.learning import CPU, PRESETS

NUM_JUDGED = 400
JUDGED_SEED = 20261127
RATES = (1 / 10, 1 / 3, 3.0, 10.0, 30.0)
"""Tried beside the task's own learning rate, as multiples of it."""
RANKS = 4
"""Tried beside the task's own rank, as a multiple of it."""
RULE = "outrun, or clearly worse at its best"
"""The form's own settings are out where another that has no lower learning rate is clearly better at a comparison; where they come to the
end, they give way only to what is clearly better, each where its held-out loss was lowest, image by image and relative to it. That lowest
loss orders what fourteen other runs on SDXL draw as it should, that of the end does not. Rows of another rule, or of none, are of earlier
ones, with which tasks became worse: RESULTS.md tells of them."""
RESULTS = Path(__file__).with_name("sweeps.jsonl")


@dataclass(frozen=True)
class Change:
    """What a task changes in its family's preset. is_wrong: so that the preset's settings are far from good ones."""

    name: str
    rate: float = 1.0
    rank: int | None = None
    steps: float = 1.0
    images: int = 24
    is_wrong: bool = True


CHANGES = (
    Change("rate / 30", rate=1 / 30),
    Change("rate / 10", rate=1 / 10),
    Change("rate / 4", rate=1 / 4),
    Change("ten times the rate", rate=10.0),
    Change("rank 1, rate / 4", rate=1 / 4, rank=1),
    Change("half of the steps, half of the rate", rate=1 / 2, steps=1 / 2),
    Change("as the preset", is_wrong=False),
    Change("12 images", images=12, is_wrong=False),
    Change("36 images", images=36, is_wrong=False),
)
TASKS = [(family, change) for change in CHANGES for family in picks.FAMILIES][:25]
"""18 of them with wrong settings."""


def options_of(folder: Path, family: str, change: Change) -> RunOptions:
    """The settings that a sweep is begun with, for images that are written into the folder."""
    values = toml_files.read_toml(PRESETS / f"{picks.FAMILIES[family][0]}.toml")
    number = CHANGES.index(change)
    images = picks.written(folder, family, picks.Kind(change.name, change.images, 1.0, 1.0), 100 + number)
    changes = {
        "learning_rate": values["learning_rate"] * change.rate,
        "network_dim": change.rank,
        "max_train_steps": max(1, round(values["max_train_steps"] * change.steps)),
        "validation_split": 0.2,
        "seed": 500 + number,
        "sample_prompts": "",
        "output_dir": str(folder / "output"),
        "preflight": "off",
    }
    given = {name: value for name, value in (values | images).items() if value is not None}
    return flat.build(flat.run_of(values), given | {name: value for name, value in changes.items() if value is not None})


def swept(options: RunOptions) -> tuple[sweeps.Sweep, Mapping[str, Any], RunDirectory, RunDirectory | None]:
    """A sweep that is through, what its winner changes, the winner's run and, where it came to the end, that of its own settings."""
    now = flat.flatten(options)
    axes = {
        "learning_rate": [now["learning_rate"], *(now["learning_rate"] * rate for rate in RATES)],
        "network_dim": [now["network_dim"], now["network_dim"] * RANKS],
    }
    supervisor = JobSupervisor(Path(now["output_dir"]))
    kept = sweeps.Sweeps(supervisor)
    try:
        name = kept.begin(sweeps.planned(options, axes)).name
        while not kept.read(name).is_ended:
            supervisor.jobs()
            progress = kept.advance(name)
            time.sleep(0.5)
        assert progress.winner is not None, [one.out for one in progress.standings]
        sweep, jobs = kept.read(name), kept.jobs()
        won, own = sweep.members[progress.winner], sweep.members[0]
        return sweep, won.values, jobs[won.run].run, jobs[own.run].run if jobs[own.run].state == "finished" else None
    finally:
        supervisor.close()


def trained(options: RunOptions) -> RunDirectory:
    """One run to its end."""
    process = forked(main, options.family, options.method, command_line.to_argv(options))
    process.join()
    assert process.exitcode == 0
    (log,) = Path(options.output.output_dir).glob("*/events.jsonl")
    return RunDirectory(log.parent)


def right(family: str, run: RunDirectory) -> str:
    """Of each judged prompt 1 where the run's file draws what it says, else 0."""
    word, model = picks.FAMILIES[family][1], families.family(family)
    parts = model.load(run.options().model, CPU, torch.float32)
    merge_into(parts, drawing.saved_files(run.path)[0])
    tasks = [task for kind in picks._kinds(word) for task in measure.prompts(kind, NUM_JUDGED // 2, JUDGED_SEED, worlds.colors_of(family))]
    return "".join(
        str(int(worlds.read(image).shows(task.scene))) for task, image in zip(tasks, picks.drawn(model, parts, run, tasks), strict=True)
    )


def result(folder: Path, family: str, change: Change) -> dict[str, Any]:
    before = _cpu_seconds()
    options = options_of(folder, family, change)
    sweep, winner, run, own_run = swept(options)
    told = {
        "family": family,
        "change": change.name,
        "rule": RULE,
        "is_wrong": change.is_wrong,
        "winner": dict(winner),
        "cost": sweep.rungs.cost,
    }
    alone = flat.build(type(options), {**sweeps._given(sweep.options(sweeps.Member({}))), "output_dir": str(folder / "alone")})
    own = right(family, own_run or trained(alone))
    return {**told, "own": own, "won": right(family, run) if winner else own, "cpu_seconds": round(_cpu_seconds() - before)}


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def rows() -> list[dict[str, Any]]:
    """All results, with a digit for each judged image; the file has them as hexadecimal numbers."""
    found = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []
    return [row | {name: f"{int(row[name], 16):0{NUM_JUDGED}b}" for name in ("own", "won")} for row in found]


def run(folder: str | None = None, most: str = "25") -> None:
    done = {(row["family"], row["change"]) for row in rows() if row.get("rule") == RULE}
    for family, change in [task for task in TASKS if (task[0], task[1].name) not in done][: int(most)]:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            row = result(Path(place), family, change)
        with RESULTS.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row | {name: f"{int(row[name], 2):x}" for name in ("own", "won")}) + "\n")
        print(family, change.name, row["winner"], judged(row), row["cpu_seconds"], flush=True)


def judged(row: dict[str, Any]) -> tuple[float, float]:
    """By how many points the winner lies above the task's own settings, and half of the paired 95 % interval of that."""
    gaps = [int(one) - int(other) for one, other in zip(row["won"], row["own"], strict=True)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1))
    return 100 * mean, 196 * deviation / math.sqrt(len(gaps))


def table() -> None:
    """Of each task how many were right before and after, and whether it is better, worse or a tie; *: chosen by an earlier rule."""
    counts = dict.fromkeys(("better", "worse", "tie"), 0)
    print("| task | own settings | winner | difference | |\n|---|---|---|---|---|")
    latest = {(row["family"], row["change"]): row for row in rows()}
    for row in latest.values():
        gap, half = judged(row)
        said = "better" if gap > half else "worse" if gap < -half else "tie"
        counts[said] += 1
        shares = [f"{100 * row[name].count('1') / NUM_JUDGED:.1f} %" for name in ("own", "won")]
        values = ", ".join(f"{name} {value:.3g}" for name, value in row["winner"].items()) or "its own"
        mark = "" if row.get("rule") == RULE else " *"
        print(f"| {row['family']}, {row['change']} | {shares[0]} | {shares[1]} ({values}) | {gap:+.1f} ± {half:.1f} | {said}{mark} |")
    print(f"\n{counts} of {len(latest)} tasks")


if __name__ == "__main__":
    {"run": run, "table": table}[sys.argv[1]](*sys.argv[2:])
