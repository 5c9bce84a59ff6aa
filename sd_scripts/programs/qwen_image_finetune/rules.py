"""What keys of qwen-image-finetune's configurations become."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from sd_scripts.schema.sheet import is_empty, unless_empty

from ..table import PRECISIONS, ForeignSheet, Rule, Table, each, literal, only, optimizer, take_arguments, to, unneeded, where, words
from .keys import DEFAULTS, ENCODERS_DEVICES, NOT_NEEDED, NOT_READ, PLAIN, SEED_KEYS
from .models import IMAGE_ATTENTION, MODELS, PARTS, ends, name_of


def _also(sheet: ForeignSheet, key: str, option: str, value: object) -> None:
    """A second option of the same key, where the run has it."""
    if option in sheet.known:
        sheet.put(option, value, key)


def _plain(option: str) -> Rule:
    why = "encoders come to the GPU one after the other, and leave it once their outputs are cached"
    return where(lambda sheet: option in sheet.known, to(option), why) if option in ENCODERS_DEVICES else to(option)


def _is_of_first_schema(sheet: ForeignSheet) -> bool:
    return any(sheet.value(key) is not None for key in SEED_KEYS)


# --- model ----------------------------------------------------------------------------------------------------------


def _trainer(sheet: ForeignSheet, key: str) -> None:
    base = str(sheet.value("model.pretrained_model_name_or_path") or "").lower()
    if name_of(sheet.given) not in MODELS:
        known = ", ".join(MODELS)
        text = f"{sheet.value(key)} is not a trainer of that program that is known here; {known} are. It is read as {sheet.model.label}"
        sheet.lose(key, text)
        for option, said in sheet.model.options.items():
            sheet.put(option, said, key)
    elif not sheet.model.options:
        sheet.skip(key, f"the kind of run says it: {sheet.run.label}")
    else:
        for option, said in sheet.model.options.items():
            sheet.take(key, option, "edit-2511" if "2511" in base and said == "edit-2509" else said)


def _mode(sheet: ForeignSheet, key: str) -> None:
    ways = {"cache": "start the run with --cache_only for that", "predict": "that is what Generate is for"}
    sheet.skip(key, ways.get(str(sheet.value(key)), "a run trains, and fills its caches first"))


@unless_empty
def _resume(sheet: ForeignSheet, key: str) -> None:
    folder = str(sheet.value(key))
    if folder == "False":
        sheet.skip(key, "it is off")
    elif folder in ("latest", "auto", "True"):
        sheet.take(key, "resume", "auto", "the newest run of this name goes on; where there is none, a new one starts")
    elif key == "resume" or re.search(r"(^|[/\\])checkpoint-[^/\\]*[/\\]?$", folder) or folder.endswith(".safetensors"):
        sheet.refuse(
            key, "states of that program are not read; give its pytorch_lora_weights.safetensors as network_weights to go on from it"
        )
    else:
        sheet.take(key, "resume", folder, "the folder of a run or of a state that was made here")


def _base(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key))
    if re.search(r"4bit|fp4|nf4|fp8", name.lower()):
        sheet.refuse(key, f"{name} is quantised already, which is not read; name its original, with transformer_quantization")
    else:
        sheet.take(key, "pretrained_model_name_or_path", name)


def _quantize(sheet: ForeignSheet, key: str) -> None:
    if not sheet.on(key):
        sheet.skip(key, "it is off")
    elif _is_of_first_schema(sheet):
        sheet.take(key, "transformer_quantization", "qfloat8", "as there; qint8 is more exact in the same memory")
    else:
        sheet.take(key, "transformer_quantization", "qint8")


def _rank(sheet: ForeignSheet, key: str) -> None:
    sheet.take(key, "network_dim", sheet.value(key))
    sheet.put("network_alpha", sheet.value(key), key)


def _init(sheet: ForeignSheet, key: str) -> None:
    if str(sheet.value(key)) in ("gaussian", "normal", "True"):
        sheet.skip(key, "the down matrices begin with random numbers and the up matrices with zeros here as well")
    else:
        sheet.refuse(key, f"{sheet.value(key)} is not there; the down matrices begin with random numbers and the up matrices with zeros")


_IMAGE = set(IMAGE_ATTENTION)
_TEXT = {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
_MLPS = {"img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"}
_MODULATION = {"img_mod.1", "txt_mod.1"}
_PRESETS = {
    "image_attention": _IMAGE,
    "attention": _IMAGE | _TEXT,
    "all": _IMAGE | _TEXT | _MLPS,
    "all_with_modulation": _IMAGE | _TEXT | _MLPS | _MODULATION,
}


@unless_empty
def _targets(sheet: ForeignSheet, key: str) -> None:
    value = sheet.value(key)
    names = {str(item) for item in value} if isinstance(value, list) else set()
    preset = next((preset for preset, members in _PRESETS.items() if names == members), None)
    if value == "all-linear" and "lora_targets" not in sheet.known:
        sheet.skip(key, "all layers of the blocks have an adapter; those outside of the blocks, which PEFT takes as well, get none")
    elif value == "all-linear":
        # PEFT's word for every linear layer.
        sheet.take(key, "lora_targets", "all_with_modulation", "layers outside of the blocks, which PEFT takes as well, get no adapter")
    elif preset is not None and "lora_targets" in sheet.known:
        sheet.take(key, "lora_targets", preset)
    else:
        # There a text is an expression for the whole name.
        sheet.take(key, "target_modules", ends(names) if isinstance(value, list) else [f"^(?:{value})$"])
        # target_modules choose among these.
        _also(sheet, key, "lora_targets", "all_with_modulation")


@unless_empty
def _start(sheet: ForeignSheet, key: str) -> None:
    if not str(sheet.value(key)).endswith(".safetensors"):
        sheet.refuse(key, "only a .safetensors file on this machine can be started from; download it and give it as network_weights")
    else:
        sheet.take(key, "network_weights", str(sheet.value(key)))


@unless_empty
def _part(sheet: ForeignSheet, key: str) -> None:
    """A part that comes from elsewhere than the base model."""
    option = PARTS.get(sheet.run.family, {}).get(key.rpartition(".")[2])
    if option is None:
        sheet.skip(key, "that program does not use it for this model")
    else:
        sheet.take(key, option, str(sheet.value(key)))


# --- data -----------------------------------------------------------------------------------------------------------


@unless_empty
def _dataset(sheet: ForeignSheet, key: str) -> None:
    value = sheet.value(key)
    paths = value if isinstance(value, list) else [value]
    if any(isinstance(path, Mapping) for path in paths):
        sheet.refuse(key, "data sets of the hub are not read; export it to folders target and control, and give that as train_data_dir")
    elif len(paths) != 1:
        sheet.refuse(key, "several folders are written into a dataset_config, one [[datasets.subsets]] each")
    elif str(paths[0]).endswith((".csv", ".jsonl")):
        sheet.take(key, "in_json", str(paths[0]))
        _also(sheet, key, "train_data_dir", str(PurePosixPath(str(paths[0]).replace("\\", "/")).parent))
    else:
        sheet.take(key, "train_data_dir", str(paths[0]))


@unless_empty
def _size(sheet: ForeignSheet, key: str) -> None:
    value: Any = sheet.value(key)
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(side, int) for side in value)):
        sheet.refuse(key, f"{value} is not a pair of whole numbers; give resolution")
    elif key.endswith("image_size"):
        _resolution(sheet, key, value, "images keep their own aspect ratio while enable_bucket is on")
    else:
        _resolution(sheet, key, value[::-1], "width first here")


def _resolution(sheet: ForeignSheet, key: str, sides: list[int], text: str) -> None:
    sheet.take(key, "resolution", sides, text)
    smallest = sheet.known["min_bucket_reso"].default
    if isinstance(smallest, int) and min(sides) < smallest:
        _also(sheet, key, "min_bucket_reso", min(sides))


def _process_type(sheet: ForeignSheet, key: str) -> None:
    value = sheet.value(key)
    if value == "center_crop":
        sheet.take(key, "enable_bucket", False, "images are cut at the centre to one shape")
    elif value == "fixed_pixels" or is_empty(value):
        sheet.skip(key, "buckets keep the number of pixels and the aspect ratio")
    else:
        sheet.refuse(key, f"{value} is not there: with enable_bucket images keep their shape, without it they are cut at the centre")


@unless_empty
def _target_pixels(sheet: ForeignSheet, key: str) -> None:
    side = _side(sheet.value(key))
    if side is None:
        sheet.refuse(key, f"{sheet.value(key)} is not a number of pixels; give resolution")
    else:
        _resolution(sheet, key, [side, side], "about the same number of pixels, in each image's own aspect ratio")


@unless_empty
def _multi_resolutions(sheet: ForeignSheet, key: str) -> None:
    value = sheet.value(key)
    areas = value.get("target") if isinstance(value, Mapping) else value
    sides = [_side(area) for area in areas] if isinstance(areas, list) else []
    if not sides or None in sides:
        sheet.refuse(key, f"{value} is not a list of numbers of pixels; give resolution and additional_resolutions")
    else:
        largest = max(side for side in sides if side is not None)
        _resolution(sheet, key, [largest, largest], "each image at about its own size up to this, never enlarged")


@unless_empty
def _control_area(sheet: ForeignSheet, key: str) -> None:
    """One area of all control images: numbers of pixels, or sizes."""
    value: object = sheet.value(key)
    many: list[Any] = value if isinstance(value, list) else [value]
    if key.endswith("controls_size"):
        sizes = many if isinstance(many[0], list) else [many]
        good = all(isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size) for size in sizes)
        areas = {size[0] * size[1] for size in sizes} if good else set()
    else:
        sides = [_side(area) for area in many]
        areas = {side * side for side in sides if side is not None} if None not in sides else set()
    if len(areas) != 1:
        sheet.refuse(key, f"{value}: control images have one area here; give control_resolution")
    else:
        side = max(16, round(math.sqrt(areas.pop()) / 16) * 16)
        sheet.take(key, "control_resolution", side, "about the same area, in each image's own aspect ratio")


def _side(area: object) -> int | None:
    """The side of a square of an area such as 589824 or "832*576", in multiples of 16; None for something else."""
    if isinstance(area, bool):
        return None
    match = re.fullmatch(r"\s*(\d{1,5})\s*\*\s*(\d{1,5})\s*|\s*(\d{1,9})\s*", str(area))
    if match is None:
        return None
    pixels = int(match[3]) if match[3] else int(match[1]) * int(match[2])
    return max(16, round(math.sqrt(pixels) / 16) * 16)


# --- optimizer, training, caches ------------------------------------------------------------------------------------


def _optimizer_argument(sheet: ForeignSheet, key: str) -> None:
    """Arguments besides the rate."""
    prefix = "optimizer.init_args."
    given = {name.removeprefix(prefix): value for name, value in sheet.given.items() if name.startswith(prefix) and value is not None}
    take_arguments(sheet, key, [f"{name}={literal(value)}" for name, value in given.items() if name != "lr"])


def _limit(sheet: ForeignSheet, key: str) -> None:
    value, every = sheet.value(key), sheet.given.get("train.checkpointing_steps", DEFAULTS["save_every_n_steps"])
    if not isinstance(value, int) or isinstance(value, bool) or not isinstance(every, int):
        sheet.skip(key, "it is empty")
    elif _is_of_first_schema(sheet):
        sheet.take(key, "save_last_n_steps", value * every, "the same number of files")
    else:
        sheet.skip(key, NOT_READ)


def _use_cache(sheet: ForeignSheet, key: str) -> None:
    on = sheet.value(key) is not False
    sheet.take(key, "cache_latents", on)
    _also(sheet, key, "cache_text_encoder_outputs", on)


def _mask_loss(sheet: ForeignSheet, key: str) -> None:
    if not sheet.on(key):
        sheet.skip(key, "it is off")
        return
    sheet.take(key, "masked_loss", True)
    # Its own spelling, and the right one.
    front, back = sheet.number("loss.forground_weight", "loss.foreground_weight"), sheet.number("loss.background_weight")
    _outside(sheet, key, front, back)


def _outside(sheet: ForeignSheet, key: str, front: float | None, back: float | None) -> None:
    """The background's weight divided by the foreground's; None are that program's own."""
    front, back = 2.0 if front is None else front, 1.0 if back is None else back
    _also(sheet, key, "masked_loss_outside_weight", min(1.0, back / front) if front > 0 else 1.0)


