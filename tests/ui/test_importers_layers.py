"""Which layers get an adapter by other trainers' files: told here by their own rules on names, and planned on small models."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from torch import nn

from kohya_like import importers
from kohya_like.importers import Imported
from sd_scripts.library.adapters.layer_names import layers_of
from sd_scripts.library.adapters.layers import plan_layers
from sd_scripts.schema import flat


@functools.cache
def _model(family: str) -> tuple[Any, Any]:
    made = importlib.import_module(f"sd_scripts.families.{family}.model").FAMILY
    return made, made.tiny()


def planned(found: Imported) -> tuple[set[str], set[str]]:
    """The layers of the backbone that get an adapter, and all its linear layers."""
    family, parts = _model(found.run.family)
    named = {sentence.partition(":")[0] for sentence in found.missing}
    network: Any = flat.build(found.run, {**dict.fromkeys(named, "given"), **found.values})
    bases = layers_of(parts)
    architecture = importlib.import_module(f"sd_scripts.families.{found.run.family}.names").ARCHITECTURES[0]
    names = architecture.layer_names(architecture, parts.backbone.config, bases)
    plans = plan_layers(parts, network.network, family.adapter_targets(parts, False), names)
    linear = {name for name, layer in parts.backbone.named_modules() if isinstance(layer, nn.Linear)}
    return {plan.layer for plan in plans if plan.module == "backbone"}, linear


def toolkit(arch: str, **network: Any) -> Imported:
    process = {
        "type": "diffusion_trainer",
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4, **network},
        "datasets": [{"folder_path": "a"}],
        "train": {"noise_scheduler": "flowmatch", "steps": 9},
        "model": {"name_or_path": "a/b", "arch": arch},
    }
    return importers.read("job.yaml", yaml.safe_dump({"job": "extension", "config": {"name": "x", "process": [process]}}).encode())


def pipe(kind: str) -> Imported:
    text = f'output_dir = "o"\ndataset = "d"\nepochs = 1\n[model]\ntype = "{kind}"\ndiffusion_model = "m"\n'
    return importers.read("main.toml", (text + '[adapter]\ntype = "lora"\nrank = 4\n[optimizer]\ntype = "adamw"\n').encode())


def tuner(family: str, **changes: Any) -> Imported:
    given = {"model_family": family, "model_type": "lora", "pretrained_model_name_or_path": "a/b", "lora_rank": 4, **changes}
    return importers.read("config.json", json.dumps(given).encode())


def one(model: str, **changes: Any) -> Imported:
    given = {"training_method": "LORA", "model_type": model, "base_model_name": "x/y", "lora_rank": 4, **changes}
    return importers.read("OneTrainer.json", json.dumps(given).encode())


def example(script: str, *options: str) -> Imported:
    words = ["accelerate launch", f"train_dreambooth_lora{script}.py", "--instance_data_dir=a", *options]
    return importers.read("line", " ".join(words).encode())


def synth(model: str, targets: str) -> Imported:
    script = f"examples/{model}/model_training/train.py"
    return importers.read(
        "line", f"accelerate launch {script} --dataset_base_path a --lora_base_model dit --lora_target_modules {targets}".encode()
    )


def in_blocks(name: str) -> bool:
    return "transformer_blocks" in name


CASES: dict[str, tuple[Callable[[], Imported], Callable[[str], bool]]] = {
    "ai-toolkit: all of the blocks of FLUX.1": (lambda: toolkit("flux"), in_blocks),
    "ai-toolkit: all of Z-Image's layers, not its refiners": (lambda: toolkit("zimage"), lambda name: name.startswith("layers.")),
    "ai-toolkit: pieces of names win": (
        lambda: toolkit("zimage", network_kwargs={"only_if_contains": ["feed_forward"], "ignore_if_contains": ["refiner"]}),
        lambda name: name.startswith("layers.") and "feed_forward" in name,
    ),
    "diffusion-pipe: Z-Image's refiners too": (lambda: pipe("z_image"), lambda name: bool(re.search(r"(layers|_refiner)\.\d", name))),
    "SimpleTuner: attention of both streams of FLUX.1": (
        lambda: tuner("flux"),
        lambda name: bool(re.search(r"\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)$", name)),
    ),
    "SimpleTuner: all+ffs": (
        lambda: tuner("flux", flux_lora_target="all+ffs"),
        lambda name: in_blocks(name) and "norm" not in name,
    ),
    "SimpleTuner: attention of Z-Image, refiners too": (
        lambda: tuner("z_image"),
        lambda name: bool(re.search(r"\.(to_[qkv]|to_out\.0)$", name)),
    ),
    "SimpleTuner: attention of SDXL": (lambda: tuner("sdxl"), lambda name: bool(re.search(r"\.(to_[qkv]|to_out\.0)$", name))),
    "diffusers: attention and MLPs of both streams of FLUX.1, attention alone in blocks of one": (
        lambda: example("_flux"),
        lambda name: bool(re.search(r"attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)$|ff(_context)?\.net\.(0\.proj|2)$", name)),
    ),
    "diffusers: FLUX.2, and what blocks of one stream make of both": (
        lambda: example("_flux2_klein"),
        lambda name: bool(re.search(r"\.(to_[qkv]|to_out\.0|to_qkv_mlp_proj)$|single_transformer_blocks\.\d+\.attn\.to_out$", name)),
    ),
    "diffusers: attention of Z-Image, refiners too": (
        lambda: example("_z_image"),
        lambda name: bool(re.search(r"\.(to_[qkv]|to_out\.0)$", name)),
    ),
    "diffusers: the layers that are named, by the ends of their names": (
        lambda: example("_qwen_image", "--lora_layers=to_q,img_mlp.net.2"),
        lambda name: name.endswith((".to_q", ".img_mlp.net.2")),
    ),
    "DiffSynth: FLUX.1 by its own names": (
        lambda: synth("flux", "a_to_qkv,b_to_out,ff_a.0,ff_b.2,to_qkv_mlp,norm1_b.linear"),
        lambda name: bool(
            re.search(r"attn\.(to_[qkv]|to_add_out)$|\.ff\.net\.0\.proj$|ff_context\.net\.2$|proj_mlp$|norm1_context\.linear$", name)
        ),
    ),
    "DiffSynth: FLUX.1's blocks of two streams alone": (
        lambda: synth("flux", "a_to_qkv"),
        lambda name: bool(re.search(r"^transformer_blocks\.\d+\.attn\.to_[qkv]$", name)),
    ),
    "DiffSynth: Krea 2 by its own names": (
        lambda: synth("krea2", "wq,wk,wv,wo,gate,up,down,first,tproj.1"),
        lambda name: in_blocks(name) and bool(re.search(r"\.(to_[qkv]|to_out\.0|to_gate|ff\.(gate|up|down))$", name)),
    ),
    "DiffSynth: Qwen-Image with modulation": (
        lambda: synth("qwen_image", "to_q,img_mod.1,img_mlp.net.2"),
        lambda name: name.endswith((".to_q", ".img_mod.1", ".img_mlp.net.2")),
    ),
    "DiffSynth: Z-Image": (
        lambda: synth("z_image", "to_q,to_k,to_v,to_out.0,w1,w2,w3"),
        lambda name: bool(re.search(r"\.(to_[qkv]|to_out\.0|w[123])$", name)),
    ),
    "OneTrainer: attention and MLPs of FLUX.1 by pieces of names": (
        lambda: one("FLUX_DEV_1", layer_filter="attn,ff.net,proj_mlp", layer_filter_preset="attn-mlp"),
        lambda name: any(piece in name for piece in ("attn", "ff.net", "proj_mlp")),
    ),
    "OneTrainer: blocks of Z-Image": (lambda: one("Z_IMAGE", layer_filter_preset="blocks"), lambda name: name.startswith("layers.")),
    "OneTrainer: attention of SDXL alone": (
        lambda: one("STABLE_DIFFUSION_XL_10_BASE", layer_filter_preset="attn-only"),
        lambda name: "attn" in name,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_has_the_layers_that_it_has_there(case: str) -> None:
    read, there = CASES[case]
    chosen, linear = planned(read())
    assert chosen == {name for name in linear if there(name)}


def test_what_has_an_adapter_there_alone_is_said() -> None:
    full = one("STABLE_DIFFUSION_XL_10_BASE", lora_alpha=2.0)
    assert (full.values["conv_dim"], full.values["conv_alpha"]) == (4, 2.0)
    assert any("before and after the blocks" in text for text in full.conflicts)
    assert any("join the texts" in text for text in pipe("krea2").conflicts)
    assert pipe("qwen_image").values["lora_targets"] == "all_with_modulation"
    classes = tuner(
        "flux", lora_type="lycoris", lycoris_config={"algo": "lokr", "linear_dim": 8, "apply_preset": {"target_module": ["Attention"]}}
    )
    assert all(".attn." in name for name in planned(classes)[0])
    assert any("x_embedder" not in text and "all+ffs" in text for text in tuner("flux", flux_lora_target="all+ffs+embedder").conflicts)
