"""What is trained: an adapter on the frozen base (type, ranks, targets), or the model itself; and its learning rates."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from . import fields
from .errors import shortened
from .fields import Count, Expression, Fraction, NotNegative, Positive, Rate, Section, Show, raise_all

Rank = Annotated[int, Field(ge=1, le=4096)]
RankOrNone = Annotated[int, Field(ge=0, le=4096)]
"""0 leaves the layers out."""
Indices = Annotated[str, Field(pattern=r"^(all|none|\d+(-\d+)?(,\d+(-\d+)?)*)$")]
"""Numbers of blocks as kohya writes them: all, none, or 0-3,5."""


def _numbered(option: str, texts: tuple[str, ...], whole: bool) -> list[str]:
    """What is wrong in a list of expression=number."""
    problems = []
    for text in texts:
        expression, equals, number = text.rpartition("=")
        try:
            fields.expression(expression)
            good = bool(equals and expression) and 0 <= (int(number) if whole else float(number)) <= (4096 if whole else 100)
        except (ValueError, OverflowError):
            good = False
        if not good:
            problems.append(f"{option}: {shortened(text)!r} is not expression=number, such as {'attn2=8' if whole else 'attn2=1e-5'}")
    return problems


_LORA = Show(needs="network_type=lora|dora")
_LOKR = Show(needs="network_type=lokr")
# oft is not the identity at the start on convolutions in peft.
_CONVOLUTIONS = Show(needs="network_type!=oft")
_OF_UNET = Show(needs="train_unet")
_OF_TEXT = Show(needs="train_text_encoder")


class NetworkOptions(Section):
    """The adapter (LoRA and its relatives) of any family.

    Families say which networks may get one: fields train_unet, train_text_encoder, text_encoder_lr and loraplus_text_encoder_lr_ratio
    where there is a choice, class variables of the same names where there is none.
    """

    title: ClassVar[str] = "Network"

    network_type: Literal["lora", "dora", "loha", "lokr", "oft"] = "lora"
    """Kind of adapter. lora is read by every program; dora, loha and lokr by ComfyUI and Forge, by others in part (verify_lora counts). oft
    is read by this project alone, under any names: merge it into a model for other programs."""
    network_dim: Annotated[Rank, Show(basic=True)] = 16
    """Rank of the adapter. More rank learns more detail, makes a larger file, and overfits sooner. For oft it is not used: see
    oft_block_size."""
    network_alpha: Positive | None = None
    """The update is scaled by alpha / rank (by alpha / sqrt(rank) with rank_stabilized); None means alpha = rank, a scale of 1."""
    rank_stabilized: Annotated[bool, _LORA] = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, Kalajdzievski 2023). The exported alpha is converted, so every tool
    reads it right."""
    network_dropout: Annotated[Fraction, Field(lt=1), _LORA] = 0.0
    """Chance that an input of the adapter is zeroed during training (lora and dora)."""
    rank_dropout: Annotated[Fraction, Field(lt=1), Show(needs="network_type=loha|lokr")] = 0.0
    """Chance that a rank is left out for a step (loha and lokr)."""
    module_dropout: Annotated[Fraction, Field(lt=1), Show(needs="network_type=loha|lokr|oft")] = 0.0
    """Chance that a whole adapter layer is left out for a step (loha, lokr and oft)."""
    unet_lr: Rate | None = None
    """Learning rate of the adapter on the UNet or transformer; None takes learning_rate."""
    loraplus_lr_ratio: Annotated[Positive | None, _LORA] = None
    """LoRA+ (Hayou et al. 2024): the up matrices learn this many times faster than the down matrices; None means 1."""
    loraplus_unet_lr_ratio: Annotated[Positive | None, _LORA] = None
    """LoRA+ ratio of the UNet or transformer only; None takes loraplus_lr_ratio."""
    target_modules: tuple[Expression, ...] = ()
    """Regular expressions on module names of the diffusers model (for example `attn2\\.to_k`); only matching layers get an adapter. Empty
    means all the default ones."""
    exclude_modules: tuple[Expression, ...] = ()
    """Regular expressions on module names; matching layers get no adapter."""
    network_reg_dims: tuple[str, ...] = ()
    """Ranks by name, as expression=rank (for example `attn2=8`); the first expression found in a layer's name decides. 0 leaves the layer
    out."""
    network_reg_lrs: tuple[str, ...] = ()
    """Learning rates by name, as expression=rate (for example `single_transformer_blocks\\.=1e-5`); the first expression found in a layer's
    name decides. 0 freezes the layer."""
    network_weights: Annotated[str | None, Show(kind="file")] = None
    """A LoRA file to start from (kohya or diffusers names); None starts from an adapter that changes nothing."""
    dim_from_weights: Annotated[bool, Show(needs="network_weights")] = False
    """Take ranks, alphas and targets from network_weights instead of from the options above."""
    scale_weight_norms: Annotated[Positive | None, Show(needs="network_type=lora")] = None
    """After each step, shrink an adapter layer whose weight update has a larger norm than this (lora); None does nothing."""
    lokr_factor: Annotated[int, Field(ge=-1, le=65536), _LOKR] = -1
    """Size of the small Kronecker factor (lokr); -1 takes the one nearest to the square root of the layer."""
    lokr_decompose_both: Annotated[bool, _LOKR] = False
    """Factor the small Kronecker matrix as well (lokr)."""
    oft_block_size: Annotated[Count, Show(needs="network_type=oft")] = 32
    """Side of the orthogonal blocks (oft); a layer whose input width it does not divide takes the nearest smaller divisor."""

    @property
    def wants_convolutions(self) -> bool:
        """Whether 3x3 convolutions get an adapter, too."""
        return False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        problems += _numbered("network_reg_dims", self.network_reg_dims, whole=True)
        problems += _numbered("network_reg_lrs", self.network_reg_lrs, whole=False)
        raise_all(problems)
        return self


