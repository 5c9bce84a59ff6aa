"""The texts in a saved file's header: kohya's `ss_*` keys, modelspec, and the settings of the run. Never a folder or a path.

A run that was killed and resumed must write the same bytes as one that was not. So nothing here looks at a clock or draws a random
number: kohya's ss_training_started_at and ss_training_finished_at are left out, ss_session_id follows from the settings, and
modelspec.date is written only when the caller gives a date (one that belongs to the run, such as that of its folder).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from sd_scripts.families import FACTS
from sd_scripts.library.core.diffusion import anchor_sigmas
from sd_scripts.library.core.protocols import Kind, StateDict, TrainingAdapter, Version
from sd_scripts.library.core.safetensors_file import serialise
from sd_scripts.schema.anchored_flow import AnchoredFlowOptions
from sd_scripts.schema.fields import show_of
from sd_scripts.schema.network import AdapterOptions, TextNetworkOptions
from sd_scripts.schema.objective import RegressionOptions
from sd_scripts.schema.runs import RunOptions

CONFIG = "kohya_like.config"

_MINIMAL = ("ss_v2", "ss_base_model_version", "ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_network_args")
_NETWORK_MODULES = {"loha": "lycoris.kohya", "lokr": "lycoris.kohya", "oft": "peft"}
_PREDICTION = {"epsilon": "epsilon", "v_prediction": "v", "velocity": "flow", "sample": "sample"}
# Kept out of the settings in the header: they say where things are or how this start came about, not what was trained.
_NOT_SETTINGS = ("resume", "log_tracker_name", "wandb_run_name", "sample_prompts", "vae_device", "text_encoder_device")


@dataclass(frozen=True)
class BaseFacts:
    """What the header says about the base model."""

    name: str
    """Parts.source: a file name or hub id."""
    kind: Kind
    """What its network predicts."""
    version: Version
    shift: float = 1.0
    """Of its scheduler, which places the sampler's steps."""
    training_adapter: TrainingAdapter | None = None
    """What was on it in training and is not in the file."""


@dataclass(frozen=True)
class DatasetFacts:
    """What the header says about the images; folders are numbered, not named."""

    num_train_images: int = 0
    """Images of an epoch, repeats counted."""
    num_reg_images: int = 0
    num_validation_images: int = 0
    num_batches_per_epoch: int = 0
    global_batch: int = 0
    """Samples of an optimizer step, over all processes and accumulated batches."""
    num_epochs: int = 0
    dataset_hash: str = ""
    subsets: tuple[tuple[int, int], ...] = ()
    """(repeats, images) of each training folder."""
    tag_frequency: Mapping[str, int] = field(default_factory=dict)
    """How often each part of a caption occurs."""
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Images of each bucket (width, height), repeats counted."""


def build(
    options: RunOptions,
    base: BaseFacts,
    *,
    step: int,
    epoch: int,
    dataset: DatasetFacts | None = None,
    base_hash: str | None = None,
    date: str | None = None,
) -> dict[str, str]:
    """Header texts of a file saved after `step` optimizer steps, in kohya's formats: plain strings, "None", JSON for tables.

    date: ISO 8601, of the run. Hashes of the tensors are added by `with_hashes`. With options.output.metadata = minimal only what other
    tools need to read the file.
    """
    texts = _network(options, base) | _modelspec(options, base, date)
    if options.output.metadata == "minimal":
        return {key: value for key, value in texts.items() if key in _MINIMAL or key.startswith("modelspec.")}
    settings = effective_settings(options, base.name)
    texts |= _training(options, step, epoch, base.name, base_hash) | _anchors(options, base) | _training_adapter(base)
    texts |= _dataset(options, dataset or DatasetFacts())
    texts[CONFIG] = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    # kohya: a random number of 31 bits for each start. Here every start of the same run has the same one.
    texts["ss_session_id"] = str(int.from_bytes(hashlib.sha256(texts[CONFIG].encode()).digest()[:4], "big") >> 1)
    return texts


def effective_settings(options: RunOptions, base: str) -> dict[str, object]:
    """All settings by flat name, without folders, files and names of places; the base model by its name alone."""
    settings: dict[str, object] = {}
    for section in type(options).model_fields:
        values = getattr(options, section)
        for name, info in type(values).model_fields.items():
            show = show_of(info)
            if show.kind in ("folder", "file") or show.cli_only or name in _NOT_SETTINGS:
                continue
            settings[name] = getattr(values, name)
    named = None if options.model.pretrained_model_name_or_path is None else base
    return json.loads(json.dumps({"script": options.script} | settings | {"pretrained_model_name_or_path": named}))


def with_hashes(texts: Mapping[str, str], tensors: StateDict) -> dict[str, str]:
    """Adds the hashes that galleries and kohya's tools know a file by.

    sshs_model_hash and modelspec.hash_sha256: SHA-256 of everything after the header. sshs_legacy_hash: first 8 digits of the SHA-256 of
    64 KiB from the first MiB on, of the file with its ss_ texts only, because kohya computes it before it adds the others.
    """
    data = serialise(tensors, {key: value for key, value in texts.items() if key.startswith("ss_")})
    digest = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    legacy = hashlib.sha256(data[0x100000:0x110000]).hexdigest()[:8]
    return {**texts, "sshs_model_hash": digest, "sshs_legacy_hash": legacy, "modelspec.hash_sha256": f"0x{digest}"}


def _network(options: RunOptions, base: BaseFacts) -> dict[str, str]:
    network = options.adapter
    texts = {"ss_base_model_version": base.version.kohya}
    if base.version.is_v2 is not None:
        texts["ss_v2"] = str(base.version.is_v2)
    if options.method != "network":
        return texts
    module = _NETWORK_MODULES.get(network.network_type) or FACTS[options.family].lora_module or ""
    kind = network.network_type
    arguments: dict[str, str] = {} if kind == "lora" else {"algo": "locon" if kind == "dora" else kind}
    if kind == "dora":
        arguments["dora_wd"] = "True"
    for name in _ARGUMENTS + _own_arguments(network):
        value = getattr(network, name)
        if value != type(network).model_fields[name].default:
            arguments[name] = ",".join(str(number) for number in value) if isinstance(value, tuple) else str(value)
    return {
        **texts,
        "ss_network_module": module,
        "ss_network_dim": str(network.network_dim),
        "ss_network_alpha": str(float(network.network_dim) if network.network_alpha is None else network.network_alpha),
        "ss_network_args": json.dumps(arguments, sort_keys=True),
    }


_ARGUMENTS = ("rank_dropout", "module_dropout", "network_reg_dims", "network_reg_lrs")


def _own_arguments(network: AdapterOptions) -> tuple[str, ...]:
    """The network arguments that not every adapter has, by the names of kohya's scripts."""
    return tuple(name for name in type(network).model_fields if name not in TextNetworkOptions.model_fields)


