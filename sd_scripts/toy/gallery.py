"""The page docs/toys.md: what each family's toy preset teaches, drawn before and after at fixed seeds, with figures, weak ones included.

`bash setup.sh toys [FAMILY ...]` runs it. Runs what Start runs: the preset, `accelerate launch`, the saved file. A training that was
stopped goes on, and what is done is not done again until its preset or its built-in model changes. Toys train side by side, a core each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from PIL import Image, ImageDraw, ImageFont

from sd_scripts.families import FACTS, RUNS, family
from sd_scripts.runs.command import launch_command, launch_environment
from sd_scripts.schema.command_line import fail
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically, written_aside
from sd_scripts.schema.flat import build, run_of
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import SampleOptions
from sd_scripts.schema.toml_files import read_toml, to_toml

from . import edits, measure, worlds
from .build import BASES

if TYPE_CHECKING:
    from sd_scripts.library.core.protocols import ModelFamily, Parts

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ROOT / "presets"
SEED = 23
SHOWN = 8
"""Images in a row of the grid; those of the first prompts, none of them chosen."""
CELL = 96
"""Sides of a cell of the grid, in pixels."""
MOST_JOBS = 4
"""Toys that train at once unless more are asked for; each takes up to 1 GB of host RAM (0.75 of FLUX.3 were measured)."""
STATE_EVERY = 100
"""Steps that a stopped training loses at most."""

log = logging.getLogger("toys")


@dataclass(frozen=True)
class Toy:
    """A preset that teaches something to a built-in model, and the words to ask it for."""

    preset: str
    words: tuple[str, ...]
    """Of measure.Kind, or edits.KINDS for a model that edits; the first is what is new."""

    @property
    def name(self) -> str:
        """That of its preset, its images and its record."""
        return Path(self.preset).name


TOYS = (
    Toy("sdxl_train_network/toy-star", ("star", "old", "held_out")),
    Toy("sd_train_network/toy-star-sd", ("star", "old", "held_out")),
    Toy("flux_train_network/toy-star-flux", ("star", "old", "held_out")),
    Toy("flux2_train_network/toy-star-flux2", ("star", "old", "held_out")),
    Toy("flux3_train_network/toy-star-flux3", ("star", "old", "held_out")),
    Toy("krea2_train_network/toy-star-krea2", ("star", "old", "held_out")),
    Toy("anima_train_network/toy-star-anima", ("star", "old", "held_out")),
    Toy("chroma_train_network/toy-star-chroma", ("star", "old", "held_out")),
    Toy("zimage_train_network/toy-star-zimage", ("star", "old", "held_out")),
    Toy("qwen_image21_train_network/toy-star-qwen21", ("star", "old", "held_out")),
    Toy("qwen_image_train_network/toy-edit-border", ("border", "keep", *edits.OLD_KINDS)),
    Toy("kontext_train_network/toy-edit-border-kontext", ("border", "keep", *edits.OLD_KINDS)),
    Toy("ddpm_train/toy-shapes", ("old", "held_out")),
)
TITLES = {
    "star": "the new shape, a star",
    "teal": "the new colour, teal",
    "old": "old words",
    "held_out": "old words in combinations that it never saw",
    "border": "the new instruction, a border",
    "keep": "instructions to leave the image as it is",
    "recolour": "recolour",
    "move": "move",
    "remove": "remove",
}

Draw = Callable[[list[str], list[int], tuple[int, int], Sequence[tuple[Image.Image, ...]]], list[Image.Image]]
"""(prompts, seeds, (width, height), control images of each) -> one image each."""


@dataclass(frozen=True)
class Shown:
    """What was drawn for one kind of words: rows of images, and the fraction of them that is as asked, by the row's name."""

    rows: dict[str, list[Image.Image]]
    right: dict[str, float]
    prompts: list[str]


def trained(options: RunOptions, folder: Path) -> tuple[Path, float]:
    """The file that training in this folder saved, and the CPU seconds that all calls took for it; done here if it is not there.

    Raises OptionError for a training that fails.
    """
    name, spent = f"{options.output.output_name}{options.output.ending}", folder / "cpu_seconds.txt"
    seconds = float(spent.read_text(encoding="utf-8")) if spent.is_file() else 0.0
    if not (files := sorted(folder.glob(f"*/{name}"))):
        config, before = folder / "toy.toml", os.times()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(config, to_toml(options))
        try:
            environment = os.environ | launch_environment(options)
            code = subprocess.run(launch_command(options, config=config), env=environment, check=False).returncode
        finally:
            now = os.times()
            seconds += now.children_user + now.children_system - before.children_user - before.children_system
            write_atomically(spent, f"{seconds:.1f}\n")
        files = sorted(folder.glob(f"*/{name}"))
        if code != 0 or not files:
            raise OptionError(f"the training ended with code {code}; its log is in {folder}, and a second call goes on")
    return files[-1], seconds


