"""What to change when the device has no memory left: the levers that help most with the options as they are."""

from __future__ import annotations

from typing import Literal

import torch

from sd_scripts.schema.ddpm import DdpmModelOptions
from sd_scripts.schema.lgt import LgtModelOptions, LgtObjectiveOptions
from sd_scripts.schema.model import QwenImageModelOptions, ZImageModelOptions
from sd_scripts.schema.network import NetworkOptions
from sd_scripts.schema.runs import RunOptions

Work = Literal["cache", "train", "sample"]


def levers(options: RunOptions, on_gpu: bool, work: Work = "train") -> list[str]:
    """At most three sentences, the most helpful first; only levers that are not pulled yet."""
    found = [text for applies, text in (_caching(options) if work == "cache" else _training(options, on_gpu)) if applies]
    return found[:3] or ["a GPU with more memory, or a smaller base model; every lever is pulled already"]


def _caching(options: RunOptions) -> list[tuple[bool, str]]:
    data, model = options.dataset, options.model
    whole = isinstance(model, QwenImageModelOptions | ZImageModelOptions) and model.text_encoder_quantization == "none"
    return [
        (whole, "text_encoder_quantization = qint8, half the memory of the text encoder"),
        (data.vae_batch_size > 1, f"vae_batch_size = 1 instead of {data.vae_batch_size}"),
        (
            "text_encoder_batch_size" in type(data).model_fields and data.text_encoder_batch_size > 1,
            f"text_encoder_batch_size = 1 instead of {data.text_encoder_batch_size}",
        ),
        (model.vae_dtype == "float", "vae_dtype = bf16, half the memory of the VAE"),
        (min(data.resolution) > 512, _smaller(data.resolution)),
    ]


def _training(options: RunOptions, on_gpu: bool) -> list[tuple[bool, str]]:
    data, training, network = options.dataset, options.training, options.network
    batch, accumulation = data.train_batch_size, training.gradient_accumulation_steps
    adapter = isinstance(network, NetworkOptions)
    wide = adapter and (network.network_dim > 32 or network.wants_convolutions)
    model = options.model
    has = type(data).model_fields
    small = isinstance(model, DdpmModelOptions | LgtModelOptions)
    objective = options.objective
    energy = objective if isinstance(objective, LgtObjectiveOptions) else None
    whole = adapter and isinstance(model, QwenImageModelOptions | ZImageModelOptions) and model.transformer_quantization == "none"
    return [
        (on_gpu and whole, "transformer_quantization = qint8: half the memory of the frozen transformer, nearly the same result"),
        (
            energy is not None and not energy.checkpoint_steps,
            "checkpoint_steps on: memory hardly grows with ode_integration_steps any more, same result",
        ),
        (not training.gradient_checkpointing, "gradient_checkpointing on: the largest saving, about a third slower, same result"),
        (
            batch > 1,
            f"train_batch_size = 1 with gradient_accumulation_steps = {batch * accumulation} "
            f"instead of {batch} and {accumulation}: the same training",
        ),
        (
            not data.cache_text_encoder_outputs and not network.train_text_encoder and "cache_text_encoder_outputs" in has,
            "cache_text_encoder_outputs on: the text encoders leave the device",
        ),
        (not data.cache_latents and "cache_latents" in has, "cache_latents on: the VAE leaves the device"),
        (on_gpu and training.mixed_precision == "no", "mixed_precision = bf16: half the memory of the base model"),
        (min(data.resolution) > 512, _smaller(data.resolution)),
        (network.train_text_encoder and "train_text_encoder" in type(network).model_fields, "train_text_encoder off"),
        (wide, "a network on fewer layers: conv_dim removed, network_dim = 16, or target_modules such as attn"),
        (not adapter and options.optimizer.optimizer_type != "Adafactor", "optimizer_type = Adafactor, which keeps almost no state"),
        (on_gpu and adapter and options.optimizer.optimizer_type in ("AdamW", "Prodigy"), "optimizer_type = AdamW8bit"),
        (
            small and model.pretrained_model_name_or_path is None,
            "a smaller model: half of base_channels is a quarter of the weights, and fewer attention_levels need less",
        ),
        (
            not adapter and not small and not network.target_modules,
            "target_modules = attn: train only a part of the weights, or a LoRA",
        ),
        (training.use_ema, "use_ema off"),
    ]


def _smaller(resolution: tuple[int, int]) -> str:
    width, height = (max(256, round(side * 0.75 / 64) * 64) for side in resolution)
    return f"resolution = {width},{height} instead of {resolution[0]},{resolution[1]}: about half the memory of the activations"


_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    # What takes memory past torch's own allocator: contexts, kernels that are loaded, work space of the libraries.
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(err: BaseException) -> bool:
    """Whether the error says that the device, or on a CPU the machine, has no memory left."""
    if isinstance(err, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(err, RuntimeError) and any(text in str(err) for text in _NO_MEMORY)
