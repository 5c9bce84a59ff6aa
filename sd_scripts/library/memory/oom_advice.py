"""What to change when the device has no memory left: the memory options that help most with the others as they are."""

from __future__ import annotations

from typing import Literal

import torch

from sd_scripts.families import FACTS
from sd_scripts.library.core.errors import OutOfMemory
from sd_scripts.schema.runs import RunOptions

Work = Literal["cache", "train", "sample"]


def oom_advice(options: RunOptions, on_gpu: bool, work: Work = "train") -> list[str]:
    """At most three sentences, the most helpful first; only options that are not set yet."""
    tables = {"cache": _caching, "train": _training, "sample": _sampling}
    found = [text for applies, text in tables[work](options, on_gpu) if applies]
    return found[:3] or ["a GPU with more memory, or a smaller base model; every option that spares memory is set already"]


Advice = list[tuple[bool, str]]
"""Sentences, and whether each of them applies."""


def _caching(options: RunOptions, on_gpu: bool) -> Advice:
    data, model = options.dataset, options.model
    return [
        (
            getattr(model, "text_encoder_quantization", "") == "none" and not options.output.has_all_parts,
            "text_encoder_quantization = qint8, half the memory of the text encoder",
        ),
        (data.vae_batch_size > 1, f"vae_batch_size = 1 instead of {data.vae_batch_size}"),
        (
            data.caches_texts and data.text_encoder_batch_size > 1,
            f"text_encoder_batch_size = 1 instead of {data.text_encoder_batch_size}",
        ),
        (model.vae_dtype == "float", "vae_dtype = bf16, half the memory of the VAE"),
        (min(data.resolution) > 512, _smaller(data.resolution)),
    ]


def _sampling(options: RunOptions, on_gpu: bool) -> Advice:
    """Of previews, which need no gradients: what decodes them, what else is on the device, how large they are."""
    return [
        (not options.memory.vae_tiling, "vae_tiling on: previews are decoded in tiles, which need little memory whatever their size"),
        *_away(options),
        *_less_of_the_network(options, on_gpu),
        (options.samples.by_prompt, "sample_prompts with smaller --w and --h"),
        (True, "preflight = off, if previews may be missing: one that does not fit does not end a run"),
    ]


def _training(options: RunOptions, on_gpu: bool) -> Advice:
    data, training, network, memory = options.dataset, options.training, options.adapter, options.memory
    batch, accumulation = data.train_batch_size, training.gradient_accumulation_steps
    adapter = options.method == "network"
    wide = adapter and (network.network_dim > 32 or network.wants_convolutions)
    less, large = _less_of_the_network(options, on_gpu), FACTS[options.family].network.mostly_weights
    return [
        *(less[:1] if large else []),
        (
            not getattr(options.objective, "checkpoint_steps", True),
            "checkpoint_steps on: memory hardly grows with ode_integration_steps any more, same result",
        ),
        (not memory.gradient_checkpointing, "gradient_checkpointing on: the largest saving, about a third slower, same result"),
        (
            memory.gradient_checkpointing and memory.gradient_checkpointing_share < 1,
            f"gradient_checkpointing_share = 1 instead of {memory.gradient_checkpointing_share:g}: slower, same result",
        ),
        (
            batch > 1 and not memory.steps_in_backward,
            f"train_batch_size = 1 with gradient_accumulation_steps = {batch * accumulation} "
            f"instead of {batch} and {accumulation}: the same training",
        ),
        (batch > 1 and memory.steps_in_backward, f"train_batch_size = 1 instead of {batch}, with a lower learning_rate"),
        *_away(options),
        (on_gpu and training.mixed_precision == "no", "mixed_precision = bf16: half the memory of the base model"),
        *_of_full_finetune(options, on_gpu),
        *(less[1:] if large else less),
        (
            memory.gradient_checkpointing and not memory.gradient_checkpointing_cpu_offload and on_gpu,
            "gradient_checkpointing_cpu_offload on: what blocks begin with waits in host RAM, a little slower, same result",
        ),
        (min(data.resolution) > 512, _smaller(data.resolution)),
        (network.train_text_encoder and options.method != "scratch", "train_text_encoder off"),
        (wide, "a network on fewer layers: conv_dim removed, network_dim = 16, or target_modules such as attn"),
        (not adapter and options.optimizer.optimizer_type != "Adafactor", "optimizer_type = Adafactor, which keeps almost no state"),
        (on_gpu and adapter and options.optimizer.optimizer_type in ("AdamW", "Prodigy"), "optimizer_type = AdamW8bit"),
        (
            options.method == "scratch" and options.model.pretrained_model_name_or_path is None,
            "a smaller model: half of base_channels is a quarter of the weights, and fewer attention_levels need less",
        ),
        (
            options.method == "full" and not network.target_modules,
            "target_modules = attn: train only a part of the weights, or a LoRA",
        ),
        (training.use_ema, "use_ema off"),
    ]


def _away(options: RunOptions) -> Advice:
    """Networks that need not be on the device."""
    data, network = options.dataset, options.network
    return [
        (
            not data.cache_text_encoder_outputs and not network.train_text_encoder and data.caches_texts,
            "cache_text_encoder_outputs on: the text encoders leave the device",
        ),
        (not data.cache_latents, "cache_latents on: the VAE leaves the device"),
    ]


def _less_of_the_network(options: RunOptions, on_gpu: bool) -> Advice:
    """Fewer bits of its weights, or fewer of its blocks, on the device."""
    model, compiling = options.model, options.compile
    bits = model.quantization
    whole = on_gpu and options.distributed.distributed_strategy != "fsdp2"
    frozen = whole and options.method == "network"
    fixed = compiling.compile and (compiling.records_addresses or compiling.compile_scope == "network")
    return [
        (frozen and bits == "none", "transformer_quantization = qint8: half the memory of the frozen network, nearly the same result"),
        (
            whole and not options.memory.blocks_to_swap and not fixed,
            "blocks_to_swap = 8, or more: as many blocks of the network wait in host RAM until they are due, some speed, same result",
        ),
        (
            frozen and bits in ("qint8", "qfloat8", "fp8"),
            f"transformer_quantization = nf4 instead of {bits}: half of that again, a less exact base",
        ),
    ]


def _of_full_finetune(options: RunOptions, on_gpu: bool) -> Advice:
    """Gradients and precision of weights that are trained themselves."""
    memory, training = options.memory, options.training
    if options.method == "network" or options.distributed.distributed_strategy == "fsdp2":
        return []
    alone = training.gradient_accumulation_steps == 1 and not options.distributed.multi_gpu and training.mixed_precision != "fp16"
    return [
        (
            alone and not memory.steps_in_backward and options.optimizer.optimizer_type != "Prodigy",
            "fused_backward_pass on with max_grad_norm = 0: gradients of the whole model are never in memory together",
        ),
        (
            on_gpu and not memory.weights_in_bf16 and training.mixed_precision in ("bf16", "auto"),
            "full_bf16 on: half the memory of the trained weights, nearly the same result",
        ),
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
    if isinstance(err, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(err, RuntimeError) and any(text in str(err) for text in _NO_MEMORY)
