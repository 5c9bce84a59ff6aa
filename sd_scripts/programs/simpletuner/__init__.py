"""SimpleTuner's configurations (config.json, config.toml), as a kind of run, values and a report.

Facts about the other program are those of its commit bc8e6ab (2026-08), read in its code. Names may have two dashes before them. Its data
lies in a file of its own, data_backend_config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer
from sd_scripts.schema.sheet import is_empty, is_off, parts, shown

from ..table import (
    DIFFUSERS_LINE,
    SCHEDULES,
    DataFile,
    ForeignSheet,
    NamedModel,
    Rule,
    Table,
    assume_layers,
    each,
    fill,
    kind_of_run,
    line_of,
    line_of_prompt,
    more_than_zero,
    only,
    opened,
    optimizer,
    quantized,
    switch_to,
    times,
    times_by_size,
    to,
    unneeded,
    where,
    words,
)
from . import data, lycoris

PROGRAM = "SimpleTuner"
_TWICE = 32
"""The side in pixels of what it counts as a token of FLUX.2, of whose latents, which are patches already, it makes patches once more."""
_OWN_STREAM = [r"\.to_(q|k|v)$", r"\.to_out\.0$"]
_OF_TEXTS = [r"\.add_(q|k|v)_proj$", r"\.to_add_out$"]
_ATTENTION = {"target_modules": _OWN_STREAM}
_JOINT = {"target_modules": [*_OWN_STREAM, *_OF_TEXTS]}
_OF_FLUX_2 = {"target_modules": [*_OWN_STREAM, r"\.to_qkv_mlp_proj$"]}
"""What a LoRA is on where the file does not say it: attention, with FLUX.1 and Chroma that of the texts as well."""
_FLUX_LAYERS: Mapping[str, list[str]] = {
    "all": [*_OWN_STREAM, *_OF_TEXTS],
    "all+ffs": [*_OWN_STREAM, *_OF_TEXTS, r"\.ff(_context)?\.net\.", r"\.proj_mlp$", r"\.proj_out$"],
    "context": _OF_TEXTS,
    "context+ffs": [*_OF_TEXTS, r"\.ff_context\.net\."],
    "ai-toolkit": [],
    "tiny": [r"single_transformer_blocks\.(7|20)\.proj_out$"],
    "nano": [r"single_transformer_blocks\.7\.proj_out$"],
}
"""Its names for layers of FLUX.1; none are all that an adapter has here."""

MODELS: Mapping[str, NamedModel] = {
    "sd1x": NamedModel("sd", "Stable Diffusion 1.x", layers=_ATTENTION),
    "sd2x": NamedModel("sd", "Stable Diffusion 2", layers=_ATTENTION),
    "sdxl": NamedModel("sdxl", "SDXL", layers=_ATTENTION),
    "flux": NamedModel("flux", "FLUX.1", layers=_JOINT),
    "flux kontext": NamedModel("kontext", "FLUX.1 Kontext", layers=_JOINT),
    "flux2": NamedModel("flux2_dev", "FLUX.2 dev", by_size=DIFFUSERS_LINE, token=_TWICE, layers=_OF_FLUX_2),
    "flux2 klein": NamedModel("flux2", "FLUX.2 Klein", by_size=DIFFUSERS_LINE, token=_TWICE, layers=_OF_FLUX_2),
    "chroma": NamedModel("chroma", "Chroma", layers=_JOINT),
    "krea2": NamedModel("krea2", "Krea 2", layers=_ATTENTION),
    "anima": NamedModel("anima", "Anima"),
    "z_image": NamedModel("zimage", "Z-Image", layers=_ATTENTION),
    "qwen_image": NamedModel("qwen_edit", "Qwen-Image", layers=_ATTENTION),
    **{
        name: NamedModel("", label)
        for name, label in {
            "sd3": "Stable Diffusion 3",
            "deepfloyd": "DeepFloyd IF",
            "pixart": "PixArt",
            "pixart_sigma": "PixArt Sigma",
            "auraflow": "AuraFlow",
            "kolors": "Kolors",
            "sana": "Sana",
            "stable_cascade": "Stable Cascade",
            "hidream": "HiDream-I1",
            "lumina2": "Lumina 2",
            "omnigen": "OmniGen",
            "cosmos": "Cosmos-Predict2",
            "cosmos3": "Cosmos 3",
            "bria": "Bria",
            "ideogram": "Ideogram 4",
            "ernie": "ERNIE-Image",
            "mageflow": "MageFlow",
            "boogu_image": "Boogu",
            "longcat_image": "LongCat-Image",
            "zlab_i1": "ZLab I1",
            "z_image_omni": "Z-Image Omni",
            "kandinsky5_image": "Kandinsky 5",
            "kandinsky5-image": "Kandinsky 5",
            **dict.fromkeys(
                """wan wan_s2v ltxvideo ltxvideo2 hunyuanvideo longcat_video kandinsky5_video sanavideo infinitetalk minimaxh3""".split(),
                "a model of videos",
            ),
            **dict.fromkeys("ace_step heartmula minimaxmusic".split(), "a model of sounds"),
        }.items()
    },
}
_VERSIONS = {"v1": "image", "v2": "image", "edit-v1": "edit", "edit-v2": "edit-2509", "edit-v3": "edit-2511"}
"""Beginnings of the flavours of Qwen-Image."""
_WEIGHTS = {
    ("sd1x", "1.5"): "stable-diffusion-v1-5/stable-diffusion-v1-5",
    ("sd1x", "dreamshaper"): "Lykon/dreamshaper-8",
    ("sd2x", "2.1"): "stabilityai/stable-diffusion-2-1",
    ("sdxl", "base-1.0"): "stabilityai/stable-diffusion-xl-base-1.0",
    ("flux", "dev"): "black-forest-labs/FLUX.1-dev",
    ("flux", "krea"): "black-forest-labs/FLUX.1-Krea-dev",
    ("flux", "schnell"): "black-forest-labs/FLUX.1-schnell",
    ("flux", "kontext"): "black-forest-labs/FLUX.1-Kontext-dev",
    ("chroma", "base"): "lodestones/Chroma1-Base",
    ("chroma", "hd"): "lodestones/Chroma1-HD",
    ("z_image", "turbo"): "Tongyi-MAI/Z-Image-Turbo",
    ("z_image", "base"): "Tongyi-MAI/Z-Image",
    ("qwen_image", "v1.0"): "Qwen/Qwen-Image",
    ("qwen_image", "v2.0"): "Qwen/Qwen-Image-2512",
    ("qwen_image", "edit-v1"): "Qwen/Qwen-Image-Edit",
    ("qwen_image", "edit-v2"): "Qwen/Qwen-Image-Edit-2509",
    ("qwen_image", "edit-v3"): "Qwen/Qwen-Image-Edit-2511",
    ("krea2", "raw"): "krea/Krea-2-Raw",
    ("krea2", "turbo"): "krea/Krea-2-Turbo",
    ("flux2", "dev"): "black-forest-labs/FLUX.2-dev",
    ("flux2", "klein-4b"): "black-forest-labs/FLUX.2-klein-base-4B",
    ("flux2", "klein-9b"): "black-forest-labs/FLUX.2-klein-base-9B",
}
"""Weights that a flavour means where the file names none."""
_FIRST = {
    "sd1x": "1.5",
    "sd2x": "2.1",
    "sdxl": "base-1.0",
    "flux": "dev",
    "chroma": "base",
    "z_image": "turbo",
    "qwen_image": "v1.0",
    "krea2": "raw",
}
_LIBRARY = "user_prompt_library"
_ONE_LESS = {"zimage": 1.0, "krea2": 0.0}
"""Families whose pipeline adds its guidance to the prediction, and up to where it is off there; 1 is off here."""
_DEFAULTS: dict[str, object] = {
    "learning_rate": 4e-7,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 0,
    "train_batch_size": 4,
    "network_dim": 16,
    "network_dropout": 0.1,
    "mixed_precision": "bf16",
    "resolution": [1024, 1024],
    "caption_dropout_rate": 0.1,
    "gradient_checkpointing": True,
    "save_every_n_steps": 500,
    "timestep_sampling": "shift",
    "discrete_flow_shift": 3.0,
    "bucket_no_upscale": False,
}
"""That program's own, where they may not be ours."""


