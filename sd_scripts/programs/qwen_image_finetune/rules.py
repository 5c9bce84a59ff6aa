"""What keys of qwen-image-finetune's configurations become that are no plain option."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from sd_scripts.schema.optimizer import BY_NAME

from .keys import DEFAULTS, NOT_NEEDED, NOT_READ, KeyReader, Rule
from .models import IMAGE_ATTENTION, MODELS, PARTS, ends, name_of

RULES: dict[str, Rule] = {}
"""The rule of each key that has one."""
GROUPS: dict[str, Rule] = {}
"""Rules for all keys that begin alike."""


def rule_for(*keys: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for key in keys:
            assert key not in RULES, key
            RULES[key] = rule
        return rule

    return register


# --- model ----------------------------------------------------------------------------------------------------------


@rule_for("trainer")
def _trainer(reader: KeyReader, key: str, value: object) -> None:
    base = str(reader.given.get("model.pretrained_model_name_or_path") or "").lower()
    if name_of(reader.given) not in MODELS:
        known = ", ".join(MODELS)
        reader.lose(key, f"{value} is not a trainer of that program that is known here; {known} are. It is read as {reader.model.label}")
        for option, said in reader.model.options.items():
            reader.put(option, said, key)
    elif not reader.model.options:
        reader.skip(key, f"the kind of run says it: {reader.run.label}")
    else:
        for option, said in reader.model.options.items():
            reader.take(key, option, "edit-2511" if "2511" in base and said == "edit-2509" else said)


@rule_for("mode")
def _mode(reader: KeyReader, key: str, value: object) -> None:
    ways = {"cache": "start the run with --cache_only for that", "predict": "that is what Generate is for"}
    reader.skip(key, ways.get(str(value), "a run trains, and fills its caches first"))


@rule_for("resume", "resume_from_checkpoint", "train.resume_from_checkpoint")
def _resume(reader: KeyReader, key: str, value: object) -> None:
    folder = str(value)
    if value in (None, "", False):
        reader.skip(key, "it is empty")
    elif value in ("latest", "auto", True):
        reader.take(key, "resume", "auto", "the newest run of this name goes on; where there is none, a new one starts")
    elif key == "resume" or re.search(r"(^|[/\\])checkpoint-[^/\\]*[/\\]?$", folder) or folder.endswith(".safetensors"):
        reader.refuse(
            key, "states of that program are not read; give its pytorch_lora_weights.safetensors as network_weights to go on from it"
        )
    else:
        reader.take(key, "resume", folder, "the folder of a run or of a state that was made here")


@rule_for("model.pretrained_model_name_or_path")
def _base(reader: KeyReader, key: str, value: object) -> None:
    name = str(value)
    if re.search(r"4bit|fp4|nf4|fp8", name.lower()):
        reader.refuse(key, f"{name} is quantised already, which is not read; name its original, with transformer_quantization")
        return
    reader.take(key, "pretrained_model_name_or_path", name)


@rule_for("model.quantize")
def _quantize(reader: KeyReader, key: str, value: object) -> None:
    if value is not True:
        reader.skip(key, "it is off")
    elif reader.seed_era:
        reader.take(key, "transformer_quantization", "qfloat8", "as there; qint8 is more exact in the same memory")
    else:
        reader.take(key, "transformer_quantization", "qint8")


@rule_for("model.use_vlm_prompt_enhancer")
def _enhancer(reader: KeyReader, key: str, value: object) -> None:
    if value is True:
        reader.refuse(key, "there is no prompt enhancer; write the instruction as you want it read")
    else:
        reader.skip(key, "it is off")


@rule_for("model.rank")
def _rank(reader: KeyReader, key: str, value: object) -> None:
    reader.take(key, "network_dim", value)
    reader.also(key, "network_alpha", value)


@rule_for("model.lora.init_lora_weights")
def _init(reader: KeyReader, key: str, value: object) -> None:
    if str(value) in ("gaussian", "normal", "True"):
        reader.skip(key, "the down matrices begin with random numbers and the up matrices with zeros here as well")
    else:
        reader.refuse(key, f"{value} is not there; the down matrices begin with random numbers and the up matrices with zeros")


_IMAGE = set(IMAGE_ATTENTION)
_TEXT = {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
_MLPS = {"img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"}
_MODULATION = {"img_mod.1", "txt_mod.1"}


@rule_for("model.lora.target_modules")
def _targets(reader: KeyReader, key: str, value: object) -> None:
    if value in (None, "", []):
        reader.skip(key, "it is empty")
        return
    if value == "all-linear" and "lora_targets" not in reader.known:
        reader.skip(key, "all layers of the blocks have an adapter; those outside of the blocks, which PEFT takes as well, get none")
        return
    if value == "all-linear":
        # PEFT's word for every linear layer.
        reader.take(key, "lora_targets", "all_with_modulation", "layers outside of the blocks, which PEFT takes as well, get no adapter")
        return
    if not isinstance(value, list):
        # There a text is an expression for the whole name.
        _patterns(reader, key, [f"^(?:{value})$"])
        return
    names = {str(item) for item in value}
    presets = {
        "image_attention": _IMAGE,
        "attention": _IMAGE | _TEXT,
        "all": _IMAGE | _TEXT | _MLPS,
        "all_with_modulation": _IMAGE | _TEXT | _MLPS | _MODULATION,
    }
    preset = next((preset for preset, members in presets.items() if names == members), None)
    if preset is not None and "lora_targets" in reader.known:
        reader.take(key, "lora_targets", preset)
    else:
        _patterns(reader, key, ends(names))


def _patterns(reader: KeyReader, key: str, patterns: list[str]) -> None:
    reader.take(key, "target_modules", patterns)
    # target_modules choose among these.
    reader.also(key, "lora_targets", "all_with_modulation")


@rule_for("model.lora.pretrained_weight")
def _start(reader: KeyReader, key: str, value: object) -> None:
    if value in (None, ""):
        reader.skip(key, "it is empty")
    elif not str(value).endswith(".safetensors"):
        reader.refuse(key, "only a .safetensors file on this machine can be started from; download it and give it as network_weights")
    else:
        reader.take(key, "network_weights", str(value))


# --- data -----------------------------------------------------------------------------------------------------------


@rule_for("data.shuffle")
def _shuffle(reader: KeyReader, key: str, value: object) -> None:
    if value is False:
        reader.refuse(key, "the order of the images is drawn anew in every epoch, always")
    else:
        reader.skip(key, "the order of the images is drawn anew in every epoch, always")


@rule_for("data.init_args.dataset_path")
def _dataset(reader: KeyReader, key: str, value: object) -> None:
    paths = value if isinstance(value, list) else [value]
    if any(isinstance(path, Mapping) for path in paths):
        reader.refuse(key, "data sets of the hub are not read; export it to folders target and control, and give that as train_data_dir")
    elif len(paths) != 1:
        reader.refuse(key, "several folders are written into a dataset_config, one [[datasets.subsets]] each")
    elif str(paths[0]).endswith((".csv", ".jsonl")):
        reader.take(key, "in_json", str(paths[0]))
        reader.also(key, "train_data_dir", str(PurePosixPath(str(paths[0]).replace("\\", "/")).parent))
    elif paths[0] in (None, ""):
        reader.skip(key, "it is empty")
    else:
        reader.take(key, "train_data_dir", str(paths[0]))


@rule_for("data.init_args.selected_control_indexes")
def _selected(reader: KeyReader, key: str, value: object) -> None:
    if value in (None, []):
        reader.skip(key, "it is empty, and all control images are used")
    else:
        reader.refuse(key, "name the folders of the control images that count in control_data_dir")


@rule_for("data.init_args.image_size")
def _image_size(reader: KeyReader, key: str, value: object) -> None:
    _size(reader, key, value, "images keep their own aspect ratio while enable_bucket is on")


_PROCESSOR = "data.init_args.processor.init_args."


@rule_for(_PROCESSOR + "target_size")
def _target_size(reader: KeyReader, key: str, value: object) -> None:
    # There the height comes first.
    _size(reader, key, list(reversed(value)) if isinstance(value, list) else value, "width first here")


def _size(reader: KeyReader, key: str, value: object, text: str) -> None:
    if value in (None, []):
        reader.skip(key, "it is empty")
    elif isinstance(value, list) and len(value) == 2 and all(isinstance(side, int) for side in value):
        _resolution(reader, key, value, text)
    else:
        reader.refuse(key, f"{value} is not a pair of whole numbers; give resolution")


def _resolution(reader: KeyReader, key: str, sides: list[int], text: str) -> None:
    reader.take(key, "resolution", sides, text)
    smallest = reader.known["min_bucket_reso"].default
    if isinstance(smallest, int) and min(sides) < smallest:
        reader.also(key, "min_bucket_reso", min(sides))


@rule_for(_PROCESSOR + "process_type")
def _process_type(reader: KeyReader, key: str, value: object) -> None:
    if value == "center_crop":
        reader.take(key, "enable_bucket", False, "images are cut at the centre to one shape")
    elif value in ("fixed_pixels", None):
        reader.skip(key, "buckets keep the number of pixels and the aspect ratio")
    else:
        reader.refuse(key, f"{value} is not there: with enable_bucket images keep their shape, without it they are cut at the centre")


@rule_for(_PROCESSOR + "resize_mode")
def _resize_mode(reader: KeyReader, key: str, value: object) -> None:
    reader.take(key, "resize_interpolation", {"linear": "bilinear"}.get(str(value), value))


@rule_for(_PROCESSOR + "target_pixels")
def _target_pixels(reader: KeyReader, key: str, value: object) -> None:
    side = _side(value)
    if value in (None, "", []):
        reader.skip(key, "it is empty")
    elif side is None:
        reader.refuse(key, f"{value} is not a number of pixels; give resolution")
    else:
        _resolution(reader, key, [side, side], "about the same number of pixels, in each image's own aspect ratio")


@rule_for(_PROCESSOR + "multi_resolutions")
def _multi_resolutions(reader: KeyReader, key: str, value: object) -> None:
    areas = value.get("target") if isinstance(value, Mapping) else value
    sides = [_side(area) for area in areas] if isinstance(areas, list) else []
    if value in (None, [], {}):
        reader.skip(key, "it is empty")
    elif not sides or None in sides:
        reader.refuse(key, f"{value} is not a list of numbers of pixels; give resolution and additional_resolutions")
    else:
        largest = max(side for side in sides if side is not None)
        _resolution(reader, key, [largest, largest], "each image at about its own size up to this, never enlarged")


@rule_for(_PROCESSOR + "controls_size")
def _controls_size(reader: KeyReader, key: str, value: object) -> None:
    sizes = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    good = all(isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size) for size in sizes)
    areas = {size[0] * size[1] for size in sizes if isinstance(size, list)} if good else set()
    _control_area(reader, key, value, areas)


@rule_for(_PROCESSOR + "controls_pixels")
def _controls_pixels(reader: KeyReader, key: str, value: object) -> None:
    sides = [_side(area) for area in (value if isinstance(value, list) else [value])]
    _control_area(reader, key, value, {side * side for side in sides if side is not None} if None not in sides else set())


def _control_area(reader: KeyReader, key: str, value: object, areas: set[int]) -> None:
    if value in (None, []):
        reader.skip(key, "it is empty")
    elif len(areas) != 1:
        reader.refuse(key, f"{value}: control images have one area here; give control_resolution")
    else:
        side = max(16, round(math.sqrt(areas.pop()) / 16) * 16)
        reader.take(key, "control_resolution", side, "about the same area, in each image's own aspect ratio")


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

_OPTIMIZERS = {
    **BY_NAME,
    "adam8bit": "AdamW8bit",
    "pagedadam8bit": "PagedAdamW8bit",
    "adam": "AdamW",
}


@rule_for("optimizer.class_path")
def _optimizer(reader: KeyReader, key: str, value: object) -> None:
    short = str(value).rpartition(".")[2].lower()
    if short in _OPTIMIZERS:
        reader.take(
            key, "optimizer_type", _OPTIMIZERS[short], "" if "w" in short or "adam" not in short else "its weight decay is decoupled"
        )
    else:
        reader.refuse(key, f"{value} is not built in; AdamW is used. Any class works with --allow_custom_modules on the command line")


def _optimizer_argument(reader: KeyReader, key: str, value: object) -> None:
    """Arguments besides the rate; the first of them carries all."""
    prefix = "optimizer.init_args."
    names = [name for name in reader.given if name.startswith(prefix) and name != f"{prefix}lr"]
    if key != names[0]:
        reader.skip(key, "it stands in optimizer_args together with the others")
        return
    pairs = [f"{name.removeprefix(prefix)}={_literal(reader.given[name])}" for name in names if reader.given[name] is not None]
    reader.take(key, "optimizer_args", pairs)


def _literal(value: object) -> str:
    """The value as a Python literal; YAML reads 1e-8 as a text."""
    if isinstance(value, list):
        return "(" + ",".join(_literal(item) for item in value) + ")"
    return str(value)


@rule_for("train.mixed_precision")
def _precision(reader: KeyReader, key: str, value: object) -> None:
    reader.take(key, "mixed_precision", {"fp32": "no", "float32": "no", "None": "no", "False": "no"}.get(str(value), value))


@rule_for("train.checkpoints_total_limit")
def _limit(reader: KeyReader, key: str, value: object) -> None:
    every = reader.given.get("train.checkpointing_steps", DEFAULTS["save_every_n_steps"])
    if not isinstance(value, int) or isinstance(value, bool) or not isinstance(every, int):
        reader.skip(key, "it is empty")
    elif reader.seed_era:
        reader.take(key, "save_last_n_steps", value * every, "the same number of files")
    else:
        reader.skip(key, NOT_READ)


@rule_for("cache.use_cache")
def _use_cache(reader: KeyReader, key: str, value: object) -> None:
    on = value is not False
    reader.take(key, "cache_latents", on)
    reader.also(key, "cache_text_encoder_outputs", on)


@rule_for("loss.mask_loss")
def _mask_loss(reader: KeyReader, key: str, value: object) -> None:
    if value is True:
        reader.take(key, "masked_loss", True)
        front, back = _weight(reader, "forground_weight", 2.0), _weight(reader, "background_weight", 1.0)
        reader.also(key, "masked_loss_outside_weight", min(1.0, back / front) if front > 0 else 1.0)
    else:
        reader.skip(key, "it is off")


@rule_for("loss.forground_weight", "loss.foreground_weight", "loss.background_weight")
def _mask_weight(reader: KeyReader, key: str, value: object) -> None:
    if reader.given.get("loss.mask_loss") is True:
        reader.skip(key, "it is part of masked_loss_outside_weight, the background's weight divided by the foreground's")
    else:
        reader.skip(key, "it counts with mask_loss only, which is off")


def _weight(reader: KeyReader, name: str, default: float) -> float:
    return _number(reader.given.get(f"loss.{name}", reader.given.get(f"loss.{name.replace('forg', 'foreg')}", default)), default)


def _class_of_loss(reader: KeyReader) -> str:
    return str(reader.given.get("loss.class_path") or "").rpartition(".")[2]


@rule_for("loss", "loss.class_path")
def _loss_class(reader: KeyReader, key: str, value: object) -> None:
    short = str(value or "").rpartition(".")[2]
    if short in ("", "MseLoss", "MSELoss"):
        reader.skip(key, "the squared error is the loss here as well")
    elif short == "MaskEditLoss":
        reader.take(key, "masked_loss", True, "give the masks' folder, or put them into a folder mask beside target")
        front, back = (_number(reader.given.get(f"loss.init_args.{name}_weight"), default) for name, default in _WEIGHTS)
        reader.also(key, "masked_loss_outside_weight", min(1.0, back / front) if front > 0 else 1.0)
    elif short == "AttentionMaskMseLoss":
        reader.skip(key, "padding never counts here")
    else:
        reader.refuse(key, f"{value} is not there; choose loss_type")


_WEIGHTS = (("foreground", 2.0), ("background", 1.0))


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _loss_argument(reader: KeyReader, key: str, value: object) -> None:
    """Arguments of the loss's class."""
    name, short = key.removeprefix("loss.init_args."), _class_of_loss(reader)
    if name in ("foreground_weight", "background_weight"):
        masked = short == "MaskEditLoss"
        reader.skip(key, "it is part of masked_loss_outside_weight" if masked else "it counts where masks do; turn masked_loss on for that")
    elif name == "eps" or (name == "reduction" and value in (None, "mean")):
        reader.skip(key, "the loss is a mean over what counts, here as well")
    else:
        reader.refuse(key, f"{value} of {short or 'the loss'} is not there; choose loss_type")


