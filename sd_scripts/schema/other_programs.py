"""Models by the names that other programs have for them and for their parts: whether a model is trained here or not, they are told apart by
these."""

from __future__ import annotations

OPTIONS_OF_OTHER_FAMILIES = frozenset(
    """byt5 clip_g clip_g_dropout_rate clip_l_dropout_rate controlnet_model_name_or_path dit edit edit_plus enable_scaled_pos_embed
    gemma2 gemma2_max_token_length llm_adapter_path model_type model_version num_layers pos_emb_random_crop_rate qwen3
    qwen3_max_token_length qwen_image_vae_2d remove_first_image_from_target save_clip save_t5xxl system_prompt t5_dropout_rate
    t5_max_token_length t5_tokenizer_path t5xxl_device t5xxl_dtype text_encoder vae_chunk_size vae_disable_cache fp8_llm fp8_vl""".split()
)
"""kohya's options that only families have which are not trained here."""
KOHYA_MARKS = {"clip_g": "sd3", "gemma2": "lumina", "qwen3": "anima", "byt5": "hunyuan_image"}
"""kohya's options by which such a family is known."""
KOHYA_MODELS = ("sd_model", "flux_model")
"""What kohya's tools call the base model that is merged into."""
KOHYA_SCRIPTS = {
    "train_network.py": ("sd", "network", "lora"),
    "train_db.py": ("sd", "full", "dreambooth"),
    "fine_tune.py": ("sd", "full", "finetune"),
    "sdxl_train_network.py": ("sdxl", "network", "lora"),
    "sdxl_train.py": ("sdxl", "full", ""),
    "flux_train_network.py": ("flux", "network", "lora"),
    "flux_train.py": ("flux", "full", ""),
}
"""kohya's scripts for families that are trained here: the family, how it is trained, and the page of kohya_ss where it is the same."""
_OF_FLUX = frozenset(
    """ae apply_t5_attn_mask blocks_to_swap clip_l discrete_flow_shift guidance_scale logit_mean logit_std mode_scale model_prediction_type
    sigmoid_scale t5xxl t5xxl_max_token_length text_encoder_batch_size timestep_sampling weighting_scheme""".split()
)
_OF_ADAPTERS = frozenset(
    """base_weights base_weights_multiplier dim_from_weights fp8_base_unet max_validation_steps network_alpha network_dim network_dropout
    network_train_unet_only network_weights scale_weight_norms text_encoder_lr training_comment unet_lr validate_every_n_steps
    validation_seed validation_split prior_loss_weight cpu_offload_checkpointing""".split()
)
_CACHED_TEXTS = frozenset(("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"))
KOHYA_LACKS = {
    "train_network.py": _OF_FLUX | _CACHED_TEXTS,
    "train_db.py": (_OF_FLUX | _CACHED_TEXTS | _OF_ADAPTERS | {"dataset_repeats", "in_json"}) - {"prior_loss_weight"},
    "sdxl_train_network.py": _OF_FLUX,
    "sdxl_train.py": _OF_FLUX | _OF_ADAPTERS,
    "flux_train.py": _OF_ADAPTERS - {"cpu_offload_checkpointing"},
}
"""Options that kohya's other scripts have, and these have not."""
KOHYA_MODEL_TYPES = {"chroma": "chroma"}
"""model_type of a script of kohya's for another family than the script's own."""
KOHYA_SCRIPTS_OF_OTHERS = {
    "sd3_": "Stable Diffusion 3",
    "lumina_": "Lumina",
    "anima_": "Anima",
    "hunyuan_image_": "HunyuanImage",
    "train_textual_inversion": "an embedding (textual inversion)",
    "sdxl_train_textual_inversion": "an embedding (textual inversion)",
    "train_control": "a ControlNet",
    "sdxl_train_control": "a ControlNet",
    "flux_train_control": "a ControlNet",
    "train_leco": "a slider (LECO)",
    "sdxl_train_leco": "a slider (LECO)",
}
"""What kohya's scripts whose names begin so train; none of their command lines is read."""