def looks_like(given: Mapping[str, object]) -> bool:
    """Whether these are settings of that program: it alone has families of models beside its data backends."""
    names = {key.lstrip("-") for key in given}
    return ("model_family" in names and len(names) > 1) or "data_backend_config" in names


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings of a configuration. Raises OptionError for what is not trained here."""
    plain = {str(key).lstrip("-"): value for key, value in given.items()}
    family, flavour = str(plain.get("model_family") or ""), str(plain.get("model_flavour") or "").lower()
    if str(plain.get("controlnet")).lower() == "true" or str(plain.get("control")).lower() == "true":
        raise OptionError(f"{name} is a file of {PROGRAM} that trains a ControlNet, which is not trained here")
    files = f"{flavour} {plain.get('pretrained_model_name_or_path')}".lower()
    kind = next((key for key in MODELS if " " in key and key.split()[0] == family and key.split()[1] in files), family)
    method = "network" if "lora" in str(plain.get("model_type") or "full") else "full"
    run, model = kind_of_run(PROGRAM, name, MODELS, kind, method)
    files_read = {
        key: plain.pop(key) for key in (data.KEY, lycoris.KEY, _LIBRARY) if isinstance(plain.get(key), list | dict) and plain[key]
    }
    sheet = ForeignSheet(PROGRAM, run, {**plain, **opened(files_read)}, model)
    if "model_version" in sheet.known:
        version = next((ours for start, ours in reversed(_VERSIONS.items()) if flavour.startswith(start)), "image")
        sheet.put("model_version", version, "model_flavour" if flavour else "")
    fill(sheet, TABLE)
    if "flux_lora_target" not in sheet.given and str(sheet.value("lora_type") or "standard") == "standard":
        assume_layers(sheet)
    weights = _WEIGHTS.get((family, flavour or _FIRST.get(family, "")))
    if weights and not sheet.decided("pretrained_model_name_or_path"):
        sheet.assume("pretrained_model_name_or_path", weights, PROGRAM)
    defaults = {option: value for option, value in _DEFAULTS.items() if not (method == "full" and option.startswith("network_"))}
    defaults |= {} if sheet.decided("max_train_steps") else {"max_train_epochs": 1}
    defaults |= {"ema_decay": 0.995} if sheet.values.get("use_ema") else {}
    if sheet.values.get("sample_prompts"):
        guided = "sample_guidance_scale" in sheet.known
        more = 0 if guided or sheet.run.family not in _ONE_LESS else 1
        defaults |= {"sample_steps": 30, "sample_every_n_steps": 100, "sample_guidance_scale" if guided else "sample_cfg_scale": 7.5 + more}
    return sheet.finish(f"configuration of {PROGRAM}", defaults)


def _length(sheet: ForeignSheet, key: str) -> None:
    epochs, steps = sheet.number("num_train_epochs") or 0, sheet.number("max_train_steps") or 0
    if is_off(sheet.value(key)):
        sheet.skip(key, "0 means that the other one says it")
    elif key == "max_train_steps":
        sheet.take(key, key, sheet.value(key))
    elif steps > 0:
        sheet.skip(key, "max_train_steps decides how long the run is")
    else:
        sheet.take(key, "max_train_epochs", epochs)


def _resolution(sheet: ForeignSheet, key: str) -> None:
    """A side, or an area in megapixels."""
    value = sheet.number(key)
    if value is None or value <= 0:
        sheet.refuse(key, f"{shown(sheet.value(key))} is no size; give resolution")
    else:
        side, note = data.side_of(value, str(sheet.value("resolution_type") or "pixel_area"))
        sheet.take(key, "resolution", [side, side], note)


def _data(sheet: ForeignSheet, key: str) -> None:
    sheet.lose(key, "its file of data backends was not there to be read; open it too, or give the folder of the images as train_data_dir")


def _kept(sheet: ForeignSheet, key: str) -> None:
    kept, every = sheet.number(key) or 0, sheet.number("checkpoint_step_interval", "checkpointing_steps") or 500
    if kept <= 0:
        sheet.skip(key, "it keeps all")
    else:
        sheet.take(key, "save_last_n_steps", int(kept * every), "as many files; here they are counted in steps")


def _bits(sheet: ForeignSheet, key: str) -> None:
    value = str(sheet.value(key))
    if value in ("no_change", "bf16", "fp16", "fp32", "None", "no"):
        sheet.skip(key, "weights are held as mixed_precision says")
    else:
        quantized(sheet, key, re.sub(r"-(sdnq|torchao|quanto|bnb)$", "", value), _BITS_OF.get(key, "text_encoder_quantization"))


_BITS_OF = {"base_model_precision": "transformer_quantization"}


def _has_lycoris(sheet: ForeignSheet) -> bool:
    """Whether the adapter is LyCORIS's and its own file was read."""
    return str(sheet.value("lora_type") or "").lower() == "lycoris" and f"{lycoris.KEY}.algo" in sheet.given