# --- logging and validation -----------------------------------------------------------------------------------------


@rule_for("logging.report_to")
def _report_to(reader: KeyReader, key: str, value: object) -> None:
    if value in (None, "", "none"):
        reader.skip(key, "it is empty")
    elif value in ("tensorboard", "wandb", "all"):
        reader.take(key, "log_with", value)
    else:
        reader.refuse(key, f"{value} is not there; choose log_with = tensorboard or wandb. The run's own page shows the curves in any case")


@rule_for("logging.tracker_project_name")
def _project(reader: KeyReader, key: str, value: object) -> None:
    name = re.sub(r"[\x00-\x1f/\\:*?\"<>|]", "-", str(value or "")).lstrip(".")[:120]
    if not name:
        reader.skip(key, "it is empty")
        return
    reader.take(key, "output_name", name)
    if reader.given.get("logging.report_to") in ("tensorboard", "wandb", "all"):
        reader.also(key, "log_tracker_name", str(value))


@rule_for("validation.samples")
def _samples(reader: KeyReader, key: str, value: object) -> None:
    if reader.given.get("validation.enabled") is not True:
        reader.skip(key, "validation is off")
        return
    # Guidance that is told to the model's embedding, or that of two calls.
    guidance = "g" if "sample_guidance_scale" in reader.known else "l"
    lines = [line for line in (_prompt_line(sample, guidance) for sample in (value if isinstance(value, list) else [])) if line]
    limit = reader.given.get("validation.max_samples")
    lines = lines[:limit] if isinstance(limit, int) and limit >= 0 else lines
    if lines:
        seed = reader.given.get("validation.seed", 42)
        reader.take(key, "sample_prompts", "\n".join(f"{line} --d {seed}" for line in lines))
    else:
        reader.refuse(key, "no sample has a prompt; write them as sample_prompts, one a line")


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


