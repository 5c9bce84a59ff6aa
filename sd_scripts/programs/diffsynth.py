"""Command lines of DiffSynth-Studio's training scripts (`examples/<model>/model_training/train.py`), as a kind of run, values and a report.

Facts about the program are those of its commit fed7b18 (2026-08), read in its code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported
from sd_scripts.schema.sheet import parts, unless_empty, unless_off

from . import simpletuner
from .command_lines import Command, clear
from .diffusers_examples import OF_ACCELERATE
from .table import (
    ForeignSheet,
    NamedModel,
    Table,
    each,
    ends_of_names,
    fill,
    kind_of_run,
    only,
    optimizer,
    quantized,
    rule_of,
    switch_to,
    to,
    unneeded,
    where,
)

PROGRAM = "DiffSynth-Studio"
MODELS: Mapping[str, NamedModel] = {
    "z_image": NamedModel("zimage", "Z-Image"),
    "qwen_image": NamedModel("qwen_edit", "Qwen-Image"),
    "flux": NamedModel("flux", "FLUX.1"),
    "flux kontext": NamedModel("kontext", "FLUX.1 Kontext"),
    "flux2": NamedModel("flux2_dev", "FLUX.2 dev"),
    "flux2 klein": NamedModel("flux2", "FLUX.2 Klein"),
    "krea2": NamedModel("krea2", "Krea 2"),
    "anima": NamedModel("anima", "Anima"),
    "stable_diffusion": NamedModel("sd", "Stable Diffusion 1.5"),
    "stable_diffusion_xl": NamedModel("sdxl", "SDXL"),
    "ideogram4": NamedModel("", "Ideogram 4"),
    "hidream_o1_image": NamedModel("", "HiDream-O1"),
    "ernie_image": NamedModel("", "ERNIE-Image"),
    "boogu_image": NamedModel("", "Boogu"),
    "joyai_image": NamedModel("", "JoyAI"),
    "ace_step": NamedModel("", "ACE-Step, a model of sounds"),
    **dict.fromkeys(("wanvideo", "ltx2", "minimax_h3", "mova", "lingbot_video"), NamedModel("", "a model of videos")),
}
"""By the folder of the script; a word after it is looked for in the names of the weights."""
_SHIFTS = {"flux": 3.0, "kontext": 3.0, "zimage": 3.0, "anima": 3.0}
"""By what even times are shifted in training, exp(0.8) where a model is not named."""
_VERSIONS = (("edit-2511", "edit-2511"), ("edit-2509", "edit-2509"), ("edit", "edit"), ("", "image"))
_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "flux": {
        "a_to_qkv": ("transformer_blocks.attn.to_q", "transformer_blocks.attn.to_k", "transformer_blocks.attn.to_v"),
        "b_to_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "a_to_out": ("attn.to_out.0",),
        "b_to_out": ("attn.to_add_out",),
        "ff_a.0": ("ff.net.0.proj",),
        "ff_a.2": ("ff.net.2",),
        "ff_b.0": ("ff_context.net.0.proj",),
        "ff_b.2": ("ff_context.net.2",),
        "norm1_a.linear": ("norm1.linear",),
        "norm1_b.linear": ("norm1_context.linear",),
        "to_qkv_mlp": ("single_transformer_blocks.attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    },
    "krea2": {
        "wq": ("to_q",),
        "wk": ("to_k",),
        "wv": ("to_v",),
        "wo": ("to_out.0",),
        "gate": ("to_gate", "ff.gate"),
        "up": ("ff.up",),
        "down": ("ff.down",),
    },
}
"""Its own names of layers, as diffusers calls them; a family that is not here has diffusers' names there too."""
_BEYOND = {"krea2": {"first", "last.linear", "projector", "txtmlp.1", "txtmlp.3", "tmlp.0", "tmlp.2", "tproj.1"}}
"""Layers outside of the blocks, by its names."""
_INPUTS = {"edit_image", "kontext_images", "input_image"}
_DEFAULTS: dict[str, object] = {
    "learning_rate": 1e-4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "max_train_epochs": 1,
    "save_every_n_epochs": 1,
    "network_dim": 32,
    "mixed_precision": "bf16",
    "resolution": [1024, 1024],
    "bucket_reso_steps": 16,
    "optimizer_args": ["weight_decay=0.01"],
    "max_grad_norm": 0.0,
}
"""That program's own, where they may not be ours."""


