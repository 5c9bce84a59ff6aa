"""Runs of musubi-tuner as our options."""

from __future__ import annotations

import math

import pytest

from kohya_like import importers
from sd_scripts.families import RUNS
from sd_scripts.schema.errors import OptionError
from tests.ui.foreign_files import builds, musubi, said


def test_a_run_of_musubi_tuner_becomes_the_same_run() -> None:
    found = musubi()
    options = builds(found)
    assert found.run is RUNS["qwen_edit", "network"] and not found.missing
    wanted = {
        "pretrained_model_name_or_path": "models/qwen_image_edit_2509.safetensors",
        "vae": "vae.safetensors",
        "text_encoder": "te.safetensors",
        "model_version": "edit-2509",
        "dataset_config": "set.toml",
        "network_dim": 16,
        "network_alpha": 1.0,
        "loraplus_lr_ratio": 4.0,
        "exclude_modules": (".*img_mlp.*",),
        "optimizer_type": "AdamW8bit",
        "timestep_sampling": "qwen_shift",
        "transformer_quantization": "qfloat8",
        "text_encoder_quantization": "qfloat8",
        "blocks_to_swap": 16,
        "lr_scheduler": "constant",
        "enable_bucket": False,
        "resolution": (960, 544),
        "save_precision": "float",
    }
    assert {name: options[name] for name in wanted} == wanted
    assert not [row for row in found.rows if row.verdict in ("not supported", "unknown")]
    line = "accelerate launch --mixed_precision bf16 src/musubi_tuner/qwen_image_train_network.py "
    line += " ".join(f"--{key} {value}" for key, value in options.items() if key in ("vae", "text_encoder", "learning_rate", "network_dim"))
    line += " --dit m --edit_plus --network_module networks.lora_qwen_image --dataset_config=set.toml"
    assert builds(importers.read("train.bat", line.encode()))["model_version"] == "edit-2509"


def test_an_alpha_that_equals_the_rank_stays_that_alpha() -> None:
    options = builds(musubi(network_alpha="16"))
    assert options["network_dim"] == 16 and options["network_alpha"] in (None, 16.0)


def test_times_of_musubi_tuner_are_the_same_density_here() -> None:
    """logSNR = 2 ln((1 - t) / t) is normal there: 40,000 draws of each, by quantiles."""
    import torch

    from sd_scripts.library.objectives import times as densities

    found = musubi(timestep_sampling='"logsnr"', logit_mean="-6.0", logit_std="2.0")
    options = builds(found)
    assert options["timestep_sampling"] == "logit_normal"
    u = (torch.arange(40_000, dtype=torch.float64) + 0.5) / 40_000
    theirs = torch.sigmoid(-(-6.0 + 2.0 * 2**0.5 * torch.erfinv(2 * u - 1)) / 2).sort().values
    ours = densities.logit_normal(options["logit_mean"], options["logit_std"]).quantile(u).sort().values
    assert torch.allclose(theirs, ours, atol=1e-6)
    assert builds(musubi(timestep_sampling='"sigma"'))["discrete_flow_shift"] == 1.0
    assert builds(musubi(weighting_scheme='"cosmap"'))["weighting_scheme"] == "cosmap"
    lines = {"dit": '"klein.safetensors"', "network_module": '"networks.lora_flux_2"', "model_version": '"klein-base-4b"'}
    other = musubi(timestep_sampling='"flux2_shift"', **lines)
    assert other.run is RUNS["flux2", "network"] and builds(other)["timestep_sampling"] == "shift"
    assert any(text.startswith("timestep_sampling") for text in other.conflicts)
    lost = musubi(timestep_sampling='"qinglong_qwen"')
    assert said(lost, "timestep_sampling")[0] == "not supported" and any("qinglong_qwen" in text for text in lost.conflicts)


def test_models_of_musubi_tuner_that_are_not_trained_are_refused_by_their_names() -> None:
    for module, named in {"networks.lora_wan": "Wan", "networks.lora_ideogram4": "Ideogram 4", "networks.lora": "HunyuanVideo"}.items():
        with pytest.raises(OptionError, match=f"for {named}.*does not train"):
            musubi(network_module=f'"{module}"')
    with pytest.raises(OptionError, match="Layered"):
        musubi(model_version='"layered"')
    with pytest.raises(OptionError, match="does not say which model"):
        importers.read("x.toml", b'dit = "m"\nvae = "v"\nnetwork_module = "networks.loha"\n')


def test_the_model_of_krea_2s_previews_is_told() -> None:
    line = "accelerate launch krea2_train_network.py --dit raw --network_module networks.lora_krea2 --turbo_dit turbo --turbo_dit_cache"
    rows = {row.key: row for row in importers.read("x.sh", f"{line} --sample_prompts p.txt --seed 1".encode()).rows}
    assert rows["turbo_dit"].verdict == "not supported" and "the model that is trained" in rows["turbo_dit"].text
    assert rows["turbo_dit_cache"].verdict == "not needed"
    rows = {row.key: row for row in importers.read("x.sh", line.encode()).rows}
    assert rows["turbo_dit"].verdict == "not needed", "there are no previews"


def test_mixed_times_of_musubi_tuner_are_those_of_most_draws() -> None:
    own = musubi(timestep_sampling='"qinglong_qwen"')
    assert builds(own)["timestep_sampling"] == "qwen_shift" and any("95 of 100 draws" in text for text in own.conflicts)
    other = musubi(timestep_sampling='"qinglong_flux"')
    options = builds(other)
    shift = math.exp(0.5 + (1.15 - 0.5) * (4096 - 256) / (4096 - 256))
    assert options["timestep_sampling"] == "shift" and options["discrete_flow_shift"] == pytest.approx(shift, abs=1e-3)
    assert any("79 of 100 draws" in text for text in other.conflicts)
