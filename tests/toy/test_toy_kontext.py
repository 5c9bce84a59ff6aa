"""The toy FLUX.1 Kontext base: FLUX's network continued on edits, and what it left as it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from diffusers import FluxKontextPipeline
from safetensors.torch import load_file
from torch import nn

from sd_scripts.families import RUNS, family
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.schema import flat, toml_files
from sd_scripts.toy import autoencoder, build, demo, editing, edits, flux, kontext, measure, pretraining, reading, sharing, worlds
from sd_scripts.toy.build import BuildPlan
from sd_scripts.toy.kontext import KontextSettings

FOLDER = build.BASES / "kontext"
SIZES = worlds.sizes_of("kontext")


@pytest.fixture(scope="module")
def pipeline() -> FluxKontextPipeline:
    loaded = sharing.load_pipeline(FOLDER)
    assert isinstance(loaded, FluxKontextPipeline)
    return loaded


def _model() -> Parts:
    values = toml_files.read_toml(build.BASES.parents[2] / "presets" / "kontext_train_network" / "toy-edit-border-kontext.toml")
    options = flat.build(RUNS["kontext", "network"], {**values, "output_dir": "."})
    return family("kontext").load(options.model, torch.device("cpu"), torch.float32)


def test_the_stored_base_is_what_the_recipe_makes_and_shares_with_flux_what_it_left_as_it_was() -> None:
    record = json.loads((FOLDER / "BUILD.json").read_text(encoding="utf-8"))
    assert record["settings"] == asdict(KontextSettings())
    scores = {kind: min(record["scores"][kind]["trained"], record["scores"][kind]["held_out"]) for kind in (*edits.OLD_KINDS, "keep")}
    assert min(scores.values()) >= 0.78, scores
    assert record["scores"]["border"]["obeyed"] < 0.05
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_600_000
    (own,) = (path for path in files if path.suffix == ".safetensors")
    assert not [name for name in load_file(own) if any(f".{kept}." in f".{name}" for kept in kontext.KEPT)]


def test_the_base_obeys_instructions_knows_no_border_and_draws_from_captions(pipeline: FluxKontextPipeline) -> None:
    render = kontext.render_with(pipeline)
    tasks = [task for kind in edits.OLD_KINDS for held in (False, True) for task in measure.edit_tasks(kind, 3, 2, held, SIZES)]
    assert measure.edit_obedience(render, tasks) >= 0.75
    assert measure.edit_obedience(render, measure.edit_tasks("border", 3, 2, sizes=SIZES)) == 0
    assert (
        measure.obedience(demo.renderer(family("kontext"), _model(), 12, 1.0), measure.prompts("old", 6, 6, worlds.KNOWN_COLORS), SIZES).all
        >= 0.6
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", [*edits.OLD_KINDS, "keep"])
def test_the_base_obeys_most_instructions_seen_and_held_out(kind: edits.EditKind, pipeline: FluxKontextPipeline) -> None:
    render = kontext.render_with(pipeline)
    for held_out in (False, True):
        assert measure.edit_obedience(render, measure.edit_tasks(kind, 60, 3, held_out, SIZES)) >= 0.65


def test_the_trainer_renders_what_the_base_is_measured_with(pipeline: FluxKontextPipeline) -> None:
    """At all sizes: the preset's control_resolution leaves each source as it is."""
    parts = _model()
    for task in measure.edit_tasks("recolour", 3, 5, sizes=SIZES):
        preview = Preview(task.edit.instruction, "", *task.source.size, task.seed, 3, 1.0, "auto", 3.5, controls=(task.source,))
        (ours,) = kontext.render_with(pipeline, 3)([task.edit.instruction], [task.source], [task.seed])
        (theirs,) = family("kontext").preview(parts, [preview])
        assert (autoencoder.to_pixels([ours]) - autoencoder.to_pixels([theirs])).abs().max() <= 3 / 127.5