def models(options: RunOptions, file: Path) -> tuple[ModelFamily, dict[str, Callable[[], Parts]]]:
    """The family, and how to have its model before (where there is one) and after."""
    import torch

    from sd_scripts.library.adapters.merge import merge_into

    chosen, cpu = family(options.family), torch.device("cpu")
    if options.method == "scratch":
        saved = type(options.model).model_validate({"pretrained_model_name_or_path": str(file)})
        return chosen, {"after": lambda: chosen.load(saved, cpu, torch.float32)}

    def after() -> Parts:
        parts = chosen.load(options.model, cpu, torch.float32)
        merge_into(parts, file)
        return parts

    return chosen, {"before": lambda: chosen.load(options.model, cpu, torch.float32), "after": after}


def drawing(chosen: ModelFamily, parts: Parts, samples: SampleOptions) -> Draw:
    """What draws with this model, with the steps and guidance of the preset's previews."""
    from sd_scripts.library.core.protocols import Preview
    from sd_scripts.library.render.renderer import Renderer

    def draw(texts: list[str], seeds: list[int], size: tuple[int, int], controls: Sequence[tuple[Image.Image, ...]]) -> list[Image.Image]:
        requests = [
            Preview(text, "", *size, seed, samples.sample_steps, samples.sample_cfg_scale, controls=given)
            for text, seed, given in zip(texts, seeds, controls, strict=True)
        ]
        return Renderer(chosen, parts).render(requests)

    return draw


def drawn(toy: Toy, options: RunOptions, file: Path, num: int) -> dict[str, Shown]:
    """num prompts or edits of each kind, before and after."""
    chosen, ways = models(options, file)
    shown: dict[str, Shown] = {kind: Shown({}, {}, []) for kind in toy.words}
    for when, load in ways.items():
        draw = drawing(chosen, load(), options.samples)
        for kind, found in shown.items():
            if kind in edits.KINDS:
                show_edits(found, when, kind, draw, num, options)
            else:
                show_prompts(found, when, cast("measure.Kind", kind), draw, num, options)
    return shown


def show_prompts(found: Shown, when: str, kind: measure.Kind, draw: Draw, num: int, options: RunOptions) -> None:
    """Adds the images of prompts of this kind, and how many are right in all."""
    tasks = measure.prompts(kind, num, SEED, worlds.colors_of(options.family))

    def render(texts: list[str], seeds: list[int], width: int, height: int) -> list[Image.Image]:
        return draw(texts, seeds, (width, height), [()] * len(texts))

    images = measure.render_tasks(render, tasks, worlds.sizes_of(options.family))
    found.prompts[:] = [task.prompt for task in tasks[:SHOWN]]
    found.rows[when] = images[:SHOWN]
    found.right[when] = measure.score([task.scene for task in tasks], images).all


def show_edits(found: Shown, when: str, kind: edits.EditKind, draw: Draw, num: int, options: RunOptions) -> None:
    """Adds the results of edits of this kind, and how many are as asked with all else as it was."""
    tasks = measure.edit_tasks(kind, num, SEED, sizes=worlds.sizes_of(options.family))

    def render(texts: list[str], images: list[Image.Image], seeds: list[int]) -> list[Image.Image]:
        return draw(texts, seeds, images[0].size, [(image,) for image in images])

    results = measure.render_edits(render, tasks)
    found.prompts[:] = [task.edit.instruction for task in tasks[:SHOWN]]
    found.rows["given"] = [task.source for task in tasks[:SHOWN]]
    found.rows[when] = results[:SHOWN]
    found.right[when] = sum(edits.obeyed(task.edit, task.source, image) for task, image in zip(tasks, results, strict=True)) / num


