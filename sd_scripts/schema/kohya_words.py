"""kohya's words: the one place that command lines, files of options and the page's settings are read with, and lines are written with.

What a family is called there stands in its own facts, what became of names that are no words here in `legacy`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .optimizer import BUILT_IN, BY_NAME
from .samples import SAMPLERS as OUR_SAMPLERS

DEFAULTS: dict[str, object] = {
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "lr_decay_steps": 0,
    "enable_bucket": False,
    "bucket_no_upscale": False,
    "max_bucket_reso": 1024,
    "learning_rate": 2e-6,
    "network_dim": 4,
    "network_alpha": 1.0,
    "conv_alpha": 1.0,
}
"""Defaults of kohya's scripts of all families, where they are others than ours and change what is trained; a family's own are facts."""

OPTIMIZERS_BY_NAME = {**BY_NAME, "pagedadamw32bit": "AdamW", "pagedlion8bit": "Lion8bit"}
"""Optimizers that compute the same, in small letters: pages and bits save memory only."""


_PACKAGES = re.compile(
    r"(pytorch_optimizer(\.optimizer)?|schedulefree|prodigyopt|lion_pytorch|(torch|bitsandbytes|bnb)\.optim|transformers(\.optimization)?)\."
)
_OF_ANY_PACKAGE = {name.lower() for name in BUILT_IN}


def bare_name(optimizer: str) -> str:
    """An optimizer's name in small letters, without the packages whose optimizers need no class of one's own here."""
    whole = optimizer.strip().lower()
    found = _PACKAGES.match(whole)
    if found is None:
        return whole
    bare = whole[found.end() :]
    # torch has optimizers of the same names as the package pytorch-optimizer, which are not those.
    same = found[1].startswith(("pytorch_optimizer", "schedulefree")) or bare in _OF_ANY_PACKAGE or bare.startswith(("paged", "ademamix"))
    return bare if same else whole


FILE_PRECISIONS = {"float32": "float", "fp32": "float", "float16": "fp16", "bfloat16": "bf16"}
SAMPLERS = {"dpmsolver": "dpmsolver++", "dpmsingle": "dpmsolver++", "auto": "auto"} | {name: name for name in OUR_SAMPLERS}
"""Samplers of previews, without the k_ before their names."""
LINEAR_ONLY = ("attn-mlp", "attn-only", "unet-transformer-only", "full-lin")
"""LyCORIS's presets that leave convolutions alone."""
SAME_RESULT = """attn_mode flash3 flash_attn sage_attn split_attn use_32bit_attention use_flash_attn use_sage_attn fused_backward_pass
    ddp_gradient_as_bucket_view ddp_static_graph ddp_timeout""".split()
"""Names that `legacy` does not support, but without which the same is trained."""
BESIDE_THE_RESULT = frozenset(
    """log_tracker_config metadata_is_negative_embedding metadata_merged_from metadata_preprocessor metadata_thumbnail num_timestep_buckets
    output_config save_state_to_huggingface show_timesteps show_timesteps_resolution debug_dataset validate_every_n_epochs""".split()
)
"""Names that `legacy` does not support and that neither the result nor what fits follows from."""
TEXT_RATES = ("text_encoder_lr1", "text_encoder_lr2", "learning_rate_te", "learning_rate_te1", "learning_rate_te2")
"""Learning rates of text encoders, one by one."""
INTERVALS = """save_every_n_steps save_every_n_epochs save_n_epoch_ratio save_last_n_steps save_last_n_epochs sample_every_n_steps
    sample_every_n_epochs""".split()
