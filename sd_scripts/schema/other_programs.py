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
MUSUBI_KINDS = ("flux_2", "framepack", "hidream_o1", "hv_1_5", "ideogram4", "kandinsky", "krea2", "qwen_image", "wan", "zimage")
"""Ends of musubi-tuner's network modules, after `networks.lora_`."""
