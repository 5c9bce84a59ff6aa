"""What SimpleTuner's files of data backends (multidatabackend.json) say: sets of images, and the caches beside them."""

from __future__ import annotations

import re

from sd_scripts.schema.sheet import is_empty, is_off, shown, unless_empty

from ..table import ForeignSheet, Rule, Table, each, folder_here, here, only, switched_here, unneeded

KEY = "data_backend_config"


def looks_like(given: object) -> bool:
    """Whether these are that program's data backends: a list of tables with an id, of which one says what kind of data it holds."""
    tables = given if isinstance(given, list) else []
    named = bool(tables) and all(isinstance(table, dict) and "id" in table for table in tables)
    return named and any({"dataset_type", "instance_data_dir", "caption_strategy", "cache_dir_vae"} & table.keys() for table in tables)


def side_of(value: float, kind: str) -> tuple[int, str]:
    """The side of a square for a resolution of that program, with a note: an area in megapixels, or a side."""
    if kind == "area" or value < 16:
        return max(64, round((value * 1024 * 1024) ** 0.5 / 64) * 64), "the side of a square of so many megapixels"
    return int(value), "the shorter side there; here about the area" if kind == "pixel" else ""


def _own(sheet: ForeignSheet, key: str, name: str) -> object:
    """The value of a key of the same backend."""
    found = re.match(r".*?\[\d+\]", key)
    return sheet.value(f"{found[0] if found else ''}.{name}")


def _of_images(rule: Rule) -> Rule:
    """A rule for backends with images that are trained on; of others nothing but the folder is read, by who names them."""

    def chosen(sheet: ForeignSheet, key: str) -> None:
        kind = str(_own(sheet, key, "dataset_type") or "image")
        if any(not is_off(_own(sheet, key, name)) and not is_empty(_own(sheet, key, name)) for name in ("disabled", "disable")):
            sheet.skip(key, "the data set is off")
        elif kind.endswith("_embeds"):
            sheet.skip(key, "it is a cache; caches lie in output_dir, or where cache_dir says")
        elif kind == "conditioning":
            sheet.skip(key, "its folder belongs to the data set that names it as conditioning_data")
        elif kind == "eval":
            sheet.skip(key, "it is for evaluation; validation_split holds out a part of the training images")
        elif kind != "image":
            sheet.lose(key, f"{kind}s are not trained on; images are") if key.endswith("].id") else sheet.skip(key, f"it is for {kind}s")
        else:
            rule(sheet, key)

    return chosen


def _place(sheet: ForeignSheet, key: str) -> None:
    if str(sheet.value(key)) == "local":
        sheet.skip(key, "the images lie in a folder here as well")
    else:
        sheet.lose(key, f"images are not fetched from there ({shown(sheet.value(key))}); bring them into a folder, for train_data_dir")


def _resolution(sheet: ForeignSheet, key: str) -> None:
    value = sheet.number(key)
    if value is None or value <= 0:
        sheet.refuse(key, f"{shown(sheet.value(key))} is no size; give resolution")
    else:
        side, note = side_of(value, str(_own(sheet, key, "resolution_type") or sheet.value("resolution_type") or "pixel_area"))
        sheet.set_here(key, "resolution", [side, side], note)


def _repeats(sheet: ForeignSheet, key: str) -> None:
    sheet.set_here(key, "num_repeats", int(sheet.number(key) or 0) + 1, "0 is once there, 1 is twice")


def _crop(sheet: ForeignSheet, key: str) -> None:
    name, aspect = key.rpartition(".")[2], str(_own(sheet, key, "crop_aspect") or "square")
    on, style = not is_off(_own(sheet, key, "crop")), str(sheet.value(key))
    if not on:
        sheet.skip(key, "images are not cropped there, and brought to the nearest bucket here")
    elif name == "crop" and aspect == "square":
        sheet.set_here(key, "enable_bucket", False, "squares")
    elif name == "crop" and aspect == "random":
        sheet.lose(key, "the shape of an image is not drawn; each goes to the bucket nearest to its own")
    elif name == "crop_style" and style == "random":
        sheet.set_here(key, "random_crop", True)
    elif name == "crop_style" and style not in ("center", "centre"):
        sheet.lose(key, "images are cut in the middle, or at a random place with random_crop")
    elif name == "crop_aspect_buckets" and aspect != "square":
        sheet.lose(key, "shapes are not chosen one by one; buckets are all sizes of about that area")
    else:
        sheet.skip(key, "each image goes to the bucket nearest to its own shape" if name == "crop" else "crop says it")


def _captions(sheet: ForeignSheet, key: str) -> None:
    strategy = str(sheet.value(key))
    if strategy == "instanceprompt":
        sheet.skip(key, "instance_prompt holds it")
    elif strategy != "textfile":
        sheet.lose(key, "captions are texts beside the images, or a list as in_json; write them so")
    elif is_off(_own(sheet, key, "disable_multiline_split")) or is_empty(_own(sheet, key, "disable_multiline_split")):
        sheet.set_here(key, "enable_wildcard", True, "of several lines in a text one is drawn, as there; {a|b} is drawn from as well")
    else:
        sheet.lose(key, "a caption is one line here, the first of its text; join the lines")


