"""What a configuration of OneTrainer says of the model and the adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PureWindowsPath

from sd_scripts.runs.layers import layers_of
from sd_scripts.schema.sheet import is_empty, is_off, shown, unless_empty, unless_off

from ..table import BITS, ForeignSheet, Rule, Table, TwoWay, each, more_than_zero, only, quantized, targets, to, unneeded, where

KINDS = {"LORA": "lora", "LOHA": "loha", "LOKR": "lokr", "OFT_2": "oft"}
_PRECISIONS = {"FLOAT_32": "no", "TFLOAT_32": "no", "FLOAT_16": "fp16", "BFLOAT_16": "bf16"}
PRECISIONS = {"float": "FLOAT_32", "no": "FLOAT_32", "fp16": "FLOAT_16", "bf16": "BFLOAT_16"}
"""That program's words for ours."""
BACKBONES = ("unet", "transformer")


def backbone_of(model: str) -> str:
    """What that program calls the network of a model."""
    return "unet" if model.startswith("STABLE_DIFFUSION") else "transformer"


PARTS = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "vae")


def _of_part(rule: Rule) -> Rule:
    """A rule for what a file says of a part, where the model has it."""

    def write(sheet: ForeignSheet, key: str) -> None:
        if key.split(".")[0] in sheet.model.parts:
            rule(sheet, key)
        else:
            sheet.skip(key, _ELSEWHERE)

    return replace(rule, write=write) if isinstance(rule, TwoWay) else write


def _of_adapter(rule: Rule) -> Rule:
    """A rule for what a file says of adapters, which it does for whole models, too."""

    def write(sheet: ForeignSheet, key: str) -> None:
        if sheet.run.method == "network":
            rule(sheet, key)
        else:
            sheet.skip(key, "it is a setting of adapters, and this run trains the model itself")

    return replace(rule, write=write) if isinstance(rule, TwoWay) else write


def assumed_precision(sheet: ForeignSheet) -> None:
    """Weights that are trained themselves are kept in the precision of their part, which is often 16 bits."""
    part = next((part for part in BACKBONES if f"{part}.weight_dtype" in sheet.given and part in sheet.model.parts), None)
    if sheet.run.method != "full" or part is None or "full_bf16" not in sheet.known:
        return
    if str(sheet.value(f"{part}.weight_dtype")) == "BFLOAT_16":
        sheet.take(f"{part}.weight_dtype", "full_bf16", True, "rounded stochastically")


def _model(sheet: ForeignSheet, key: str) -> None:
    sheet.skip(key, f"the kind of run says it: {sheet.run.label}")


def _destination(sheet: ForeignSheet, key: str) -> None:
    path = PureWindowsPath(str(sheet.value(key) or ""))
    if is_empty(sheet.value(key)) or not path.name:
        sheet.skip(key, "it is empty")
        return
    sheet.take(key, "output_name", re.sub(r"[\x00-\x1f:*?\"<>|]", "-", path.stem if path.suffix else path.name).lstrip(".")[:120])
    folder = str(sheet.value(key))[: -len(path.name)].rstrip("/\\")
    if folder:
        sheet.put("output_dir", folder, key)
        sheet.write(key, "renamed", f"output_name = {sheet.values.get('output_name', path.stem)} and output_dir = {folder}")


def _format(sheet: ForeignSheet, key: str) -> None:
    names = {"KOHYA_LORA": "kohya", "DIFFUSERS_LORA": "diffusers", "COMFY_LORA": "comfyui", "DIFFUSERS": "diffusers"}
    single = ("ORIGINAL_SINGLE_FILE", "ORIGINAL_TRANSFORMER", "COMFY_TRANSFORMER", "LEGACY_SAFETENSORS", "SAFETENSORS")
    value = str(sheet.value(key))
    if value in names and sheet.has("save_model_as", names[value]):
        sheet.take(key, "save_model_as", names[value])
    elif sheet.run.method == "full" and value in single:
        sheet.take(key, "save_model_as", "safetensors")
    else:
        default = sheet.known["save_model_as"].default if "save_model_as" in sheet.known else "a .safetensors file"
        sheet.skip(key, f"{value}: save_model_as = {default} is what other programs read; its help says which")


def _dtype(option: str) -> Rule:

    def rule(sheet: ForeignSheet, key: str) -> None:
        value = _PRECISIONS.get(str(sheet.value(key)))
        if value is None:
            sheet.refuse(key, f"{shown(sheet.value(key))} is no such precision here; choose {option}")
        else:
            sheet.take(key, option, "float" if value == "no" and option != "mixed_precision" else value)
            if sheet.value(key) == "TFLOAT_32" and option == "mixed_precision":
                sheet.put("cuda_allow_tf32", True, key)

    return rule