def test_the_loss_is_that_of_the_trainers_velocity() -> None:
    """With a reference image, at an instruction's embedded guidance."""
    chosen, rng, settings = family("kontext"), torch.Generator().manual_seed(0), KontextSettings()
    reader, network = flux.FluxReader(0).eval(), flux.new_transformer(0).eval()
    targets, sources, noise = torch.randn(3, 2, 16, 8, 12, generator=rng)
    texts, u = ["move it to the left", ""], torch.tensor([0.2, 0.7])
    numbers = torch.tensor([[1.0, 24.0]] * 2)
    batch = editing.EditBatch((96, 64), targets, sources, noise, u, texts, torch.empty(2, 0, 0), numbers)
    tiny = chosen.tiny()  # type: ignore[attr-defined]
    own = {
        "backbone": network,
        "text_encoders": {"te1": reader.clip, "te3": reader.t5},
        "tokenizers": {"te1": reader.words, "te3": reader.pieces},
    }
    parts = Parts(**{**vars(tiny), **own, "settings": {**tiny.settings, "t5xxl_max_token_length": 24}})
    t = pretraining.logit_normal(u, settings.time_mean, settings.time_deviation)
    with torch.no_grad():
        conditions = [{**text, "control_0": source} for text, source in zip(chosen.encode_prompts(parts, texts), sources, strict=True)]
        v = chosen.denoise(parts, torch.lerp(targets, noise, t[:, None, None, None]), t, conditions)
        found = kontext.loss_of(network, reader, batch, settings)
    torch.testing.assert_close(found, (v - (noise - targets)).square().mean(), rtol=1e-4, atol=0)
    heads = nn.ModuleList([nn.Linear(network.inner_dim, 1 + len(names)) for names in reading.NAMES])
    batch.meant.extend(["a red circle", "a blue square"])
    seeing = kontext.rounds(settings)[-1]
    loss = kontext.loss_of(network, reader, batch, replace(seeing, time_mean=settings.time_mean), heads)
    assert loss > found
    loss.backward()
    assert all(head.weight.grad.abs().sum() > 0 for head in heads)


def test_a_short_build_edits_and_shares_with_flux_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KontextSettings(
        num_steps=3,
        num_late_steps=1,
        num_move_steps=1,
        move_schedule_steps=3,
        num_seeing_steps=1,
        num_warmup_steps=1,
        batch_size=2,
        num_images=6,
        num_move_images=6,
        num_seeing_images=6,
        num_drawings=8,
        drawing_fraction=0.5,
    )
    monkeypatch.setattr(kontext, "KontextSettings", lambda: settings)
    for name in ("common", "flux"):
        shutil.copytree(build.BASES / name, tmp_path / name)
    record = build.build(BuildPlan("kontext", tmp_path / "kontext", vae=tmp_path / "common" / "vae", num_prompts=2))
    assert record["scores"].keys() == set(edits.KINDS)  # type: ignore[attr-defined]
    pipeline = sharing.load_pipeline(tmp_path / "kontext")
    before, after = (one.transformer.state_dict() for one in (sharing.load_pipeline(tmp_path / "flux"), pipeline))
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    kept = {name for name in after if any(f".{layer}." in f".{name}" for layer in kontext.KEPT)}
    assert kept <= same
    (own,) = (tmp_path / "kontext").rglob("*.safetensors")
    assert set(load_file(own)) == after.keys() - same and len(same) < len(after) / 2
    source = measure.edit_tasks("remove", 1, 0)[0].source
    assert kontext.render_with(pipeline, 1)(["remove it"], [source], [0])[0].size == source.size


def test_some_batches_are_of_drawings_and_every_step_is_the_same_again() -> None:
    settings = KontextSettings(num_steps=30, batch_size=2, num_images=6, num_drawings=8, drawing_fraction=0.3)
    pairs, drawings = kontext.encode_worlds(autoencoder.new_vae(0).eval(), settings, 0)
    one, two = (list(kontext.batches(pairs, drawings, settings, 0)) for _ in range(2))
    kinds = [isinstance(batch, editing.EditBatch) for batch in one]
    assert 0.4 < sum(kinds) / len(kinds) < 0.95
    assert all(torch.equal(a.noise, b.noise) for a, b in zip(one, two, strict=True))


def test_more_instructions_say_it_where_it_is_to_be_seen_and_all_know_what_they_mean() -> None:
    settings = KontextSettings(num_steps=20, batch_size=4, num_images=30, num_drawings=8)
    pairs, _ = kontext.encode_worlds(autoencoder.new_vae(0).eval(), settings, 0)

    def of(unnamed: float) -> tuple[list[str], list[str]]:
        shown = list(editing.batches(pairs, replace(settings, unnamed_fraction=unnamed, dropout_fraction=0.0), 0))
        return [text for batch in shown for text in batch.instructions], [text for batch in shown for text in batch.meant]

    def share(texts: list[str]) -> float:
        return sum(" it" in text for text in texts) / len(texts)

    (some, _), (most, meant) = of(0.0), of(1.0)
    assert share(some) < 0.4 < 0.5 < share(most)
    pairs_of = zip(most, meant, strict=True)
    told = [(text, meaning, shape) for text, meaning in pairs_of for shape in worlds.BASE_SHAPES if f" {shape}" in text]
    assert told and all(meaning.endswith(shape) for _, meaning, shape in told)
