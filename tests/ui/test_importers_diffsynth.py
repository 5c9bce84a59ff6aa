"""Command lines of DiffSynth-Studio's training scripts, and the metadata that its data sets have."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kohya_like import importers
from kohya_like.importers import Imported
from sd_scripts.dataset.metadata import lists_controls, read_metadata
from sd_scripts.families import FACTS, RUNS
from sd_scripts.programs import diffsynth
from sd_scripts.schema.errors import OptionError
from tests.ui.foreign_files import builds, said


def line(model: str, *options: str) -> Imported:
    words = ["accelerate launch --num_processes 2", f"examples/{model}/model_training/train.py --dataset_base_path data/a", *options]
    return importers.read("line", " ".join(words).encode())


def test_a_line_of_diffsynth_becomes_the_same_run() -> None:
    found = line(
        "qwen_image",
        "--dataset_metadata_path data/a/metadata.json --data_file_keys image,edit_image --extra_inputs edit_image --max_pixels 589824",
        "--dataset_repeat 50",
        "--model_id_with_origin_paths Qwen/Qwen-Image:text_encoder/model*.safetensors,Qwen/Qwen-Image-Edit-2509:transformer/d*",
        "--learning_rate 2e-4 --num_epochs 5 --output_path models/x --lora_base_model dit --lora_target_modules to_q,to_k --lora_rank 16",
        "--use_gradient_checkpointing_offload --weight_decay 0.1 --customized_optimizer bitsandbytes.optim.AdamW8bit --save_steps 200",
        "--fp8_models Qwen/Qwen-Image:transformer --enable_wandb_log --wandb_project mine --lora_checkpoint old.safetensors",
    )
    options = builds(found)
    wanted: dict[str, Any] = {
        "pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit-2509",
        "model_version": "edit-2509",
        "train_data_dir": "data/a",
        "in_json": "data/a/metadata.json",
        "resolution": (768, 768),
        "bucket_reso_steps": 16,
        "dataset_repeats": 50,
        "learning_rate": 2e-4,
        "max_train_epochs": 5,
        "output_dir": "models/x",
        "target_modules": (r"(^|\.)to_q$", r"(^|\.)to_k$"),
        "network_dim": 16,
        "network_alpha": None,
        "network_weights": "old.safetensors",
        "gradient_checkpointing": True,
        "gradient_checkpointing_cpu_offload": True,
        "optimizer_type": "AdamW8bit",
        "optimizer_args": ("weight_decay=0.1",),
        "lr_scheduler": "constant",
        "max_grad_norm": 0.0,
        "save_every_n_steps": 200,
        "transformer_quantization": "fp8",
        "mixed_precision": "bf16",
        "log_with": "wandb",
        "log_tracker_name": "mine",
        "multi_gpu": True,
        "timestep_sampling": "sigma",
        "discrete_flow_shift": round(math.exp(0.8), 4),
    }
    assert {name: options[name] for name in wanted} == wanted
    assert any("a bell around 0.5" in text for text in found.conflicts)


def test_each_folder_of_a_model_is_a_family_and_every_option_has_a_rule() -> None:
    every = [f"--{name}" for name in diffsynth.TABLE if not name.endswith("*")]
    for name, model in diffsynth.MODELS.items():
        folder, _, word = name.partition(" ")
        values = ["--task sft --lora_base_model dit --trainable_models dit", f"--model_id_with_origin_paths a/{word}-b:transformer/x"]
        if model.family:
            found = line(folder, *every, *values)
            assert (found.run.family, found.count("unknown")) == (model.family, 0) and model.family in FACTS
        else:
            with pytest.raises(OptionError, match=f"for {model.label}, which this version does not train"):
                line(folder, *values)
    assert line("flux2", "--trainable_models dit").run is RUNS["flux2_dev", "full"]


def test_what_is_not_trained_here_is_said() -> None:
    with pytest.raises(OptionError, match="that trains controlnet, which is not trained here"):
        line("flux", "--trainable_models controlnet")
    with pytest.raises(OptionError, match="for a model that it does not name"):
        importers.read("line", b"accelerate launch train.py --dataset_base_path a")
    assert "distill is no training on images alone" in said(line("z_image", "--task direct_distill"), "task")[1]
    assert (
        "ipadapter_images goes into a model that is made otherwise"
        in said(line("flux", "--extra_inputs ipadapter_images"), "extra_inputs")[1]
    )
    two = (
        "accelerate launch examples/flux/model_training/train.py --dataset_base_path a --lora_base_model dit --task sft:{} --lora_rank {}\n"
    )
    found = importers.read("two.sh", (two.format("data_process", 3) + two.format("train", 5)).encode())
    assert found.values["network_dim"] == 5


def test_sizes_and_files_of_models_are_read() -> None:
    fixed = builds(line("z_image", "--width 768 --height 1024 --max_pixels 9 --lora_base_model dit"))
    assert (fixed["resolution"], fixed["enable_bucket"]) == ((768, 1024), False)
    paths = json.dumps([["m/a-1.safetensors", "m/a-2.safetensors"], "v.safetensors"])
    found = line("z_image", "--lora_base_model dit", f"--model_paths '{paths}'")
    assert found.values["pretrained_model_name_or_path"] == "m" and any("first file" in text for text in found.conflicts)
    assert said(line("z_image", "--model_paths nothing"), "model_paths")[0] == "not supported"


def test_the_metadata_of_its_data_sets_is_read_as_it_is(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "before.png"):
        Image.new("RGB", (64, 64)).save(tmp_path / name)
    table = tmp_path / "metadata.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["image", "prompt", "edit_image"], ["a.png", "make it red, please", "before.png"]])
    listed = read_metadata(table, ", ")[str(tmp_path / "a.png")]
    assert (listed.caption, listed.controls) == ("make it red, please", (str(tmp_path / "before.png"),)) and lists_controls(table)
    plain = tmp_path / "plain.csv"
    plain.write_text("image,prompt\na.png,a cat\n", encoding="utf-8")
    assert read_metadata(plain, ", ")[str(tmp_path / "a.png")].caption == "a cat" and not lists_controls(plain)
    several = tmp_path / "metadata.json"
    several.write_text(json.dumps([{"image": "b.png", "prompt": "p", "edit_image": ["a.png", "before.png"]}]), encoding="utf-8")
    assert read_metadata(several, ", ")["b.png"].controls == ("a.png", "before.png")
