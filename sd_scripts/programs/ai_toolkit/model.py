"""What a job of ai-toolkit says of the model and the adapter."""

from __future__ import annotations

from typing import Any

from sd_scripts.schema.sheet import is_empty, is_off, unless_empty, unless_off

from ..table import NOT_HERE, ForeignSheet, Rule, Table, each, more_than_zero, only, quantized, switch_to, targets, to, unneeded, where


def _bits(sheet: ForeignSheet, key: str) -> None:
    text = key.endswith("_te")
    kind = str(sheet.value("model.qtype_te" if text else "model.qtype") or "qfloat8")
    on = sheet.on("model.quantize_te") if text and "model.quantize_te" in sheet.given else sheet.on("model.quantize")
    if not on:
        sheet.skip(key, "it is off" if "quantize" in key else "quantize is off")
    elif key.startswith("model.quantize") and f"model.qtype{'_te' if text else ''}" in sheet.given:
        sheet.skip(key, f"qtype{'_te' if text else ''} says in how many bits")
    else:
        quantized(sheet, key, kind, "text_encoder_quantization" if text else "transformer_quantization")


@unless_empty
def _assistant(sheet: ForeignSheet, key: str) -> None:
    if "training_adapter" in sheet.known:
        sheet.take(key, "training_adapter", sheet.value(key))
    else:
        sheet.lose(key, "a LoRA that is on while training only is not used by this family; base_weights merges one for good")


def _text_files(sheet: ForeignSheet, key: str) -> None:
    """Parts of the model that lie elsewhere."""
    names = {"model.vae_path": ("vae", "ae"), "model.te_name_or_path": ("text_encoder", "t5xxl")}
    wanted = names.get(key, ("text_encoder", "t5xxl"))
    option = next((one for one in wanted if one in sheet.known), None)
    value = sheet.value(key)
    if is_empty(value) or value == sheet.value("model.name_or_path"):
        sheet.skip(key, "it is empty" if is_empty(value) else "parts come with the base model")
    elif option is None:
        sheet.refuse(key, "this family's text encoders come with the base model")
    else:
        sheet.take(key, option, value)
        vae = next((one for one in ("vae", "ae") if one in sheet.known), None)
        if key == "model.extras_name_or_path" and vae:
            sheet.put(vae, value, key)


@unless_off
def _offloaded(sheet: ForeignSheet, key: str) -> None:
    sheet.lose(key, "layers are not moved one by one; set blocks_to_swap to as many of the network's blocks as do not fit")


def _shown_pieces(option: str) -> Any:
    @unless_empty
    def rule(sheet: ForeignSheet, key: str) -> None:
        value = sheet.value(key)
        sheet.take(key, option, targets(value if isinstance(value, list) else [value]), "pieces of names, as there")

    return rule


def _of_whole_model(option: str) -> Rule:
    """Which weights are trained of a whole model; an adapter is told by network_kwargs."""
    return where(lambda sheet: sheet.run.method == "full", _shown_pieces(option), "it is for a whole model; network_kwargs tell an adapter")


@unless_empty
def _rank(sheet: ForeignSheet, key: str) -> None:
    lokr = str(sheet.value("network.type") or "").lower() == "lokr" and sheet.value("network.lokr_full_rank") is not False
    name = key.rpartition(".")[2]
    option = "network_dim" if name in ("linear", "rank") else "network_alpha"
    if lokr and option == "network_dim":
        sheet.take(key, option, 4096, "whole matrices, which is what lokr_full_rank means there")
    elif lokr:
        sheet.skip(key, "whole matrices have no alpha")
    elif (name == "linear" and "network.rank" in sheet.given) or (name == "alpha" and "network.linear_alpha" in sheet.given):
        sheet.skip(key, "rank says it" if name == "linear" else "linear_alpha says it")
    else:
        sheet.take(key, option, sheet.value(key))


def _convolutions(sheet: ForeignSheet, key: str) -> None:
    option = "conv_dim" if key == "network.conv" else "conv_alpha"
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is empty")
    elif option not in sheet.known:
        sheet.skip(key, "the network has no 3x3 convolutions")
    elif "network.conv" not in sheet.given:
        sheet.skip(key, "it is for conv, which is not given")
    else:
        sheet.take(key, option, sheet.value(key))