ZERO_IS_NONE = ["min_snr_gamma", "min_timestep", "scale_weight_norms", "vae_batch_size", "max_validation_steps", *INTERVALS]
"""Numbers whose 0 means that they are not given."""
SWITCHES: Mapping[str, Mapping[str, object]] = {
    "use_8bit_adam": {"optimizer_type": "AdamW8bit"},
    "use_lion_optimizer": {"optimizer_type": "Lion"},
    "v_parameterization": {"prediction_type": "v_prediction"},
    "no_half_vae": {"vae_dtype": "float"},
    "no_metadata": {"metadata": "minimal"},
    "fp8_base": {"transformer_quantization": "fp8"},
    "fp8_base_unet": {"transformer_quantization": "fp8"},
    "fp8_scaled": {"transformer_quantization": "qfloat8"},
    "cpu_offload_checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_cpu_offload": True},
    "unsloth_offload_checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_cpu_offload": True},
    "torch_compile": {"compile": True},
    "network_train_unet_only": {"train_text_encoder": False},
    "network_train_text_encoder_only": {"train_text_encoder": True, "train_unet": False, "cache_text_encoder_outputs": False},
}
"""Switches whose meaning, when they are on, is that of these options."""


@dataclass(frozen=True)
class AdapterType:
    """One of kohya's or LyCORIS's types: ours, whether it adapts convolutions, and what is lost."""

    ours: str
    convolutions: bool = False
    lost: str = ""


_DYLORA = "ranks are not trained one by one (DyLoRA); an ordinary LoRA of the full rank is, and the resize tool makes it smaller"
_FROZEN = "both matrices are trained; LoRA-FA, which freezes one of them, is not made"
TYPES = {
    "standard": AdapterType("lora"),
    "lora": AdapterType("lora"),
    "lora-fa": AdapterType("lora", lost=_FROZEN),
    "locon": AdapterType("lora", convolutions=True),
    "dylora": AdapterType("lora", convolutions=True, lost=_DYLORA),
    "loha": AdapterType("loha", convolutions=True),
    "lokr": AdapterType("lokr", convolutions=True),
    "oft": AdapterType("oft"),
    "diag-oft": AdapterType("oft", lost="peft's OFT takes its place; its blocks have oft_block_size, and convolutions are left alone"),
    "transformer": AdapterType("lora"),
    "transformer oft": AdapterType("oft", lost="kohya's rank is the number of blocks, oft_block_size here is their side; check it"),
    "boft": AdapterType("oft", lost="orthogonal blocks without butterflies (OFT) are the nearest there is"),
    "glora": AdapterType("lora", convolutions=True, lost="GLoRA is not made; LoRA is the nearest there is"),
    "ia3": AdapterType("lora", lost="iA3 is not made; a LoRA of a small rank is the nearest there is, with a learning rate about a tenth"),
    "native fine-tuning": AdapterType(
        "lora", lost="a whole model in an adapter file is not made; use the DreamBooth and fine-tuning script"
    ),
}
MODULES = {
    "networks.lora": "standard",
    "networks.lora_fa": "lora-fa",
    "networks.dylora": "dylora",
    "networks.oft": "diag-oft",
    "networks.loha": "loha",
    "networks.lokr": "lokr",
}
ALGORITHMS = {"lora": "locon", "locon": "locon", "full": "native fine-tuning"}
"""LyCORIS's algorithms whose names are others than those of the types."""

# --- names of options ------------------------------------------------------------------------------------------------

