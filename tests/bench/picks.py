"""Does the proposed checkpoint hold what it promises? Toy runs that end too early, in time and too late, of three families; of each the
proposal, the last and the middle checkpoint beside the best one, judged by the exact reader.

usage: picks.py run [folder]   trains, draws and reads what has no result yet; a second call goes on
       picks.py table          the figures so far, as RESULTS.md has them

Everything below was fixed before the first run. A proposal knows what a user knows who has no exact reader: held-out losses, and how near
the images of a grid, on prompts and seeds of its own, and those of the base come to training images. The judge draws NUM_JUDGED prompts a
checkpoint, the same noise for each, half of them of the new word and half of old ones; an image counts when shape, colour and place are
all right. A checkpoint is significantly worse than the best one when the 95 % interval of the paired difference lies above 0.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from PIL import Image

from kohya_like import measures, picks
from sd_scripts import families
from sd_scripts.dataset import triage
from sd_scripts.families.flux.options import FluxSampleOptions
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import ModelFamily, Parts, Preview
from sd_scripts.library.train.launch import main
from sd_scripts.runs import drawing
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line, flat, toml_files
from sd_scripts.toy import measure, worlds
from tests.forked import forked
from tests.runs.learning import CPU, PRESETS

NUM_CHECKPOINTS = 5
NUM_JUDGED = 400
NUM_IN_GRID = 16
MAX_STEPS = 10
"""Of drawing: the presets' own are more, and half of the time is drawing."""
JUDGED_SEED, GRID_SEED = 20261125, 7
FAMILIES: dict[str, tuple[str, measure.Kind]] = {
    "sdxl": ("sdxl_train_network/toy-star", "star"),
    "sd": ("sd_train_network/toy-star-sd", "star"),
    "flux": ("flux_train_network/toy-teal-flux", "teal"),
}
"""Preset, and the word that its runs teach."""
RESULTS = Path(__file__).with_name("picks.jsonl.gz")


@dataclass(frozen=True)
class Kind:
    """How a run differs from its family's preset."""

    name: str
    images: int
    rate: float
    steps: float
    is_alone: bool = False
    """Without regularisation images."""


KINDS = (
    Kind("rate / 10", 24, 0.1, 1.0),
    Kind("rate / 4", 24, 0.25, 1.0),
    Kind("a third of the steps", 24, 1.0, 0.34),
    Kind("as the preset", 24, 1.0, 1.0),
    Kind("16 images", 16, 1.0, 1.0),
    Kind("36 images, two thirds of the rate", 36, 0.67, 1.0),
    Kind("6 images, twice the steps", 6, 1.0, 2.0),
    Kind("8 images alone, twice the rate", 8, 2.0, 1.0, is_alone=True),
    Kind("24 images alone", 24, 1.0, 1.5, is_alone=True),
    Kind("three times the rate", 24, 3.0, 1.0),
)
TASKS = [(family, number) for number in range(len(KINDS)) for family in FAMILIES]


def scenes_of(word: measure.Kind, family: str, num: int) -> list[worlds.Scene]:
    """What the images of a run show: combinations in turn, most of which stay unseen."""
    tasks = measure.prompts(word, 200, 3, worlds.colors_of(family))
    return list(dict.fromkeys(task.scene for task in tasks))[:num]


def written(folder: Path, family: str, kind: Kind, number: int) -> dict[str, object]:
    """Writes the images of a run, which its number tells from those of others, and gives the options that name them."""
    word = FAMILIES[family][1]
    old = [task.scene for task in measure.prompts("old", 60, 4, worlds.colors_of(family)) if task.scene not in worlds.HELD_OUT]
    parts = {f"train/3_{word}": scenes_of(word, family, kind.images)} | ({} if kind.is_alone else {"reg/1_shape": old})
    for part, scenes in parts.items():
        (folder / part).mkdir(parents=True)
        for index, scene in enumerate(scenes):
            rng = worlds.rng_for(1000 + number, list(FAMILIES).index(family), part.startswith("reg"), index)
            worlds.draw(scene, *worlds.SIZES[index % 3], rng).save(folder / part / f"{index:03d}.png")
            (folder / part / f"{index:03d}.txt").write_text(worlds.caption(scene, rng) + "\n", encoding="utf-8")
    return {"train_data_dir": str(folder / "train"), "reg_data_dir": None if kind.is_alone else str(folder / "reg")}


