"""diffusion-pipe's main files (TOML), as a kind of run, values and a report, and its dataset files, which a main file names.

Facts about the other program are those of its commit 8f83dbf (2026-08), read in its code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.sheet import is_empty, number, shown, unless_empty

from .table import (
    ARGUMENT_NAMES,
    DIFFUSERS_LINE,
    DataFile,
    ForeignSheet,
    NamedModel,
    Rule,
    Table,
    among,
    assume_layers,
    each,
    fill,
    here,
    kind_of_run,
    literal,
    more_than_zero,
    only,
    opened,
    optimizer,
    optimizer_of,
    quantized,
    released,
    sizes,
    switch_to,
    take_arguments,
    times,
    times_by_size,
    to,
    unneeded,
    where,
    words,
)

PROGRAM = "diffusion-pipe"
_TWICE = 32
"""The side in pixels of what it counts as a token of FLUX.2, of whose latents, which are patches already, it makes patches once more."""
MODELS: Mapping[str, NamedModel] = {
    "sdxl": NamedModel("sdxl", "SDXL"),
    "flux": NamedModel("flux", "FLUX.1"),
    "flux_kontext": NamedModel("kontext", "FLUX.1 Kontext"),
    "flux2": NamedModel("flux2_dev", "FLUX.2 dev", token=_TWICE),
    "flux2_klein": NamedModel("flux2", "FLUX.2 Klein", token=_TWICE),
    "chroma": NamedModel("chroma", "Chroma"),
    "krea2": NamedModel("krea2", "Krea 2", beyond="the layers that join the texts"),
    "anima": NamedModel("anima", "Anima"),
    "qwen_image": NamedModel("qwen_edit", "Qwen-Image", {"model_version": "image"}, layers={"lora_targets": "all_with_modulation"}),
    "z_image": NamedModel("zimage", "Z-Image", layers={"lora_targets": "all"}),
    **{
        name: NamedModel("", label)
        for name, label in {
            "ltx-video": "LTX-Video, a model of videos",
            "ltx2": "LTX-2, a model of videos",
            "hunyuan-video": "HunyuanVideo",
            "hunyuan_video_15": "HunyuanVideo 1.5",
            "hunyuan_image": "HunyuanImage",
            "cosmos": "Cosmos",
            "cosmos_predict2": "Cosmos-Predict2",
            "lumina_2": "Lumina 2",
            "wan": "Wan, a model of videos",
            "hidream": "HiDream-I1",
            "sd3": "Stable Diffusion 3",
            "omnigen2": "OmniGen2",
            "auraflow": "AuraFlow",
            "ernie_image": "ERNIE-Image",
            "ideogram4": "Ideogram 4",
            "minimax_h3": "MiniMax-H3, a model of videos",
        }.items()
    },
}
_DEFAULTS: dict[str, object] = {
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "max_train_epochs": 1000,
    "sample_at_first": False,
    "enable_bucket": True,
    "timestep_sampling": "sigmoid",
    "bucket_no_upscale": False,
}
"""That program's own, where they may not be ours."""
_MODEL_PIECES = {"flux_kontext": ("flux", "kontext"), "flux2_klein": ("flux2", "klein")}