SAME = frozenset(
    """adaptive_noise_scale ae alpha_mask apply_t5_attn_mask base_weights base_weights_multiplier blocks_to_swap bucket_no_upscale
    bucket_reso_steps cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk
    caption_dropout_every_n_epochs caption_dropout_rate caption_extension caption_prefix caption_separator caption_suffix
    caption_tag_dropout_rate clip_l clip_skip color_aug conditioning_data_dir dataset_config dataset_repeats debiased_estimation_loss
    dim_from_weights discrete_flow_shift enable_bucket enable_wildcard flip_aug full_bf16 fused_backward_pass gradient_accumulation_steps
    gradient_checkpointing guidance_scale huber_c huber_scale huber_schedule huggingface_path_in_repo huggingface_repo_id
    huggingface_repo_visibility in_json ip_noise_gamma ip_noise_gamma_random_strength keep_tokens keep_tokens_separator learning_rate
    log_tracker_name log_with logit_mean logit_std loss_type lr_decay_steps lr_scheduler lr_scheduler_args lr_scheduler_min_lr_ratio
    lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_timescale lr_warmup_steps masked_loss max_bucket_reso max_data_loader_n_workers
    max_grad_norm max_timestep max_token_length max_train_epochs max_train_steps max_validation_steps metadata_author metadata_description
    metadata_license metadata_tags metadata_title metadata_trigger_phrase metadata_usage_hint min_bucket_reso min_snr_gamma min_timestep
    mixed_precision mode_scale model_prediction_type multires_noise_discount multires_noise_iterations network_alpha network_dim
    network_dropout network_weights noise_offset noise_offset_random_strength optimizer_args optimizer_type output_dir output_name
    pretrained_model_name_or_path prior_loss_weight random_crop reg_data_dir resize_interpolation resolution sample_at_first
    sample_every_n_epochs sample_every_n_steps sample_sampler save_every_n_epochs save_every_n_steps save_last_n_epochs save_last_n_steps
    save_n_epoch_ratio save_precision save_state save_state_on_train_end scale_v_pred_loss_like_noise_pred scale_weight_norms
    secondary_separator seed shuffle_caption sigmoid_scale t5xxl t5xxl_max_token_length text_encoder_batch_size text_encoder_lr
    timestep_sampling token_warmup_min token_warmup_step train_batch_size train_data_dir training_comment unet_lr v_pred_like_loss vae
    vae_batch_size validate_every_n_steps validation_seed validation_split wandb_run_name weighted_captions weighting_scheme
    zero_terminal_snr""".split()
)
"""Options that sd-scripts has under the same name."""


def whole_name(name: str, known: Iterable[str]) -> str:
    """The option that the beginning of its name stands for, as argparse takes it in kohya's scripts; the name itself where none or several
    begin so."""
    names = set(known)
    found = [one for one in names if one.startswith(name)]
    return found[0] if name not in names and len(found) == 1 and len(name) > 3 else name