def _kind_of_network(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key)).lower()
    if name in ("lora", "locon", "lokr", "dora"):
        sheet.take(key, "network_type", {"locon": "lora"}.get(name, name))
    else:
        sheet.lose(key, "it is not made; network_type = lora was put")


TABLE: Table = {
    "network.type": _kind_of_network,
    **each("network.", "linear rank linear_alpha alpha", _rank),
    **each("network.", "conv conv_alpha", _convolutions),
    "network.dropout": more_than_zero("network_dropout"),
    "network.lokr_full_rank": unneeded("network_dim says it"),
    "network.lokr_factor": to("lokr_factor"),
    "network.old_lokr_format": unneeded("save_model_as says which names are in the file"),
    "network.transformer_only": only(True, "other layers get an adapter by target_modules"),
    "network.split_multistage_loras": unneeded("it is for models in two stages"),
    "network.layer_offloading": only(False, NOT_HERE),
    "network.all_layers": only(False, "weights that are no layers are not trained"),
    "network.pretrained_lora_path": to("network_weights"),
    **each("network.", "lorm lorm.*", unneeded("it is for network.type = lorm, which is not made")),
    "network.network_kwargs": unneeded("it is empty"),
    "network.network_kwargs.only_if_contains": _shown_pieces("target_modules"),
    "network.network_kwargs.ignore_if_contains": _shown_pieces("exclude_modules"),
    "model.name_or_path": to("pretrained_model_name_or_path"),
    "model.is_v_pred": where(
        lambda sheet: "prediction_type" in sheet.known, switch_to("prediction_type", "v_prediction"), "the kind of run says it"
    ),
    **each("model.", "quantize qtype quantize_te qtype_te", _bits),
    "model.quantize_kwargs.*": unneeded("layers that are left whole there are embeddings and the last, here as well"),
    **each("model.", "quantize_kwargs model_kwargs model_paths", unneeded("it is empty")),
    "model.model_kwargs.match_target_res": only(False, "give control_resolution"),
    "model.low_vram": unneeded("each network is on the GPU only while it is needed there"),
    "model.assistant_lora_path": _assistant,
    "model.accuracy_recovery_adapter": only(None, "it corrects weights of few bits and is not read", banner=True),
    "model.inference_lora_path": only(None, "previews are drawn with the trained adapter alone"),
    "model.lora_path": lambda sheet, key: (
        sheet.skip(key, "it is empty") if is_empty(sheet.value(key)) else sheet.take(key, "base_weights", [str(sheet.value(key))])
    ),
    **each("model.", "vae_path te_name_or_path extras_name_or_path", _text_files),
    **each("model.", "layer_offloading auto_memory", _offloaded),
    **each(
        "model.",
        "layer_offloading_transformer_percent layer_offloading_text_encoder_percent",
        unneeded("blocks_to_swap says how much"),
    ),
    "model.compile": to("compile"),
    "model.block_compile": unneeded("compile_scope = blocks is the default"),
    "model.compile_mode": to("compile_mode"),
    "model.compile_fullgraph": to("compile_fullgraph"),
    "model.compile_dynamic": unneeded("compile_dynamic = auto finds out"),
    "model.cache_size_limit": unneeded("compiled code is kept as long as it fits"),
    "model.attn_masking": to("apply_t5_attn_mask"),
    **each(
        "model.",
        "dtype vae_dtype te_dtype vae_device te_device text_encoder_bits",
        unneeded("mixed_precision and vae_dtype say it"),
    ),
    "model.split_model_over_gpus": only(False, "weights are sharded with distributed_strategy = fsdp2", banner=True),
    "model.split_model_other_module_param_count_scale": unneeded("it belongs to split_model_over_gpus"),
    **{f"model.{name}": only(None, NOT_HERE, banner=True) for name in ("refiner_name_or_path", "unet_path", "unconditional_lora_path")},
    **{f"model.{name}": only(True, NOT_HERE) for name in ("use_text_encoder_1", "use_text_encoder_2")},
    **{f"model.{name}": only(None, NOT_HERE) for name in ("latent_space_version", "unet_sample_size")},
    "model.only_if_contains": _of_whole_model("target_modules"),
    "model.ignore_if_contains": _of_whole_model("exclude_modules"),
    **{f"model.{name}": only(False, NOT_HERE) for name in ("experimental_xl", "in_context")},
    "model.refiner_start_at": unneeded("there is no refiner"),
}
