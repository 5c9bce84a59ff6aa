"""What a job of ai-toolkit says of its data sets."""

from __future__ import annotations

from sd_scripts.schema.sheet import is_empty, is_off, number, shown, switch, unless_empty, unless_off

from ..table import NOT_HERE, ForeignSheet, Table, TwoWay, each, folder_here, here, only, sides_here, switched_here, unneeded


@unless_empty
def _trigger(sheet: ForeignSheet, key: str) -> None:
    word = sheet.value(key)
    more = f"a caption with neither gets it put first there; for such captions set caption_prefix = {shown(word)}"
    for index in range(max(1, len(sheet.sets), sum(name.endswith("].folder_path") for name in sheet.given))):
        sheet.one(f"[{index}]").setdefault("class_tokens", (word, key))
    sheet.write(key, "renamed", f"instance_prompt = {shown(word)}, which stands for [trigger] in captions; {more}")
    sheet.conflicts.append(f"trigger_word = {shown(word)}: {more}")


@unless_empty
def _controls(sheet: ForeignSheet, key: str) -> None:
    names = ("control_path", "control_path_1", "control_path_2", "control_path_3")
    if "control_data_dir" not in sheet.known:
        sheet.lose(key, "this model takes no control images")
    else:
        found = [sheet.beside(key, name) for name in names]
        folders = [str(path) for one in found for path in (one if isinstance(one, list) else [one]) if not is_empty(path)]
        sheet.set_here(key, "control_data_dir", folders)


def _mask(sheet: ForeignSheet, key: str) -> None:
    if is_empty(sheet.value(key)) or is_off(sheet.value(key)):
        sheet.skip(key, "it is empty")
        return
    sheet.set_here(key, "conditioning_data_dir" if key.endswith("mask_path") else "alpha_mask", sheet.value(key), "with masked_loss")
    sheet.one(key)["masked_loss"] = (True, key)
    sheet.one(key)["normalize_masked_loss"] = (True, key)  # There by the mean of a batch's masks.


def _outside(sheet: ForeignSheet, key: str) -> None:
    if is_empty(sheet.beside(key, "mask_path")) and not switch(sheet.beside(key, "alpha_mask")):
        sheet.skip(key, "there are no masks")
    else:
        sheet.set_here(key, "masked_loss_outside_weight", sheet.value(key))


@unless_off
def _kept_tokens(sheet: ForeignSheet, key: str) -> None:
    """There tokens are kept from being dropped, and shuffled all the same."""
    shuffled, dropped = switch(sheet.beside(key, "shuffle_tokens")), number(sheet.beside(key, "token_dropout_rate"))
    if shuffled and not dropped:
        sheet.skip(key, "all tokens are shuffled there; it keeps them from being dropped")
        return
    sheet.set_here(key, "keep_tokens", sheet.value(key))
    if shuffled:
        sheet.conflicts.append(f"{key} = {shown(sheet.value(key))}: these stay in place here; there they are shuffled with the others")


def _ending(value: object) -> str:
    text = str(value)
    return text if text.startswith(".") else f".{text}"


@unless_empty
def _default_caption(sheet: ForeignSheet, key: str) -> None:
    sheet.set_here(key, "class_tokens", sheet.value(key), "the caption of images that have none")


def _frames(sheet: ForeignSheet, key: str) -> None:
    if (number(sheet.value(key)) or 1) <= 1:
        sheet.skip(key, "1 means images")
    else:
        sheet.lose(key, "videos are not trained on; images are")


@unless_off
def _regularises(sheet: ForeignSheet, key: str) -> None:
    sheet.set_here(key, "is_reg", True, "regularisation images are repeated until there are as many as others")


def _cached(sheet: ForeignSheet, key: str) -> None:
    sheet.skip(key, "latents are cached by themselves, on disk as well")


def _not_for_images(sheet: ForeignSheet, key: str) -> None:
    sheet.skip(key, "it is for videos and sounds")


_DATA_OFF: dict[str, object] = {
    **dict.fromkeys(
        "flip_y invert_mask random_scale square_crop control_from_same_folder prior_reg use_short_captions debug".split(), False
    ),
    **dict.fromkeys(
        "augments augmentations controls random_triggers inpaint_path unconditional_path clip_image_path replacements".split(), None
    ),
    "loss_multiplier": 1.0,
    "network_weight": 1.0,
    "scale": 1.0,
    "clip_image_from_same_folder": False,
    "type": "image",
}

TABLE: Table = {
    "trigger_word": _trigger,
    **each("datasets[].", "folder_path dataset_path", folder_here()),
    "datasets[].resolution": sides_here,
    "datasets[].caption_ext": here("caption_extension", convert=_ending),
    "datasets[].caption_type": here("caption_extension", convert=_ending),
    "datasets[].default_caption": _default_caption,
    "datasets[].trigger_word": here("class_tokens", "which stands for [trigger] in captions"),
    "datasets[].caption_dropout_rate": here("caption_dropout_rate"),
    "datasets[].token_dropout_rate": here("caption_tag_dropout_rate"),
    "datasets[].shuffle_tokens": switched_here("shuffle_caption"),
    "datasets[].keep_tokens": TwoWay(_kept_tokens, "keep_tokens", lambda value: value),
    "datasets[].num_repeats": here("num_repeats"),
    "datasets[].flip_x": switched_here("flip_aug"),
    "datasets[].random_crop": switched_here("random_crop"),
    "datasets[].buckets": here("enable_bucket"),
    "datasets[].bucket_tolerance": here("bucket_reso_steps"),
    "datasets[].is_reg": _regularises,
    "datasets[].poi": only(None, "images are cut at the centre; cut out what counts beforehand. That program has given it up", banner=True),
    **each("datasets[].", "mask_path alpha_mask", _mask),
    "datasets[].mask_min_value": _outside,
    **dict.fromkeys((f"datasets[].control_path{end}" for end in ("", "_1", "_2", "_3")), _controls),
    **dict.fromkeys((f"datasets[].cache_{what}" for what in ("latents", "latents_to_disk", "text_embeddings", "tensors_to_disk")), _cached),
    **each("datasets[].", "cache_clip_vision_to_disk load_image_when_caching_latents", _cached),
    "datasets[].batch_size": here("train_batch_size", "for the whole run"),
    "datasets[].num_frames": _frames,
    **each(
        "datasets[].",
        """shrink_video_to_frames fps auto_frame_count trim_auto_frame_count_tail do_i2v do_audio audio_preserve_pitch audio_normalize""",
        _not_for_images,
    ),
    **each(
        "datasets[].",
        """num_workers prefetch_factor cache_latents_num_workers fast_image_size replay_transforms full_size_control_images
        control_transparent_color guidance_type num_controls_from_same_folder random_triggers_max shuffle_augmentations
        standardize_images extra_values diff_output_preservation diff_output_preservation_class clip_image_augmentations
        clip_image_shuffle_augmentations""",
        unneeded("it changes nothing here"),
    ),
    **{f"datasets[].{name}": only(usual, NOT_HERE, banner=True) for name, usual in _DATA_OFF.items()},
}