def _mask_weight(sheet: ForeignSheet, key: str) -> None:
    if sheet.on("loss.mask_loss"):
        sheet.skip(key, "it is part of masked_loss_outside_weight, the background's weight divided by the foreground's")
    else:
        sheet.skip(key, "it counts with mask_loss only, which is off")


def _class_of_loss(sheet: ForeignSheet) -> str:
    return str(sheet.value("loss.class_path") or "").rpartition(".")[2]


def _loss_class(sheet: ForeignSheet, key: str) -> None:
    short = str(sheet.value(key) or "").rpartition(".")[2]
    if short in ("", "MseLoss", "MSELoss"):
        sheet.skip(key, "the squared error is the loss here as well")
    elif short == "MaskEditLoss":
        sheet.take(key, "masked_loss", True, "give the masks' folder, or put them into a folder mask beside target")
        _outside(sheet, key, *(sheet.number(f"loss.init_args.{name}_weight") for name in ("foreground", "background")))
    elif short == "AttentionMaskMseLoss":
        sheet.skip(key, "padding never counts here")
    else:
        sheet.refuse(key, f"{sheet.value(key)} is not there; choose loss_type")


def _loss_argument(sheet: ForeignSheet, key: str) -> None:
    """Arguments of the loss's class."""
    name, short, value = key.removeprefix("loss.init_args."), _class_of_loss(sheet), sheet.value(key)
    if name in ("foreground_weight", "background_weight"):
        masked = short == "MaskEditLoss"
        sheet.skip(key, "it is part of masked_loss_outside_weight" if masked else "it counts where masks do; turn masked_loss on for that")
    elif name == "eps" or (name == "reduction" and value in (None, "mean")):
        sheet.skip(key, "the loss is a mean over what counts, here as well")
    else:
        sheet.refuse(key, f"{value} of {short or 'the loss'} is not there; choose loss_type")