def trained(folder: Path, family: str, number: int) -> RunDirectory:
    """Trains a run whose checkpoints are measured on held-out images as they are saved."""
    values = toml_files.read_toml(PRESETS / f"{FAMILIES[family][0]}.toml")
    kind = KINDS[number]
    every = max(1, round(values["max_train_steps"] * kind.steps / NUM_CHECKPOINTS))
    changes = {
        "learning_rate": values["learning_rate"] * kind.rate,
        "max_train_steps": every * NUM_CHECKPOINTS,
        "save_every_n_steps": every,
        "validate_every_n_steps": every,
        "validation_split": 0.2,
        "seed": 300 + number,
        "sample_prompts": "",
        "output_dir": str(folder / "output"),
        "preflight": "off",
    }
    given = {name: value for name, value in (values | written(folder, family, kind, number) | changes).items() if value is not None}
    options = flat.build(flat.run_of(values), given)
    process = forked(main, options.family, options.method, command_line.to_argv(options))
    process.join()
    assert process.exitcode == 0
    (log,) = (folder / "output").glob("*/events.jsonl")
    return RunDirectory(log.parent)


def drawn(family: ModelFamily, parts: Parts, run: RunDirectory, tasks: Sequence[measure.Task]) -> list[Image.Image]:
    samples = run.options().samples
    guidance = samples.sample_guidance_scale if isinstance(samples, FluxSampleOptions) else 3.5

    def render(prompts: list[str], seeds: list[int], width: int, height: int) -> list[Image.Image]:
        asked = [
            Preview(prompt, "", width, height, seed, min(MAX_STEPS, samples.sample_steps), samples.sample_cfg_scale, "auto", guidance)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [image for at in range(0, len(asked), 50) for image in family.preview(parts, asked[at : at + 50])]

    return measure.render_tasks(render, tasks)


def signs(images: Sequence[Image.Image], folder: Path) -> list[triage.Signs]:
    """What images are compared by, as the page's own grid has them: from files."""
    found = []
    for index, image in enumerate(images):
        path = folder / f"{index}.png"
        image.save(path)
        found.append(triage.signs_of(path))
    return found


def models(family: ModelFamily, run: RunDirectory) -> Iterator[tuple[str, Parts]]:
    """The base under the name "", and every checkpoint."""
    model = run.options().model
    yield "", family.load(model, CPU, torch.float32)
    for file in drawing.saved_files(run.path):
        parts = family.load(model, CPU, torch.float32)
        merge_into(parts, file)
        yield file.name, parts


def _kinds(word: measure.Kind) -> tuple[measure.Kind, ...]:
    return word, "old"


def result(folder: Path, name: str, number: int) -> dict[str, Any]:
    word = FAMILIES[name][1]
    run, family = trained(folder, name, number), families.family(name)
    losses = measures.held_out(run, [file.name for file in drawing.saved_files(run.path)])
    judged = [task for kind in _kinds(word) for task in measure.prompts(kind, NUM_JUDGED // 2, JUDGED_SEED, worlds.colors_of(name))]
    grid = [task for kind in _kinds(word) for task in measure.prompts(kind, NUM_IN_GRID // 2, GRID_SEED, worlds.colors_of(name))]
    beside = [triage.signs_of(path) for path in measures.training_images(run, folder / "output", lambda _: None)]
    checkpoints = []
    for file, parts in models(family, run):
        (folder / f"grid{file}").mkdir()
        near = measures.nearness(signs(drawn(family, parts, run, grid), folder / f"grid{file}"), beside)
        told: dict[str, Any] = {"file": file, "near": near and asdict(near)}
        if file:
            found = losses.get(file)
            told |= {"step": found and found.step, "held_out": found and asdict(found)}
            right = [worlds.read(image).shows(task.scene) for task, image in zip(judged, drawn(family, parts, run, judged), strict=True)]
            told["right"] = "".join(str(int(one)) for one in right)
        checkpoints.append(told)
    return {"family": name, "kind": KINDS[number].name, "checkpoints": checkpoints}


def rows() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    with gzip.open(RESULTS, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def run(folder: str | None = None) -> None:
    done = {(row["family"], row["kind"]) for row in rows()}
    for family, number in TASKS:
        if (family, KINDS[number].name) in done:
            continue
        with tempfile.TemporaryDirectory(dir=folder) as place:
            row = result(Path(place), family, number)
        with gzip.open(RESULTS, "at", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        shares = [f"{one['right'].count('1') / NUM_JUDGED:.0%}" for one in row["checkpoints"] if one["file"]]
        print(family, KINDS[number].name, shares, proposed(row), flush=True)


# What is made of it


def _held_out(told: dict[str, Any] | None) -> measures.HeldOut | None:
    if told is None:
        return None
    mean = [None if one is None else measures.Mean(**one) for one in (told["mean"], told["behind"])]
    assert mean[0] is not None
    return measures.HeldOut(told["step"], mean[0], tuple(one and measures.Mean(**one) for one in told["bands"]), mean[1])


def _near(told: dict[str, Any] | None) -> measures.Nearness | None:
    return measures.Nearness(**told) if told else None


def of_steps(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The checkpoints of a run in the order of their steps; the base is none."""
    found = [one for one in row["checkpoints"] if one["file"]]
    return sorted(found, key=lambda one: math.inf if one["step"] is None else one["step"])


def proposed(row: dict[str, Any]) -> int | None:
    """Which of the checkpoints the page proposes."""
    base = next(one for one in row["checkpoints"] if not one["file"])
    candidates = [
        picks.Candidate(place, one["file"], _held_out(one["held_out"]), _near(one["near"])) for place, one in enumerate(of_steps(row))
    ]
    return picks.proposal(candidates, [], _near(base["near"])).column


def behind(row: dict[str, Any], place: int) -> tuple[float, float]:
    """By how many points a checkpoint lies behind the best one, and the lower end of the paired 95 % interval of that."""
    rights = [[int(one) for one in checkpoint["right"]] for checkpoint in of_steps(row)]
    best = max(rights, key=sum)
    gaps = [one - other for one, other in zip(best, rights[place], strict=True)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1))
    return 100 * mean, 100 * (mean - 1.96 * deviation / math.sqrt(len(gaps)))


def table() -> None:
    """Of each run what every checkpoint got, which one is proposed, and by how much that, the last and the middle one lie behind."""
    found = rows()
    good = dict.fromkeys(("proposed", "last", "middle"), 0)
    points: dict[str, list[float]] = {name: [] for name in good}
    print("| run | right, by checkpoint | proposed | behind the best: proposed | last | middle |\n|---|---|---|---|---|---|")
    for row in found:
        shares = [100 * one["right"].count("1") / NUM_JUDGED for one in of_steps(row)]
        choice = proposed(row)
        places = {"proposed": choice, "last": len(shares) - 1, "middle": (len(shares) - 1) // 2}
        cells = []
        for name, place in places.items():
            gap, least = behind(row, place) if place is not None else (max(shares), max(shares))
            good[name] += least <= 0
            points[name].append(gap)
            cells.append(f"{gap:.1f}{'' if least <= 0 else ' *'}")
        told = ", ".join(f"{share:.0f}" for share in shares)
        print(f"| {row['family']}, {row['kind']} | {told} | {'none' if choice is None else choice + 1} | {' | '.join(cells)} |")
    print(f"\nof {len(found)} runs not significantly worse than the best: {good}")
    print("mean points behind the best:", {name: round(sum(gaps) / max(1, len(gaps)), 1) for name, gaps in points.items()})


if __name__ == "__main__":
    {"run": run, "table": table}[sys.argv[1]](*sys.argv[2:])
