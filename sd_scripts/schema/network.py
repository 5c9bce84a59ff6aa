"""What is trained on top of the frozen base: adapter type, ranks, targets and their learning rates."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .fields import Count, Fraction, NotNegative, Positive, Section, Show, WholeNumber, raise_all

Rank = Annotated[int, Field(ge=1, le=4096)]


class NetworkOptions(Section):
    """The adapter (LoRA and its relatives)."""

    title: ClassVar[str] = "Network"

    network_type: Literal["lora", "dora", "loha", "lokr", "oft"] = "lora"
    """Kind of adapter. lora and dora are read by every tool; loha, lokr and oft by fewer, and only in their own file layout."""
    network_dim: Annotated[Rank, Show(basic=True)] = 16
    """Rank of the adapter. More rank learns more detail, makes a larger file, and overfits sooner. For oft it is not used: see
    oft_block_size."""
    network_alpha: Positive | None = None
    """The update is scaled by alpha / rank (by alpha / sqrt(rank) with rank_stabilized); None means alpha = rank, a scale of 1."""
    conv_dim: Rank | None = None
    """Rank for 3x3 convolutions (ResNet blocks, down- and upsamplers); None leaves them alone."""
    conv_alpha: Positive | None = None
    """Alpha for 3x3 convolutions; None means alpha = conv_dim."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, Kalajdzievski 2023). The exported alpha is converted, so every tool
    reads it right."""
    network_dropout: Annotated[Fraction, Field(lt=1)] = 0.0
    """Chance that an input of the adapter is zeroed during training (lora and dora)."""
    rank_dropout: Annotated[Fraction, Field(lt=1)] = 0.0
    """Chance that a rank is left out for a step (loha and lokr)."""
    module_dropout: Annotated[Fraction, Field(lt=1)] = 0.0
    """Chance that a whole adapter layer is left out for a step (loha, lokr and oft)."""
    train_unet: bool = True
    """Attach the adapter to the UNet."""
    train_text_encoder: bool = False
    """Attach the adapter to both text encoders as well. Needs cache_text_encoder_outputs off."""
    unet_lr: NotNegative | None = None
    """Learning rate of the UNet's adapter; None takes learning_rate."""
    text_encoder_lr: Annotated[tuple[NotNegative, ...], Field(max_length=2)] = ()
    """Learning rate of the text encoders' adapters, one number for both or two (first, second); 0 leaves an encoder as it is; empty takes
    learning_rate."""
    loraplus_lr_ratio: Positive | None = None
    """LoRA+ (Hayou et al. 2024): the up matrices learn this many times faster than the down matrices; None means 1."""
    loraplus_unet_lr_ratio: Positive | None = None
    """LoRA+ ratio of the UNet only; None takes loraplus_lr_ratio."""
    loraplus_text_encoder_lr_ratio: Positive | None = None
    """LoRA+ ratio of the text encoders only; None takes loraplus_lr_ratio."""
    target_modules: tuple[str, ...] = ()
    """Regular expressions on module names of the diffusers model (for example `attn2\\.to_k`); only matching layers get an adapter. Empty
    means all the default ones."""
    exclude_modules: tuple[str, ...] = ()
    """Regular expressions on module names; matching layers get no adapter."""
    block_dims: tuple[WholeNumber, ...] = ()
    """Rank of each UNet block in the order input blocks, middle, output blocks of the original layout (SDXL: 9 + 1 + 9 = 19 numbers); 0
    leaves a block out. Empty means network_dim everywhere."""
    block_alphas: tuple[Positive, ...] = ()
    """Alpha of each UNet block, in the order of block_dims; empty means network_alpha everywhere."""
    conv_block_dims: tuple[WholeNumber, ...] = ()
    """Rank of the 3x3 convolutions in each UNet block, in the order of block_dims; 0 leaves them out. Empty means conv_dim everywhere."""
    block_lr_weight: tuple[NotNegative, ...] = ()
    """Factor on unet_lr for each UNet block, in the order of block_dims; 0 freezes a block. Empty means 1 everywhere."""
    network_weights: Annotated[str | None, Show(kind="file")] = None
    """A LoRA file to start from (kohya or diffusers names); None starts from an adapter that changes nothing."""
    dim_from_weights: bool = False
    """Take ranks, alphas and targets from network_weights instead of from the options above."""
    scale_weight_norms: Positive | None = None
    """After each step, shrink an adapter layer whose weight update has a larger norm than this (lora); None does nothing."""
    lokr_factor: Annotated[int, Field(ge=-1)] = -1
    """Size of the small Kronecker factor (lokr); -1 takes the one nearest to the square root of the layer."""
    lokr_decompose_both: bool = False
    """Factor the small Kronecker matrix as well (lokr)."""
    oft_block_size: Count = 32
    """Side of the orthogonal blocks (oft); a layer whose input width it does not divide takes the nearest smaller divisor."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if not self.train_unet and not self.train_text_encoder:
            problems.append("train_unet and train_text_encoder are both off, so nothing would be trained; turn one on")
        if self.dim_from_weights and self.network_weights is None:
            problems.append("dim_from_weights needs a file in network_weights")
        if self.network_dropout and self.network_type not in ("lora", "dora"):
            problems.append(f"network_dropout works with network_type lora and dora, not {self.network_type}; set it to 0")
        if self.rank_dropout and self.network_type not in ("loha", "lokr"):
            problems.append(f"rank_dropout works with network_type loha and lokr, not {self.network_type}; set it to 0")
        if self.module_dropout and self.network_type not in ("loha", "lokr", "oft"):
            problems.append(f"module_dropout works with network_type loha, lokr and oft, not {self.network_type}; set it to 0")
        if self.scale_weight_norms is not None and self.network_type != "lora":
            problems.append(f"scale_weight_norms works with network_type lora, not {self.network_type}; remove it")
        if self.rank_stabilized and self.network_type not in ("lora", "dora"):
            problems.append(f"rank_stabilized works with network_type lora and dora, not {self.network_type}; turn it off")
        if self.network_type == "oft" and (self.conv_dim is not None or self.conv_block_dims):
            problems.append(
                "conv_dim and conv_block_dims do not work with network_type oft, which is not the identity at the start on "
                "convolutions in peft; remove them"
            )
        if (self.lokr_factor != -1 or self.lokr_decompose_both) and self.network_type != "lokr":
            problems.append(f"lokr_factor and lokr_decompose_both are for network_type lokr, not {self.network_type}; remove them")
        if self.oft_block_size != 32 and self.network_type != "oft":
            problems.append(f"oft_block_size is for network_type oft, not {self.network_type}; remove it")
        if self.conv_alpha is not None and self.conv_dim is None and not self.conv_block_dims:
            problems.append("conv_alpha has no effect without conv_dim or conv_block_dims; set one of them or remove conv_alpha")
        ratio = self.loraplus_lr_ratio or self.loraplus_unet_lr_ratio or self.loraplus_text_encoder_lr_ratio
        if ratio is not None and self.network_type not in ("lora", "dora"):
            problems.append(f"the loraplus ratios work with network_type lora and dora, not {self.network_type}; remove them")
        if self.text_encoder_lr and not self.train_text_encoder:
            problems.append("text_encoder_lr is set but train_text_encoder is off; turn it on or remove text_encoder_lr")
        lengths = {len(v) for v in (self.block_dims, self.block_alphas, self.conv_block_dims, self.block_lr_weight) if v}
        if len(lengths) > 1:
            problems.append("block_dims, block_alphas, conv_block_dims and block_lr_weight must have the same number of values")
        raise_all(problems)
        return self