def looks_like(given: Mapping[str, object]) -> bool:
    """Whether a file's tables are the main file of that program."""
    model = given.get("model")
    return isinstance(model, Mapping) and "type" in model and ("micro_batch_size_per_gpu" in given or "dataset" in given)


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings of a main file, with a row for each key, named by its path. Raises OptionError for what is not trained here."""
    model = given.get("model")
    if not isinstance(model, Mapping):
        raise OptionError(f"{name} is a file of {PROGRAM} without a table [model]; give the main file")
    kind = str(model.get("type") or "")
    files = " ".join(str(value) for value in model.values()).lower()
    kind = next((name for name, (base, piece) in _MODEL_PIECES.items() if kind == base and piece in files), kind)
    run, found = kind_of_run(PROGRAM, name, MODELS, kind, "network" if isinstance(given.get("adapter"), Mapping) else "full")
    sheet = ForeignSheet(PROGRAM, run, opened(given), found)
    for option, value in found.options.items():
        sheet.put(option, "edit" if option == "model_version" and "edit" in files else value, "model.type")
    fill(sheet, TABLE)
    assume_layers(sheet)
    defaults = {name: value for name, value in _DEFAULTS.items() if name != "max_train_epochs" or not sheet.decided("max_train_steps")}
    if sheet.number("warmup_steps"):
        defaults["lr_scheduler"] = "constant_with_warmup"
    return sheet.finish(f"configuration of {PROGRAM}", defaults)


def _file(*names: str) -> Rule:
    """A part of the model: the first of our options that this kind of run has."""

    @unless_empty
    def rule(sheet: ForeignSheet, key: str) -> None:
        option = next((name for name in names if name in sheet.known), None)
        if option is None:
            sheet.refuse(key, "this part comes with the base model")
        else:
            sheet.take(key, option, sheet.value(key))

    return rule


def _folder(sheet: ForeignSheet, key: str) -> None:
    """A diffusers folder: the base model, or what is left of it beside a transformer of its own."""
    if is_empty(sheet.value("model.transformer_path")):
        to("pretrained_model_name_or_path")(sheet, key)
        return
    for option in ("vae", "ae", "text_encoder", "t5xxl", "clip_l"):
        if option in sheet.known:
            sheet.put(option, sheet.value(key), key)
    sheet.write(key, "renamed", "the other parts of the model beside transformer_path")


def _dataset(sheet: ForeignSheet, key: str) -> None:
    sheet.lose(key, "the file was not there to be read; open it too, or give the folder of its images as train_data_dir")


def looks_like_data(given: object) -> bool:
    """Whether a file's tables are a dataset file of that program: it alone has a list of tables `directory`."""
    tables = given.get("directory") if isinstance(given, Mapping) else None
    return isinstance(tables, list) and any(isinstance(table, Mapping) and "path" in table for table in tables)


def _places(sheet: ForeignSheet, key: str) -> list[str]:
    """The directories that a key is for: its own, or all without a word of theirs on it."""
    own = re.match(r"dataset\.directory\[\d+\]", key)
    found = dict.fromkeys(one[0] for name in sheet.given if (one := re.match(r"dataset\.directory\[\d+\]", name)))
    name = key.rpartition(".")[2]
    return [own[0]] if own else [place for place in found if f"{place}.{name}" not in sheet.given]


