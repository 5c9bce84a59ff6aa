"""The toy FLUX.1 Kontext base: FLUX's network continued on edits, and what it left as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sd_scripts.families import family
from sd_scripts.library.core.protocols import Parts
from sd_scripts.toy import autoencoder, build, editing, edits, flux, kontext, measure, pretraining, sharing
from sd_scripts.toy.build import BuildPlan
from sd_scripts.toy.kontext import KontextSettings


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


def test_a_short_build_edits_and_shares_with_flux_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KontextSettings(
        num_steps=3, num_late_steps=1, num_warmup_steps=1, batch_size=2, num_images=6, num_drawings=8, drawing_fraction=0.5
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