# --- logging and validation -----------------------------------------------------------------------------------------

_TRACKERS = ("tensorboard", "wandb", "all")


@unless_empty
def _project(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key))
    safe = re.sub(r"[\x00-\x1f/\\:*?\"<>|]", "-", name).lstrip(".")[:120]
    if not safe:
        sheet.skip(key, "it is empty")
        return
    sheet.take(key, "output_name", safe)
    if sheet.value("logging.report_to") in _TRACKERS:
        _also(sheet, key, "log_tracker_name", name)


def _samples(sheet: ForeignSheet, key: str) -> None:
    samples, limit = sheet.value(key), sheet.value("validation.max_samples")
    # Guidance that is told to the model's embedding, or that of two calls.
    guidance = "g" if "sample_guidance_scale" in sheet.known else "l"
    lines = [line for line in (_prompt_line(sample, guidance) for sample in (samples if isinstance(samples, list) else [])) if line]
    lines = lines[:limit] if isinstance(limit, int) and limit >= 0 else lines
    if lines:
        seed = sheet.given.get("validation.seed", 42)
        sheet.take(key, "sample_prompts", "\n".join(f"{line} --d {seed}" for line in lines))
    else:
        sheet.refuse(key, "no sample has a prompt; write them as sample_prompts, one a line")