@unless_empty
def _prompt(sheet: ForeignSheet, key: str) -> None:
    alone = str(_own(sheet, key, "caption_strategy")) == "instanceprompt" or bool(_own(sheet, key, "only_instance_prompt"))
    if alone:
        sheet.set_here(key, "class_tokens", sheet.value(key), "the caption of images that have no text beside them")
    elif not is_off(_own(sheet, key, "prepend_instance_prompt")):
        sheet.set_here(key, "caption_prefix", sheet.value(key))
    else:
        sheet.skip(key, "caption_strategy does not use it")


def _shuffled(sheet: ForeignSheet, key: str) -> None:
    name, marks = key.rpartition(".")[2], {"comma": ",", "space": " ", "period": "."}
    if is_off(_own(sheet, key, "caption_shuffle.enable")):
        sheet.skip(key, "captions are not shuffled")
    elif name == "enable":
        sheet.set_here(key, "shuffle_caption", True)
    elif name == "position_start":
        sheet.set_here(key, "keep_tokens", sheet.value(key))
    elif name == "count":
        sheet.set_here(key, "caption_variants", int(sheet.number(key) or 1) + 1, "with the caption as it is")
    elif name == "split_on" and str(sheet.value(key)) in marks:
        sheet.set_here(key, "caption_separator", marks[str(sheet.value(key))])
    elif name == "split_on":
        sheet.lose(key, "give caption_separator")
    else:
        sheet.skip(key, "seed decides what is drawn")


def _conditions(sheet: ForeignSheet, key: str) -> None:
    """The folders of the backends that are named: control images, or masks."""
    value = sheet.value(key)
    wanted = [str(one) for one in (value if isinstance(value, list) else [value])]
    places = {str(text): name.removesuffix("id") for name, text in sheet.given.items() if name.startswith(KEY) and name.endswith("].id")}
    found = [places[one] for one in wanted if one in places]
    kinds = {str(sheet.value(f"{place}conditioning_type") or "controlnet").split("_")[0] for place in found}
    folders = [str(folder) for place in found if not is_empty(folder := sheet.value(f"{place}instance_data_dir"))]
    if len(folders) < len(wanted):
        sheet.lose(key, "the folder of what it names is not in this file")
    elif kinds == {"reference"} and "control_data_dir" in sheet.known:
        sheet.set_here(key, "control_data_dir", folders)
    elif kinds == {"mask"} and len(folders) == 1:
        sheet.set_here(key, "conditioning_data_dir", folders[0], "with masked_loss")
        sheet.one(key)["masked_loss"] = (True, key)
    else:
        sheet.lose(key, "this model takes no control images" if kinds <= {"reference", "controlnet"} else "masks are one for each image")


_SIZES = only(None, "images are neither left out nor cut down by their size; do it beforehand")
_WHEN = "every folder counts from the beginning to the end, as often as num_repeats says"
_RULES: Table = {
    "id": unneeded("a name"),
    "dataset_type": unneeded("images are what is trained on"),
    "type": _place,
    "instance_data_dir": folder_here(),
    **each(
        "",
        """dataset_name csv_file csv_url_column csv_caption_column csv_cache_dir image_column caption_column video_column split revision
        huggingface.* webshart.* parquet.*
        aws_bucket_name aws_data_prefix aws_region_name aws_endpoint_url aws_access_key_id aws_secret_access_key""",
        unneeded("it says where the images are fetched, which is not done here"),
    ),
    "resolution": _resolution,
    "resolution_type": unneeded("resolution holds it"),
    "repeats": _repeats,
    "train_batch_size": here("train_batch_size", "for the whole run"),
    **each("", "crop crop_style crop_aspect crop_aspect_buckets", _crop),
    **each("", "minimum_image_size maximum_image_size target_downsample_size max_upscale_threshold", _SIZES),
    **each("", "minimum_aspect_ratio maximum_aspect_ratio", _SIZES),
    "caption_strategy": _captions,
    "instance_prompt": _prompt,
    **each("", "prepend_instance_prompt only_instance_prompt disable_multiline_split", unneeded("the captions' other settings hold it")),
    **each("caption_shuffle.", "enable count seed split_on position_start include_original", _shuffled),
    "caption_filter_list": only(None, "captions stay as they are; clean them beforehand", banner=True),
    "conditioning_data": _conditions,
    **each("", "conditioning conditioning.* conditioning[].*", only(None, "control images are not made; give folders", banner=True)),
    **each("", "is_regularisation_data is_regularization_data", switched_here("is_reg")),
    **each("", "probability start_epoch end_epoch", only(1, _WHEN, banner=True)),
    **each("", "max_num_samples start_step end_step slider_strength timestep_sampling_offset", only(0, _WHEN, banner=True)),
    "metadata_backend": only("discovery", "sizes are read from the images; captions in a table go into in_json"),
    **each(
        "",
        """cache_dir cache_dir_vae cache_file_suffix text_embeds image_embeds conditioning_image_embeds metadata_update_interval default
        write_batch_size text_encoder_batch_size text_cache_ondemand text_cache_disable vae_cache_clear_each_epoch vae_cache_ondemand
        vae_cache_disable skip_file_discovery preserve_data_backend_cache hash_filenames bucket_report disabled disable
        conditioning_type source_dataset_id delete_unwanted_images delete_problematic_images delete_nsfw_images video.* audio.*""",
        unneeded("it says how that program works, not what is trained"),
    ),
}
TABLE: Table = {f"{KEY}[].{name}": _of_images(rule) for name, rule in _RULES.items()}