def _modelspec(options: RunOptions, base: BaseFacts, date: str | None) -> dict[str, str]:
    """modelspec 1.0.1."""
    output = options.output
    width, height = options.dataset.resolution
    architecture, layout = base.version.modelspec, base.version.layout
    adapter = options.method == "network"
    texts: dict[str, str | None] = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{architecture}/lora" if adapter else architecture,
        "implementation": "diffusers" if options.output.save_model_as == "diffusers" else layout,
        "title": output.metadata_title or output.output_name,
        "resolution": f"{width}x{height}",
        "prediction_type": _PREDICTION[base.kind],
        "timestep_range": "{},{}".format(*options.objective.times),
        "date": date,
        "author": output.metadata_author,
        "description": output.metadata_description,
        "license": output.metadata_license,
        "tags": output.metadata_tags,
        "trigger_phrase": output.metadata_trigger_phrase,
        "usage_hint": output.metadata_usage_hint,
    }
    return {f"modelspec.{key}": value for key, value in texts.items() if value is not None}


_REGRESSION = ("loss_type", "huber_schedule", "huber_scale", "huber_c", "ip_noise_gamma_random_strength")
"""Options of the distance between prediction and target, and of the input."""


def _training(options: RunOptions, step: int, epoch: int, base: str, base_hash: str | None) -> dict[str, str]:
    network, training, optimizer, objective, output = (
        options.network,
        options.training,
        options.optimizer,
        options.objective,
        options.output,
    )
    # kohya writes one number where one was given, and a list otherwise.
    text_rate = network.text_encoder_lr[0] if len(network.text_encoder_lr) == 1 else list(network.text_encoder_lr) or None
    values: dict[str, object] = {
        "output_name": output.output_name,
        "learning_rate": optimizer.learning_rate,
        "unet_lr": network.unet_lr,
        "text_encoder_lr": text_rate,
        "epoch": epoch,
        "steps": step,
        "max_train_steps": training.max_train_steps,
        "gradient_checkpointing": options.memory.gradient_checkpointing,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "lr_scheduler": optimizer.lr_scheduler_type or optimizer.lr_scheduler,
        "lr_warmup_steps": optimizer.lr_warmup_steps,
        "optimizer": optimizer.optimizer_type + (f"({','.join(optimizer.optimizer_args)})" if optimizer.optimizer_args else ""),
        "max_grad_norm": optimizer.max_grad_norm,
        "mixed_precision": training.mixed_precision,
        "seed": training.seed,
        "cache_latents": options.dataset.cache_latents,
        "prior_loss_weight": options.dataset.prior_loss_weight,
        "training_comment": output.training_comment,
    }
    if objective.target != "own":
        values |= {name: getattr(objective, name) for name in _REGRESSION}
        values["ip_noise_gamma"] = cast("RegressionOptions", objective).ip_noise_gamma or None
    if options.model.pretrained_model_name_or_path is not None:
        values |= {"sd_model_name": Path(base).name, "new_sd_model_hash": base_hash}
    if options.method == "network":
        adapter = options.adapter
        values |= {"network_dropout": adapter.network_dropout or None, "scale_weight_norms": adapter.scale_weight_norms}
    if objective.target == "velocity":
        values |= {name: getattr(objective, name) for name in _FLOW}
    return _kohya(values | options.model.header_values() | (_noise(objective) if objective.target == "noise" else {}))