def _weights(sheet: ForeignSheet, key: str) -> None:
    """In which bits a part is kept."""
    part, value = key.split(".")[0], str(sheet.value(key))
    if part == "vae":
        _dtype("vae_dtype")(sheet, key)
    elif value.lower() in BITS or "GGUF" in value:
        quantized(sheet, key, value, "transformer_quantization" if part in BACKBONES else "text_encoder_quantization")
    else:
        sheet.skip(key, "mixed_precision says in what is computed; frozen weights are kept in it")


def _offloaded(sheet: ForeignSheet, key: str) -> None:
    share = sheet.number(key) or 0
    if share <= 0:
        sheet.skip(key, "it is off")
    elif key.split(".")[0] not in BACKBONES and key != "layer_offload_fraction":
        sheet.skip(key, "text encoders leave the GPU once captions are encoded")
    elif key == "layer_offload_fraction" and sheet.value("gradient_checkpointing") != "CPU_OFFLOADED":
        sheet.skip(key, "it counts with gradient_checkpointing CPU_OFFLOADED only")
    elif (table := layers_of(sheet.run.family)) and "blocks_to_swap" in sheet.known:
        number = min(math.ceil(round(share * table.blocks, 6)), table.blocks)
        sheet.take(key, "blocks_to_swap", number, f"{share:g} of {table.blocks} blocks")
    else:
        sheet.lose(key, "the blocks of this family cannot wait in host RAM")


def _checkpointing(sheet: ForeignSheet, key: str) -> None:
    value = sheet.value(key)
    if key.split(".")[0] not in (*BACKBONES, "gradient_checkpointing"):
        sheet.skip(key, "it is for the part that is trained")
    elif str(value) == "CPU_OFFLOADED":
        sheet.put("gradient_checkpointing_cpu_offload", True, key)
        sheet.take(key, "gradient_checkpointing", True, "with gradient_checkpointing_cpu_offload")
    else:
        sheet.take(key, "gradient_checkpointing", str(value).upper() in ("ON", "TRUE"))


def _activations(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)) or key.split(".")[0] not in BACKBONES:
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "it is for the part that is trained")
    else:
        sheet.put("gradient_checkpointing", True, key)
        sheet.take(key, "gradient_checkpointing_cpu_offload", True)


def _trained(sheet: ForeignSheet, key: str) -> None:
    part, on = key.split(".")[0], not is_off(sheet.value(key))
    if part in BACKBONES:
        if on:
            sheet.skip(key, "the network is what is trained")
        elif "train_unet" in sheet.known:
            sheet.take(key, "train_unet", False)
        else:
            sheet.lose(key, "the network is always trained")
    elif not on:
        sheet.skip(key, "it is off")
    elif part == "vae":
        sheet.skip(key, "a VAE is trained by a method of its own there")
    elif not sheet.model.trains_texts:
        sheet.skip(key, "this model's text encoders are trained there neither")
    elif part.startswith("text_encoder") and "train_text_encoder" in sheet.known:
        sheet.take(key, "train_text_encoder", True)
        sheet.put("cache_text_encoder_outputs", False, key)
    else:
        sheet.lose(key, "this part stays as it is here")


def _rate_of_part(sheet: ForeignSheet, key: str) -> None:
    part = key.split(".")[0]
    if is_empty(sheet.value(key)):
        sheet.skip(key, "it is empty, which means learning_rate")
    elif part in BACKBONES:
        sheet.take(key, "unet_lr", sheet.value(key))
    elif sheet.on(f"{part}.train") and "text_encoder_lr" in sheet.known:
        rates = [sheet.number(f"{name}.learning_rate") for name in ("text_encoder", "text_encoder_2")]
        sheet.take(key, "text_encoder_lr", [str(rate) for rate in rates if rate is not None])
    else:
        sheet.skip(key, "this part is not trained")


def _stopped(sheet: ForeignSheet, key: str) -> None:
    """When a part is trained no longer."""
    part, after = key.split(".")[0], sheet.number(key.removesuffix("_unit"))
    epochs = sheet.number("epochs") or 100
    trained = part in BACKBONES or (part != "vae" and sheet.on(f"{part}.train") and sheet.model.trains_texts)
    if str(sheet.value(key)) in ("NEVER", "ALWAYS"):
        sheet.skip(key, f"{sheet.value(key)} is what happens here as well")
    elif not trained:
        sheet.skip(key, "this part is not trained")
    elif after is not None and sheet.value(key) == "EPOCH" and after >= epochs:
        sheet.skip(key, "the run ends before")
    else:
        sheet.lose(key, "parts are trained to the end; a lower rate does it in part")


