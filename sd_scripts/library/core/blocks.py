"""The repeated blocks of a denoising network: what is compiled, swapped and recomputed piece by piece. Knows no family."""

from __future__ import annotations

from torch import nn

_OF_UNETS = ("BasicTransformerBlock", "ResnetBlock2D")
_STAGES = ("down_blocks", "mid_block", "up_blocks")


def blocks_of(network: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a diffusers network by name, in the order in which a forward pass calls them; none is inside another.

    Of a transformer they are those of its class's `_repeated_blocks`, of a U-Net its transformer blocks and its residual blocks, which are
    also what gradient checkpointing recomputes.
    """
    of_unet = hasattr(network, "down_blocks")
    kinds = _OF_UNETS if of_unet else tuple(getattr(network, "_repeated_blocks", None) or ())
    # A block that fsdp2 has sharded is of a class with FSDP before its name.
    found = {name: module for name, module in network.named_modules() if type(module).__name__.removeprefix("FSDP") in kinds}
    # A transformer lists its blocks in the order of its forward pass.
    return dict(sorted(found.items(), key=lambda item: _turn(item[0]))) if of_unet else found


def _turn(name: str) -> tuple[int, ...]:
    """The place of a U-Net's block in its forward pass: each residual block of a level comes before the attention of the same number."""
    stage, *rest = name.split(".")
    level = int(rest.pop(0)) if stage != "mid_block" else 0
    kind, *numbers = rest
    return _STAGES.index(stage), level, int(numbers[0]), int(kind == "attentions"), *(int(word) for word in numbers[1:] if word.isdigit())