def _validation(reader: KeyReader, key: str, value: object) -> None:
    name = key.removeprefix("validation.")
    on = reader.given.get("validation.enabled") is True
    if name == "enabled" or not on:
        reader.skip(key, "previews are drawn when there are sample_prompts" if on else "validation is off")
    elif name == "steps":
        reader.take(key, "sample_every_n_steps", value)
    elif name in ("max_samples", "seed"):
        reader.skip(key, "it is part of sample_prompts")
    elif value in (None, ""):
        reader.skip(key, "it is empty")
    elif name == "dataset":
        reader.refuse(key, "previews edit the images named in sample_prompts; validation_split holds pairs out for a loss of their own")
    else:
        reader.refuse(key, "it is not known")


def _sampling(reader: KeyReader, key: str, value: object) -> None:
    """Images in the course of training, as versions between the two schemas wrote them."""
    if reader.given.get("logging.sampling.enable") is True and key == "logging.sampling.validation_data" and value not in (None, ""):
        reader.refuse(key, "previews edit the images named in sample_prompts; write them there")
    else:
        reader.skip(key, "previews are drawn when there are sample_prompts, every sample_every_n_steps")


def _part(reader: KeyReader, key: str, value: object) -> None:
    """A part that comes from elsewhere than the base model."""
    option = PARTS.get(reader.run.family, {}).get(key.rpartition(".")[2])
    if option is None or value in (None, ""):
        reader.skip(key, "that program does not use it for this model" if option is None else "it is empty")
    else:
        reader.take(key, option, str(value))


def _predict_device(reader: KeyReader, key: str, value: object) -> None:
    """Devices of prediction: no option of a run, but kept for who predicts."""
    name = key.removeprefix("predict.devices.")
    options = {
        "transformer": "transformer_device",
        "dit": "transformer_device",
        "vae": "vae_device",
        "vae_encoder": "vae_device",
        "text_encoder": "text_encoder_device",
    }
    if value not in (None, "") and name in options:
        reader.predict[options[name]] = value
    reader.skip(key, "it is for predicting: Generate has devices of its own")


GROUPS |= {
    "loss.init_args.": _loss_argument,
    "logging.sampling.": _sampling,
    "train.fit_device.": lambda reader, key, value: reader.skip(key, NOT_NEEDED["train.fit_device"]),
    "optimizer.init_args.": _optimizer_argument,
    "validation.": _validation,
    "predict.": _predict_device,
    "model.pretrained_embeddings.": _part,
}
