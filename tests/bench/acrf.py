"""Does AC-RF teach a model of few steps better than flow matching? Pairs of trainings that differ in their objective alone.

usage: acrf.py run      trains and measures what has no result yet; a second call goes on
       acrf.py table    the figures so far, as RESULTS.md has them

Everything below was fixed before the first run. Each pair has the toy preset's base, data, prior, rate and steps, and a seed of its own.
An image counts when its shape, colour and place are all as its prompt says, by the exact reader; both of a pair draw the same prompts
from the same noise. The advantage of a seed is the difference of its two shares; the interval is Student's over the seeds.

The rule: acrf stays the default for models of few steps if the 95 % interval of its advantage at 8 steps on new words lies above 0 and it
loses no more than 3 points on old words, by the mean; otherwise flow becomes the default.

A second question, fixed before its runs too: without the prior, does acrf keep more of the old words than flow? It is worth asking for
there if the 95 % interval of its advantage at 8 steps on old words lies above 0.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from PIL import Image
from scipy import stats

from sd_scripts.library.core.protocols import Preview
from sd_scripts.toy import measure, worlds
from tests.runs.learning import Learned, learn

PRESET = "zimage_train_network/toy-star-zimage"
SEEDS = (101, 102, 103, 104, 105)
_ACRF: dict[str, Any] = {"train_data_dir": "toy:star", "objective": "acrf", "jitter_scale": 0.1}
_FLOW: dict[str, Any] = {"train_data_dir": "toy:star"}
_ALONE = {"base_prior_weight": 0.0}
OBJECTIVES: dict[str, dict[str, Any]] = {"acrf": _ACRF, "flow": _FLOW, "acrf alone": {**_ACRF, **_ALONE}, "flow alone": {**_FLOW, **_ALONE}}
"""What differs. The preset has had other images and flow matching since; the comparison stays what it was when it was fixed."""
PAIRS = (("acrf", "flow"), ("acrf alone", "flow alone"))
KINDS: dict[str, measure.Kind] = {"old": "old", "held out": "held_out", "new": "star"}
STEPS = (8, 4)
NUM_IMAGES = 200
PROMPTS_SEED = 20261123
RESULTS = Path(__file__).with_name("acrf.jsonl")


def right(learned: Learned, kind: measure.Kind, steps: int) -> list[bool]:
    """Which of the images of the saved file are as asked."""
    tasks = measure.prompts(kind, NUM_IMAGES, PROMPTS_SEED, worlds.colors_of("zimage"))

    def render(prompts: list[str], seeds: list[int], width: int, height: int) -> list[Image.Image]:
        scale = learned.options.samples.sample_cfg_scale
        made = [Preview(text, "", width, height, seed, steps, scale) for text, seed in zip(prompts, seeds, strict=True)]
        return learned.family.preview(learned.after, made)

    images = measure.render_tasks(render, tasks)
    return [worlds.read(image).shows(task.scene) for task, image in zip(tasks, images, strict=True)]


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []


def run() -> None:
    done = {(row["seed"], row["objective"]) for row in rows()}
    for seed in SEEDS:
        for objective, changes in OBJECTIVES.items():
            if (seed, objective) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                learned = learn(PRESET, Path(folder), seed=seed, **changes)
                shares = {f"{kind} {steps}": right(learned, chosen, steps) for kind, chosen in KINDS.items() for steps in STEPS}
            row = {"seed": seed, "objective": objective}
            row |= {name: "".join(str(int(one)) for one in found) for name, found in shares.items()}
            with RESULTS.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
            print(seed, objective, {name: sum(found) / len(found) for name, found in shares.items()}, flush=True)


def table(ours: str, other: str) -> None:
    found = {(row["seed"], row["objective"]): row for row in rows()}
    pairs = [seed for seed in SEEDS if {(seed, ours), (seed, other)} <= found.keys()]
    print(f"{len(pairs)} pairs of {len(SEEDS)}, {NUM_IMAGES} images a cell\n")
    if len(pairs) < 2:
        return
    print(f"| words, steps | {ours} | {other} | advantage, points | 95 % |\n|---|---|---|---|---|")
    for kind in KINDS:
        for steps in STEPS:
            one, two = ([100 * found[seed, name][f"{kind} {steps}"].count("1") / NUM_IMAGES for seed in pairs] for name in (ours, other))
            gains = [high - low for high, low in zip(one, two, strict=True)]
            mean = sum(gains) / len(gains)
            deviation = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1))
            half = float(stats.t.ppf(0.975, len(gains) - 1)) * deviation / math.sqrt(len(gains))
            print(
                f"| {kind}, {steps} | {sum(one) / len(one):.1f} % | {sum(two) / len(two):.1f} % | {mean:+.1f} | "
                f"{mean - half:+.1f} to {mean + half:+.1f} |"
            )


def tables() -> None:
    for pair in PAIRS:
        table(*pair)


if __name__ == "__main__":
    {"run": run, "table": tables}[sys.argv[1]]()