@unless_empty
def _part_file(sheet: ForeignSheet, key: str) -> None:
    part, value = key.split(".")[0], sheet.value(key)
    options = {"vae": ("vae", "ae"), "text_encoder": ("text_encoder",), "transformer": ("pretrained_model_name_or_path",)}
    option = next((name for name in options.get(part, ()) if name in sheet.known), None)
    if part == "transformer":
        base = sheet.value("base_model_name")
        if str(value).startswith(("http://", "https://")):
            sheet.lose(key, "a file is not fetched by its address; download it and give its path as pretrained_model_name_or_path")
        else:
            sheet.take(key, "pretrained_model_name_or_path", value, f"with vae and text_encoder from {base}")
        for name in ("vae", "ae", "text_encoder", "t5xxl", "clip_l"):
            if name in sheet.known and not sheet.decided(name) and not is_empty(base):
                sheet.put(name, base, key)
    elif option is None:
        sheet.lose(key, "this part comes with the base model")
    else:
        sheet.take(key, option, value)


def _base(sheet: ForeignSheet, key: str) -> None:
    if not is_empty(sheet.value("transformer.model_name")):
        sheet.skip(key, "transformer.model_name is trained; the other parts come from here")
    else:
        to("pretrained_model_name_or_path")(sheet, key)


def _preset(sheet: ForeignSheet) -> str:
    pieces = is_empty(sheet.value("layer_filter"))
    return str(sheet.value("layer_filter_preset") or ("full" if pieces else "custom"))


def _layers(sheet: ForeignSheet, key: str) -> None:
    """A preset of layers, or pieces of their names; a preset has its pieces in the file as well."""
    preset, known = _preset(sheet), sheet.model.layers
    if preset in known and key != "layer_filter_preset" and "layer_filter_preset" in sheet.given:
        sheet.skip(key, f"layer_filter_preset = {preset} says it")
    elif preset in known:
        given = known[preset]
        options = {**given} if isinstance(given, Mapping) else {}
        for option, value in options.items():
            sheet.take(key, option, value, "pieces of names, as there")
        if not options:
            sheet.skip(key, "these are the layers that an adapter has here")
    elif preset == "full":
        every_layer(sheet, key)
    elif key == "layer_filter_preset":
        sheet.skip(key, "layer_filter has its pieces")
    else:
        pieces = [piece.strip() for piece in str(sheet.value(key) or "").split(",") if piece.strip()]
        regex = sheet.on("layer_filter_regex")
        if pieces:
            sheet.take(key, "target_modules", pieces if regex else targets(pieces), "" if regex else "pieces of names, as there")
        else:
            sheet.skip(key, "it is empty")


def every_layer(sheet: ForeignSheet, key: str) -> None:
    """All layers that an adapter can have here, 3x3 convolutions too; there those outside of the blocks have one as well."""
    if "lora_targets" in sheet.known:
        sheet.put("lora_targets", sheet.known["lora_targets"].choices[-1], key)
    if "conv_dim" in sheet.known:
        sheet.put("conv_dim", int(sheet.number("lora_rank") or 16), key)
        sheet.put("conv_alpha", sheet.number("lora_alpha") or 1.0, key)
    sheet.write(key, "not supported", LAYERS_BEYOND)
    if (text := f"layer_filter_preset = full: {LAYERS_BEYOND}") not in sheet.conflicts:
        sheet.conflicts.append(text)


LAYERS_BEYOND = "all layers of the blocks have an adapter; there those before and after the blocks have one too"


def _rank(sheet: ForeignSheet, key: str) -> None:
    kind = str(sheet.value("peft_type") or "LORA")
    of_lokr = kind == "LOKR"
    if kind == "OFT_2" or (of_lokr != (key == "lokr_dim") and key != "lora_alpha"):
        sheet.skip(key, f"it is not for {kind}")
    elif of_lokr and sheet.on("lokr_full_matrix"):
        sheet.take(key, "network_dim", 4096, "whole matrices") if key == "lokr_dim" else sheet.skip(key, "whole matrices have no alpha")
    else:
        sheet.take(key, "network_alpha" if key == "lora_alpha" else "network_dim", sheet.value(key))


def _kind(sheet: ForeignSheet, key: str) -> None:
    kind = KINDS.get(str(sheet.value(key)))
    if kind is None:
        sheet.lose(key, "it is not made; network_type = lora was put")
    else:
        sheet.take(key, "network_type", "dora" if kind == "lora" and sheet.on("lora_decompose") else kind)