class TextNetworkOptions(NetworkOptions):
    """The adapter of a family whose text encoders can have one, too."""

    train_unet: bool = True
    """Attach the adapter to the denoising network (UNet or transformer)."""
    train_text_encoder: bool = False
    """Attach the adapter to the text encoders as well. Needs cache_text_encoder_outputs off."""
    text_encoder_lr: Annotated[tuple[Rate, ...], Field(max_length=2), _OF_TEXT] = ()
    """Learning rate of the text encoders' adapters, one number for all or one for each (SDXL: CLIP-L, CLIP-G; FLUX: CLIP-L, T5); 0 leaves
    an encoder as it is; empty takes learning_rate."""
    loraplus_text_encoder_lr_ratio: Annotated[Positive | None, _LORA] = None
    """LoRA+ ratio of the text encoders only; None takes loraplus_lr_ratio."""

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        if not self.train_unet and not self.train_text_encoder:
            raise_all(["train_unet and train_text_encoder are both off, so nothing would be trained; turn one on"])
        return self


class UNetNetworkOptions(TextNetworkOptions):
    """The adapter on a UNet (Stable Diffusion, SDXL)."""

    conv_dim: Annotated[Rank | None, _CONVOLUTIONS] = None
    """Rank for 3x3 convolutions (ResNet blocks, down- and upsamplers); None leaves them alone."""
    conv_alpha: Annotated[Positive | None, Show(needs="conv_dim or conv_block_dims")] = None
    """Alpha for 3x3 convolutions; None means alpha = conv_dim."""
    block_dims: tuple[RankOrNone, ...] = ()
    """Rank of each UNet block in the order input blocks, middle, output blocks of the original layout (SDXL: 9 + 1 + 9 = 19 numbers, Stable
    Diffusion: 12 + 1 + 12 = 25); 0 leaves a block out. Empty means network_dim everywhere."""
    block_alphas: tuple[Positive, ...] = ()
    """Alpha of each UNet block, in the order of block_dims; empty means network_alpha everywhere."""
    conv_block_dims: Annotated[tuple[RankOrNone, ...], _CONVOLUTIONS] = ()
    """Rank of the 3x3 convolutions in each UNet block, in the order of block_dims; 0 leaves them out. Empty means conv_dim everywhere."""
    block_lr_weight: tuple[NotNegative, ...] = ()
    """Factor on unet_lr for each UNet block, in the order of block_dims; 0 freezes a block. Empty means 1 everywhere."""

    @property
    def wants_convolutions(self) -> bool:
        """Whether 3x3 convolutions get an adapter, too."""
        return self.conv_dim is not None or bool(self.conv_block_dims)

    @model_validator(mode="after")
    def _blocks_agree(self) -> Self:
        problems = []
        lengths = {len(v) for v in (self.block_dims, self.block_alphas, self.conv_block_dims, self.block_lr_weight) if v}
        if len(lengths) > 1:
            problems.append("block_dims, block_alphas, conv_block_dims and block_lr_weight must have the same number of values")
        raise_all(problems)
        return self