def _prompt_line(sample: object, guidance: str) -> str:
    """A sample as a line of sample_prompts; empty without a prompt."""
    if not isinstance(sample, Mapping) or not str(sample.get("prompt") or "").strip():
        return ""
    parts = [" ".join(str(sample["prompt"]).split())]
    images = sample.get("images") or []
    parts += [f"--ci {path}" for path in (images if isinstance(images, list) else [images])]
    flags = {"width": "w", "height": "h", "num_inference_steps": "s", "guidance_scale": guidance, "negative_prompt": "n"}
    parts += [f"--{flag} {sample[name]}" for name, flag in flags.items() if sample.get(name) not in (None, "")]
    return " ".join(parts)


def _validated(rule: Rule) -> Rule:
    """A rule of what counts while previews are drawn."""

    def asked(sheet: ForeignSheet, key: str) -> None:
        rule(sheet, key) if sheet.on("validation.enabled") else sheet.skip(key, "validation is off")

    return asked


def _sampling(sheet: ForeignSheet, key: str) -> None:
    """Images in the course of training, as versions between the two schemas wrote them."""
    if sheet.on("logging.sampling.enable") and key == "logging.sampling.validation_data" and not is_empty(sheet.value(key)):
        sheet.refuse(key, "previews edit the images named in sample_prompts; write them there")
    else:
        sheet.skip(key, "previews are drawn when there are sample_prompts, every sample_every_n_steps")


