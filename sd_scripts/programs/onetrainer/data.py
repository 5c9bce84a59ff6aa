"""What a configuration of OneTrainer says of its concepts and samples."""

from __future__ import annotations

import re
from typing import Any

from sd_scripts.schema.sheet import is_empty, is_off, number, shown, switch, unless_empty, unless_off

from ..table import ForeignSheet, Rule, Table, TwoWay, among, each, here, line_of_prompt, only, switched_here, to, unneeded


def _masked(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value("masked_training")):
        sheet.skip(key, "masked_training is off")
    elif key == "masked_training":
        sheet.take(key, "masked_loss", True, "masks beside the images, NAME-masklabel.png, are found")
        if "unmasked_probability" not in sheet.given:
            sheet.conflicts.append(
                "masked_training: masks count in every step here; there not in one of ten, where the file says nothing else"
            )
    elif key == "unmasked_weight":
        note = "grey of a mask counts as its own value there where that is more, here as a mix of both" if sheet.number(key) else ""
        sheet.take(key, "masked_loss_outside_weight", sheet.value(key), note)
    elif key == "normalize_masked_area_loss":
        sheet.take(key, "normalize_masked_loss", sheet.value(key))
    elif is_off(sheet.value(key)):
        sheet.skip(key, "it is off")
    else:
        sheet.lose(
            key, "masks count in every step here" if key == "unmasked_probability" else "what a mask leaves out is not kept as it is"
        )


def _samples(sheet: ForeignSheet, key: str) -> None:
    indices = sorted({int(found[1]) for name in sheet.given if (found := re.match(r"samples\[(\d+)\]", name))})
    chosen = [index for index in indices if not _is_disabled(sheet.value(f"samples[{index}].enabled"))]
    lines = []
    for index in chosen:
        got = {name: sheet.value(f"samples[{index}].{name}") for name in _OF_SAMPLE}
        if not is_empty(got["prompt"]):
            guided = "sample_guidance_scale" in sheet.known
            line = line_of_prompt(
                got["prompt"],
                w=got["width"],
                h=got["height"],
                d=None if switch(sheet.value(f"samples[{index}].random_seed")) else got["seed"],
                l=None if guided else got["cfg_scale"],
                g=got["cfg_scale"] if guided else None,
                s=got["diffusion_steps"],
                n=got["negative_prompt"],
            )
            lines.append(line)
    if not lines:
        sheet.skip(key, "no sample is enabled that has a prompt")
    elif sheet.decided("sample_prompts"):
        sheet.skip(key, "it stands in sample_prompts, or has no counterpart in a preview")
    else:
        sheet.take(key, "sample_prompts", "\n".join(lines), f"{len(lines)} previews, one a line")


_OF_SAMPLE = ("prompt", "negative_prompt", "width", "height", "seed", "diffusion_steps", "cfg_scale")


def _is_disabled(value: object) -> bool:
    return not is_empty(value) and is_off(value)


def _concept(sheet: ForeignSheet, key: str) -> None:
    """The folder of a concept, and what it is for."""
    name = key.rpartition(".")[2]
    if _is_disabled(sheet.beside(key, "enabled")):
        sheet.skip(key, "the concept is off")
    elif name == "path" and is_empty(sheet.value(key)):
        sheet.skip(key, "it is empty")
    elif str(sheet.beside(key, "type")) == "VALIDATION":
        sheet.skip(key, "it is for validation; validation_split holds images out") if name != "path" else sheet.refuse(
            key, "validation_split holds out a part of the training images"
        )
    elif name == "path":
        sheet.set_here(key, "image_dir", sheet.value(key))
        if sheet.beside(key, "image.enable_crop_jitter") is None and str(sheet.beside(key, "type")) != "PRIOR_PREDICTION":
            sheet.one(key)["random_crop"] = (True, key)
    elif sheet.value(key) == "PRIOR_PREDICTION":
        sheet.set_here(key, "is_reg", True, "with base_prior_weight: the base model's own answer is their goal")
        if "base_prior_weight" in sheet.known:
            sheet.put("base_prior_weight", sheet.number(f"{key.rpartition('.')[0]}.loss_weight") or 1.0, key)
    else:
        sheet.skip(key, "images to be learned are what concepts are for")


def _inside(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "folders inside are left out where there are several concepts; those of one folder alone are read")
    else:
        sheet.skip(key, "folders inside are read")
        sheet.one(key)["recursive"] = (True, key)