class FluxNetworkOptions(TextNetworkOptions):
    """The adapter on a FLUX transformer."""

    train_t5xxl: Annotated[bool, Show(needs="train_text_encoder")] = False
    """With train_text_encoder, attach the adapter to T5-XXL as well as to CLIP-L."""
    split_qkv: bool = False
    """Give query, key and value (and the MLP of single blocks) adapters of their own. Off, they share one down matrix, as in kohya's files;
    on, a file with kohya's names holds them side by side and its ranks are three (four) times as large."""
    train_blocks: Literal["all", "double", "single"] = "all"
    """Which transformer blocks get an adapter."""
    train_double_block_indices: Annotated[Indices, Show(needs="train_blocks=all|double")] = "all"
    """Numbers of the double blocks that get an adapter: all, none, or such as 0-3,5."""
    train_single_block_indices: Annotated[Indices, Show(needs="train_blocks=all|single")] = "all"
    """Numbers of the single blocks that get an adapter: all, none, or such as 0-3,5."""
    img_attn_dim: RankOrNone | None = None
    """Rank for the picture's attention in double blocks; 0 leaves it out, None takes network_dim."""
    txt_attn_dim: RankOrNone | None = None
    """Rank for the text's attention in double blocks; 0 leaves it out, None takes network_dim."""
    img_mlp_dim: RankOrNone | None = None
    """Rank for the picture's MLP in double blocks; 0 leaves it out, None takes network_dim."""
    txt_mlp_dim: RankOrNone | None = None
    """Rank for the text's MLP in double blocks; 0 leaves it out, None takes network_dim."""
    img_mod_dim: RankOrNone | None = None
    """Rank for the picture's modulation in double blocks; 0 leaves it out, None takes network_dim."""
    txt_mod_dim: RankOrNone | None = None
    """Rank for the text's modulation in double blocks; 0 leaves it out, None takes network_dim."""
    single_dim: RankOrNone | None = None
    """Rank for attention and MLP in single blocks; 0 leaves them out, None takes network_dim."""
    single_mod_dim: RankOrNone | None = None
    """Rank for the modulation in single blocks; 0 leaves it out, None takes network_dim."""
    in_dims: Annotated[tuple[RankOrNone, ...], Field(max_length=5)] = ()
    """Ranks for the five input layers: picture, time, vector, guidance, text; 0 leaves one out. Empty means none of them."""

    @model_validator(mode="after")
    def _flux_agrees(self) -> Self:
        if self.in_dims and len(self.in_dims) != 5:
            raise_all([f"in_dims has {len(self.in_dims)} numbers; give five (picture, time, vector, guidance, text), or none"])
        return self


class TransformerNetworkOptions(NetworkOptions):
    """The adapter of a family whose text encoder, a large language model, stays as it is."""

    train_unet: ClassVar[bool] = True
    train_text_encoder: ClassVar[bool] = False
    text_encoder_lr: ClassVar[tuple[float, ...]] = ()
    loraplus_text_encoder_lr_ratio: ClassVar[float | None] = None


