"""kohya's other option names: for each, what to use instead, or why it is not needed or not supported.

A name that a kind of run has as a field never gets here. What a name means may depend on the kind of run, see Options.verdicts.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sd_scripts.families import FACTS

from . import kohya_words as words
from .fields import Options, Verdict
from .runs import RunOptions

FORMER = {"oom_ladder": "oom_fallback", "rehearse": "preflight"}
"""Names that options of ours had in 0.1: read for ever, wherever options are given."""

RENAMED: dict[str, str] = {
    **{
        name: f"{option}, of {facts.label}"
        for facts in FACTS.values()
        if facts.kohya
        for option, names in facts.kohya.options.items()
        for name in names
    },
    **{
        name: ", with ".join(f"{option} = {str(value).lower() if isinstance(value, bool) else value}" for option, value in meant.items())
        for name, meant in words.SWITCHES.items()
    },
    "caption_extention": "caption_extension",
    "epoch": "max_train_epochs",
    "learning_rate_te": "text_encoder_lr (one number)",
    "learning_rate_te1": "text_encoder_lr (its first number)",
    "learning_rate_te2": "text_encoder_lr (its second number)",
    "metadata_reso": "resolution, which is written into the metadata",
    "network_module": "network_type (networks.lora is lora; lycoris.kohya is loha, lokr or oft; conv_dim replaces LoCon)",
    "network_train_text_encoder_only": "train_unet = false together with train_text_encoder = true",
    "network_train_unet_only": "train_text_encoder = false, which is the default",
    "cpu_offload_checkpointing": "gradient_checkpointing_cpu_offload",
    "unsloth_offload_checkpointing": "gradient_checkpointing_cpu_offload",
    "double_blocks_to_swap": "blocks_to_swap, the number of all blocks together",
    "single_blocks_to_swap": "blocks_to_swap, the number of all blocks together",
    "split_mode": "blocks_to_swap = 18",
    "dynamo_backend": "compile_backend, with compile",
    "dynamo_mode": "compile_mode, with compile",
    "dynamo_use_fullgraph": "compile_fullgraph, with compile",
    "dynamo_fullgraph": "compile_fullgraph, with compile",
    "dynamo_use_dynamic": "compile_dynamic, with compile",
    "dynamo_dynamic": "compile_dynamic, with compile",
    "fp8_base": "transformer_quantization = fp8 (or qfloat8, which is more exact)",
    "fp8_base_unet": "transformer_quantization = fp8 (or qfloat8, which is more exact)",
    "fused_optimizer_groups": "fused_backward_pass, of the scripts that train a whole model",
    "blockwise_fused_optimizers": "fused_backward_pass, of the scripts that train a whole model",
    "no_half_vae": "vae_dtype = float, which is the default",
    "save_last_n_epochs_state": "save_last_n_states",
    "save_last_n_steps_state": "save_last_n_states",
    "validate_every_n_epochs": "validate_every_n_steps",
    "initial_step": "resume, with the number of a step",
    "output_config": "dry_run on the command line, or Save TOML on the page",
    "debug_dataset": "dry_run on the command line, or Check data set on the page",
}

NOT_NEEDED: dict[str, str] = {
    "cache_info": "the index of sizes and captions is always kept, and renewed for files that changed",
    "skip_cache_check": "every cache entry is checked as it is read, which costs almost nothing",
    "skip_latents_validity_check": "every cache entry is checked as it is read, which costs almost nothing",
    "persistent_data_loader_workers": "readers are threads that live as long as the run",
    "config_file": "a file cannot name another one; give --config_file on the command line",
    "console_log_file": "the console of a run is kept in its folder as console.log",
    "console_log_level": "the console shows what a person needs, and events.jsonl has the rest",
    "console_log_simple": "the console is plain already",
    "logging_dir": "TensorBoard files are written into the run's own folder",
    "log_prefix": "TensorBoard files are written into the run's own folder",
    "log_config": "config.toml in the run's folder holds every setting, and trackers get it too",
    "dataset_class": "running other people's classes from a configuration is not safe; folders and TOML cover the same data",
    "disable_mmap_load_safetensors": "files are read without memory mapping where that is faster",
    "disable_numpy_memmap": "caches are safetensors files, not numpy archives",
    "mem_eff_save": "an adapter's file is small, and is written in one piece",
    "highvram": "the GPU's cache is emptied only after caching and previews, where it costs nothing",
    "lowram": "each network is on the GPU only while it is needed there",
    "lowvram": "each network is on the GPU only while it is needed there",
    "noise_offset_type": "noise_offset and multires_noise_iterations say it",
    "use_safetensors": "safetensors is the only format",
    "sdpa": "PyTorch's scaled-dot-product attention is always used",
    "xformers": "PyTorch's own attention is as fast and always there",
    "diffusers_xformers": "PyTorch's own attention is as fast and always there",
    "mem_eff_attn": "PyTorch's own attention needs no more memory and is faster",
    "block_swap_h2d_only": "blocks_to_swap never copies frozen weights back",
    "block_swap_ring_size": "blocks_to_swap keeps two places on the GPU, one for the block that computes and one for the next",
    "use_pinned_memory_for_block_swap": "blocks_to_swap keeps what it moves in pinned memory",
    "use_sdpa": "PyTorch's scaled-dot-product attention is always used",
    "skip_until_initial_step": "a resumed run continues at its exact sample without reading the ones before it",
    "initial_epoch": "a resumed run knows its epoch",
    **words.BESIDE,
    "optimizer_schedulefree_wrapper": "sd-scripts does not read it; optimizer_type has schedule-free optimizers, such as ScheduleFreeAdamW",
    "schedulefree_wrapper_args": "sd-scripts does not read it; a schedule-free optimizer takes optimizer_args",
    "perlin_noise": "sd-scripts does not read it; it has noise_offset and multires_noise_iterations",
    "tokenizer_cache_dir": "tokenizers are read from the model's folder or the hub's own cache",
    "huggingface_token": "secrets are read from the environment (HF_TOKEN), never from a file or flag",
    "wandb_api_key": "secrets are read from the environment (WANDB_API_KEY), never from a file or flag",
    "wandb_key": "secrets are read from the environment (WANDB_API_KEY), never from a file or flag",
    "metadata_arch": "the architecture is written by itself",
    "text_encoder_cpu": "text encoders leave the GPU after caching (cache_text_encoder_outputs)",
    "cache_text_encoder_outputs_on_cpu": "text encoders leave the GPU after caching (cache_text_encoder_outputs)",
    "preserve_distribution_shape": "min_timestep and max_timestep cut the density without changing its shape",
    "no_token_padding": "captions are padded as the model's pipeline does it, so that training and use agree",
    "train_blocks": "target_modules chooses what is trained",
    **{box: "the script says which family is trained" for facts in FACTS.values() if facts.kohya for box in facts.kohya.boxes},
    "v2": "versions of a family are told apart by the model itself",
    "async_upload": "uploads run beside the training and are complete when the run ends",
    "huggingface_repo_type": "the upload goes to a model repository",
}

UNSUPPORTED: dict[str, str] = {
    "clip_skip": "this family always reads the same layer of its text encoders; files made with another fit no tool. Remove it",
    "full_bf16": "adapter weights in 16 bit lose small updates; use mixed_precision = bf16",
    "full_fp16": "adapter weights in 16 bit lose small updates; use mixed_precision = fp16",
    "face_crop_aug_range": "crop faces beforehand, or use random_crop",
    "conditioning_dropout": "use caption_dropout_rate",
    "stop_text_encoder_training": "give the text encoders a lower text_encoder_lr instead",
    "log_tracker_config": "use log_tracker_name and wandb_run_name, and the trackers' environment variables for the rest",
    "metadata_is_negative_embedding": "it is for embeddings; remove it",
    "metadata_merged_from": "it is for merged files; remove it",
    "metadata_preprocessor": "it is for ControlNets; remove it",
    "metadata_thumbnail": "it would put an image into every file; remove it",
    "num_timestep_buckets": "uniform sampling covers the times over many steps; remove it",
    "show_timesteps": "it will come as a plot on the page; remove it",
    "show_timesteps_resolution": "it will come as a plot on the page; remove it",
    "block_lr": "it is for full fine-tuning of a UNet; use block_lr_weight for an adapter",
    "save_state_to_huggingface": "training states stay in the run's folder; copy it to go on elsewhere",
    "resume_from_huggingface": "download the run's folder and give it to resume",
    "use_tucker": "Tucker factors are not made; remove it",
    "ggpo_beta": "gradient-guided perturbation is not part of this version; remove it",
    "ggpo_sigma": "gradient-guided perturbation is not part of this version; remove it",
    "datasets": "a command line reads the tables [[datasets]] from a file of their own, which dataset_config names",
    "train_inpainting": "inpainting models have other inputs; use masked_loss to train only a part of each image",
}

_GROUPS: tuple[tuple[str, Iterable[str]], ...] = (
    (
        "it belongs to another model family, or to one that this version does not train; remove it",
        words.OPTIONS_OF_OTHERS,
    ),
    (
        "this memory option is not part of this version; docs/memory.md lists those that are",
        "fp16_master_weights_and_gradients fp8_fast img_in_txt_in_offloading".split(),
    ),
    (
        "all layers of a whole model have one learning rate, learning_rate; network_reg_lrs is for an adapter's. Remove it",
        "llm_adapter_lr self_attn_lr cross_attn_lr mlp_lr mod_lr".split(),
    ),
    (
        "it is for training a whole model; an adapter's gradients are small. Remove it",
        ["fused_backward_pass"],
    ),
    (
        "PyTorch's scaled-dot-product attention is always used, which takes the fastest kernel that is there; remove it",
        "attn_mode flash3 flash_attn sage_attn split_attn use_32bit_attention use_flash_attn use_sage_attn".split(),
    ),
    (
        "gradients are summed over processes without options of their own; remove it (distributed_timeout says how long one waits)",
        "ddp_gradient_as_bucket_view ddp_static_graph ddp_timeout".split(),
    ),
    (
        "DeepSpeed is not part of this version; use distributed_strategy = fsdp2, which shards weights, gradients and optimizer states",
        """deepspeed offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag
        zero3_save_16bit_model zero_stage""".split(),
    ),
)
for _text, _names in _GROUPS:
    UNSUPPORTED |= dict.fromkeys(_names, _text)
_ALL: dict[str, Verdict] = {
    **{_name: ("not supported", _text) for _name, _text in UNSUPPORTED.items()},
    **{_name: ("not needed", _text) for _name, _text in NOT_NEEDED.items()},
    **{_name: ("renamed", _text) for _name, _text in RENAMED.items()},
}

OF_METHOD: dict[str, dict[str, Verdict]] = {
    "full": {
        "full_fp16": ("not supported", "weights in fp16 lose small updates; take full_bf16, whose rounding keeps them on average"),
        "mem_eff_save": ("not needed", "a model is written tensor by tensor"),
    }
}
"""Verdicts that hold for one method of all families. They win over the others; those of a kind of run (its `verdicts`) win over them."""


def find(name: str, run: type[Options] | None = None) -> Verdict | None:
    """What became of this option of kohya's; None for a name that kohya does not have either. run is the kind of run that it is given to,
    for names whose meaning depends on it."""
    own: Mapping[str, Verdict] = run.verdicts if run is not None else {}
    of_method = OF_METHOD.get(run.method, {}) if run is not None and issubclass(run, RunOptions) else {}
    for table in (own, of_method, _ALL):
        if name in table:
            return table[name]
    return None


def verdict(name: str, value: object, run: type[Options] | None = None) -> str | None:
    """What to tell somebody who gave this option of kohya's to this kind of run; None for a name that kohya does not have either."""
    found = find(name, run)
    if found is None:
        return None
    if name == "model_type" and (family := words.MODEL_TYPES.get(str(value))) and run is not None and issubclass(run, RunOptions):
        return f"{value} is a family of its own here, with {run.script.replace(run.family, family, 1)}; run that, without model_type"
    kind, text = found
    if kind == "renamed":
        return f"it is called {text} here" if value is not False else f"it is called {text} here; as it is off, remove it"
    return f"not needed, because {text}; remove it" if kind == "not needed" else f"not supported: {text}"


def network_args(value: object, known: Mapping[str, Any]) -> tuple[dict[str, object], list[str]]:
    """kohya's `network_args` (a list of key=value texts) as plain options, and sentences for what is not understood.

    Lists are written with commas (block_dims=4,4,8). Every plain option of the network section may be given this way too.
    """
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list | tuple):
        return {}, [f"network_args: {value!r} is not a list of key=value texts, such as conv_dim=8 conv_alpha=4"]
    opened: dict[str, object] = {}
    problems: list[str] = []
    for item in value:
        key, equals, text = str(item).partition("=")
        name = words.NETWORK_ARGS.get(key, key)
        if not equals:
            problems.append(f'network_args: "{item}" is not key=value')
        elif name not in known or known[name].section != "network":
            allowed = ", ".join(sorted(words.NETWORK_ARGS))
            problems.append(f"network_args: {key} is not known here; allowed are {allowed} and the options of the network section")
        else:
            opened[name] = [part for part in text.split(",") if part] if known[name].many else text
    return opened, problems