def _network(sheet: ForeignSheet, key: str) -> None:
    value = str(sheet.value(key))
    if _has_lycoris(sheet):
        sheet.skip(key, f"{lycoris.KEY} says which")
    elif value == "lycoris":
        sheet.lose(key, "its algorithm stands in lycoris_config, a file of its own; choose network_type, lokr_factor and network_dim")
    else:
        sheet.take(key, "network_type", "dora" if sheet.on("use_dora") else "lora")


def _flavour(sheet: ForeignSheet, key: str) -> None:
    sheet.skip(key, f"the kind of run and the base model say it: {sheet.run.label}")


def _times(sheet: ForeignSheet, key: str) -> None:
    """sigmoid(scale N), or uniform, then a shift s by t' = s t / (1 + (s - 1) t)."""
    if "model_prediction_type" not in sheet.known:
        sheet.skip(key, "it is for flow matching; this run has a noise schedule")
        return
    if key != next(name for name in sheet.given if name in _OF_TIMES):
        sheet.skip(key, "timestep_sampling and its numbers hold it")
        return
    uniform, scale = sheet.on("flow_use_uniform_schedule"), sheet.number("flow_sigmoid_scale") or 1.0
    given, by_size = sheet.number("flow_schedule_shift"), sheet.on("flow_schedule_auto_shift")
    shift = 3.0 if given is None else given
    spread: dict[str, float] = {} if uniform or scale == 1 else {"sigmoid_scale": scale}
    if by_size:
        times_by_size(sheet, key, _side(sheet), line_of(sheet) or DIFFUSERS_LINE, even=uniform, scale=1.0 if uniform else scale)
    elif shift > 0 and shift != 1:
        times(sheet, key, "sigma" if uniform else "shift", "", discrete_flow_shift=shift, **spread)
    else:
        times(sheet, key, "uniform" if uniform else "sigmoid", "", **spread)
    if sheet.on("flow_use_beta_schedule"):
        put = sheet.values.get("timestep_sampling", sheet.known["timestep_sampling"].default)
        sheet.lose("flow_use_beta_schedule", f"times are not drawn from a beta density; timestep_sampling = {put} was put")


