"""Which of PyTorch's kernels compute: those of the denoising network's attention, float32 products on NVIDIA GPUs, cuDNN's choice.

What attention uses is a property of the network: the VAE and the text encoders, whose heads and masks some kernels cannot take, keep the
fastest that can. What PyTorch knows of globally is set within `chosen` alone.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sd_scripts.families import FACTS
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.memory import MemoryOptions
from sd_scripts.schema.runs import RunOptions

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
"""By the names of attention_backend."""
TOKENS = 128
"""Length of the sequences that a probe tries: the least that all kernels divide."""
_UNABLE = ("No available kernel", "No viable backend for scaled_dot_product_attention")


# Attention.


def use_attention(network: nn.Module, name: str) -> None:
    """Has every attention of a diffusers network computed by one backend, in place; auto changes nothing.

    Calls without gradient, which are previews and validation, fall back to others where that one cannot compute them: texts of several
    prompts are padded there, which takes a mask.
    """
    if name == "auto":
        return
    for module in network.modules():
        if callable(getattr(module, "processor", None)):
            module.processor = _by(BACKENDS[name], module.processor)


def _by(backend: SDPBackend, processor: Any) -> Any:
    """A processor that computes what another does, with this backend."""
    kind = type(processor)
    ways = [backend, *(other for other in BACKENDS.values() if other is not backend)]

    # The signature is that of the original: diffusers passes only arguments that it names.
    @functools.wraps(kind.__call__)
    def computed(self: Any, *arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            with sdpa_kernel(backend):
                return kind.__call__(self, *arguments, **named)
        with sdpa_kernel(ways, set_priority=True):
            return kind.__call__(self, *arguments, **named)

    ours = copy.copy(processor)
    ours.__class__ = type(kind.__name__, (kind,), {"__call__": computed})
    return ours


def check(options: RunOptions, device: torch.device, network: nn.Module | None = None) -> None:
    """Tries attention forward and backward, in the precision of the run: of this network, or of published ones of its kind before it is
    loaded.

    Raises OptionError with the backends that work where the one that is named does not, and for a layout that cannot be sharded.
    """
    memory = options.memory
    if memory.in_channels_last and options.distributed.distributed_strategy == "fsdp2":
        text = "channels_last: distributed_strategy fsdp2 cuts weights into rows, which this layout does not have; turn one of them off"
        raise OptionError(Problem("channels_last", text))
    name = memory.attention_backend
    if name == "auto":
        return
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.training.mixed_precision, torch.float32)
    masked = _has_masks(options)
    heads = FACTS[options.family].network.head_sizes(options.model) if network is None else head_sizes_of(network)
    if all(_works(BACKENDS[name], head, dtype, device, masked) for head in heads):
        return
    working = [
        other
        for other, backend in BACKENDS.items()
        if other != name and all(_works(backend, head, dtype, device, masked) for head in heads)
    ]
    call = f"heads of {' and '.join(map(str, heads))} numbers in {str(dtype).removeprefix('torch.')}"
    padded = " with a mask, which hides the padding of shorter texts" if masked else ""
    spared = masked and not FACTS[options.family].network.always_masked
    hint = " (train_batch_size 1 needs no mask)" if spared and _works(BACKENDS[name], heads[0], dtype, device, False) else ""
    text = f"{name} cannot compute {call} on this {device.type.upper()}{padded}{hint}; here work {', '.join(['auto', *working])}"
    raise OptionError(Problem("attention_backend", f"attention_backend: {text}"))


def _works(backend: SDPBackend, head: int, dtype: torch.dtype, device: torch.device, masked: bool) -> bool:
    try:
        with warnings.catch_warnings(), torch.enable_grad(), sdpa_kernel(backend):
            # Why a kernel cannot take the call is told in warnings, one for each kernel.
            warnings.simplefilter("ignore")
            rows = [torch.zeros(2, 2, TOKENS, head, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
            mask = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool, device=device) if masked else None
            F.scaled_dot_product_attention(rows[0], rows[1], rows[2], attn_mask=mask).sum().backward()
    except RuntimeError:
        return False
    return True


def head_sizes_of(network: nn.Module) -> tuple[int, ...]:
    """Numbers of each attention head that a diffusers network has, sorted."""
    attentions = [module for module in network.modules() if callable(getattr(module, "processor", None))]
    return tuple(sorted({getattr(module, "head_dim", 0) or module.inner_dim // module.heads for module in attentions}))


def _has_masks(options: RunOptions) -> bool:
    """Whether attention is told what is padding."""
    network = FACTS[options.family].network
    return network.always_masked or (network.text_lengths_vary(options.model) and options.dataset.train_batch_size > 1)


# What is global.


@contextmanager
def chosen(options: MemoryOptions, device: torch.device) -> Iterator[None]:
    """Within the block PyTorch computes as the options say; afterwards, and after an error, as before.

    Turns the error of an attention that the chosen backend cannot compute into a sentence.
    """
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    on_cpu = torch.backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    exact = matmul.fp32_precision, convolution.fp32_precision, on_cpu.fp32_precision
    on_gpu = device.type == "cuda"
    try:
        if options.cuda_allow_tf32 and on_gpu:
            # Sets the state that inductor asks for too, which refuses to answer when fp32_precision alone was changed.
            torch.set_float32_matmul_precision("high")
            convolution.fp32_precision = "tf32"
        if options.cuda_cudnn_benchmark and on_gpu:
            torch.backends.cudnn.benchmark = True
        yield
    except RuntimeError as err:
        if any(words in str(err) for words in _UNABLE):
            raise TrainingError(
                f"attention_backend {options.attention_backend} cannot compute an attention of this model; choose auto: training goes on "
                "from the last saved state"
            ) from err
        raise
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]
        matmul.fp32_precision, convolution.fp32_precision, on_cpu.fp32_precision = exact