@unless_off
def _decomposed(sheet: ForeignSheet, key: str) -> None:
    if key == "lora_decompose" and str(sheet.value("peft_type") or "LORA") == "LORA":
        sheet.take(key, "network_type", "dora")
    elif key == "lora_decompose":
        sheet.lose(key, "weights are decomposed (DoRA) for LoRA only")
    else:
        sheet.skip(key, "it is how DoRA's norm is computed")


def _skipped_layers(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is 0")
    elif "clip_skip" in sheet.known and key == "text_encoder_layer_skip":
        sheet.take(key, "clip_skip", int(sheet.number(key) or 0) + 1, "layers are counted from the last one, which is 1")
    else:
        sheet.lose(key, "this family always reads the same layer of its text encoders")


def _attention_masked(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)) or "apply_t5_attn_mask" not in sheet.known:
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "padding is hidden wherever the model was trained so")
    else:
        sheet.take(key, "apply_t5_attn_mask", True)


_ELSEWHERE = "it is for another model's parts"

TABLE: Table = {
    **{
        f"{part}.{name}": _of_part(rule)
        for part in PARTS
        for name, rule in {
            "train": _trained,
            "learning_rate": _rate_of_part,
            "weight_dtype": _weights,
            "model_name": _part_file,
            "offload_fraction": _offloaded,
            "gradient_checkpointing": _checkpointing,
            "activation_offloading": _activations,
            "attention_mask": _attention_masked,
            "guidance_scale": where(lambda sheet: "guidance_scale" in sheet.known, to("guidance_scale"), "there is no embedded guidance"),
            "dropout_probability": more_than_zero("caption_dropout_rate"),
            "include": only(True, "parts cannot be left out", banner=True),
            "stop_training_after": unneeded("see stop_training_after_unit"),
            "stop_training_after_unit": _stopped,
            "train_embedding": unneeded("embeddings are not trained"),
            "compile": unneeded("compile says it"),
        }.items()
    },
    "base_model_name": _base,
    "weight_dtype": unneeded("each part has its own"),
    "output_dtype": _dtype("save_precision"),
    "output_model_format": _format,
    "output_model_destination": _destination,
    "train_dtype": _dtype("mixed_precision"),
    "compile": to("compile"),
    **each("", "gradient_checkpointing", _checkpointing),
    "layer_offload_fraction": _offloaded,
    **each("", "enable_activation_offloading enable_async_offloading", unneeded("each part says it")),
    **each("", "text_encoder_layer_skip text_encoder_2_layer_skip text_encoder_3_layer_skip text_encoder_4_layer_skip", _skipped_layers),
    **each(
        "",
        "prior.* effnet_encoder.* decoder.* decoder_text_encoder.* decoder_vqgan.* unconditional_transformer.*",
        unneeded(_ELSEWHERE),
    ),
    **each("", "quantization.*", unneeded("the network's family says which layers are held in few bits here: linear ones of its blocks")),
    **each("", "layer_filter layer_filter_preset", _layers),
    "layer_filter_regex": unneeded("target_modules are expressions"),
    **each(
        "",
        "embedding_learning_rate preserve_embedding_norm embedding.* additional_embeddings embedding_weight_dtype",
        unneeded("embeddings are not trained"),
    ),
    "additional_embeddings[].*": unneeded("embeddings are not trained"),
    "bundle_additional_embeddings": unneeded("embeddings are not trained"),
    "peft_type": _of_adapter(_kind),
    "lora_model_name": _of_adapter(to("network_weights")),
    **each("", "lora_rank lokr_dim lora_alpha", _of_adapter(_rank)),
    **each("", "lora_decompose lora_decompose_norm_epsilon lora_decompose_output_axis", _of_adapter(_decomposed)),
    "lora_weight_dtype": unneeded("an adapter's weights are float32"),
    "oft_block_size": where(lambda sheet: str(sheet.value("peft_type")) == "OFT_2", to("oft_block_size"), "it is for OFT"),
    **each("", "oft_block_share oft_scaled oft_coft lokr_use_tucker lokr_weight_decompose", only(False, "adapters are not made so")),
    "coft_eps": unneeded("oft_coft says it"),
    "lokr_decompose_both": _of_adapter(more_than_zero("lokr_decompose_both")),
    "lokr_decompose_factor": where(lambda sheet: str(sheet.value("peft_type")) == "LOKR", to("lokr_factor"), "it is for LoKr"),
    **each("", "lokr_full_matrix lokr_vec_trick lokr_dora_on_output", unneeded("network_type and network_dim say it")),
}