def _side(sheet: ForeignSheet) -> int:
    """The side of the images that are trained, of the run or of its first data set that has one."""
    named = [name for name in sheet.given if name.endswith("].resolution")]
    value = next((number for name in ("resolution", *named) if (number := sheet.number(name))), 1024.0)
    return data.side_of(value, str(sheet.value("resolution_type") or "pixel_area"))[0]


_OF_TIMES = ("flow_schedule_shift", "flow_schedule_auto_shift", "flow_sigmoid_scale", "flow_use_uniform_schedule", "flow_use_beta_schedule")


def _clipping(sheet: ForeignSheet, key: str) -> None:
    """There gradients are cut value by value unless the file says norm."""
    by_value = str(sheet.value("grad_clip_method") or "value") == "value"
    limit = sheet.number("max_grad_norm")
    if key == "grad_clip_method" and limit is not None:
        sheet.skip(key, "max_grad_norm says it")
    elif by_value:
        sheet.put("max_grad_norm", 1.0, key)
        sheet.lose(key, "gradients are cut value by value there, and by their norm here; max_grad_norm = 1 was put")
    elif key == "max_grad_norm":
        sheet.take(key, key, limit)
    else:
        sheet.skip(key, "gradients are cut by their norm here as well")


def _adam(sheet: ForeignSheet, key: str) -> None:
    """Arguments of the optimizer; the first key carries them all."""
    first, second = (sheet.number(f"optimizer_beta{index}", f"adam_beta{index}") for index in (1, 2))
    pairs = [f"betas=({first:g},{second:g})"] if first is not None and second is not None else []
    pairs += [f"weight_decay={sheet.value('adam_weight_decay')}"] if sheet.number("adam_weight_decay") is not None else []
    pairs += [f"eps={sheet.value('adam_epsilon')}"] if sheet.number("adam_epsilon") is not None else []
    if "adam" not in str(sheet.value("optimizer") or "adamw_bf16"):
        sheet.skip(key, "it is for Adam")
    elif sheet.decided("optimizer_args") or not pairs:
        sheet.skip(key, "it stands in optimizer_args together with the others" if pairs else "one of two betas alone says nothing")
    else:
        sheet.take(key, "optimizer_args", pairs)


def _schedule(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key))
    if name in SCHEDULES:
        sheet.take(key, key, name)
    elif name == "sine":
        sheet.put(key, "cosine", key)
        sheet.lose(key, "a rate that swings is not here; lr_scheduler = cosine was put")
    else:
        sheet.lose(key, "it is not here; choose lr_scheduler")


def _previews(sheet: ForeignSheet, key: str) -> None:
    """The prompt, and those of the library, which has a name for each."""
    library = [name for name in sheet.given if name.startswith(f"{_LIBRARY}.")]
    texts = {name: sheet.value(name) for name in ("validation_prompt", *library) if not is_empty(sheet.value(name))}
    if not texts or sheet.on("validation_disable"):
        sheet.skip(key, "no previews are drawn")
    elif key != next(iter(texts)):
        sheet.skip(key, "it stands in sample_prompts")
    else:
        sides = [int(side) for side in re.findall(r"\d+", str(sheet.value("validation_resolution") or ""))[:2]]
        flags = {"d": sheet.value("validation_seed"), "w": sides[0] if sides else None, "h": sides[-1] if sides else None}
        sheet.take(key, "sample_prompts", "\n".join(line_of_prompt(text, **flags) for text in texts.values()), "a prompt a line")


def _guidance(sheet: ForeignSheet, key: str) -> None:
    if "sample_guidance_scale" in sheet.known:
        sheet.take(key, "sample_guidance_scale", sheet.value(key))
        return
    value, off = sheet.number(key), _ONE_LESS.get(sheet.run.family)
    if value is None or off is None:
        sheet.take(key, "sample_cfg_scale", sheet.value(key))
    else:
        sheet.take(key, "sample_cfg_scale", value + 1 if value > off else 1.0, "one more than the pipeline's number")


def _compiled(sheet: ForeignSheet, key: str) -> None:
    """torch.compile, as accelerate has it."""
    backend = str(sheet.value("dynamo_backend") or "no").lower()
    if key != "dynamo_backend":
        options = {"mode": "compile_mode", "use_regional_compilation": "compile_scope"}
        option = options.get(key[len("dynamo_") :], f"compile_{key[len('dynamo_') :]}")
        if is_off(sheet.value(key)) or not sheet.has("compile_backend", backend):
            sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "nothing is compiled")
        else:
            written = {"compile_scope": "blocks", "compile_dynamic": "true"}
            sheet.take(key, option, written.get(option, sheet.value(key)))
    elif backend == "no":
        sheet.skip(key, "it is off")
    elif sheet.has("compile_backend", backend):
        sheet.put("compile", True, key)
        sheet.take(key, "compile_backend", backend, "with compile on")
    else:
        sheet.lose(key, "the network is not compiled; compile with inductor is the usual way")


def _processes(sheet: ForeignSheet, key: str) -> None:
    count = int(sheet.number(key) or 1)
    if count <= 1:
        sheet.skip(key, "one process is the default here as well")
    else:
        sheet.put("multi_gpu", True, key)
        sheet.take(key, "num_gpus", count, "with multi_gpu on")


