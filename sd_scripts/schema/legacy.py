"""kohya's other option names: for each, what to use instead, or why it is not needed or not supported.

A name that a kind of run has as a field never gets here. What a name means may depend on the kind of run: see SPECIAL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Kind = Literal["renamed", "not needed", "not supported"]

RENAMED: dict[str, str] = {
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
    "fp8_scaled": "transformer_quantization = qfloat8",
    "fused_optimizer_groups": "fused_backward_pass, of the scripts that train a whole model",
    "blockwise_fused_optimizers": "fused_backward_pass, of the scripts that train a whole model",
    "torch_compile": "compile",
    "no_half_vae": "vae_dtype = float, which is the default",
    "no_metadata": "metadata = minimal",
    "save_last_n_epochs_state": "save_last_n_states",
    "save_last_n_steps_state": "save_last_n_states",
    "use_8bit_adam": "optimizer_type = AdamW8bit",
    "use_lion_optimizer": "optimizer_type = Lion",
    "v_parameterization": "prediction_type = v_prediction",
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
    "highvram": "the device cache is emptied only after caching and previews, where it costs nothing",
    "lowram": "each network is on the device only while it is needed there",
    "lowvram": "each network is on the device only while it is needed there",
    "noise_offset_type": "noise_offset and multires_noise_iterations say it",
    "use_safetensors": "safetensors is the only format",
    "sdpa": "PyTorch's scaled-dot-product attention is always used",
    "xformers": "PyTorch's own attention is as fast and always there",
    "diffusers_xformers": "PyTorch's own attention is as fast and always there",
    "mem_eff_attn": "PyTorch's own attention needs no more memory and is faster",
    "block_swap_h2d_only": "blocks_to_swap never copies frozen weights back",
    "block_swap_ring_size": "blocks_to_swap keeps two places on the device, one for the block that computes and one for the next",
    "use_pinned_memory_for_block_swap": "blocks_to_swap keeps what it moves in pinned memory",
    "use_sdpa": "PyTorch's scaled-dot-product attention is always used",
    "skip_until_initial_step": "a resumed run continues at its exact sample without reading the ones before it",
    "initial_epoch": "a resumed run knows its epoch",
    "tokenizer_cache_dir": "tokenizers are read from the model's folder or the hub's own cache",
    "huggingface_token": "secrets are read from the environment (HF_TOKEN), never from a file or flag",
    "wandb_api_key": "secrets are read from the environment (WANDB_API_KEY), never from a file or flag",
    "wandb_key": "secrets are read from the environment (WANDB_API_KEY), never from a file or flag",
    "metadata_arch": "the architecture is written by itself",
    "text_encoder_cpu": "text encoders leave the device after caching (cache_text_encoder_outputs)",
    "cache_text_encoder_outputs_on_cpu": "text encoders leave the device after caching (cache_text_encoder_outputs)",
    "preserve_distribution_shape": "min_timestep and max_timestep cut the density without changing its shape",
    "no_token_padding": "captions are padded as the model's pipeline does it, so that training and use agree",
    "train_blocks": "target_modules chooses what is trained",
    "v2": "Stable Diffusion 1.x and 2.x are told apart by the model itself, and sd_train_network.py and sd_train.py train both",
    "sdxl": "the script says which family is trained",
    "async_upload": "uploads run beside the training and are complete when the run ends",
    "huggingface_repo_type": "the upload goes to a model repository",
}

UNSUPPORTED: dict[str, str] = {
    "clip_skip": "SDXL always reads the last but one layer of its text encoders, and FLUX the last; files made with another fit no tool. "
    "Remove it",
    "full_bf16": "adapter weights in 16 bit lose small updates; use mixed_precision = bf16",
    "full_fp16": "adapter weights in 16 bit lose small updates; use mixed_precision = fp16",
    "face_crop_aug_range": "crop faces beforehand, or use random_crop",
    "conditioning_dropout": "use caption_dropout_rate",
    "stop_text_encoder_training": "give the text encoders a lower text_encoder_lr instead",
    "log_tracker_config": "use log_tracker_name and wandb_run_name, and the trackers' environment variables for the rest",
    "metadata_is_negative_embedding": "it is for embeddings; remove it",
    "metadata_merged_from": "it is for merged files; remove it",
    "metadata_preprocessor": "it is for ControlNets; remove it",
    "metadata_thumbnail": "it would put a picture into every file; remove it",
    "num_timestep_buckets": "uniform sampling covers the times over many steps; remove it",
    "show_timesteps": "it will come as a plot on the page; remove it",
    "show_timesteps_resolution": "it will come as a plot on the page; remove it",
    "block_lr": "it is for full fine-tuning of SDXL; use block_lr_weight for an adapter",
    "save_state_to_huggingface": "training states stay in the run's folder; copy it to go on elsewhere",
    "resume_from_huggingface": "download the run's folder and give it to resume",
    "use_tucker": "Tucker factors are not made; remove it",
    "ggpo_beta": "gradient-guided perturbation is not part of this version; remove it",
    "ggpo_sigma": "gradient-guided perturbation is not part of this version; remove it",
    "train_inpainting": "inpainting models have other inputs; use masked_loss to train only a part of each picture",
}

_GROUPS: tuple[tuple[str, Iterable[str]], ...] = (
    (
        "it belongs to a model family that this version does not train; remove it",
        """byt5 clip_g clip_g_dropout_rate clip_l_dropout_rate controlnet_model_name_or_path dit edit edit_plus
        enable_scaled_pos_embed gemma2 gemma2_max_token_length llm_adapter_path model_type model_version num_layers
        pos_emb_random_crop_rate qwen3 qwen3_max_token_length qwen_image_vae_2d remove_first_image_from_target save_clip
        save_t5xxl system_prompt t5_dropout_rate t5_max_token_length t5_tokenizer_path t5xxl_device t5xxl_dtype text_encoder
        vae_chunk_size vae_disable_cache fp8_llm fp8_vl""".split(),
    ),
    (
        "this memory lever is not part of this version; docs/memory.md lists those that are",
        "fp16_master_weights_and_gradients fp8_fast img_in_txt_in_offloading".split(),
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
        "DeepSpeed is not part of this version; use distributed_strategy = fsdp2, which shares out weights, gradients and optimizer states",
        """deepspeed offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag
        zero3_save_16bit_model zero_stage""".split(),
    ),
)
for _text, _names in _GROUPS:
    UNSUPPORTED |= dict.fromkeys(_names, _text)
OF_OTHER_FAMILIES = frozenset(_GROUPS[0][1])
"""Options that only families have which are not trained here."""

_NETWORK_ARGS = {
    "conv_dim": "conv_dim",
    "conv_alpha": "conv_alpha",
    "block_dims": "block_dims",
    "block_alphas": "block_alphas",
    "conv_block_dims": "conv_block_dims",
    "rank_dropout": "rank_dropout",
    "module_dropout": "module_dropout",
    "loraplus_lr_ratio": "loraplus_lr_ratio",
    "loraplus_unet_lr_ratio": "loraplus_unet_lr_ratio",
    "loraplus_text_encoder_lr_ratio": "loraplus_text_encoder_lr_ratio",
    "network_reg_dims": "network_reg_dims",
    "network_reg_lrs": "network_reg_lrs",
    "img_attn_dim": "img_attn_dim",
    "txt_attn_dim": "txt_attn_dim",
    "img_mlp_dim": "img_mlp_dim",
    "txt_mlp_dim": "txt_mlp_dim",
    "img_mod_dim": "img_mod_dim",
    "txt_mod_dim": "txt_mod_dim",
    "single_dim": "single_dim",
    "single_mod_dim": "single_mod_dim",
    "in_dims": "in_dims",
    "train_blocks": "train_blocks",
    "train_double_block_indices": "train_double_block_indices",
    "train_single_block_indices": "train_single_block_indices",
    "split_qkv": "split_qkv",
    "train_t5xxl": "train_t5xxl",
    "factor": "lokr_factor",
    "decompose_both": "lokr_decompose_both",
    "block_size": "oft_block_size",
    "algo": "network_type",
}
"""kohya's and LyCORIS's network arguments by the option that says the same here."""


_TEXT_RATES_OF_FLUX = "FLUX's text encoders are not trained together with the whole transformer; an adapter can train them"
SPECIAL: dict[tuple[str, str, str], tuple[Kind, str]] = {
    ("learning_rate_te", "flux", "full"): ("not needed", _TEXT_RATES_OF_FLUX),
    ("learning_rate_te1", "flux", "full"): ("not needed", _TEXT_RATES_OF_FLUX),
    ("learning_rate_te2", "flux", "full"): ("not needed", _TEXT_RATES_OF_FLUX),
    ("learning_rate_te2", "sd", ""): ("not needed", "Stable Diffusion 1.x and 2.x have one text encoder; see text_encoder_lr"),
    ("learning_rate_te1", "sd", ""): ("renamed", "text_encoder_lr"),
    ("train_text_encoder", "flux", "full"): ("not needed", _TEXT_RATES_OF_FLUX),
    ("stop_text_encoder_training", "flux", "full"): ("not needed", _TEXT_RATES_OF_FLUX),
    ("full_fp16", "", "full"): (
        "not supported",
        "weights in fp16 lose small updates; take full_bf16, whose rounding keeps them on average",
    ),
    ("block_lr", "sd", "full"): ("not supported", "rates of blocks are for SDXL; here target_modules chooses what is trained"),
    ("block_lr", "flux", ""): ("not supported", "rates of blocks are for SDXL; for FLUX an adapter has network_reg_lrs"),
    ("clip_skip", "sdxl", ""): (
        "not supported",
        "SDXL always reads the last but one layer of its text encoders; files made with another fit no tool. Remove it",
    ),
    ("clip_skip", "flux", ""): ("not supported", "FLUX always reads the last layer of its text encoders. Remove it"),
    ("mem_eff_save", "", "full"): ("not needed", "a model is written tensor by tensor"),
    ("max_token_length", "flux", ""): ("not needed", "FLUX has t5xxl_max_token_length"),
    ("dit", "qwen_edit", ""): ("renamed", "pretrained_model_name_or_path"),
    ("edit", "qwen_edit", ""): ("renamed", "model_version = edit"),
    ("edit_plus", "qwen_edit", ""): ("renamed", "model_version = edit-2509"),
    ("fp8_vl", "qwen_edit", ""): ("renamed", "text_encoder_quantization = qint8 (or qfloat8)"),
    ("clip_skip", "qwen_edit", ""): ("not supported", "Qwen-Image always reads the last layer of its text encoder. Remove it"),
    ("train_text_encoder", "qwen_edit", ""): ("not supported", "the text encoder, a language model, stays as it is. Remove it"),
}
"""Verdicts that hold for one kind of run, by (name, family, method); an empty family or method stands for all. They win over the others."""


# Names of the trainers for Z-Image Turbo that AC-RF comes from: None Z-Image Turbo trainer and its fork Plus.
_BY_TERMS = "the loss has no modes here; each term has a weight of its own, and 0 leaves it out"
_OF_ACRF: tuple[tuple[Kind, str, str], ...] = (
    ("renamed", "pretrained_model_name_or_path", "dit"),
    ("renamed", "config_file, or Import on the page for a file of the other program", "config"),
    ("renamed", "network_dim", "dim"),
    ("renamed", "network_alpha", "alpha"),
    ("renamed", "max_train_epochs", "num_train_epochs"),
    ("renamed", "train_batch_size", "batch_size"),
    ("renamed", "lr_scheduler_num_cycles", "lr_num_cycles"),
    ("renamed", "optimizer_args = weight_decay=...", "weight_decay"),
    ("renamed", "scheduler_shift; leave it out to take the model's own", "shift"),
    ("renamed", "max_token_length", "max_sequence_length max_seq_len"),
    ("renamed", "dataset_repeats, or num_repeats in a dataset_config", "num_repeats"),
    ("renamed", "resolution; each data set of a dataset_config may have its own", "resolution_limit"),
    ("renamed", "enable_bucket = false", "disable_bucket"),
    ("renamed", "deterministic", "force_deterministic"),
    ("renamed", "lora_targets = all, which trains the modulation as well", "train_adaln"),
    ("renamed", "target_modules", "trainable_modules"),
    ("renamed", "exclude_modules, with names of embeddings", "freeze_embeddings"),
    ("renamed", "network_weights, to go on from a saved file; resume continues a run with its optimizer", "resume_lora resume_lora_path"),
    ("renamed", "resume", "resume_training"),
    ("renamed", "objective: acrf when it was on, flow when it was off", "enable_turbo"),
    ("renamed", "loss_type = l1", "lambda_l1"),
    ("renamed", "loss_type = l2", "lambda_mse"),
    ("renamed", "free_stream_ratio, and free_stream_final_ratio for the end of the run", "l2_initial_ratio raft_mode"),
    ("renamed", "free_stream_final_ratio, which is reached in a straight line", "l2_final_ratio l2_schedule_mode"),
    ("renamed", "curvature_weight; 0 is off", "enable_curvature lambda_curvature"),
    ("renamed", "curvature_start, in optimizer steps", "curvature_start_epoch"),
    ("renamed", "cfg_training_scale; 1 is off", "cfg_training cfg_scale"),
    ("renamed", "latent_jitter", "latent_jitter_scale"),
    ("renamed", "caption_dropout_rate, which shows the empty caption", "drop_text_ratio"),
    ("renamed", "alpha_hf and beta_lf, each with the product of both weights", "enable_freq lambda_freq"),
    (
        "renamed",
        "lambda_struct, lambda_light, lambda_color and lambda_tex, each with the product of both weights",
        "enable_style lambda_style",
    ),
    ("renamed", "reg_data_dir, or is_reg = true in a dataset_config", "reg_dataset reg_data_path reg_cache_directory"),
    ("renamed", "prior_loss_weight, the weight of regularisation pictures", "reg_weight"),
    ("not needed", f"{_BY_TERMS} (lambda_cosine, lambda_fft, alpha_hf, beta_lf, lambda_struct ...)", "loss_mode"),
    ("not needed", "weights are of the whole run, and a data set or picture may have its own, see dataset_config", "loss_scope"),
    ("not needed", "the distance between velocities always counts 1; loss_type chooses it", "lambda_base"),
    (
        "not needed",
        "regularisation pictures are repeated until there are as many as training pictures",
        "reg_ratio reg_repeats reg_enabled",
    ),
    (
        "not needed",
        "Z-Image is sampled with one shift for all sizes, which is read from the model (scheduler_shift)",
        "use_dynamic_shift use_dynamic_shifting base_shift max_shift base_seq_len",
    ),
    ("not needed", "caches of all data sets lie in cache_dir; name the folder of pictures as train_data_dir", "cache_directory"),
    ("not needed", "the order of the pictures is drawn anew in every epoch", "shuffle"),
    ("not needed", "what is written in the options is what happens; the log names levers when memory runs out", "auto_optimize"),
    ("not needed", "free levels take the place of anchors in their share of samples", "l2_include_anchor l2_anchor_ratio mse_use_anchor"),
    (
        "not needed",
        "PyTorch's scaled-dot-product attention is always used, which takes the fastest kernel that is there",
        "enable_flash_attention use_memory_efficient_attention sdpa_optimize_level sdpa_min_seq_length "
        "sdpa_batch_size_threshold spda_enabled",
    ),
    ("not needed", "an adapter is zimage_train_network.py, the whole model zimage_train.py", "training_type"),
    ("not supported", "milestones of the free share are not set; it changes in a straight line. Remove it", "l2_milestones"),
    (
        "not supported",
        "weights by noise level are anchor_weighting; colour terms end at noise level 0.5 by themselves. Remove it",
        "enable_timestep_aware_loss timestep_high_threshold timestep_low_threshold",
    ),
    ("not supported", "these trainers make pictures from text; remove it", "condition_mode"),
    ("not supported", "degraded inputs are not trained; remove it", "enable_degradation degradation_strength"),
    ("not supported", "use network_dropout; remove it", "attention_dropout"),
    (
        "not supported",
        "give Adafactor's own settings in optimizer_args (relative_step, scale_parameter, warmup_init)",
        "adafactor_relative adafactor_scale adafactor_warmup relative_step",
    ),
    (
        "not supported",
        "the one-cycle schedule is not there; take cosine with lr_warmup_steps",
        "lr_pct_start lr_div_factor lr_final_div_factor",
    ),
    ("not supported", "one picture is not shared between GPUs; remove it", "sequence_parallel ulysses_seq_len"),
    (
        "not supported",
        "blocks_to_swap says how many blocks are swapped, and the rest follows; remove it",
        "block_swap_enabled block_swap_block_size block_swap_cpu_buffer_size block_swap_swap_strategy "
        "block_swap_swap_threshold block_swap_compression_enabled block_swap_prefetch_enabled activation_checkpoint_block_size",
    ),
    (
        "not supported",
        "memory is shown on the page and not managed by options; remove it",
        "memory_monitoring_enabled memory_pool_strategy memory_swap_frequency",
    ),
)
SPECIAL |= {(_name, "zimage", ""): (_kind, _advice) for _kind, _advice, _names in _OF_ACRF for _name in _names.split()}
SPECIAL |= {
    (_name, "zimage", "full"): ("not supported", "it is for an adapter, and this run trains the whole model. Remove it")
    for _name in "dim alpha network_dim network_alpha train_adaln resume_lora resume_lora_path".split()
}


def find(name: str, family: str = "", method: str = "") -> tuple[Kind, str] | None:
    """What became of this option of kohya's, and the text that says it; None for a name that kohya does not have either."""
    for key in ((name, family, method), (name, family, ""), (name, "", method)):
        if key in SPECIAL:
            return SPECIAL[key]
    tables: tuple[tuple[Kind, dict[str, str]], ...] = (("renamed", RENAMED), ("not needed", NOT_NEEDED), ("not supported", UNSUPPORTED))
    return next(((kind, table[name]) for kind, table in tables if name in table), None)


def verdict(name: str, value: object, family: str = "", method: str = "") -> str | None:
    """What to tell somebody who gave this option of kohya's; None for a name that kohya does not have either.

    family and method are those of the kind of run, for names whose meaning depends on it.
    """
    found = find(name, family, method)
    if found is None:
        return None
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
        name = _NETWORK_ARGS.get(key, key)
        if not equals:
            problems.append(f'network_args: "{item}" is not key=value')
        elif name not in known or known[name].section != "network":
            allowed = ", ".join(sorted(_NETWORK_ARGS))
            problems.append(f"network_args: {key} is not known here; allowed are {allowed} and the options of the network section")
        else:
            opened[name] = [part for part in text.split(",") if part] if known[name].many else text
    return opened, problems