def _data(option: str, note: str = "", convert: Callable[[Any], object] = lambda value: value) -> Rule:
    """An option of a directory, or of all that say nothing else."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        places = _places(sheet, key)
        if is_empty(sheet.value(key)) or not places:
            sheet.skip(key, "it is empty" if places else "each directory says it itself")
        for place in places if not is_empty(sheet.value(key)) else ():
            sheet.set_here(key, option, convert(sheet.value(key)), note, at=place)

    return rule


def _resolutions(sheet: ForeignSheet, key: str) -> None:
    """Areas, as sides of squares or as pairs of sides."""
    value = sheet.value(key)
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2] if isinstance(value, list) else []
    areas = [(number(pair[0]) or 0) * (number(pair[1]) or 0) for pair in pairs]
    found = sizes([round(area**0.5) for area in areas] if pairs else value)
    if found is None:
        sheet.refuse(key, f"{shown(value)} are no sides in pixels; give resolution")
        return
    side, others = found
    size = pairs[0] if len(pairs) == 1 else [side, side]
    for place in _places(sheet, key):
        sheet.set_here(key, "resolution", size, f"and additional_resolutions = {shown(others)}" if others else "", at=place)
        if others:
            sheet.one(place)["additional_resolutions"] = (others, key)


def _shuffled(sheet: ForeignSheet, key: str) -> None:
    """Versions of a caption that are made once."""
    count = sheet.number(key) or 0
    if count < 1:
        sheet.skip(key, "captions stay as they are")
    else:
        _data("shuffle_caption", f"{count:g} versions of each caption, as there", lambda _value: True)(sheet, key)
        for place in _places(sheet, key):
            sheet.one(place)["caption_variants"] = (int(count), key)


def _directory(sheet: ForeignSheet, key: str) -> None:
    here("image_dir")(sheet, key)
    if all(is_empty(value) for value in (sheet.beside(key, "enable_ar_bucket"), sheet.value("dataset.enable_ar_bucket"))):
        sheet.one(key)["enable_bucket"] = (False, key)


def _folders_beside(sheet: ForeignSheet, key: str) -> None:
    if key.endswith("mask_path"):
        sheet.set_here(key, "conditioning_data_dir", sheet.value(key), "with masked_loss")
        sheet.one(key)["masked_loss"] = (True, key)
    elif "control_data_dir" in sheet.known:
        sheet.set_here(key, "control_data_dir", [str(sheet.value(key))])
    else:
        sheet.lose(key, "this model takes no control images")


_FINER = unneeded("buckets are all sizes of about that area, in steps of bucket_reso_steps, which are finer")
_OF_ALL: Table = {
    "resolutions": _resolutions,
    "enable_ar_bucket": _data("enable_bucket"),
    **each("", "min_ar max_ar num_ar_buckets ar_buckets", _FINER),
    "size_buckets": only(None, "shapes are not chosen one by one; give resolution", banner=True),
    "frame_buckets": unneeded("images are one frame"),
    "num_repeats": _data("num_repeats", convert=lambda value: max(1, round(number(value) or 1))),
    "cache_shuffle_num": _shuffled,
    "cache_shuffle_delimiter": _data("caption_separator", convert=lambda value: str(value).strip() or value),
    "shuffle_tags": _data("shuffle_caption"),
    "caption_prefix": _data("caption_prefix", "followed by a space", lambda value: str(value).strip()),
    "skip_empty_caption": only(True, "an image without a text is shown with instance_prompt, or with nothing"),
    "online_captions": only(False, "captions.json is not read; give a metadata file as in_json", banner=True),
    "shuffle_metadata": unneeded("the order is drawn anew in each epoch"),
}
_DATA_TABLE: Table = {
    **{f"dataset.{name}": rule for name, rule in _OF_ALL.items()},
    **{f"dataset.directory[].{name}": rule for name, rule in _OF_ALL.items()},
    "dataset.directory[].path": _directory,
    **each("dataset.directory[].", "mask_path control_path", _folders_beside),
    "dataset.directory[].default_mask_file": only(None, "an image without a mask counts everywhere", banner=True),
    "dataset.subsample_ratio": only(1, "all images are shown in each epoch", banner=True),
}


def _batch(sheet: ForeignSheet, key: str) -> None:
    value = sheet.value(key)
    if isinstance(value, list):
        sizes = [pair[1] for pair in value if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)]
        sheet.put("train_batch_size", min(sizes, default=1), key)
        sheet.lose(key, f"one batch size holds for all resolutions; train_batch_size = {min(sizes, default=1)} was put, the smallest")
    else:
        sheet.take(key, "train_batch_size", value)


def _length(sheet: ForeignSheet, key: str) -> None:
    if key == "max_steps":
        sheet.take(key, "max_train_steps", sheet.value(key), "it ends the run there whatever epochs says")
    elif sheet.number("max_steps"):
        sheet.skip(key, "max_steps ends the run before")
    else:
        sheet.take(key, "max_train_epochs", sheet.value(key))


def _checkpointing(sheet: ForeignSheet, key: str) -> None:
    if sheet.value(key) == "unsloth":
        sheet.put("gradient_checkpointing_cpu_offload", True, key)
        sheet.take(key, "gradient_checkpointing", True, "with gradient_checkpointing_cpu_offload")
    else:
        sheet.take(key, "gradient_checkpointing", sheet.value(key))


def _stages(sheet: ForeignSheet, key: str) -> None:
    if (sheet.number(key) or 1) <= 1:
        sheet.skip(key, "1 is one device for the whole model")
    else:
        sheet.lose(key, "a model is not cut into stages; distributed_strategy = fsdp2 shards it, blocks_to_swap keeps blocks in host RAM")


def _bits(sheet: ForeignSheet, key: str) -> None:
    value = str(sheet.value(key))
    if value in ("bfloat16", "float16", "float32"):
        sheet.skip(key, "mixed_precision says it")
    elif value.startswith("float8") and sheet.has("transformer_quantization", "fp8") and sheet.run.method == "network":
        sheet.take(key, "transformer_quantization", "fp8", "without a scale, as there")
    else:
        quantized(sheet, key, value)


def _times(sheet: ForeignSheet, key: str) -> None:
    """sigmoid(scale N) or uniform, then a shift s by t' = s t / (1 + (s - 1) t)."""
    if "model_prediction_type" not in sheet.known:
        sheet.skip(key, "it is for flow matching; this run has a noise schedule")
        return
    if key != next(name for name in sheet.given if name in _OF_TIMES):
        sheet.skip(key, "timestep_sampling and its numbers hold it")
        return
    uniform = sheet.value("model.timestep_sample_method") == "uniform"
    scale = sheet.number("model.sigmoid_scale") or 1.0
    shift = sheet.number("model.shift")
    by_size = sheet.on("model.flux_shift") and not shift
    spread: dict[str, float] = {} if uniform or scale == 1 else {"sigmoid_scale": scale}
    if by_size:
        found = (sizes(sheet.value(name)) for name in sheet.given if name.endswith("resolutions"))
        side = next((one[0] for one in found if one), 1024)
        times_by_size(sheet, key, side, DIFFUSERS_LINE, even=uniform, scale=1.0 if uniform else scale)
    elif shift:
        times(sheet, key, "sigma" if uniform else "shift", "", discrete_flow_shift=shift, **spread)
    else:
        times(sheet, key, "uniform" if uniform else "sigmoid", "", **spread)


