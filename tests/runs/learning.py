"""Training of a toy preset as it is, and measuring of what the saved file draws; for the tests that models learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sd_scripts import families
from sd_scripts.families.flux.options import FluxSampleOptions
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import ModelFamily, Parts, Preview
from sd_scripts.library.train.launch import main
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line, flat, toml_files
from sd_scripts.schema.runs import RunOptions
from sd_scripts.toy import measure, worlds
from sd_scripts.toy.build import BASES
from sd_scripts.toy.edits import EditKind
from tests.forked import forked

PRESETS = Path(__file__).parents[2] / "presets"
CPU = torch.device("cpu")
SEED = 17


def recorded(family: str, kind: measure.Kind) -> measure.Scores:
    """What 200 prompts got of a toy base before any training; tests/toy holds the record to the weights."""
    return measure.Scores(**json.loads((BASES / family / "BUILD.json").read_text(encoding="utf-8"))["scores"][kind])


@dataclass(frozen=True)
class Learned:
    """A finished run and its model, before and after."""

    options: RunOptions
    run: RunDirectory
    family: ModelFamily
    before: Parts | None
    """None for a model that the run has made."""
    after: Parts
    num_images: int
    """Drawn for each measurement."""

    def _model(self, after: bool) -> Parts:
        chosen = self.after if after else self.before
        assert chosen is not None
        return chosen

    def obedience(self, kind: measure.Kind, after: bool = True) -> measure.Scores:
        if not after and kind in ("old", "star", "teal"):
            return recorded(self.options.family, kind)
        return self.obediences(kind, after=after)[0]

    def obediences(self, *kinds: measure.Kind, after: bool = True) -> list[measure.Scores]:
        """Of several kinds, drawn together: a call of a small model costs more than what it draws."""
        family, num = self.options.family, self.num_images
        tasks = [task for kind in kinds for task in measure.prompts(kind, num, SEED, worlds.colors_of(family))]
        images = measure.render_tasks(self.render(after), tasks, worlds.sizes_of(family))
        starts = range(0, len(tasks), num)
        return [measure.score([task.scene for task in tasks[at : at + num]], images[at : at + num]) for at in starts]

    def share(self, prompt: str, after: bool = True) -> float:
        return measure.subject_share(self.render(after), prompt, self.num_images, SEED)

    def render(self, after: bool) -> measure.Render:
        samples = self.options.samples
        guidance = samples.sample_guidance_scale if isinstance(samples, FluxSampleOptions) else 3.5

        def render(prompts: list[str], seeds: list[int], width: int, height: int) -> list[Image.Image]:
            made = [
                Preview(prompt, "", width, height, seed, samples.sample_steps, samples.sample_cfg_scale, "auto", guidance)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            return self.family.preview(self._model(after), made)

        return render

    def edits_obeyed(self, kinds: Sequence[EditKind], after: bool = True) -> float:
        """Fraction of num_images edits of each of these kinds that are done as asked, with all else as it was."""
        tasks = [task for kind in kinds for task in self._edits(kind)]
        return measure.edit_obedience(self.render_edits(after), tasks)

    def _edits(self, kind: EditKind) -> list[measure.EditTask]:
        return measure.edit_tasks(kind, self.num_images, SEED, sizes=worlds.sizes_of(self.options.family))

    def distance_to_targets(self, kind: EditKind, after: bool = True) -> float:
        """Mean difference, in [0, 1], of num_images edits from what perfect ones look like: it falls long before edits are right."""
        tasks = self._edits(kind)
        results = measure.render_edits(self.render_edits(after), tasks)
        pairs = [(np.asarray(image, np.float64), np.asarray(task.target, np.float64)) for image, task in zip(results, tasks, strict=True)]
        return float(np.mean([np.abs(image - target).mean() / 255 for image, target in pairs]))

    def render_edits(self, after: bool) -> measure.EditRender:
        samples = self.options.samples

        def render(instructions: list[str], images: list[Image.Image], seeds: list[int]) -> list[Image.Image]:
            made = [
                Preview(text, "", *image.size, seed, samples.sample_steps, samples.sample_cfg_scale, controls=(image,))
                for text, image, seed in zip(instructions, images, seeds, strict=True)
            ]
            return self.family.preview(self._model(after), made)

        return render


def learn(preset: str, folder: Path, num_images: int = 45, **changes: object) -> Learned:
    """Trains a preset in a process of its own, and loads the file that it saved."""
    values = toml_files.read_toml(PRESETS / f"{preset}.toml")
    run_type = flat.run_of(values)
    options = flat.build(run_type, values | {"output_dir": str(folder), "sample_prompts": "", **changes})
    process = forked(main, options.family, options.method, command_line.to_argv(options))
    process.join(1500)
    assert process.exitcode == 0
    (log,) = folder.glob("*/events.jsonl")
    run, family = RunDirectory(log.parent), families.family(options.family)
    file = run.path / f"{options.output.output_name}{options.output.ending}"
    if options.method == "scratch":
        saved = type(options.model).model_validate({"pretrained_model_name_or_path": str(file)})
        return Learned(options, run, family, None, family.load(saved, CPU, torch.float32), num_images)
    before, after = family.load(options.model, CPU, torch.float32), family.load(options.model, CPU, torch.float32)
    if options.method == "network":
        merge_into(after, file)
    else:
        beside = folder / "base"
        family.save(before, beside, "diffusers", None, {})
        (beside / file.name).write_bytes(file.read_bytes())
        own = {"ae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"} if options.family == "flux" else {}
        model = {"pretrained_model_name_or_path": str(beside / file.name), **{name: str(beside / part) for name, part in own.items()}}
        after = family.load(options.model.model_copy(update=model), CPU, torch.float32)
    return Learned(options, run, family, before, after, num_images)


def losses_fall(learned: Learned) -> bool:
    losses = [event["loss"] for event in learned.run.events()[0] if event["kind"] == "step"]
    quarter = len(losses) // 4
    return sum(losses[-quarter:]) < 0.9 * sum(losses[:quarter])
