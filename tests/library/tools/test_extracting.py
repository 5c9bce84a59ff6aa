"""LoRA files extracted from two models, against float64 decompositions of what changed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.tools.extracting import extract
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.tools import ExtractSection
from tests.library.tools.tools_in_small import adapter, largest_difference, on_disk, tiny, weights


def section(**values: object) -> ExtractSection:
    return ExtractSection(save_precision="float", **values)


@torch.no_grad()
def shaken(parts: Parts, seed: int) -> None:
    """Changes every layer of the model, by about a tenth."""
    rng = torch.Generator().manual_seed(seed)
    for weight in weights(parts).values():
        weight += 0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=rng)


@pytest.mark.parametrize(("name", "layout"), [("sd2", "diffusers"), ("flux", "comfyui"), ("qwen_edit", "kohya"), ("zimage", "comfyui")])
def test_a_merged_lora_is_found_again(name: str, layout: str, tmp_path: Path) -> None:
    parts = tiny(name)
    base = on_disk(name, parts, tmp_path)
    merge_into(parts, adapter(parts, tmp_path / "a.safetensors", text=True))
    tuned = on_disk(name, parts, tmp_path, stem="tuned")
    target = tmp_path / "x.safetensors"
    report = extract(
        section(model_org=str(base.folder), model_tuned=str(tuned.folder), save_to=str(target), dim=4, save_model_as=layout, min_diff=0)
    )
    assert report.values["relative_error"] < 1e-5 and not report.values["left_out"]
    fresh = base.load(base.folder)
    merge_into(fresh, target)
    assert largest_difference(fresh, parts) < 1e-5


def test_each_layer_gets_the_best_matrix_of_its_rank_and_the_errors_are_told(tmp_path: Path) -> None:
    parts = tiny("flux")
    base = on_disk("flux", parts, tmp_path)
    before = {name: weight.double() for name, weight in weights(tiny("flux")).items()}
    seed = random.getrandbits(31)
    shaken(parts, seed)
    tuned = on_disk("flux", parts, tmp_path, stem="tuned")
    target = tmp_path / "x.safetensors"
    report = extract(section(model_org=str(base.file), model_tuned=str(tuned.file), save_to=str(target), dim=3))
    q, k, v = (f"backbone.transformer_blocks.0.attn.to_{side}" for side in "qkv")
    change = torch.cat([weights(parts)[name].double() - before[name] for name in (q, k, v)])
    values = torch.linalg.svdvals(change)
    best = float(values[3:].norm() / values.norm())
    tensors = load_file(target)
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    up, down = tensors[f"{stem}.lora_up.weight"], tensors[f"{stem}.lora_down.weight"]
    assert down.shape == (3, change.shape[1]) and up.shape == (change.shape[0], 3) and tensors[f"{stem}.alpha"] == 3
    error = float((up.double() @ down.double() - change).norm() / change.norm())
    told = report.values["layers"]["diffusion_model.double_blocks.0.img_attn.qkv"]
    assert error == pytest.approx(best, rel=1e-4), seed
    assert told["relative_error"] == pytest.approx(error, rel=1e-4) and told["norm"] == pytest.approx(float(change.norm()), rel=1e-5)
    with safe_open(target, framework="pt") as file:
        assert file.metadata()["ss_network_dim"] == "3" and file.metadata()["modelspec.architecture"] == "flux-1-dev/lora"


def test_dynamic_ranks_follow_the_values_of_each_layer(tmp_path: Path) -> None:
    parts = tiny("sd1")
    base = on_disk("sd1", parts, tmp_path)
    before = {name: weight.double().clone() for name, weight in weights(parts).items()}
    shaken(parts, 3)
    tuned = on_disk("sd1", parts, tmp_path, stem="tuned")
    target = tmp_path / "x.safetensors"
    report = extract(
        section(
            model_org=str(base.folder), model_tuned=str(tuned.file), save_to=str(target), dim=20, dynamic_method="sv_fro", dynamic_param=0.8
        )
    )
    for name, weight in weights(parts).items():
        if not name.startswith("backbone.") or (weight.dim() == 4 and weight.shape[2] > 1):
            continue
        values = torch.linalg.svdvals((weight.double() - before[name]).flatten(1)).square()
        wanted = min(20, int((values.cumsum(0) < 0.64 * values.sum()).sum()) + 1)
        assert report.values["layers"]["unet." + name.removeprefix("backbone.")]["rank"] == wanted, name


def test_what_a_lora_cannot_say_is_reported(tmp_path: Path) -> None:
    parts = tiny("sd1")
    base = on_disk("sd1", parts, tmp_path)
    with torch.no_grad():
        parts.backbone.conv_out.bias += 1
        parts.backbone.conv_in.weight += 0.1
        parts.backbone.mid_block.attentions[0].proj_in.weight += 0.1
        next(parts.text_encoders["te1"].parameters()).add_(0.001)
    tuned = on_disk("sd1", parts, tmp_path, stem="tuned")
    options = {"model_org": str(base.folder), "model_tuned": str(tuned.folder), "dim": 2}
    report = extract(section(**options, save_to=str(tmp_path / "x.safetensors")))
    assert set(report.values["left_out"]) == {"unet.conv_in", "backbone.conv_out.bias"}
    assert list(report.values["layers"]) == ["unet.mid_block.attentions.0.proj_in"]
    assert report.values["text_encoders_left_out"].keys() == {"te1"}
    assert 0 < report.values["share_left_out"] < 1
    assert report.values["text_encoders_left_out"]["te1"] == 0, "its embedding is no layer"
    same = extract(section(**options, min_diff=0, save_to=str(tmp_path / "z.safetensors")))
    assert same.values["text_encoders_left_out"] == {"te1": 0} and same.values["layers"].keys() == report.values["layers"].keys()
    whole = extract(section(**options, conv_dim=2, save_to=str(tmp_path / "y.safetensors")))
    assert set(whole.values["layers"]) == {"unet.mid_block.attentions.0.proj_in", "unet.conv_in"}
    assert load_file(tmp_path / "y.safetensors")["lora_unet_conv_in.lora_down.weight"].shape == (2, 4, 3, 3)


def test_models_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    sd, flux = on_disk("sd1", tiny("sd1"), tmp_path, stem="sd"), on_disk("flux", tiny("flux"), tmp_path, stem="flux")
    target = tmp_path / "x.safetensors"
    with pytest.raises(OptionError, match="must be of one family"):
        extract(section(model_org=str(sd.folder), model_tuned=str(flux.folder), save_to=str(target)))
    with pytest.raises(OptionError, match="nothing to extract"):
        extract(section(model_org=str(sd.folder), model_tuned=str(sd.file), save_to=str(target)))
    with pytest.raises(OptionError) as raised:
        extract(section(model_org="nowhere", model_tuned=str(tmp_path / "no.safetensors"), save_to=str(tmp_path / "x.ckpt")))
    assert all(option in str(raised.value) for option in ("model_org", "model_tuned", "save_to"))
    assert not list(tmp_path.glob("x.*")) and not list(tmp_path.glob(".*"))