_OF_TIMES = ("model.timestep_sample_method", "model.sigmoid_scale", "model.shift", "model.flux_shift")


def _range(option: str, usual: float) -> Rule:
    def rule(sheet: ForeignSheet, key: str) -> None:
        value = sheet.number(key)
        if value is None or value == usual:
            sheet.skip(key, f"{usual:g} is all of them")
        else:
            sheet.take(key, option, round(value * 1000))

    return rule


def _rank(sheet: ForeignSheet, key: str) -> None:
    rank = sheet.number(key) or 0
    if rank > 4096:
        sheet.take(key, "network_dim", 4096, "whole matrices, which is what so large a rank asks for")
    else:
        sheet.take(key, "network_dim", sheet.value(key), "alpha = rank, as there")


def _optimizer_argument(sheet: ForeignSheet, key: str) -> None:
    """What optimizer_args have of it; the first key carries them all."""
    ours, why = optimizer_of(str(sheet.value("optimizer.type") or "adamw"))
    kept = [name for name in ("betas", "weight_decay", "eps", "momentum") if not is_empty(sheet.value(f"optimizer.{name}"))]
    if why or ours in ("Adafactor", "SGD"):
        kept = [name for name in kept if not why and name in ("weight_decay", "momentum")]
    elif ours in ("Lion", "Lion8bit"):
        kept = [name for name in kept if name in ("betas", "weight_decay")]
    name = key.rpartition(".")[2]
    if name not in kept:
        sheet.skip(key, f"it belongs to an optimizer that {ours} replaces" if why else f"{ours} does it its own way, or has no such thing")
    else:
        take_arguments(sheet, key, [f"{one}={literal(sheet.value(f'optimizer.{one}'))}" for one in kept])


def _clipping(sheet: ForeignSheet, key: str) -> None:
    if sheet.on("optimizer.gradient_release"):
        sheet.skip(key, "gradient_release clips nothing, there as well")
    else:
        sheet.take(key, "max_grad_norm", sheet.value(key))


def _by_examples(option: str) -> Rule:
    """Images seen between two of them; a step has a batch for each that is accumulated."""

    def rule(sheet: ForeignSheet, key: str) -> None:
        batch = (sheet.number("micro_batch_size_per_gpu") or 1) * (sheet.number("gradient_accumulation_steps") or 1)
        count = sheet.number(key)
        if not count:
            sheet.skip(key, "it is off")
        else:
            sheet.take(key, option, max(1, round(count / batch)), f"{shown(count)} images are so many steps of one process")

    return rule


def _schedule(sheet: ForeignSheet, key: str) -> None:
    """A rate that stays may rise before."""
    name = str(sheet.value(key)).lower()
    if name in ("constant", "none"):
        sheet.take(key, key, "constant_with_warmup" if sheet.number("warmup_steps") else "constant")
    elif name in ("linear", "cosine"):
        sheet.take(key, key, name)
    else:
        sheet.lose(key, "it is not here; choose lr_scheduler")


def _huber(sheet: ForeignSheet, key: str) -> None:
    if not number(sheet.value(key)):
        sheet.skip(key, "it is off")
        return
    sheet.put("huber_c", sheet.value(key), key)
    sheet.put("huber_schedule", "constant", key)
    sheet.take(key, "loss_type", "huber", "with a constant huber_c")