def _offset(sheet: ForeignSheet, key: str) -> None:
    """An offset of the noise, which only a part of the samples gets there."""
    if not sheet.on("offset_noise"):
        sheet.skip(key, "offset_noise is off")
        return
    if key == "offset_noise" and "noise_offset" in sheet.given:
        sheet.skip(key, "noise_offset says it")
        return
    given, share = sheet.number("noise_offset"), sheet.number("noise_offset_probability")
    sheet.take(key, "noise_offset", 0.1 if given is None else given)
    share = 0.25 if share is None else share
    if share < 1:
        sheet.lose(key, f"every sample has it here; there {share:.0%} of them (noise_offset_probability)")


def _tracker(sheet: ForeignSheet, key: str) -> None:
    names = [name for name in parts(sheet.value(key)) if name in ("wandb", "tensorboard")]
    if not names:
        told = "it is off" if is_off(sheet.value(key)) else "tensorboard and wandb are the trackers here; the page shows the curves"
        sheet.skip(key, told)
    else:
        sheet.take(key, "log_with", "all" if len(names) > 1 else names[0])


def _tracked(option: str) -> Rule:
    tracks = ("wandb",) if option == "wandb_run_name" else ("wandb", "tensorboard")
    return where(lambda sheet: any(name in str(sheet.value("report_to")) for name in tracks), to(option), "no tracker would use it")


def _hub(sheet: ForeignSheet, key: str) -> None:
    repository = str(sheet.value("hub_model_id") or "")
    if is_off(sheet.value("push_to_hub")) or is_empty(repository):
        sheet.skip(key, "nothing is uploaded")
    elif key != "hub_model_id":
        sheet.skip(key, "huggingface_repo_id says it")
    elif "/" not in repository:
        sheet.refuse(key, "write it as owner/name")
    else:
        sheet.take(key, "huggingface_repo_id", repository)


def _text_encoder(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)) or "train_text_encoder" not in sheet.known:
        sheet.skip(key, "it is off") if is_off(sheet.value(key)) else sheet.lose(key, "this family's text encoder stays as it is")
    else:
        sheet.take(key, key, True)
        sheet.put("cache_text_encoder_outputs", False, key)


def _released(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)) or "fused_backward_pass" not in sheet.known:
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "an adapter's gradients are small")
    else:
        sheet.put("max_grad_norm", 0.0, key)
        sheet.take(key, "fused_backward_pass", True, "gradients are never there together, so max_grad_norm = 0")


def _offloaded(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is off")
    else:
        sheet.lose(key, "layers are not moved one by one; set blocks_to_swap to as many of the network's blocks as do not fit")


def _targets(sheet: ForeignSheet, key: str) -> None:
    names = [name for name in parts(sheet.value(key)) if name.strip("'\"")]
    if is_empty(sheet.value(key)):
        sheet.skip(key, "it is empty")
    else:
        sheet.take(key, "target_modules", [rf"(^|\.){re.escape(name)}$".replace(r"\_", "_") for name in names], "ends of names, as there")


def _flux_layers(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key))
    found = _FLUX_LAYERS.get(name)
    if not is_empty(sheet.value("peft_lora_target_modules")):
        sheet.skip(key, "peft_lora_target_modules names the layers")
    elif found is None:
        sheet.take(key, "target_modules", _FLUX_LAYERS["all+ffs"])
        sheet.lose(key, "an adapter has layers of the blocks alone here; those of all+ffs were put")
    elif found:
        sheet.take(key, "target_modules", found)
    else:
        sheet.skip(key, "these are the layers that an adapter has here")


def _sizes_of_images(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "0 leaves nothing out")
    else:
        sheet.refuse(key, "images are neither left out nor cut down by their size; do it beforehand")


_PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v_prediction", "flow_matching": "flow"}
_MACHINE = unneeded("it says how that program works, not what is trained")
_CACHE = unneeded("latents and captions are cached by themselves, and renewed where something changed")
_LOST = "it is not part of this version"
_PARTS = """crepa irepa layersync urepa nextlat xm mixflow twinflow internal_guidance scheduled_sampling timestep_bias group_offload
    ramtorch refiner_training singlora controlnet distillation flow_timesteps gradient_checkpointing_offload freeze_encoder fsdp offload
    sla"""