def of_line(name: str, command: Command) -> Imported | None:
    """The settings of a command line of that program; None for another's. Raises OptionError for what is not trained here."""
    folder = re.search(r"(?:^|[/\\])(\w+)[/\\]model_training[/\\]train\.py$", command.script)
    if folder is None and not (command.name == "train.py" and "dataset_base_path" in command.options):
        return None
    if str(command.options.get("task")).endswith(":data_process"):
        # The first of two: it encodes, and the second trains.
        return None
    weights = f"{command.options.get('model_id_with_origin_paths')} {command.options.get('model_paths')}".lower()
    kind = folder[1] if folder is not None else ""
    kind = next((key for key in MODELS if " " in key and key.split()[0] == kind and key.split()[1] in weights), kind)
    trained = parts(command.options.get("trainable_models") or "") or parts(command.options.get("lora_base_model") or "")
    other = next((part for part in trained if part not in ("dit", "unet", "text_encoder", "text_encoder_2")), None)
    if other is not None:
        raise OptionError(f"{name} is a command line of {PROGRAM} that trains {other}, which is not trained here")
    method = "network" if "lora_base_model" in command.options else "full"
    run, model = kind_of_run(PROGRAM, name, MODELS, kind, method)
    known, unclear = clear({**command.launcher, **command.options})
    sheet = ForeignSheet(PROGRAM, run, known, model)
    if "model_version" in sheet.known:
        sheet.put("model_version", next(ours for piece, ours in _VERSIONS if piece in weights))
    table = {**OF_ACCELERATE, **TABLE}
    fill(sheet, table)
    sheet.ask(unclear, rule_of(table))
    return sheet.finish(f"command line of {PROGRAM}", _defaults(sheet))


def _defaults(sheet: ForeignSheet) -> dict[str, object]:
    found = dict(_DEFAULTS)
    if sheet.decided("save_every_n_steps"):
        del found["save_every_n_epochs"]
    if sheet.has("timestep_sampling", "sigma"):
        found |= {"timestep_sampling": "sigma", "discrete_flow_shift": round(_SHIFTS.get(sheet.run.family, math.exp(0.8)), 4)}
        sheet.conflicts.append(
            f"{PROGRAM} weights each loss by its time, most in the middle (a bell around 0.5); here all times that are drawn count the same"
        )
    return found


# --- rules ------------------------------------------------------------------------------------------------------------


def _base(sheet: ForeignSheet, key: str) -> None:
    """The model of the transformer; its text encoders and VAE come from the same place."""
    pairs = [part.partition(":") for part in parts(sheet.value(key))]
    main = next((model for model, _, file in pairs if not re.search(r"text_encoder|tokenizer|vae|(^|/)ae\.", file)), "")
    if not main:
        sheet.lose(key, "it names no transformer; give the base model as pretrained_model_name_or_path")
    else:
        sheet.take(key, "pretrained_model_name_or_path", main, "with the text encoders and the VAE that belong to it")


def _paths(sheet: ForeignSheet, key: str) -> None:
    """A list of files in JSON, of which a list in it are the parts of one model."""
    try:
        given = json.loads(str(sheet.value(key)))
        first = given[0][0].rpartition("/")[0] if isinstance(given[0], list) else given[0]
    except (ValueError, LookupError, AttributeError, TypeError):
        sheet.refuse(key, "it is no list of files in JSON; give the base model as pretrained_model_name_or_path")
        return
    sheet.take(key, "pretrained_model_name_or_path", str(first))
    if len(given) > 1:
        sheet.lose(key, "the first file was taken for the transformer; give the others as text encoder and VAE")


def _resolution(sheet: ForeignSheet, key: str) -> None:
    width, height = sheet.number("width"), sheet.number("height")
    if width and height:
        if key == "max_pixels" or sheet.decided("resolution"):
            sheet.skip(key, "resolution holds width and height" if key != "max_pixels" else "width and height say it")
        else:
            sheet.put("enable_bucket", False, key)
            sheet.take(key, "resolution", [int(width), int(height)], "for all images, with enable_bucket off")
    elif key == "max_pixels" and (area := sheet.number(key)):
        side = round(math.sqrt(area))
        sheet.take(key, "resolution", [side, side], "the side of a square of as many pixels; each image keeps its shape")
    else:
        sheet.skip(key, "one of width and height alone says nothing there")


def _layer_names(sheet: ForeignSheet, key: str) -> Iterator[str]:
    family = {"kontext": "flux"}.get(sheet.run.family, sheet.run.family)
    for name in parts(sheet.value(key)):
        if name not in _BEYOND.get(family, set()):
            yield from _NAMES.get(family, {}).get(name, (name,))


@unless_empty
def _targets(sheet: ForeignSheet, key: str) -> None:
    names = list(dict.fromkeys(_layer_names(sheet, key)))
    # The blocks of FLUX.1 have numbers between their names.
    expressions = [text.replace(r"transformer_blocks\.attn", r"transformer_blocks\.\d+\.attn") for text in ends_of_names(names)]
    sheet.take(key, "target_modules", expressions, "the same layers by diffusers' names")
    outside = [name for name in parts(sheet.value(key)) if name in _BEYOND.get(sheet.run.family, set())]
    if sheet.run.family in _BEYOND:
        beyond = ", ".join([*outside, "layers that join the texts"])
        sheet.conflicts.append(f"{beyond} have an adapter in {PROGRAM} as well; here an adapter has layers of the blocks alone")