_FLOW = ("weighting_scheme", "logit_mean", "logit_std", "mode_scale", "timestep_sampling", "sigmoid_scale", "model_prediction_type") + (
    "discrete_flow_shift",
)


def _anchors(options: RunOptions, base: BaseFacts) -> dict[str, str]:
    """The noise levels that acrf has trained, in the sampler's order: images are made with as many steps, at these."""
    if not options.objective.has_terms:
        return {}
    objective = cast("AnchoredFlowOptions", options.objective)
    texts = {"ss_scheduler_shift": str(base.shift)}
    if objective.num_anchors:
        texts["ss_turbo_steps"] = str(objective.turbo_steps)
        texts["ss_acrf_sigmas"] = json.dumps(anchor_sigmas(objective.turbo_steps, base.shift))
    return texts


def _training_adapter(base: BaseFacts) -> dict[str, str]:
    adapter = base.training_adapter
    if adapter is None:
        return {}
    return {
        "ss_training_adapter": adapter.name,
        "ss_training_adapter_sha256": adapter.sha256,
        "ss_training_adapter_multiplier": str(adapter.strength),
    }


def _noise(objective: Any) -> dict[str, object]:
    """The noise and the weights of a model on a noise schedule."""
    return {
        "noise_offset": objective.noise_offset or None,
        "noise_offset_random_strength": objective.noise_offset_random_strength,
        "adaptive_noise_scale": objective.adaptive_noise_scale or None,
        "multires_noise_iterations": objective.multires_noise_iterations or None,
        "multires_noise_discount": objective.multires_noise_discount,
        "min_snr_gamma": objective.min_snr_gamma,
        "debiased_estimation": objective.debiased_estimation_loss,
    }


def _dataset(options: RunOptions, facts: DatasetFacts) -> dict[str, str]:
    dataset = options.dataset
    width, height = dataset.resolution
    subsets = {f"{number}": {"n_repeats": repeats, "img_count": images} for number, (repeats, images) in enumerate(facts.subsets, 1)}
    buckets = [{"resolution": list(size), "count": count} for size, count in sorted(facts.buckets.items())]
    values = {
        "num_train_images": facts.num_train_images,
        "num_reg_images": facts.num_reg_images,
        "num_validation_images": facts.num_validation_images,
        "num_batches_per_epoch": facts.num_batches_per_epoch,
        "num_epochs": facts.num_epochs,
        "batch_size_per_device": dataset.train_batch_size,
        "total_batch_size": facts.global_batch,
        "resolution": f"({width}, {height})",
        "enable_bucket": dataset.enable_bucket,
        "bucket_no_upscale": dataset.bucket_no_upscale,
        "min_bucket_reso": dataset.min_bucket_reso,
        "max_bucket_reso": dataset.max_bucket_reso,
        "color_aug": dataset.color_aug,
        "flip_aug": dataset.flip_aug,
        "random_crop": dataset.random_crop,
        "shuffle_caption": dataset.shuffle_caption,
        "keep_tokens": dataset.keep_tokens,
        "caption_dropout_rate": dataset.caption_dropout_rate,
        "caption_dropout_every_n_epochs": dataset.caption_dropout_every_n_epochs,
        "caption_tag_dropout_rate": dataset.caption_tag_dropout_rate,
        "resize_interpolation": dataset.resize_interpolation,
        "dataset_dirs": json.dumps(subsets),
        "tag_frequency": json.dumps(
            {"1": dict(sorted(facts.tag_frequency.items(), key=lambda item: (-item[1], item[0])))}, ensure_ascii=False
        ),
        "bucket_info": json.dumps({"buckets": {str(number): bucket for number, bucket in enumerate(buckets)}}),
    }
    texts = _kohya(values)
    if facts.dataset_hash:
        texts["kohya_like.dataset_hash"] = facts.dataset_hash
    return texts


def _kohya(values: Mapping[str, object]) -> dict[str, str]:
    """kohya's keys and formats: str() of everything, so None is "None" and True is "True"."""
    return {f"ss_{key}": str(value) for key, value in values.items()}