def _fused(sheet: ForeignSheet, key: str) -> None:
    if key.endswith("].path"):
        paths = [value for name, value in sheet.given.items() if name.startswith("adapter.fuse_adapters[") and name.endswith("].path")]
        sheet.take(key, "base_weights", [str(path) for path in paths])
    else:
        weights = [value for name, value in sheet.given.items() if name.startswith("adapter.fuse_adapters[") and name.endswith("].weight")]
        sheet.take(key, "base_weights_multiplier", [str(weight) for weight in weights])


def _merged(sheet: ForeignSheet, key: str) -> None:
    """LoRA files under the trained one: one that undoes a distillation while training where there is such a thing, else merged for good."""
    files = sheet.value(key) if isinstance(sheet.value(key), list) else [sheet.value(key)]
    paths = [str(path) for path in (files if isinstance(files, list) else []) if not is_empty(path)]
    if not paths:
        sheet.skip(key, "it is empty")
    elif "training_adapter" in sheet.known and len(paths) == 1:
        sheet.take(key, "training_adapter", paths[0])
    else:
        sheet.take(key, "base_weights", paths)


def _text_rate(sheet: ForeignSheet, key: str) -> None:
    """Text encoders are trained there unless their rate is 0."""
    rates = [sheet.number(f"model.text_encoder_{index}_lr") for index in (1, 2)]
    given = [rate for rate in rates if rate is not None]
    if not any(given) or "train_text_encoder" not in sheet.known:
        sheet.skip(key, "0 leaves the text encoders as they are, which is the default here")
        return
    sheet.put("train_text_encoder", True, key)
    sheet.put("cache_text_encoder_outputs", False, key)
    sheet.take(key, "text_encoder_lr", [str(rate) for rate in given])


_EVALUATION = unneeded("validation_split holds out a part of the images; its loss is measured with each saved file")
_PROCESS = unneeded("it says how processes of that program work, not what is trained")

