"""Training of a toy preset as it is, and measuring of what the saved file draws; for the tests that models learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from sd_scripts import families
from sd_scripts.families.flux.options import FluxSampleOptions
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import ModelFamily, Parts, Preview
from sd_scripts.library.train.launch import main
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from sd_scripts.schema.runs import RunOptions
from sd_scripts.toy import measure, worlds
from sd_scripts.toy.edits import EditKind
from tests.forked import forked

PRESETS = Path(__file__).parents[2] / "presets"
CPU = torch.device("cpu")
SEED = 17


OF_BASES: dict[tuple[str, ...], measure.Scores] = {}
"""What bases score before training, by their family, the kind of prompts, and the options of model and previews."""


@dataclass(frozen=True)
class Learned:
    """A finished run and its model, before and after."""

    options: RunOptions
    run: RunDirectory
    family: ModelFamily
    before: Parts | None
    """None for a model that the run has made."""
    after: Parts
    num_pictures: int
    """Drawn for each measurement."""

    def _model(self, after: bool) -> Parts:
        chosen = self.after if after else self.before
        assert chosen is not None
        return chosen

    def obedience(self, kind: measure.Kind, after: bool = True) -> measure.Scores:
        tasks = measure.prompts(kind, self.num_pictures, SEED, worlds.colors_of(self.options.family))
        if after:
            return measure.obedience(self.render(after), tasks)
        # All presets of a family begin with one base, so what it draws is measured once.
        drawn = (
            self.options.family,
            kind,
            str(self.num_pictures),
            self.options.model.model_dump_json(),
            self.options.samples.model_dump_json(),
        )
        if drawn not in OF_BASES:
            OF_BASES[drawn] = measure.obedience(self.render(after), tasks)
        return OF_BASES[drawn]

    def share(self, prompt: str, after: bool = True) -> float:
        return measure.subject_share(self.render(after), prompt, self.num_pictures, SEED)

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
        """Fraction of num_pictures edits of each of these kinds that are done as asked, with all else as it was."""
        tasks = [task for kind in kinds for task in measure.edit_tasks(kind, self.num_pictures, SEED)]
        return measure.edit_obedience(self.render_edits(after), tasks)

    def render_edits(self, after: bool) -> measure.EditRender:
        samples = self.options.samples

        def render(instructions: list[str], pictures: list[Image.Image], seeds: list[int]) -> list[Image.Image]:
            made = [
                Preview(text, "", *picture.size, seed, samples.sample_steps, samples.sample_cfg_scale, controls=(picture,))
                for text, picture, seed in zip(instructions, pictures, seeds, strict=True)
            ]
            return self.family.preview(self._model(after), made)

        return render


def learn(preset: str, folder: Path, num_pictures: int = 45, **changes: object) -> Learned:
    """Trains a preset in a process of its own, and loads the file that it saved."""
    values = flat.read_toml(PRESETS / f"{preset}.toml")
    run_type = flat.run_of(values)
    options = flat.build(run_type, values | {"output_dir": str(folder), "sample_prompts": "", **changes})
    process = forked(main, options.family, options.method, flat.to_argv(options))
    process.join(1500)
    assert process.exitcode == 0
    (log,) = folder.glob("*/events.jsonl")
    run, family = RunDirectory(log.parent), families.family(options.family)
    file = run.path / f"{options.output.output_name}{options.output.ending}"
    if options.method == "scratch":
        saved = type(options.model).model_validate({"pretrained_model_name_or_path": str(file)})
        return Learned(options, run, family, None, family.load(saved, CPU, torch.float32), num_pictures)
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
    return Learned(options, run, family, before, after, num_pictures)


def losses_fall(learned: Learned) -> bool:
    losses = [event["loss"] for event in learned.run.events()[0] if event["kind"] == "step"]
    quarter = len(losses) // 4
    return sum(losses[-quarter:]) < 0.9 * sum(losses[:quarter])
