"""Which networks a run trains, or reads anew because training changes what they say, and where and in what precision each is read."""

from __future__ import annotations

import torch

from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.runs import RunOptions

from .environment import DTYPES
from .stepping import trained_dtype


def dtypes_of_run(options: RunOptions) -> dict[str, torch.dtype]:
    """The precision of backbone and text encoders by their names in Parts.modules(): networks whose own weights are trained have one of
    their own, see stepping.trained_dtype, the others that of mixed_precision, which is decided by now."""
    network = options.network
    trained: list[str] = []
    if options.method != "network":
        trained = [*(["backbone"] if network.train_unet else []), *(["te1", "te2"] if network.train_text_encoder else [])]
    own, precision = trained_dtype(options.memory), DTYPES[options.training.mixed_precision]
    return {name: own if name in trained else precision for name in ("backbone", "te1", "te2", "te3")}


def is_read_straight(options: RunOptions) -> bool:
    """Whether the denoising network is read to the device where it trains, and never is in host RAM: none of it stays there, is sharded
    or tabulated from there, or packed there, which gives the same bits whatever the device."""
    stays = options.memory.blocks_to_swap or getattr(options.model, "modulation_table", False)
    packed = getattr(options.model, "transformer_quantization", "none") != "none"
    return not (stays or packed or options.distributed.distributed_strategy == "fsdp2")


def trained_encoders(options: RunOptions, parts: Parts) -> tuple[str, ...]:
    """Text encoders whose outputs change with every step: all, some of them, or none."""
    network = options.network
    if not network.train_text_encoder:
        return ()
    return tuple(name for name in sorted(parts.text_encoders) if name not in network.frozen_encoders)
