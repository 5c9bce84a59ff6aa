"""What SimpleTuner has and this program has not, or needs not."""

from __future__ import annotations

from ..table import Table, each, only, unneeded

_MACHINE = unneeded("it says how that program works, not what is trained")
_CACHE = unneeded("latents and captions are cached by themselves, and renewed where something changed")
LOST = "it is not part of this version"
_PARTS = """crepa irepa layersync urepa nextlat xm mixflow twinflow internal_guidance scheduled_sampling timestep_bias group_offload
    ramtorch refiner_training singlora controlnet distillation flow_timesteps gradient_checkpointing_offload freeze_encoder fsdp offload
    sla"""
"""Beginnings of the names of what is not here: each says what belongs to a feature, or to a memory option, that has a row of its own."""
_OWN = """accelerate_config accelerate_extra_args accelerate_strategy accelerate_visible_devices assistant_lora_inference_strength
    audio_channels audio_duration_interval audio_flow_schedule_shift audio_max_duration_seconds audio_min_duration_seconds
    audio_truncation_mode data_aesthetic_score delete_nsfw_images disable_assistant_lora disable_multiline_split disk_low_script
    enable_nsfw_check enable_watermark eval_dataset_pooling find_unused_parameters framerate fuse_optimizer init_lora_step
    machine_rank main_process_ip main_process_port max_grounding_entities modelspec_comment nsfw_check_backend_types
    nsfw_check_min_votes nsfw_check_models nsfw_check_sample_types nsfw_check_video_frame_count nsfw_check_video_frame_selection
    nsfw_check_video_min_flagged_frames parquet_caption_column parquet_filename_column post_checkpoint_script post_upload_script
    pretrained_evaluation_model_name_or_path pretrained_gemma_model_name_or_path pretrained_grounding_model_name_or_path
    publishing_config sageattention_usage same_network save_text_encoder text_encoder_limit trust_remote_code unet_attention_slice
    vae_enable_patch_conv vae_enable_slicing vae_enable_temporal_roll validation_adapter_config validation_adapter_mode
    validation_adapter_name validation_adapter_path validation_audio_duration validation_audio_only validation_batch_size
    validation_external_background validation_external_script validation_fraction validation_guidance_skip_layers
    validation_guidance_skip_layers_start validation_guidance_skip_layers_stop validation_guidance_skip_scale
    validation_image_format validation_image_quality validation_input validation_internal_guidance_scale
    validation_ltx2_video_conditioning validation_lyrics validation_method validation_no_cfg_until_timestep
    validation_num_video_frames validation_preview_steps validation_split validation_stitch_input_location validation_using_datasets"""
"""What belongs to that program's own ways."""
_FEATURES = """distillation_method tread_config diffusion_blocks_config diff2flow_enabled mixflow_enabled xm_enabled nextlat_enabled
    irepa_enabled crepa_enabled twinflow_enabled internal_guidance_enabled layersync_enabled urepa_enabled
    slider_lora_target flow_cubic_schedule_weights flow_custom_timesteps layer_freeze_strategy refiner_training
    quantize_activations fuse_qkv_projections lr_scale lr_scale_sqrt deepspeed_config fsdp_enable custom_tracker
    timestep_bias_strategy prepend_instance_prompt only_instance_prompt init_lora_ema init_lokr_norm"""
TABLE: Table = {
    **each("", _FEATURES, only(False, LOST, banner=True)),
    **each("", "use_soft_min_snr diff2flow_loss optimizer_offload_gradients", only(False, LOST, banner=True)),
    **each("", "scheduled_sampling_max_step_offset ema_warmup_steps input_perturbation_steps", only(0, LOST, banner=True)),
    **each("", "snr_weight context_parallel_size", only(1, LOST, banner=True)),
    **each("", "soft_min_snr_sigma_data prodigy_steps quantization_config optimizer_cpu_offload_method", only(None, LOST, banner=True)),
    **{f"{name}_*": unneeded(f"it belongs to {name}, which is not part of this version") for name in _PARTS.split()},
    **each("", _OWN, _MACHINE),
    **each(
        "",
        """aspect_bucket_rounding disable_bucket_pruning compress_disk_cache skip_file_discovery preserve_data_backend_cache
        cache_dir cache_dir_text cache_dir_vae vae_cache_ondemand vae_cache_disable text_cache_ondemand text_cache_disable
        text_embed_full_cache vae_cache_scan_behaviour ignore_missing_files keep_vae_loaded override_dataset_config
        delete_problematic_images delete_unwanted_images aspect_bucket_disable_rebuild metadata_update_interval""",
        _CACHE,
    ),
    **each(
        "",
        """quantize_via sdnq_compile_mode sdnq_group_size sdnq_hadamard_group_size sdnq_use_hadamard sdnq_use_quantized_matmul
        sdnq_weights_dtype sdnq_quantized_matmul_dtype base_model_default_dtype gradient_precision num_eval_images
        eval_steps_interval eval_epoch_interval evaluation_type eval_dataset_id eval_loss_disable eval_timesteps
        strict_epoch_limit conditioning_multidataset_sampling configs_dir logging_dir merge_environment_config max_workers
        aws_max_pool_connections torch_num_threads dataloader_prefetch dataloader_prefetch_qlen aspect_bucket_worker_count
        read_batch_size write_batch_size image_processing_batch_size enable_multiprocessing set_grads_to_none
        data_backend_sampling allow_dataset_oversubscription disable_segmented_timestep_sampling
        training_scheduler_timestep_spacing inference_scheduler_timestep_spacing validation_prompt_library
        validation_guidance_rescale validation_disable_unconditional validation_lycoris_strength validation_adapter_strength
        validation_torch_compile validation_noise_scheduler num_validation_images validation_randomize validation_multigpu
        validation_seed_source validation_disable validation_on_startup validation_preview ema_device ema_cpu_only
        ema_update_interval ema_foreach_disable ema_validation seed_for_each_device tracker_image_layout
        checkpoints_rolling_total_limit checkpointing_rolling_steps checkpointing_use_tempdir delete_invalid_checkpoints
        disk_low_threshold disk_low_action fully_unload_text_encoder offload_during_startup delete_model_after_load
        accelerator_cache_clear_interval local_rank model_card_private model_card_safe_for_work model_card_note webhook_config
        webhook_reporting_interval i_know_what_i_am_doing print_filenames print_sampler_statistics debug_aspect_buckets
        debug_dataset_loader musubi_block_swap_device flow_beta_schedule_alpha
        flow_beta_schedule_beta t5_padding user_prompt_library_path controlnet control""",
        _MACHINE,
    ),
}
