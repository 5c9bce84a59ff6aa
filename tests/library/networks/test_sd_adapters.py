"""Adapters on Stable Diffusion 1.x and 2.x."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sd_scripts.families.sd.model import Sd
from sd_scripts.library.adapters.files import export
from sd_scripts.library.adapters.maths import KINDS
from sd_scripts.library.adapters.merge import apply, merge_into
from sd_scripts.library.adapters.names import names_of
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.network import UNetNetworkOptions
from tests.library.networks.adapters_in_small import attached, diffusers_pipeline, image, outputs, render, shaken

Pair = tuple[Parts, Parts]


def options_for(kind: str = "lora", **changes: object) -> UNetNetworkOptions:
    conv = {} if kind == "oft" else {"conv_dim": 2, "conv_alpha": 3.0}
    usual = {"network_type": kind, "network_dim": 4, "network_alpha": 2.0, "train_text_encoder": True}
    return UNetNetworkOptions(**{**usual, **conv, **changes})


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"rank_stabilized": True, "conv_dim": None, "conv_alpha": None}, marks=pytest.mark.long)]
)
def test_diffusers_paints_the_same_image_from_the_file_as_the_trained_model(
    changes: dict, sd_pair: Pair, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    parts, twin = sd_pair
    before, network = render(parts), shaken(attached(parts, options_for(**changes)))
    live = render(parts)
    assert (before - live).abs().max() > 1e-2
    for layout in ("kohya", "diffusers"):
        with subtests.test(msg=layout):
            file, fresh = tmp_path / f"{layout}.safetensors", diffusers_pipeline(copy.deepcopy(twin))
            export(network, parts, file, save_model_as=layout, precision="float")
            fresh.load_lora_weights(file)
            assert (live - image(fresh)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        # Every kind and every layout; the others with --all.
        *(pytest.param(kind, "kohya", marks=pytest.mark.long if kind in ("lora", "dora") else ()) for kind in KINDS),
        ("lora", "comfyui"),
        pytest.param("lokr", "comfyui", marks=pytest.mark.long),
        ("dora", "diffusers"),
    ],
)
def test_merging_and_applying_a_file_do_what_the_live_adapter_does(kind: str, layout: str, tmp_path: Path) -> None:
    second = layout == "kohya"
    parts, twin = Sd().tiny(second), Sd().tiny(second)
    network = shaken(attached(parts, options_for(kind)))
    file = tmp_path / "a.safetensors"
    export(network, parts, file, save_model_as=layout, precision="float")
    live = outputs(parts)
    put_on = apply(twin, file)
    assert (live - outputs(twin)).abs().max() <= 2e-6 * max(1.0, float(live.abs().max()))
    put_on.detach()
    assert merge_into(twin, file) == len(network.adapters())
    assert (live - outputs(twin)).abs().max() <= 2e-6 * max(1.0, float(live.abs().max()))


def test_files_have_kohyas_and_comfyuis_names(sd_pair: Pair, tmp_path: Path) -> None:
    parts, _ = sd_pair
    network = attached(parts, options_for())
    stems = {}
    for layout in ("kohya", "comfyui"):
        file = tmp_path / f"{layout}.safetensors"
        export(network, parts, file, save_model_as=layout)
        stems[layout] = {key.rpartition(".lora_down")[0] for key in load_file(file) if ".lora_down" in key}
    assert "lora_unet_mid_block_attentions_0_proj_in" in stems["kohya"]
    assert "lora_te_text_model_encoder_layers_0_mlp_fc1" in stems["kohya"]
    clip = {"sd1": "clip_l", "sd2": "clip_h"}[names_of(parts).architecture.name]
    assert "diffusion_model.middle_block.1.proj_in" in stems["comfyui"]
    assert f"text_encoders.{clip}.transformer.text_model.encoder.layers.0.mlp.fc1" in stems["comfyui"]


def test_rates_and_ranks_by_name_also_hold_for_a_unet(sd_pair: Pair) -> None:
    parts, _ = sd_pair
    options = options_for(network_reg_dims=("attn1=8", "mid_block_resnets=1"), network_reg_lrs=("attn2=0.5",), text_encoder_lr=(0.25,))
    network = attached(parts, options)
    ranks = {plan.layer: plan.rank for plan in network.plans if plan.module == "backbone"}
    assert {rank for layer, rank in ranks.items() if "attn1" in layer} == {8}
    assert {rank for layer, rank in ranks.items() if "attn2" in layer} == {4}
    assert {rank for layer, rank in ranks.items() if "mid_block.resnets" in layer} == {1}
    assert {rank for layer, rank in ranks.items() if "down_blocks.0.resnets.0.conv" in layer} == {2}
    assert {group["name"]: group["lr"] for group in network.parameter_groups(options, 1.0)} == {"unet": 1.0, "unet_reg0": 0.5, "te1": 0.25}


def test_loraplus_goes_with_rates_by_name(sd_pair: Pair) -> None:
    parts, _ = sd_pair
    options = options_for(network_reg_lrs=("attn2=0.5",), loraplus_lr_ratio=4.0, train_text_encoder=False)
    groups = attached(parts, options).parameter_groups(options, 1.0)
    assert {group["name"]: group["lr"] for group in groups} == {"unet": 1.0, "unet_up": 4.0, "unet_reg0": 0.5, "unet_up_reg0": 2.0}
    assert all(isinstance(tensor, torch.nn.Parameter) for group in groups for tensor in group["params"])