NETWORK_ARGS = {
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

# --- models -----------------------------------------------------------------------------------------------------------

BESIDE = {
    "t5_tokenizer_path": "tokenizers are read beside the model, or from the hub",
    "vae_chunk_size": "vae_tiling is what saves memory in the VAE here, where previews are decoded",
    "vae_disable_cache": "the VAE sees one image here, and keeps nothing of others",
    "qwen_image_vae_2d": "the VAE sees one image here, and keeps nothing of others",
}
"""Options for a model's parts that change nothing here, and why."""
BY_SIZE = "flux_shift"
"""The timestep_sampling that shifts times with the image's size."""
OPTIONS_OF_OTHERS = frozenset(
    """byt5 clip_g clip_g_dropout_rate clip_l_dropout_rate controlnet_model_name_or_path dit edit edit_plus enable_scaled_pos_embed
    gemma2 gemma2_max_token_length  model_type model_version num_layers pos_emb_random_crop_rate 
      remove_first_image_from_target save_clip save_t5xxl system_prompt t5_dropout_rate
      t5xxl_device t5xxl_dtype text_encoder   fp8_llm fp8_vl""".split()
)
"""kohya's options that only families have which are not trained here."""
MARKS_OF_OTHERS = {"clip_g": "sd3", "gemma2": "lumina", "byt5": "hunyuan_image"}
"""kohya's options by which such a family is known."""
MODELS_OF_TOOLS = ("sd_model", "flux_model")
"""What kohya's tools call the base model that is merged into."""
SCRIPTS = {
    "train_network.py": ("sd", "network", "lora"),
    "train_db.py": ("sd", "full", "dreambooth"),
    "fine_tune.py": ("sd", "full", "finetune"),
    "sdxl_train_network.py": ("sdxl", "network", "lora"),
    "sdxl_train.py": ("sdxl", "full", ""),
    "flux_train_network.py": ("flux", "network", "lora"),
    "flux_train.py": ("flux", "full", ""),
    "anima_train_network.py": ("anima", "network", "lora"),
    "anima_train.py": ("anima", "full", ""),
}
"""kohya's scripts for families that are trained here: the family, how it is trained, and the page of kohya_ss where it is the same."""
SCRIPTS_OF_LORA_SCRIPTS = {
    "sd-lora": "train_network.py",
    "sdxl-lora": "sdxl_train_network.py",
    "flux-lora": "flux_train_network.py",
    "anima-lora": "anima_train_network.py",
    "sd-dreambooth": "train_db.py",
    "sdxl-finetune": "sdxl_train.py",
    "flux-finetune": "flux_train.py",
    "anima-finetune": "anima_train.py",
}
"""The script that a kind of training of lora-scripts (its model_train_type) starts."""
_OF_FLOW = frozenset(
    """blocks_to_swap discrete_flow_shift logit_mean logit_std mode_scale sigmoid_scale text_encoder_batch_size timestep_sampling
    unsloth_offload_checkpointing weighting_scheme""".split()
)
_OF_FLUX = frozenset("ae apply_t5_attn_mask clip_l guidance_scale model_prediction_type t5xxl t5xxl_max_token_length".split())
_OF_ADAPTERS = frozenset(
    """base_weights base_weights_multiplier dim_from_weights fp8_base_unet max_validation_steps network_alpha network_dim network_dropout
    network_train_unet_only network_weights scale_weight_norms text_encoder_lr training_comment unet_lr validate_every_n_steps
    validation_seed validation_split prior_loss_weight cpu_offload_checkpointing""".split()
)
_CACHED_TEXTS = frozenset(("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"))
_OF_CLIP = frozenset(("max_token_length", "clip_skip"))
_FEW_BITS = frozenset(("fp8_base", "fp8_base_unet", "fp8_scaled"))
LACKING = {
    "train_network.py": _OF_FLOW | _OF_FLUX | _CACHED_TEXTS,
    "train_db.py": (_OF_FLOW | _OF_FLUX | _CACHED_TEXTS | _OF_ADAPTERS | {"dataset_repeats", "in_json"}) - {"prior_loss_weight"},
    "fine_tune.py": _OF_FLOW | _OF_FLUX | _CACHED_TEXTS | _OF_ADAPTERS,
    "sdxl_train_network.py": _OF_FLOW | _OF_FLUX,
    "sdxl_train.py": _OF_FLOW | _OF_FLUX | _OF_ADAPTERS,
    "flux_train_network.py": frozenset({"unsloth_offload_checkpointing"}),
    "flux_train.py": (_OF_ADAPTERS | {"unsloth_offload_checkpointing"}) - {"cpu_offload_checkpointing"},
    # They take CLIP's words and those for few bits, and make nothing of them.
    "anima_train_network.py": _OF_FLUX | _OF_CLIP | _FEW_BITS,
    "anima_train.py": (_OF_FLUX | _OF_CLIP | _FEW_BITS | _OF_ADAPTERS | {"no_half_vae", "no_metadata"}) - {"cpu_offload_checkpointing"},
}
"""Options that kohya's other scripts have, and these have not, or do not follow."""
MODEL_TYPES = {"chroma": "chroma"}
"""model_type of a script of kohya's for another family than the script's own."""
SCRIPTS_OF_OTHERS = {
    "sd3_": "Stable Diffusion 3",
    "lumina_": "Lumina",
    "hunyuan_image_": "HunyuanImage",
    "train_textual_inversion": "an embedding (textual inversion)",
    "sdxl_train_textual_inversion": "an embedding (textual inversion)",
    "train_control": "a ControlNet",
    "sdxl_train_control": "a ControlNet",
    "flux_train_control": "a ControlNet",
    "anima_train_control": "a ControlNet",
    "train_leco": "a slider (LECO)",
    "sdxl_train_leco": "a slider (LECO)",
}
"""What kohya's scripts whose names begin so train; none of their command lines is read."""
