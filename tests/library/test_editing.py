"""What runs on edit pairs ask for: areas, devices, images for previews, and what is said about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageModelOptions
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.library.data.pipeline import KeptEntries
from sd_scripts.library.train.describing import about_caches, base_facts, dataset_facts, lines_about_images
from sd_scripts.library.train.editing import check_control_area, check_prompts, control_area, control_size, encoder_devices, with_controls
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.prompts import PromptSpec
from tests.library.data.pairs_in_small import options_for, pairs, plan_for, tiny

FAMILY = QwenEdit()
SPEC = PromptSpec("make it red", "", 64, 64, 1, 2, 1.0, "auto")


def model(path: Path | str = "owner/name", **values: object) -> QwenImageModelOptions:
    return QwenImageModelOptions(pretrained_model_name_or_path=str(path), **values)  # type: ignore[arg-type]


def test_the_area_of_control_images_is_the_options_or_the_models_own(tmp_path: Path) -> None:
    assert control_area(FAMILY, model()) == 1024 * 1024 and control_area(FAMILY, model(control_resolution=512)) == 512 * 512
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditPlusPipeline", "_default_side": 64}))
    assert control_area(FAMILY, model(tmp_path)) == 64 * 64 and control_area(FAMILY, model(tmp_path, control_resolution=96)) == 96 * 96
    size = control_size(FAMILY, model(tmp_path))
    assert size is not None and all(size(wide) == FAMILY.control_size(tiny(), wide) for wide in ((90, 60), (64, 64), (30, 120)))
    assert control_size(Sdxl(), SdxlModelOptions(pretrained_model_name_or_path="x")) is None


def test_a_model_of_another_area_than_was_planned_with_is_named() -> None:
    check_control_area(FAMILY, model(control_resolution=64), tiny())
    check_control_area(Sdxl(), SdxlModelOptions(pretrained_model_name_or_path="x"), tiny())
    with pytest.raises(OptionError, match="control_resolution: tiny was made for images of about 64 x 64; set control_resolution to 64"):
        check_control_area(FAMILY, model(), tiny())


def test_encoders_go_where_the_options_say_and_both_wrong_names_are_told() -> None:
    here = torch.device("cpu")
    assert encoder_devices(model(), here) == (here, here)
    assert encoder_devices(model(vae_device="cpu"), torch.device("meta")) == (here, torch.device("meta"))
    with pytest.raises(OptionError) as caught:
        encoder_devices(model(vae_device="cuda:91", text_encoder_device="cuda:92"), here)
    assert [problem.option for problem in caught.value.problems] == ["vae_device", "text_encoder_device"]


def test_prompts_without_control_images_take_those_of_the_pairs_held_out_ones_first(tmp_path: Path) -> None:
    data = pairs(tmp_path / "data")
    prompts = [SPEC] * 8
    named = PromptSpec(**{**vars(SPEC), "controls": ("own.png",)})
    plan = plan_for(options_for(data, validation_split=0.3), tmp_path)
    made = with_controls([named, *prompts], plan)
    assert made[0] == named
    order = [*plan.held_out, *plan.trained_images()]
    assert len(plan.held_out) == 2 and len(order) == 6
    for place, spec in enumerate(made[1:], 1):
        assert spec.controls == tuple(control.path for control in plan.images[order[place % 6]].controls)


def test_a_prompt_with_more_control_images_than_the_model_takes_is_named() -> None:
    two = PromptSpec(**{**vars(SPEC), "controls": ("a.png", "b.png")})
    check_prompts([two], FAMILY, tiny())
    with pytest.raises(OptionError, match=r"sample_prompts: prompt 2 has 2 control images \(--ci\), and image takes none"):
        check_prompts([SPEC, two], FAMILY, tiny("image"))
    with pytest.raises(OptionError, match=r"prompt 1 has 0 control images \(--ci\), and edit takes 1"):
        check_prompts([SPEC], FAMILY, tiny("edit"))


def test_what_is_said_about_pairs_names_their_sizes_and_counts(tmp_path: Path) -> None:
    plan = plan_for(options_for(pairs(tmp_path / "data")), tmp_path)
    lines = lines_about_images(plan)
    assert lines[0] == "images: 6, regularisation 0, held out 0"
    assert "64x64 from 64x64: 2" in lines[1] and "64x64 from 64x64 + " in lines[1]
    assert lines[2] == "control images: 4 pairs with 1, 2 pairs with 2; 6 cut as their targets, 2 at a size of their own"
    facts = dataset_facts(plan, 6)
    assert facts.buckets[64, 64] == 4 and sum(facts.buckets.values()) == 6, "pairs of one target size are counted together"


def test_the_header_says_which_version_was_trained() -> None:
    architectures = {
        version: base_facts(FAMILY, tiny(version)).version.modelspec for version in ("image", "edit", "edit-2509", "edit-2511")
    }
    assert architectures == {
        "image": "Qwen-Image",
        "edit": "Qwen-Image-Edit",
        "edit-2509": "Qwen-Image-Edit-Plus",
        "edit-2511": "Qwen-Image-Edit-2511",
    }


def test_what_is_said_about_caches_adds_up() -> None:
    said = about_caches([KeptEntries("images", 3, 2**20, True), KeptEntries("instructions", 2, 2**21, True)], Path("here"))
    assert said == "cached in here: images 3 entries of 1.00 MiB; instructions 2 entries of 2.00 MiB; together 5 entries, 3.00 MiB"