_DATA, _PROCESSOR = "data.init_args.", "data.init_args.processor.init_args."
_NO_RANK = (lambda sheet: sheet.value("model.rank") is None, "model.rank is used in its place")
_DRAWN_ANEW = "the order of the images is drawn anew in every epoch, always"

TABLE: Table = {
    **{key: _plain(option) for key, option in PLAIN.items()},
    **{key: unneeded(why) for key, why in NOT_NEEDED.items()},
    **{key: where(_NO_RANK[0], to(PLAIN[key]), _NO_RANK[1]) for key in ("model.lora.r", "model.lora.lora_alpha")},
    "trainer": _trainer,
    "mode": _mode,
    **each("", "resume resume_from_checkpoint train.resume_from_checkpoint", _resume),
    "model.pretrained_model_name_or_path": _base,
    "model.pretrained_embeddings.*": _part,
    "model.quantize": _quantize,
    "model.use_vlm_prompt_enhancer": only(False, "there is no prompt enhancer; write the instruction as you want it read"),
    "model.rank": _rank,
    "model.lora.init_lora_weights": _init,
    "model.lora.target_modules": _targets,
    "model.lora.pretrained_weight": _start,
    "data.shuffle": only(True, _DRAWN_ANEW),
    f"{_DATA}dataset_path": _dataset,
    f"{_DATA}selected_control_indexes": only(None, "name the folders of the control images that count in control_data_dir"),
    **each("", f"{_DATA}image_size {_PROCESSOR}target_size", _size),
    f"{_PROCESSOR}process_type": _process_type,
    f"{_PROCESSOR}resize_mode": to("resize_interpolation", convert=lambda value: {"linear": "bilinear"}.get(str(value), value)),
    f"{_PROCESSOR}target_pixels": _target_pixels,
    f"{_PROCESSOR}multi_resolutions": _multi_resolutions,
    **each(_PROCESSOR, "controls_size controls_pixels", _control_area),
    "optimizer.class_path": optimizer(),
    "optimizer.init_args.*": _optimizer_argument,
    "train.mixed_precision": words("mixed_precision", PRECISIONS | {"none": "no", "false": "no"}, "choose no, fp16 or bf16"),
    "train.checkpoints_total_limit": _limit,
    "train.fit_device.*": unneeded(NOT_NEEDED["train.fit_device"]),
    "cache.use_cache": _use_cache,
    "predict.*": unneeded("it is for predicting: Generate has devices of its own"),
    "loss.mask_loss": _mask_loss,
    **each("loss.", "forground_weight foreground_weight background_weight", _mask_weight),
    **each("", "loss loss.class_path", _loss_class),
    "loss.init_args.*": _loss_argument,
    "logging.report_to": words(
        "log_with",
        {name: name for name in _TRACKERS},
        "choose log_with = tensorboard or wandb. The run's own page shows the curves in any case",
    ),
    "logging.tracker_project_name": _project,
    "logging.sampling.*": _sampling,
    "validation.*": _validated(lambda sheet, key: sheet.unknown(key, sheet.program, PLAIN)),
    "validation.enabled": unneeded("previews are drawn when there are sample_prompts"),
    "validation.steps": _validated(to("sample_every_n_steps")),
    **each("validation.", "max_samples seed", _validated(unneeded("it is part of sample_prompts"))),
    "validation.samples": _validated(_samples),
    "validation.dataset": _validated(
        only(None, "previews edit the images named in sample_prompts; validation_split holds pairs out for a loss of their own")
    ),
}