def _inputs(sheet: ForeignSheet, key: str) -> None:
    others = [name for name in parts(sheet.value(key)) if name not in _INPUTS]
    if others:
        sheet.lose(key, f"{', '.join(others)} goes into a model that is made otherwise, which is not trained here")
    else:
        sheet.skip(key, "images to edit are found by the metadata, or lie in control_data_dir")


def _bits(sheet: ForeignSheet, key: str) -> None:
    """Models in fp8, or entries `model:method` of what is packed while it is read."""
    value = str(sheet.value(key)).lower()
    if key == "fp8_models":
        quantized(sheet, key, "fp8_base")
    elif "nf4" in value or "int8" in value:
        quantized(sheet, key, "nf4" if "nf4" in value else "int8")
    else:
        sheet.lose(key, "choose transformer_quantization")


def _task(sheet: ForeignSheet, key: str) -> None:
    task = str(sheet.value(key))
    if task in ("sft", "sft:train"):
        sheet.skip(key, "images and captions are encoded and cached first here by themselves")
    else:
        sheet.lose(key, f"{task} is no training on images alone, and is not here")


@unless_off
def _recomputed(sheet: ForeignSheet, key: str) -> None:
    sheet.put("gradient_checkpointing", True, key)
    sheet.take(key, "gradient_checkpointing_cpu_offload", True, "with gradient_checkpointing")


@unless_off
def _trackers(sheet: ForeignSheet, key: str) -> None:
    found = [name for name in ("tensorboard", "wandb") if sheet.on(f"enable_{name}_log")]
    if sheet.decided("log_with"):
        sheet.skip(key, "log_with holds it")
    else:
        sheet.take(key, "log_with", "all" if len(found) > 1 else found[0])


TABLE: Table = {
    "dataset_base_path": to("train_data_dir"),
    "dataset_metadata_path": to("in_json", "its image, prompt and edit_image are read as they are"),
    "dataset_repeat": to("dataset_repeats"),
    "dataset_num_workers": to("max_data_loader_n_workers"),
    "data_file_keys": unneeded("the metadata is read as it is"),
    "extra_inputs": _inputs,
    **each("", "width height max_pixels", _resolution),
    "model_id_with_origin_paths": _base,
    "model_paths": _paths,
    **each("", "fp8_models quant_options", _bits),
    **each("", "offload_models initialize_model_on_cpu", unneeded("text encoders and VAE leave the GPU once everything is encoded")),
    **each("", "enable_model_cpu_offload enable_optimizer_cpu_offload", simpletuner.TABLE["ramtorch"]),
    "cpu_offload_split_threshold": unneeded("it belongs to enable_model_cpu_offload"),
    "resume_from_checkpoint": only(None, "states of that program are not read; give the last saved file as network_weights"),
    "learning_rate": to("learning_rate"),
    "num_epochs": to("max_train_epochs"),
    "gradient_accumulation_steps": to("gradient_accumulation_steps"),
    "weight_decay": lambda sheet, key: sheet.take(key, "optimizer_args", [f"weight_decay={sheet.value(key)}"]),
    "customized_optimizer": optimizer(),
    "task": _task,
    "output_path": to("output_dir"),
    "save_steps": to("save_every_n_steps"),
    "lora_rank": to("network_dim"),
    "lora_target_modules": _targets,
    "lora_checkpoint": to("network_weights"),
    "preset_lora_path": to("base_weights"),
    "use_gradient_checkpointing": switch_to("gradient_checkpointing", True),
    "use_gradient_checkpointing_offload": _recomputed,
    **each("", "enable_tensorboard_log enable_wandb_log", _trackers),
    "wandb_project": where(lambda sheet: sheet.on("enable_wandb_log"), to("log_tracker_name"), "no tracker would use it"),
    **each(
        "",
        "template_model_id_or_path enable_lora_hot_loading",
        only(False, "models that make LoRAs are not part of this version", banner=True),
    ),
    **each("", "zero_cond_t trainable_models lora_base_model", unneeded("the kind of run says it")),
    "dmd2_*": unneeded("task says what becomes of it"),
    **each(
        "",
        """tokenizer_path tokenizer_1_path tokenizer_2_path tokenizer_t5xxl_path processor_path remove_prefix_in_ckpt
        align_to_opensource_format preset_lora_model find_unused_parameters enable_swanlab_log swanlab_project enable_csv_log
        enable_npu_patch""",
        unneeded("it says how that program works, not what is trained"),
    ),
}
"""The rule of each option."""