class QwenImageNetworkOptions(TransformerNetworkOptions):
    """The adapter on a Qwen-Image transformer."""

    lora_targets: Literal["image_attention", "attention", "all", "all_with_modulation"] = "all"
    """Layers of each block that get an adapter: the picture's attention (240 layers in the full model), all attention (480), the MLPs as
    well (720), or also the modulation (840), whose weights are a third of the model. target_modules, when given, chooses among all."""
    train_block_indices: Indices = "all"
    """Numbers of the transformer blocks that get an adapter: all, or such as 0-29,55."""


class ZImageNetworkOptions(TransformerNetworkOptions):
    """The adapter on a Z-Image transformer."""

    lora_targets: Literal["attention", "attention_and_mlp", "all"] = "attention_and_mlp"
    """Layers of each of the 30 blocks that get an adapter: attention alone (120 layers in the full model), the MLPs as well (210, as most
    files for Z-Image have), or also the modulation and the refiner blocks. target_modules, when given, chooses among all."""
    train_block_indices: Indices = "all"
    """Numbers of the transformer blocks that get an adapter: all, or such as 0-14,29."""


class FullOptions(Section):
    """The model's own weights: DreamBooth and fine-tuning."""

    title: ClassVar[str] = "Network"

    unet_lr: Annotated[Rate | None, _OF_UNET] = None
    """Learning rate of the UNet or transformer; None takes learning_rate."""
    target_modules: Annotated[tuple[Expression, ...], _OF_UNET] = ()
    """Regular expressions on the names of the UNet's or transformer's weights in the diffusers model (for example `attn2`); only matching
    ones are trained. Empty means all."""
    exclude_modules: Annotated[tuple[Expression, ...], _OF_UNET] = ()
    """Regular expressions on names of weights; matching ones stay as they are."""


class UNetFullOptions(FullOptions):
    """The weights of a Stable Diffusion model: UNet and text encoders."""

    train_unet: bool = True
    """Train the denoising network, the UNet."""
    train_text_encoder: Annotated[bool, Show(basic=True)] = False
    """Train the text encoders as well. Needs cache_text_encoder_outputs off."""
    text_encoder_lr: Annotated[tuple[Rate, ...], Field(max_length=2), _OF_TEXT] = ()
    """Learning rate of the text encoders, one number for all or one for each (SDXL: CLIP-L, CLIP-G); 0 leaves an encoder as it is; empty
    takes learning_rate."""

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        if not self.train_unet and not self.train_text_encoder:
            raise_all(["train_unet and train_text_encoder are both off, so nothing would be trained; turn one on"])
        return self


class SdxlFullOptions(UNetFullOptions):
    """The weights of an SDXL model: UNet and both text encoders."""

    block_lr: Annotated[tuple[Rate, ...], _OF_UNET] = ()
    """Learning rate of each part of the UNet, 23 numbers: time and size embeddings, 9 input blocks, 3 middle blocks, 9 output blocks, the
    last layer; 0 freezes a part. Empty takes unet_lr everywhere."""

    @model_validator(mode="after")
    def _one_source_of_rates(self) -> Self:
        if self.block_lr and self.unet_lr is not None:
            raise_all(["block_lr and unet_lr both set rates of the UNet; remove one"])
        return self


class TransformerFullOptions(FullOptions):
    """The weights of a transformer; its text encoders stay as they are."""

    train_unet: ClassVar[bool] = True
    train_text_encoder: ClassVar[bool] = False
    text_encoder_lr: ClassVar[tuple[float, ...]] = ()


class FluxFullOptions(TransformerFullOptions):
    """The weights of a FLUX transformer; its text encoders stay as they are."""


class ZImageFullOptions(TransformerFullOptions):
    """The weights of a Z-Image transformer; its text encoder stays as it is."""

    trained_layers: Literal["all", "attention", "mlp", "norm"] = "all"
    """Which layers of the blocks are trained; embeddings and the last layer only with all. target_modules and exclude_modules choose among
    them."""