def _weight_of_concept(sheet: ForeignSheet, key: str) -> None:
    if str(sheet.beside(key, "type")) == "PRIOR_PREDICTION":
        sheet.skip(key, "base_prior_weight holds it")
    else:
        only(1.0, "give the folder's images a weight in a dataset_config", banner=True)(sheet, key)


def _balance(sheet: ForeignSheet, key: str) -> None:
    if str(sheet.beside(key, "balancing_strategy") or "REPEATS") != "REPEATS":
        sheet.lose(key, "a number of samples in each epoch is not drawn; num_repeats repeats a folder")
    elif (sheet.number(key) or 1) == 1:
        sheet.skip(key, "1 is once an epoch")
    elif (sheet.number(key) or 1) < 1:
        sheet.lose(key, "parts of a folder are not drawn; each image is shown once an epoch")
    else:
        repeats = round(sheet.number(key) or 1)
        sheet.set_here(key, "num_repeats", repeats, "whole numbers" if repeats != sheet.number(key) else "")


def _tags(option: str) -> Rule:
    """A setting of tags, which counts while they are shuffled or dropped."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        if not any(switch(sheet.beside(key, name)) for name in ("enable_tag_shuffling", "tag_dropout_enable")):
            sheet.skip(key, "tags are neither shuffled nor dropped")
        else:
            here(option)(sheet, key)

    return TwoWay(rule, option, lambda value: value)


def _keep(sheet: ForeignSheet, key: str) -> None:
    """One tag at the start stays where the file says nothing."""
    if is_empty(sheet.beside(key, "keep_tags_count")):
        sheet.one(key).setdefault("keep_tokens", (1, key))


@unless_off
def _shuffled(sheet: ForeignSheet, key: str) -> None:
    sheet.set_here(key, "shuffle_caption", True)
    _keep(sheet, key)


def _dropped(sheet: ForeignSheet, key: str) -> None:
    """There FULL is the mode of a file that names none."""
    mode = str(sheet.beside(key, "tag_dropout_mode") or "FULL")
    ways = {"FULL": "all of them together", "RANDOM WEIGHTED": "the last ones more often"}
    if not switch(sheet.beside(key, "tag_dropout_enable")) or is_off(sheet.value(key)):
        sheet.skip(key, "no tags are dropped")
    elif mode == "FULL" and number(sheet.beside(key, "keep_tags_count")) == 0:
        sheet.set_here(key, "caption_dropout_rate", sheet.value(key), "the whole caption, as FULL drops it where no tags are kept")
    else:
        why = f"each tag is dropped by itself here, and {mode} drops {ways[mode]}" if mode in ways else ""
        sheet.set_here(key, "caption_tag_dropout_rate", sheet.value(key), why)
        _keep(sheet, key)
        if why:
            sheet.conflicts.append(f"{key} = {shown(sheet.value(key))}: {why}")


def _source(sheet: ForeignSheet, key: str) -> None:
    kind = str(sheet.value(key))
    if kind == "sample":
        sheet.skip(key, "texts beside the images are read")
    elif kind == "concept":
        sheet.lose(key, "one file of captions for a folder is not read; write it as instance_prompt, or as files beside the images")
    else:
        sheet.lose(key, "file names are no captions here; write them into files beside the images")


def _changed(sheet: ForeignSheet, key: str) -> None:
    """An image that is changed in each epoch, in a way that is not here."""
    if is_off(sheet.value(key)) or "enable_" not in key:
        sheet.skip(key, "it is off, or belongs to a change of images that has a switch of its own")
    else:
        sheet.lose(key, "images are not changed this way; flip_aug, random_crop and color_aug are what there is")


def _read_elsewhere(sheet: ForeignSheet, key: str) -> None:
    what = key.partition("_")[0]
    if any(name.startswith(f"{what}s[") for name in sheet.given) or (what == "sample" and "samples" in sheet.given):
        sheet.skip(key, "what it holds stands in this file as well")
    elif what == "concept":
        sheet.refuse(key, "the file was not there to be read; open it too, or give the folder as train_data_dir")
    else:
        sheet.refuse(key, "the file was not there to be read; open it too, or write its prompts as sample_prompts")


_OF_IMAGES = """enable_random_rotate enable_fixed_rotate random_rotate_max_angle enable_random_brightness enable_fixed_brightness
    random_brightness_max_strength enable_random_contrast enable_fixed_contrast random_contrast_max_strength enable_random_saturation
    enable_fixed_saturation random_saturation_max_strength enable_random_hue enable_fixed_hue random_hue_max_strength resolution_override
    enable_random_circular_mask_shrink enable_random_mask_rotate_crop"""
_OF_CAPITALS = "caps_randomize_probability caps_randomize_mode caps_randomize_lowercase"
_OF_SAMPLES = """__version enabled prompt negative_prompt height width frames length seed random_seed diffusion_steps cfg_scale
    noise_scheduler text_encoder_1_layer_skip text_encoder_1_sequence_length text_encoder_2_layer_skip text_encoder_2_sequence_length
    text_encoder_3_layer_skip text_encoder_4_layer_skip transformer_attention_mask force_last_timestep sample_inpainting base_image_path
    mask_image_path"""
TABLE: Table = {
    "dataloader_threads": to("max_data_loader_n_workers"),
    "aspect_ratio_bucketing": to("enable_bucket"),
    "latent_caching": to("cache_latents"),
    **each("", "masked_training unmasked_probability unmasked_weight normalize_masked_area_loss masked_prior_preservation_weight", _masked),
    "custom_conditioning_image": only(False, "images as conditions are for editing models, as control images", banner=True),
    **each("", "concept_file_name sample_definition_file_name", _read_elsewhere),
    "concepts": unneeded("it is empty"),
    **each("concepts[].", "path type", _concept),
    **each(
        "concepts[].",
        "name enabled seed balancing_strategy concept_stats concept_stats.*",
        unneeded("it is a note, or holds in any case"),
    ),
    "concepts[].include_subdirectories": _inside,
    "concepts[].image_variations": only(1, "an image is cut once for all epochs while latents are cached"),
    "concepts[].text_variations": only(1, "caption_variants says from how many versions of a caption is drawn"),
    "concepts[].balancing": _balance,
    "concepts[].loss_weight": _weight_of_concept,
    **each("concepts[].image.", "enable_random_flip enable_fixed_flip", switched_here("flip_aug")),
    "concepts[].image.enable_crop_jitter": switched_here("random_crop"),
    **each("concepts[].image.", "enable_resolution_override", _changed),
    "concepts[].image.*": among(_OF_IMAGES, _changed),
    "concepts[].text.prompt_source": _source,
    "concepts[].text.prompt_path": unneeded("prompt_source says which texts are read"),
    "concepts[].text.enable_tag_shuffling": TwoWay(_shuffled, "shuffle_caption", lambda value: value),
    "concepts[].text.tag_delimiter": _tags("caption_separator"),
    "concepts[].text.keep_tags_count": _tags("keep_tokens"),
    "concepts[].text.tag_dropout_enable": unneeded("tag_dropout_probability says it"),
    "concepts[].text.tag_dropout_probability": TwoWay(unless_empty(_dropped), "caption_tag_dropout_rate", lambda value: value),
    "concepts[].text.tag_dropout_mode": unneeded("tag_dropout_probability says it"),
    **each("concepts[].text.", "tag_dropout_special_tags_mode", only("NONE", "keep_tokens keeps tags at the start")),
    **each(
        "concepts[].text.", "tag_dropout_special_tags tag_dropout_special_tags_regex", unneeded("tag_dropout_special_tags_mode says it")
    ),
    **each("concepts[].text.", "caps_randomize_enable", only(False, "capital letters stay as they are", banner=True)),
    "concepts[].text.*": among(_OF_CAPITALS, unneeded("caps_randomize_enable says it")),
    "samples": unneeded("it is empty"),
    "samples[].*": among(_OF_SAMPLES, _samples),
}


def _tables(given: object) -> list[dict[str, Any]]:
    return [table for table in given if isinstance(table, dict)] if isinstance(given, list) else []


def are_concepts(given: object) -> bool:
    """Whether these are concepts of that program: tables with a path and how often its images count."""
    return any({"path", "include_subdirectories"} <= table.keys() or {"path", "image", "text"} <= table.keys() for table in _tables(given))


def are_samples(given: object) -> bool:
    """Whether these are samples of that program: tables with a prompt and how it is drawn."""
    return any({"prompt", "diffusion_steps"} <= table.keys() for table in _tables(given))