"""Beginnings of the names of what is not here: each says what belongs to a feature, or to a memory option, that has a row of its own."""
_OWN = """accelerate_config accelerate_extra_args accelerate_strategy accelerate_visible_devices assistant_lora_inference_strength
    audio_channels audio_duration_interval audio_flow_schedule_shift audio_max_duration_seconds audio_min_duration_seconds
    audio_truncation_mode data_aesthetic_score delete_nsfw_images disable_assistant_lora disable_multiline_split disk_low_script
    enable_nsfw_check enable_watermark eval_dataset_pooling find_unused_parameters framerate fuse_optimizer init_lora_step
    machine_rank main_process_ip main_process_port max_grounding_entities modelspec_comment nsfw_check_backend_types
    nsfw_check_min_votes nsfw_check_models nsfw_check_sample_types nsfw_check_video_frame_count nsfw_check_video_frame_selection
    nsfw_check_video_min_flagged_frames parquet_caption_column parquet_filename_column post_checkpoint_script post_upload_script
    pretrained_evaluation_model_name_or_path pretrained_gemma_model_name_or_path pretrained_grounding_model_name_or_path
    publishing_config sageattention_usage same_network save_text_encoder text_encoder_limit trust_remote_code unet_attention_slice
    vae_enable_patch_conv vae_enable_slicing vae_enable_temporal_roll validation_adapter_config validation_adapter_mode
    validation_adapter_name validation_adapter_path validation_audio_duration validation_audio_only validation_batch_size
    validation_external_background validation_external_script validation_fraction validation_guidance_skip_layers
    validation_guidance_skip_layers_start validation_guidance_skip_layers_stop validation_guidance_skip_scale
    validation_image_format validation_image_quality validation_input validation_internal_guidance_scale
    validation_ltx2_video_conditioning validation_lyrics validation_method validation_no_cfg_until_timestep
    validation_num_video_frames validation_preview_steps validation_split validation_stitch_input_location validation_using_datasets"""
"""What belongs to that program's own ways."""
_FEATURES = """distillation_method tread_config diffusion_blocks_config diff2flow_enabled mixflow_enabled xm_enabled nextlat_enabled
        irepa_enabled crepa_enabled twinflow_enabled internal_guidance_enabled layersync_enabled urepa_enabled
        slider_lora_target flow_cubic_schedule_weights flow_custom_timesteps layer_freeze_strategy refiner_training
        quantize_activations fuse_qkv_projections lr_scale lr_scale_sqrt deepspeed_config fsdp_enable custom_tracker
        timestep_bias_strategy prepend_instance_prompt only_instance_prompt init_lora_ema init_lokr_norm"""

