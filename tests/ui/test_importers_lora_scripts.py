"""Settings of the page of lora-scripts, which starts sd-scripts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import toml

from kohya_like import importers
from kohya_like.importers import Imported
from sd_scripts.families import RUNS
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.kohya_words import SCRIPTS, SCRIPTS_OF_LORA_SCRIPTS
from tests.ui.foreign_files import builds, said

PAGE: dict[str, Any] = {
    "model_train_type": "flux-lora",
    "pretrained_model_name_or_path": "./sd-models/model.safetensors",
    "train_data_dir": "./train/aki",
    "resolution": "1024,1024",
    "bucket_reso_steps": 64,
    "learning_rate": "1e-4",
    "lr_scheduler": "cosine_with_restarts",
    "optimizer_type": "Prodigy",
    "network_module": "networks.lora_flux",
    "network_dim": 16,
    "enable_preview": True,
    "positive_prompts": "1girl,\nsolo",
    "negative_prompts": "lowres",
    "sample_width": 512,
    "sample_height": 768,
    "sample_cfg": 7,
    "sample_seed": 2333,
    "randomly_choice_prompt": False,
    "max_token_length": 255,
    "cache_latents_to_disk": True,
}


def read(**changes: Any) -> Imported:
    return importers.read("aki.toml", toml.dumps({**PAGE, **changes}).encode())


def test_the_kind_of_training_is_the_one_that_the_page_says() -> None:
    for kind, script in SCRIPTS_OF_LORA_SCRIPTS.items():
        family, method, _ = SCRIPTS[script]
        found = read(model_train_type=kind, network_module="")
        assert found.run is RUNS[family, method]
        assert said(found, "model_train_type")[0] == "not needed" and not found.count("unknown")
    same = importers.read("aki.json", json.dumps(PAGE).encode())
    assert (same.run, same.values) == (read().run, read().values)


def test_the_prompt_of_the_page_is_that_of_the_previews() -> None:
    options = builds(read(model_train_type="sdxl-lora", network_module="networks.lora"))
    assert options["sample_prompts"] == "1girl, solo --n lowres --w 512 --h 768 --l 7 --d 2333"
    assert options["max_token_length"] == 225
    assert builds(read(enable_preview=False))["sample_prompts"] == ""
    assert builds(read(prompt_file="prompts.txt"))["sample_prompts"] == "prompts.txt"
    assert said(read(randomly_choice_prompt=True), "randomly_choice_prompt")[0] == "not supported"


def test_what_the_page_has_fields_for_is_what_stands_in_lists_of_arguments() -> None:
    found = read(
        model_train_type="sdxl-lora",
        network_module="lycoris.kohya",
        lycoris_algo="lokr",
        lokr_factor=8,
        network_args_custom=["conv_dim=2"],
        optimizer_args=["weight_decay=0.1"],
        prodigy_d_coef="2.0",
        prodigy_d0="",
        ui_custom_params="network_dim = 5",
    )
    options = builds(found)
    assert (options["network_type"], options["lokr_factor"], options["conv_dim"], options["network_dim"]) == ("lokr", 8, 2, 5)
    assert options["optimizer_args"] == ("weight_decay=0.1", "d_coef=2.0")
    assert builds(read(optimizer_args_custom="weight_decay=0.2"))["optimizer_args"] == ("weight_decay=0.2",)
    with pytest.raises(OptionError, match="ui_custom_params is not valid TOML"):
        read(ui_custom_params="network_dim =")
