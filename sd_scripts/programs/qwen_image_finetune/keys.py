"""Keys of such a configuration that have an option of the same meaning, those that nothing is lost without, and its defaults. What others
become stands in rules.py."""

from __future__ import annotations

SEED_KEYS = (
    "model.rank",
    "cache.vae_encoder_device",
    "cache.text_encoder_device",
    "predict.devices.transformer",
    "data.init_args.image_size",
    "data.init_args.cache_drop_rate",
    "logging.logging_dir",
)
"""Keys that say of a file that it is of the first schema."""

PLAIN = {
    "model.lora.r": "network_dim",
    "model.lora.lora_alpha": "network_alpha",
    "data.batch_size": "train_batch_size",
    "data.num_workers": "max_data_loader_n_workers",
    "data.init_args.caption_dropout_rate": "caption_dropout_rate",
    "data.init_args.cache_drop_rate": "caption_dropout_rate",
    "optimizer.init_args.lr": "learning_rate",
    "train.gradient_accumulation_steps": "gradient_accumulation_steps",
    "train.max_train_steps": "max_train_steps",
    "train.checkpointing_steps": "save_every_n_steps",
    "train.max_grad_norm": "max_grad_norm",
    "train.gradient_checkpointing": "gradient_checkpointing",
    "train.seed": "seed",
    "cache.cache_dir": "cache_dir",
    "cache.vae_encoder_device": "vae_device",
    "cache.text_encoder_device": "text_encoder_device",
    "cache.devices.vae": "vae_device",
    "cache.devices.vae_encoder": "vae_device",
    "cache.devices.text_encoder": "text_encoder_device",
    "lr_scheduler.scheduler_type": "lr_scheduler",
    "lr_scheduler.warmup_steps": "lr_warmup_steps",
    "logging.output_dir": "output_dir",
    "logging.notes": "training_comment",
}
"""Keys whose value is that of an option."""

ENCODERS_DEVICES = ("vae_device", "text_encoder_device")
"""Options that not all kinds of run have: where encoders compute."""

PREDICT = {"transformer_device": ("transformer", "dit"), "vae_device": ("vae", "vae_encoder"), "text_encoder_device": ("text_encoder",)}
"""Options of prediction, with its names of their devices."""

DEFAULTS: dict[str, object] = {
    "network_dim": 16,
    "network_alpha": 16,
    "gradient_accumulation_steps": 4,
    "max_train_steps": 1000,
    "save_every_n_steps": 500,
    "gradient_checkpointing": True,
    "mixed_precision": "bf16",
    "learning_rate": 1e-4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "timestep_sampling": "uniform",
    "save_model_as": "diffusers",
}
"""Values that program uses where the file says nothing, and those it cannot be told: it always draws times uniformly."""

NOT_READ = "that program does not read it"
NOT_NEEDED = {
    "data.class_path": "there is one kind of data set here, which finds pairs by itself",
    "data.init_args.cache_dir": "that program takes cache.cache_dir in its place",
    "data.init_args.use_cache": "that program takes cache.use_cache in its place",
    "data.init_args.prompt_empty_drop_keys": "the empty instruction is always cached",
    "data.init_args.prompt_image_dropout_rate": NOT_READ,
    "data.init_args.use_edit_mask": "that program does not read it; masks are used with masked_loss",
    "data.init_args.processor.class_path": "images are cut in one way here, see resolution and enable_bucket",
    "data.init_args.processor.init_args.max_aspect_ratio": "buckets have limits of their own, min_bucket_reso and max_bucket_reso",
    "data.init_args.processor.init_args.resize_controls_mask_to_image": "a mask always has the size of the image that is learned",
    "cache.prompt_empty_drop_keys": "the empty instruction is always cached",
    "cache.devices.text_encoder_2": "encoders come to the GPU one after the other, and leave it once their outputs are cached",
    "cache.devices.dit": "the transformer is not in memory while caches are filled",
    "cache.devices.prompt_enhancer": "there is no prompt enhancer",
    "model.lora.adapter_name": "the file's name is output_name",
    "model.pretrained_embeddings": "all parts come with the base model",
    "lr_scheduler.num_cycles": NOT_READ,
    "lr_scheduler.power": NOT_READ,
    "train.num_epochs": "the number of steps decides, max_train_steps",
    "train.train_batch_size": "that program takes data.batch_size in its place",
    "train.low_memory": "encoders leave the GPU by themselves once their outputs are cached",
    "train.fit_device": "the launcher chooses the training devices",
    "logging.logging_dir": "the log is inside the folder of the run",
    "logging.tags": "they are labels of that program's trackers",
}