def grid(shown: dict[str, Shown]) -> Image.Image:
    """For each kind of words the prompts as heads of columns, and a line of images for each row."""
    margin, head, label = 8, 64, 70
    small, large = ImageFont.load_default(11), ImageFont.load_default(15)
    height = sum(26 + head + (CELL + margin) * len(one.rows) for one in shown.values())
    canvas = Image.new("RGB", (label + SHOWN * (CELL + margin), height + margin), "white")
    draw, top = ImageDraw.Draw(canvas), 0
    for kind, one in shown.items():
        draw.text((margin, top + 4), TITLES[kind], "black", large)
        top += 26
        for column, prompt in enumerate(one.prompts):
            draw.multiline_text((label + column * (CELL + margin), top), _wrapped(prompt), "#444444", small)
        top += head
        for name, images in one.rows.items():
            draw.text((margin, top + CELL // 2 - 8), name, "black", small)
            for column, image in enumerate(images):
                scale = CELL / max(image.size)
                fitted = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
                left = label + column * (CELL + margin)
                canvas.paste(fitted, (left + (CELL - fitted.width) // 2, top + (CELL - fitted.height) // 2))
                draw.rectangle((left - 1, top - 1, left + CELL, top + CELL), outline="#bbbbbb")
            top += CELL + margin
    return canvas


def _wrapped(text: str, letters: int = 17) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines[:4])


def record_of(toy: Toy, docs: Path) -> Path:
    """Where the figures of a toy are kept; its grid is beside them."""
    return docs / "images" / "toys" / f"{toy.name}.json"


def mark_of(toy: Toy) -> str:
    """Twelve letters for the preset as it is, and for the weights of its built-in model."""
    made = BASES / _run(toy)[0] / "BUILD.json"
    weights = json.loads(made.read_text(encoding="utf-8"))["scored_weights"] if made.is_file() else ""
    return hashlib.sha256((PRESETS / f"{toy.preset}.toml").read_bytes() + weights.encode()).hexdigest()[:12]


def is_there(toy: Toy, docs: Path, num: int) -> bool:
    """Whether the record is of the preset and the built-in model as they are, with so many images or more."""
    record = record_of(toy, docs)
    if not record.is_file():
        return False
    was = json.loads(record.read_text(encoding="utf-8"))
    return was["preset"] == mark_of(toy) and was["num"] >= num


def shows(toy: Toy, output_dir: Path, docs: Path, num: int) -> None:
    """Trains, draws, measures and records a toy. Raises OptionError for a failed training."""
    path, mark, record = PRESETS / f"{toy.preset}.toml", mark_of(toy), record_of(toy, docs)
    folder = output_dir / f"{toy.name}-{mark}"
    given = {"output_dir": str(folder), "sample_prompts": "", "save_state_every_n_steps": STATE_EVERY}
    values = read_toml(path)
    options = build(run_of(values), values | given, path.name)
    file, seconds = trained(options, folder)
    log.info("%s: drawing %d images of each of %s", toy.name, num, ", ".join(toy.words))
    found = drawn(toy, options, file, num)
    record.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(record.with_suffix(".webp")) as aside:
        grid(found).save(aside, format="WEBP", quality=65, method=6)
    values = {"preset": mark, "num": num, "steps": options.training.max_train_steps, "seconds": round(seconds)}
    write_atomically(record, json.dumps(values | {"right": {kind: one.right for kind, one in found.items()}}, indent=2) + "\n")


def side_by_side(toys: Sequence[Toy], output_dir: Path, docs: Path, num: int, jobs: int) -> None:
    """The same in processes of their own, so many at once, the longest first; what each prints is in a log.

    Raises OptionError, after the others have ended, for those that failed.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
    environment, begun = os.environ | {"OMP_NUM_THREADS": threads}, time.monotonic()

    def run(toy: Toy) -> int:
        command = [sys.executable, "-m", "sd_scripts.toy.gallery", _run(toy)[0], "--output_dir", str(output_dir), "--docs", str(docs)]
        log.info("%s begins; what it prints is in %s", toy.name, log_of(toy))
        with open(log_of(toy), "a", encoding="utf-8") as out:
            call = [*command, "--num_images", str(num), "--jobs", "1"]
            return subprocess.run(call, env=environment, cwd=ROOT, stdout=out, stderr=out, check=False).returncode

    def log_of(toy: Toy) -> Path:
        return output_dir / f"{toy.name}.log"

    output_dir.mkdir(parents=True, exist_ok=True)
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run, toy): toy for toy in sorted(toys, key=lambda toy: _last_seconds(toy, docs), reverse=True)}
        try:
            for number, done in enumerate(as_completed(waiting), 1):
                toy = waiting[done]
                failed += [toy] if done.result() else []
                how = "failed" if done.result() else "is done"
                log.info("%s %s, %d of %d, after %.1f minutes", toy.name, how, number, len(toys), (time.monotonic() - begun) / 60)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if failed:
        logs = ", ".join(str(log_of(toy)) for toy in failed)
        raise OptionError(f"{len(failed)} of {len(toys)} toys failed, as their logs tell ({logs}); a second call goes on")


def _last_seconds(toy: Toy, docs: Path) -> float:
    record = record_of(toy, docs)
    return float(json.loads(record.read_text(encoding="utf-8"))["seconds"]) if record.is_file() else float("inf")


def page(docs: Path) -> str:
    """The text of toys.md, of the records that there are."""
    lines = [HEAD]
    for toy in TOYS:
        if not (record := record_of(toy, docs)).is_file():
            continue
        facts: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        options = RUNS[_run(toy)]
        lines += [
            f"## {FACTS[options.family].label}, `{toy.name}`\n",
            f"![{toy.name}: rows before and after](images/toys/{toy.name}.webp)\n",
        ]
        whens = list(next(iter(facts["right"].values())))
        lines += [f"| of {facts['num']} images as asked | {' | '.join(whens)} |", f"|---|{'---|' * len(whens)}"]
        lines += [
            f"| {TITLES[kind]} | {' | '.join(f'{100 * right[when]:.0f} %' for when in whens)} |" for kind, right in facts["right"].items()
        ]
        lines += [f"\n{facts['steps']} steps, {facts['seconds'] / 60:.1f} CPU minutes.\n"]
    return "\n".join(lines).rstrip() + "\n"


HEAD = """# What the toys learn

Written by `bash setup.sh toys`, from trainings by the presets as they are, as many at once as there are cores; with names of families
it does these alone. A call that was stopped goes on with the next one, and what is there is not done again until its preset or its
built-in model changes. Rows show the first prompts of a fixed seed, none of them chosen. An image counts when shape, colour and place are
all as asked, by the exact reader of the toy world; an edit when it is as asked and all else is as it was. How the built-in models were
made, and what else was measured, is in [RESULTS.md](../tests/bench/RESULTS.md); style transfer has its grid in
[lgt.md](lgt.md#what-the-toy-learns).
"""


def _run(toy: Toy) -> tuple[str, str]:
    script = f"{toy.preset.partition('/')[0]}.py"
    return next(key for key, run in RUNS.items() if run.script == script)


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m sd_scripts.toy.gallery`."""
    there = sorted({_run(toy)[0] for toy in TOYS})
    parser = argparse.ArgumentParser(prog="toys", description="Train what the toy presets teach, and write docs/toys.md with images of it.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(there)}; default: all")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "output" / "toys", help="where the runs' folders are made")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of toys.md and its images")
    parser.add_argument("--num_images", type=int, default=100, help="images of each kind that are measured, before and after")
    most = min(os.cpu_count() or 1, MOST_JOBS)
    parser.add_argument(
        "--jobs", type=int, default=most, help=f"toys that train at once; default: one a core, at most {MOST_JOBS} (here {most})"
    )
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        if unknown := sorted(set(given.families) - set(there)):
            raise OptionError(f"families: {', '.join(unknown)} has no toy; there are {', '.join(there)}")
        if given.num_images < SHOWN:
            raise OptionError(f"num_images: {given.num_images} is out of range; {SHOWN} or more is allowed, as a row shows so many")
        if given.jobs < 1:
            raise OptionError(f"jobs: {given.jobs} is out of range; 1 or more is allowed")
        todo = []
        for toy in TOYS:
            if given.families and _run(toy)[0] not in given.families:
                continue
            if is_there(toy, given.docs, given.num_images):
                log.info("%s is there", toy.name)
            else:
                todo.append(toy)
        try:
            if (jobs := min(given.jobs, len(todo))) > 1:
                side_by_side(todo, given.output_dir.resolve(), given.docs.resolve(), given.num_images, jobs)
            else:
                for toy in todo:
                    shows(toy, given.output_dir, given.docs, given.num_images)
        finally:
            if given.docs.is_dir():
                write_atomically(given.docs / "toys.md", page(given.docs))
    except OptionError as err:
        fail(err, "toys")
    log.info("the page is %s", given.docs / "toys.md")


if __name__ == "__main__":
    main()