TABLE: Table = {
    "model_family": _flavour,
    **each("", "model_type model_flavour", _flavour),
    "pretrained_model_name_or_path": to("pretrained_model_name_or_path"),
    "pretrained_vae_model_name_or_path": where(lambda sheet: "vae" in sheet.known, to("vae"), "the VAE comes with the base model"),
    **each(
        "",
        """pretrained_transformer_model_name_or_path pretrained_unet_model_name_or_path pretrained_t5_model_name_or_path
        qwen_text_encoder_model_name_or_path""",
        only(None, "give a base model that has it, or the option of this part", banner=True),
    ),
    **each("", "pretrained_transformer_subfolder pretrained_unet_subfolder", unneeded("the folder's layout says it")),
    "revision": to("revision"),
    "variant": to("variant"),
    "vae_dtype": words("vae_dtype", {"bf16": "bf16", "fp16": "fp16", "fp32": "float", "default": "float"}, "choose vae_dtype"),
    data.KEY: _data,
    **data.TABLE,
    **lycoris.TABLE,
    "output_dir": to("output_dir"),
    "seed": where(lambda sheet: (sheet.number("seed") or 0) >= 0, to("seed"), "every run has a seed here"),
    "resolution": _resolution,
    "resolution_type": unneeded("resolution holds it"),
    "aspect_bucket_alignment": to("bucket_reso_steps"),
    **each("", "minimum_image_size maximum_image_size target_downsample_size max_upscale_threshold", _sizes_of_images),
    "instance_prompt": to("instance_prompt"),
    "caption_strategy": only("textfile", "captions are files beside the images; instance_prompt is that of images without one"),
    "caption_dropout_probability": to("caption_dropout_rate"),
    "masked_loss_probability": only(1.0, "masks count in every step"),
    "train_batch_size": to("train_batch_size"),
    "gradient_accumulation_steps": to("gradient_accumulation_steps"),
    **each("", "num_train_epochs max_train_steps", _length),
    "mixed_precision": to("mixed_precision"),
    "gradient_checkpointing": to("gradient_checkpointing"),
    "gradient_checkpointing_interval": where(
        lambda sheet: (sheet.number("gradient_checkpointing_interval") or 0) > 1,
        lambda sheet, key: sheet.take(key, "gradient_checkpointing_share", 1 / (sheet.number(key) or 1), "each so manieth block"),
        "every block is recomputed",
    ),
    "gradient_checkpointing_offload_attention": only(False, "see gradient_checkpointing_cpu_offload", banner=True),
    "learning_rate": to("learning_rate"),
    "text_encoder_lr": where(lambda sheet: sheet.on("train_text_encoder"), to("text_encoder_lr"), "the text encoders are not trained"),
    "train_text_encoder": _text_encoder,
    "optimizer": optimizer(),
    **each("", "adam_beta1 adam_beta2 optimizer_beta1 optimizer_beta2 adam_weight_decay adam_epsilon", _adam),
    "optimizer_config": only(None, "write them as optimizer_args, key=value", banner=True),
    "optimizer_release_gradients": _released,
    "lr_scheduler": _schedule,
    "lr_warmup_steps": to("lr_warmup_steps"),
    "lr_num_cycles": where(
        lambda sheet: str(sheet.value("lr_scheduler")) == "cosine_with_restarts",
        to("lr_scheduler_num_cycles"),
        "it is for cosine_with_restarts",
    ),
    "lr_power": where(lambda sheet: str(sheet.value("lr_scheduler")) == "polynomial", to("lr_scheduler_power"), "it is for polynomial"),
    "lr_end": unneeded("a schedule ends at 0 here; cosine_with_min_lr has a floor"),
    **each("", "max_grad_norm grad_clip_method", _clipping),
    "use_ema": to("use_ema"),
    "ema_decay": where(lambda sheet: sheet.on("use_ema"), to("ema_decay"), "use_ema is off"),
    "lora_rank": where(lambda sheet: not _has_lycoris(sheet), to("network_dim"), "lycoris_config says it"),
    "lora_alpha": where(lambda sheet: not _has_lycoris(sheet), to("network_alpha"), "lycoris_config says it"),
    "lora_dropout": more_than_zero("network_dropout"),
    "lora_type": _network,
    "use_dora": switch_to("network_type", "dora"),
    "lycoris_config": unneeded("lora_type says what becomes of it"),
    "init_lora": to("network_weights"),
    "lora_init_type": only("default", "an adapter begins as one that changes nothing"),
    "peft_lora_mode": only("standard", _LOST, banner=True),
    "peft_lora_target_modules": _targets,
    "flux_lora_target": _flux_layers,
    "lora_format": words("save_model_as", {"diffusers": "diffusers", "comfyui": "comfyui"}, "choose save_model_as"),
    "assistant_lora_path": where(
        lambda sheet: "training_adapter" in sheet.known, to("training_adapter"), "this family has no training adapter"
    ),
    "assistant_lora_strength": where(
        lambda sheet: sheet.decided("training_adapter"), to("training_adapter_multiplier"), "there is no training adapter"
    ),
    "base_model_precision": _bits,
    **{f"text_encoder_{index}_precision": _bits for index in range(1, 5)},
    "musubi_blocks_to_swap": more_than_zero("blocks_to_swap"),
    **each("", "ramtorch enable_group_offload", _offloaded),
    **each("", " ".join(_OF_TIMES), _times),
    **each("", "snr_gamma", more_than_zero("min_snr_gamma")),
    "flux_guidance_mode": only("constant", "the guidance that the model is told is one number here, guidance_scale", banner=True),
    "flux_guidance_value": where(
        lambda sheet: sheet.value("flux_guidance_mode") != "random-range", to("guidance_scale"), "flux_guidance_mode is random-range"
    ),
    **each("", "flux_guidance_min flux_guidance_max", unneeded("flux_guidance_mode says whether they count")),
    "flux_attention_masked_training": more_than_zero("apply_t5_attn_mask"),
    "flux_fast_schedule": only(False, "see timestep_sampling", banner=True),
    "prediction_type": words(
        "prediction_type", {"epsilon": "epsilon", "v_prediction": "v_prediction", "flow_matching": "flow"}, "see prediction_type"
    ),
    "rescale_betas_zero_snr": to("zero_terminal_snr"),
    "noise_offset": _offset,
    "offset_noise": _offset,
    "noise_offset_probability": unneeded("noise_offset says it"),
    "input_perturbation": more_than_zero("ip_noise_gamma"),
    "loss_type": words("loss_type", {"l2": "l2", "huber": "huber", "smooth_l1": "smooth_l1"}, "choose loss_type"),
    "huber_schedule": where(lambda sheet: sheet.value("loss_type") in ("huber", "smooth_l1"), to("huber_schedule"), "it is for huber"),
    "huber_c": where(lambda sheet: sheet.value("loss_type") in ("huber", "smooth_l1"), to("huber_c"), "it is for huber"),
    **each("", "checkpoint_step_interval checkpointing_steps", more_than_zero("save_every_n_steps")),
    "checkpoint_epoch_interval": more_than_zero("save_every_n_epochs"),
    "checkpoints_total_limit": _kept,
    "resume_from_checkpoint": only("latest", "states of that program are not read; give the last saved file as network_weights"),
    **each("", "validation_prompt validation_seed validation_resolution", _previews),
    **each("", "validation_steps validation_step_interval", more_than_zero("sample_every_n_steps")),
    "validation_epoch_interval": more_than_zero("sample_every_n_epochs"),
    **each("dynamo_", "backend mode use_regional_compilation fullgraph dynamic", _compiled),
    "num_processes": _processes,
    "num_machines": only(1, "see num_machines, and main_process_port", banner=True),
    "validation_guidance": _guidance,
    "validation_guidance_real": where(
        lambda sheet: "sample_guidance_scale" in sheet.known, to("sample_cfg_scale"), "validation_guidance says it for this model"
    ),
    "validation_num_inference_steps": to("sample_steps"),
    "validation_negative_prompt": to("sample_negative_prompt"),
    "disable_benchmark": lambda sheet, key: sheet.take(key, "sample_at_first", is_off(sheet.value(key))),
    "user_prompt_library": only(None, "the file was not there to be read; open it too, or write its prompts as sample_prompts, one a line"),
    f"{_LIBRARY}.*": _previews,
    "report_to": _tracker,
    "tracker_project_name": _tracked("log_tracker_name"),
    "tracker_run_name": _tracked("wandb_run_name"),
    **each("", "push_to_hub push_checkpoints_to_hub hub_model_id push_to_hub_background", _hub),
    "vae_batch_size": to("vae_batch_size"),
    "text_encoder_batch_size": to("text_encoder_batch_size"),
    "tokenizer_max_length": where(lambda sheet: "max_token_length" in sheet.known, to("max_token_length"), "the model says it"),
    "vae_enable_tiling": to("vae_tiling"),
    "disable_tf32": lambda sheet, key: sheet.take(key, "cuda_allow_tf32", is_off(sheet.value(key))),
    "attention_mechanism": unneeded("see attention_backend; the fastest that is there is taken"),
    **each("", _FEATURES, only(False, _LOST, banner=True)),
    **each("", "use_soft_min_snr diff2flow_loss optimizer_offload_gradients", only(False, _LOST, banner=True)),
    **each("", "scheduled_sampling_max_step_offset ema_warmup_steps input_perturbation_steps", only(0, _LOST, banner=True)),
    **each("", "snr_weight context_parallel_size", only(1, _LOST, banner=True)),
    **each("", "soft_min_snr_sigma_data prodigy_steps quantization_config optimizer_cpu_offload_method", only(None, _LOST, banner=True)),
    "gradient_checkpointing_backend": only("torch", "see gradient_checkpointing_cpu_offload", banner=True),
    "gradient_checkpointing_segment_stride": only(None, "see gradient_checkpointing_share", banner=True),
    **{f"{name}_*": unneeded(f"it belongs to {name}, which is not part of this version") for name in _PARTS.split()},
    **each("", _OWN, _MACHINE),
    **each(
        "",
        """aspect_bucket_rounding disable_bucket_pruning compress_disk_cache skip_file_discovery preserve_data_backend_cache
        cache_dir cache_dir_text cache_dir_vae vae_cache_ondemand vae_cache_disable text_cache_ondemand text_cache_disable
        text_embed_full_cache vae_cache_scan_behaviour ignore_missing_files keep_vae_loaded override_dataset_config
        delete_problematic_images delete_unwanted_images aspect_bucket_disable_rebuild metadata_update_interval""",
        _CACHE,
    ),
    **each(
        "",
        """quantize_via sdnq_compile_mode sdnq_group_size sdnq_hadamard_group_size sdnq_use_hadamard sdnq_use_quantized_matmul
        sdnq_weights_dtype sdnq_quantized_matmul_dtype base_model_default_dtype gradient_precision num_eval_images
        eval_steps_interval eval_epoch_interval evaluation_type eval_dataset_id eval_loss_disable eval_timesteps
        strict_epoch_limit conditioning_multidataset_sampling configs_dir logging_dir merge_environment_config max_workers
        aws_max_pool_connections torch_num_threads dataloader_prefetch dataloader_prefetch_qlen aspect_bucket_worker_count
        read_batch_size write_batch_size image_processing_batch_size enable_multiprocessing set_grads_to_none
        data_backend_sampling allow_dataset_oversubscription disable_segmented_timestep_sampling
        training_scheduler_timestep_spacing inference_scheduler_timestep_spacing validation_prompt_library
        validation_guidance_rescale validation_disable_unconditional validation_lycoris_strength validation_adapter_strength
        validation_torch_compile validation_noise_scheduler num_validation_images validation_randomize validation_multigpu
        validation_seed_source validation_disable validation_on_startup validation_preview ema_device ema_cpu_only
        ema_update_interval ema_foreach_disable ema_validation seed_for_each_device tracker_image_layout
        checkpoints_rolling_total_limit checkpointing_rolling_steps checkpointing_use_tempdir delete_invalid_checkpoints
        disk_low_threshold disk_low_action fully_unload_text_encoder offload_during_startup delete_model_after_load
        accelerator_cache_clear_interval local_rank model_card_private model_card_safe_for_work model_card_note webhook_config
        webhook_reporting_interval i_know_what_i_am_doing print_filenames print_sampler_statistics debug_aspect_buckets
        debug_dataset_loader musubi_block_swap_device flow_beta_schedule_alpha
        flow_beta_schedule_beta t5_padding user_prompt_library_path controlnet control""",
        _MACHINE,
    ),
}
"""The rule of each key, without the dashes before it."""


def _holds_prompts(given: object) -> bool:
    """Whether every value is a text of several words, as no file of settings has."""
    return isinstance(given, dict) and bool(given) and all(isinstance(text, str) and len(text.split()) > 2 for text in given.values())


IMPORTER = Importer(f"a configuration of {PROGRAM} (.json or .toml)", (".json", ".toml"), looks_like, read)
DATA = (
    DataFile(PROGRAM, "data backends", data.KEY, data.KEY, data.TABLE, data.looks_like),
    DataFile(PROGRAM, "a library of prompts", _LIBRARY, _LIBRARY, {f"{_LIBRARY}.*": _previews}, _holds_prompts, needs_images=False),
    DataFile(PROGRAM, "the settings of LyCORIS", lycoris.KEY, lycoris.KEY, lycoris.TABLE, lycoris.looks_like, needs_images=False),
)
