"""Names of the trainers for Z-Image Turbo that AC-RF comes from, None Z-Image Turbo trainer and its fork Plus: what became of each."""

from __future__ import annotations

from typing import Literal

from sd_scripts.schema.fields import Verdict

_BY_TERMS = "the loss has no modes here; each term has a weight of its own, and 0 leaves it out"
_VERDICTS: tuple[tuple[Literal["renamed", "not needed", "not supported"], str, str], ...] = (
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
    ("renamed", "prior_loss_weight, the weight of regularisation images", "reg_weight"),
    ("not needed", f"{_BY_TERMS} (lambda_cosine, lambda_fft, alpha_hf, beta_lf, lambda_struct ...)", "loss_mode"),
    ("not needed", "weights are of the whole run, and a data set or image may have its own, see dataset_config", "loss_scope"),
    ("not needed", "the distance between velocities always counts 1; loss_type chooses it", "lambda_base"),
    (
        "not needed",
        "regularisation images are repeated until there are as many as training images",
        "reg_ratio reg_repeats reg_enabled",
    ),
    (
        "not needed",
        "Z-Image is sampled with one shift for all sizes, which is read from the model (scheduler_shift)",
        "use_dynamic_shift use_dynamic_shifting base_shift max_shift base_seq_len",
    ),
    ("not needed", "caches of all data sets lie in cache_dir; name the folder of images as train_data_dir", "cache_directory"),
    ("not needed", "the order of the images is drawn anew in every epoch", "shuffle"),
    ("not needed", "what is written in the options is what happens; the log names memory options when memory runs out", "auto_optimize"),
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
    ("not supported", "these trainers make images from text; remove it", "condition_mode"),
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
    ("not supported", "one image is not shared between GPUs; remove it", "sequence_parallel ulysses_seq_len"),
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
VERDICTS: dict[str, Verdict] = {name: (kind, advice) for kind, advice, names in _VERDICTS for name in names.split()}
"""What became of each, for both kinds of run."""
OF_ADAPTERS: dict[str, Verdict] = dict.fromkeys(
    "dim alpha network_dim network_alpha train_adaln resume_lora resume_lora_path".split(),
    ("not supported", "it is for an adapter, and this run trains the whole model. Remove it"),
)
"""What is told instead where the whole model is trained."""