TABLE: Table = {
    "output_dir": to("output_dir"),
    "dataset": _dataset,
    **_DATA_TABLE,
    "epochs": _length,
    "max_steps": _length,
    "micro_batch_size_per_gpu": _batch,
    "gradient_accumulation_steps": to("gradient_accumulation_steps"),
    "gradient_clipping": _clipping,
    "warmup_steps": to("lr_warmup_steps"),
    "lr_scheduler": _schedule,
    "force_constant_lr": only(None, "give learning_rate with lr_scheduler = constant", banner=True),
    "pipeline_stages": _stages,
    "blocks_to_swap": more_than_zero("blocks_to_swap"),
    "pseudo_huber_c": _huber,
    **each("", "huber_delta smooth_l1_beta", only(None, "choose loss_type and huber_c", banner=True)),
    "activation_checkpointing": _checkpointing,
    "save_every_n_epochs": more_than_zero("save_every_n_epochs"),
    "save_every_n_steps": more_than_zero("save_every_n_steps"),
    "save_every_n_examples": _by_examples("save_every_n_steps"),
    "checkpoint_every_n_epochs": unneeded("training states are kept with each saved file and at the end"),
    "checkpoint_every_n_minutes": unneeded("states are kept with each saved file and at the end; save_state_every_n_steps keeps more"),
    "save_dtype": words(
        "save_precision", {"bfloat16": "bf16", "float16": "fp16", "float32": "float"}, "choose save_precision float, fp16 or bf16"
    ),
    "caching_batch_size": to("vae_batch_size"),
    "map_num_proc": unneeded("images are read in threads"),
    "compile": to("compile"),
    "logging_steps": to("log_every_n_steps"),
    "uncond_fraction": more_than_zero("caption_dropout_rate"),
    **each("", "steps_per_print x_axis_examples partition_method partition_split reentrant_activation_checkpointing", _PROCESS),
    **each("", "video_clip_mode image_micro_batch_size_per_gpu image_eval_micro_batch_size_per_gpu", unneeded("it is for videos")),
    **each(
        "", "eval_every_n_epochs eval_every_n_steps eval_every_n_examples eval_before_first_step eval_micro_batch_size_per_gpu", _EVALUATION
    ),
    **each("", "eval_gradient_accumulation_steps disable_block_swap_for_eval eval_datasets", _EVALUATION),
    "eval_datasets[].*": _EVALUATION,
    **each("", "resume_from_checkpoint", only(None, "its states are not read; give the last saved file as network_weights")),
    "regenerate_cache": unneeded("what changed is encoded anew by itself"),
    "model.type": unneeded("the kind of run says it"),
    "model.diffusers_path": _folder,
    "model.checkpoint_path": to("pretrained_model_name_or_path"),
    "model.transformer_path": to("pretrained_model_name_or_path", "the transformer alone, with its other parts beside it"),
    "model.diffusion_model": to("pretrained_model_name_or_path", "the transformer alone, with its other parts beside it"),
    **each("model.", "vae_path vae", _file("vae", "ae")),
    "model.text_encoder_path": _file("text_encoder", "t5xxl"),
    "model.llm_path": _file("text_encoder", "t5xxl"),
    "model.qwen_path": _file("text_encoder"),
    "model.llm_adapter_lr": only(0, "the text conditioner stays as it is"),
    "model.clip_path": _file("clip_l"),
    **each("model.", "text_encoders[].path", _file("text_encoder", "t5xxl")),
    "model.text_encoders[].paths": only(None, "give each text encoder by its own option", banner=True),
    "model.text_encoders[].type": unneeded("the family says it"),
    "model.merge_adapters": _merged,
    "model.dtype": words("mixed_precision", {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}, "choose mixed_precision"),
    **each("model.", "transformer_dtype diffusion_model_dtype", _bits),
    **each("model.", "timestep_sample_method sigmoid_scale shift flux_shift lumina_shift", _times),
    "model.min_t": _range("min_timestep", 0.0),
    "model.max_t": _range("max_timestep", 1.0),
    "model.guidance": where(lambda sheet: "guidance_scale" in sheet.known, to("guidance_scale"), "there is no embedded guidance"),
    "model.bypass_guidance_embedding": only(False, "the embedding is told guidance_scale; 1 is the default"),
    "model.v_pred": switch_to("prediction_type", "v_prediction"),
    "model.min_snr_gamma": more_than_zero("min_snr_gamma"),
    "model.debiased_estimation_loss": more_than_zero("debiased_estimation_loss"),
    "model.unet_lr": to("unet_lr"),
    **each("model.", "text_encoder_1_lr text_encoder_2_lr", _text_rate),
    **each(
        "model.",
        "cache_text_embeddings text_encoder_nf4 text_encoder_fp8 llama3_4bit max_llama3_sequence_length",
        unneeded("captions are encoded once, and text encoders leave the device"),
    ),
    "adapter.type": words("network_type", {"lora": "lora", "lokr": "lokr"}, "it is not made; network_type = lora stays"),
    "adapter.rank": _rank,
    "adapter.alpha": unneeded("alpha is the rank there, whatever is written"),
    "adapter.dtype": unneeded("an adapter's weights are float32"),
    "adapter.dropout": more_than_zero("network_dropout"),
    "adapter.rank_dropout": more_than_zero("rank_dropout"),
    "adapter.decompose_factor": to("lokr_factor"),
    "adapter.exclude_modules": to("exclude_modules", convert=lambda value: value if isinstance(value, list) else [str(value)]),
    "adapter.init_from_existing": to("network_weights"),
    "adapter.fuse_adapters": unneeded("it is empty"),
    **each("adapter.fuse_adapters[].", "path weight", _fused),
    "optimizer.type": optimizer(),
    "optimizer.lr": to("learning_rate"),
    "optimizer.gradient_release": released,
    "optimizer.beta2_half_life": only(None, "the second beta does not follow the batch size; give betas in optimizer_args", banner=True),
    "optimizer.*": among(ARGUMENT_NAMES, _optimizer_argument),
    "monitoring.enable_wandb": switch_to("log_with", "wandb"),
    "monitoring.wandb_api_key": unneeded("secrets are read from the environment (WANDB_API_KEY) and never written; this one was not kept"),
    "monitoring.wandb_tracker_name": where(lambda sheet: sheet.on("monitoring.enable_wandb"), to("log_tracker_name"), "wandb is off"),
    "monitoring.wandb_run_name": where(lambda sheet: sheet.on("monitoring.enable_wandb"), to("wandb_run_name"), "wandb is off"),
}
"""The rule of each key, by its path."""


IMPORTER = Importer(f"a main file of {PROGRAM} (.toml)", (".toml",), looks_like, read)
DATA = (DataFile(PROGRAM, "a data set", "dataset", "dataset", _DATA_TABLE, looks_like_data),)
