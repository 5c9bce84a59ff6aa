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
from sd_scripts.schema.sheet import is_empty, is_off, parts, shown, unless_empty, unless_off

from ..table import (
    DIFFUSERS_LINE,
    DataFile,
    ForeignSheet,
    NamedModel,
    Table,
    assume_layers,
    each,
    ends_of_names,
    fill,
    kind_of_run,
    more_than_zero,
    only,
    opened,
    quantized,
    switch_to,
    to,
    unneeded,
    where,
    words,
)
from . import absent, data, lycoris, previews, training

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
        key: plain.pop(key) for key in (data.KEY, lycoris.KEY, previews.LIBRARY) if isinstance(plain.get(key), list | dict) and plain[key]
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


def _guidance(sheet: ForeignSheet, key: str) -> None:
    if "sample_guidance_scale" in sheet.known:
        sheet.take(key, "sample_guidance_scale", sheet.value(key))
        return
    value, off = sheet.number(key), _ONE_LESS.get(sheet.run.family)
    if value is None or off is None:
        sheet.take(key, "sample_cfg_scale", sheet.value(key))
    else:
        sheet.take(key, "sample_cfg_scale", value + 1 if value > off else 1.0, "one more than the pipeline's number")


def _text_encoder(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)) or "train_text_encoder" not in sheet.known:
        sheet.skip(key, "it is off") if is_off(sheet.value(key)) else sheet.lose(key, "this family's text encoder stays as it is")
    else:
        sheet.take(key, key, True)
        sheet.put("cache_text_encoder_outputs", False, key)


@unless_off
def _offloaded(sheet: ForeignSheet, key: str) -> None:
    sheet.lose(key, "layers are not moved one by one; set blocks_to_swap to as many of the network's blocks as do not fit")


@unless_empty
@unless_empty
def _tokens(sheet: ForeignSheet, key: str) -> None:
    option = next((name for name in ("t5xxl_max_token_length", "max_token_length") if name in sheet.known), None)
    sheet.take(key, option, sheet.value(key)) if option else sheet.skip(key, "the model says it")


def _targets(sheet: ForeignSheet, key: str) -> None:
    names = [name for name in parts(sheet.value(key)) if name.strip("'\"")]
    sheet.take(key, "target_modules", ends_of_names(names), "ends of names, as there")


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
    "resolution": _resolution,
    "resolution_type": unneeded("resolution holds it"),
    "aspect_bucket_alignment": to("bucket_reso_steps"),
    **each("", "minimum_image_size maximum_image_size target_downsample_size max_upscale_threshold", _sizes_of_images),
    "instance_prompt": to("instance_prompt"),
    "caption_strategy": only("textfile", "captions are files beside the images; instance_prompt is that of images without one"),
    "caption_dropout_probability": to("caption_dropout_rate"),
    "masked_loss_probability": only(1.0, "masks count in every step"),
    "text_encoder_lr": where(lambda sheet: sheet.on("train_text_encoder"), to("text_encoder_lr"), "the text encoders are not trained"),
    "train_text_encoder": _text_encoder,
    "lora_rank": where(lambda sheet: not _has_lycoris(sheet), to("network_dim"), "lycoris_config says it"),
    "lora_alpha": where(lambda sheet: not _has_lycoris(sheet), to("network_alpha"), "lycoris_config says it"),
    "lora_dropout": more_than_zero("network_dropout"),
    "lora_type": _network,
    "use_dora": switch_to("network_type", "dora"),
    "lycoris_config": unneeded("lora_type says what becomes of it"),
    "init_lora": to("network_weights"),
    "lora_init_type": only("default", "an adapter begins as one that changes nothing"),
    "peft_lora_mode": only("standard", absent.LOST, banner=True),
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
    "flux_guidance_mode": only("constant", "the guidance that the model is told is one number here, guidance_scale", banner=True),
    "flux_guidance_value": where(
        lambda sheet: sheet.value("flux_guidance_mode") != "random-range", to("guidance_scale"), "flux_guidance_mode is random-range"
    ),
    **each("", "flux_guidance_min flux_guidance_max", unneeded("flux_guidance_mode says whether they count")),
    "flux_attention_masked_training": more_than_zero("apply_t5_attn_mask"),
    "flux_fast_schedule": only(False, "see timestep_sampling", banner=True),
    "validation_guidance": _guidance,
    "validation_guidance_real": where(
        lambda sheet: "sample_guidance_scale" in sheet.known, to("sample_cfg_scale"), "validation_guidance says it for this model"
    ),
    "vae_batch_size": to("vae_batch_size"),
    "text_encoder_batch_size": to("text_encoder_batch_size"),
    "tokenizer_max_length": _tokens,
    "vae_enable_tiling": to("vae_tiling"),
    "attention_mechanism": unneeded("see attention_backend; the fastest that is there is taken"),
    **training.TABLE,
    **previews.TABLE,
    **absent.TABLE,
}
"""The rule of each key, without the dashes before it."""

IMPORTER = Importer(f"a configuration of {PROGRAM} (.json or .toml)", (".json", ".toml"), looks_like, read)
DATA = (
    DataFile(PROGRAM, "data backends", data.KEY, data.KEY, data.TABLE, data.looks_like),
    DataFile(
        PROGRAM, "a library of prompts", previews.LIBRARY, previews.LIBRARY, previews.OF_LIBRARY, previews.holds_prompts, needs_images=False
    ),
    DataFile(PROGRAM, "the settings of LyCORIS", lycoris.KEY, lycoris.KEY, lycoris.TABLE, lycoris.looks_like, needs_images=False),
)
