"""What is trained: an adapter on the frozen base (type, ranks, targets), or the model itself; and its learning rates."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

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
OF_UNET = Show(needs="train_unet")
OF_TEXT = Show(needs="train_text_encoder")


class NetworkOptions(Section):
    """The adapter (LoRA and its relatives) of any family.

    Families say which networks may get one: fields train_unet, train_text_encoder, text_encoder_lr and loraplus_text_encoder_lr_ratio
    where there is a choice, class variables of the same names where there is none.
    """

    title: ClassVar[str] = "Network"
    chooses_networks: ClassVar[bool] = False
    """Whether the options say which networks get an adapter."""
    backbone: ClassVar[str]
    """What a user calls the denoising network."""

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
    """Chance that an input of the adapter is zeroed during training (lora and dora), as in the paper. kohya's scripts zero what the down
    matrix makes of it."""
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
    """A LoRA file to continue training from (kohya or diffusers names); None starts from an adapter that changes nothing."""
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

    def backbone_rates(self, learning_rate: float) -> list[float]:
        """Learning rates that the adapter's layers on the UNet or transformer may have; learning_rate: where none is given."""
        by_name = [float(text.rpartition("=")[2]) for text in self.network_reg_lrs]
        usual = learning_rate if self.unet_lr is None else self.unet_lr
        # A file may hold layers outside of all blocks.
        factors = (*self.block_factors, 1.0) if self.dim_from_weights or not self.block_factors else self.block_factors
        return [*by_name, *(usual * factor for factor in factors)]

    @property
    def wants_convolutions(self) -> bool:
        """Whether 3x3 convolutions get an adapter, too."""
        return False

    @property
    def block_factors(self) -> tuple[float, ...]:
        """Factor on the rate of each block; empty for 1 everywhere."""
        return ()

    @property
    def shares_downs(self) -> bool:
        """Whether layers that are one matrix in the original layout share a down matrix, as in kohya's files."""
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

    chooses_networks: ClassVar[bool] = True

    train_unet: bool = True
    """Attach the adapter to the denoising network (UNet or transformer)."""
    train_text_encoder: bool = False
    """Attach the adapter to the text encoders as well. Needs cache_text_encoder_outputs off."""
    text_encoder_lr: Annotated[tuple[Rate, ...], Field(max_length=2), OF_TEXT] = ()
    """Learning rate of the text encoders' adapters, one number for all or one for each, in the model's order; 0 leaves an encoder as it
    is; empty takes learning_rate."""
    loraplus_text_encoder_lr_ratio: Annotated[Positive | None, _LORA] = None
    """LoRA+ ratio of the text encoders only; None takes loraplus_lr_ratio."""

    @property
    def frozen_encoders(self) -> tuple[str, ...]:
        """Text encoders that train_text_encoder leaves as they are, so that their part of the texts can be cached all the same."""
        return ()

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        if not self.train_unet and not self.train_text_encoder:
            raise_all(["train_unet and train_text_encoder are both off, so nothing would be trained; turn one on"])
        return self


class UNetNetworkOptions(TextNetworkOptions):
    """The adapter on a UNet."""

    backbone: ClassVar[str] = "the UNet"

    conv_dim: Annotated[Rank | None, _CONVOLUTIONS] = None
    """Rank for 3x3 convolutions (ResNet blocks, down- and upsamplers); None leaves them alone."""
    conv_alpha: Annotated[Positive | None, Show(needs="conv_dim or conv_block_dims")] = None
    """Alpha for 3x3 convolutions; None means alpha = conv_dim."""
    block_dims: tuple[RankOrNone, ...] = ()
    """Rank of each UNet block in the order input blocks, middle, output blocks of the original layout; 0 leaves a block out.
    Empty means network_dim everywhere."""
    block_alphas: tuple[Positive, ...] = ()
    """Alpha of each UNet block, in the order of block_dims; empty means network_alpha everywhere."""
    conv_block_dims: Annotated[tuple[RankOrNone, ...], _CONVOLUTIONS] = ()
    """Rank of the 3x3 convolutions in each UNet block, in the order of block_dims; 0 leaves them out. Empty means conv_dim everywhere."""
    block_lr_weight: tuple[NotNegative, ...] = ()
    """Factor on unet_lr for each UNet block, in the order of block_dims; 0 freezes a block. Empty means 1 everywhere."""

    @property
    def wants_convolutions(self) -> bool:
        """Whether 3x3 convolutions get an adapter, too."""
        return self.conv_dim is not None or any(self.conv_block_dims)

    @property
    def block_factors(self) -> tuple[float, ...]:
        return self.block_lr_weight

    @model_validator(mode="after")
    def _blocks_agree(self) -> Self:
        problems = []
        lengths = {len(v) for v in (self.block_dims, self.block_alphas, self.conv_block_dims, self.block_lr_weight) if v}
        if len(lengths) > 1:
            problems.append("block_dims, block_alphas, conv_block_dims and block_lr_weight must have the same number of values")
        raise_all(problems)
        return self


class TransformerNetworkOptions(NetworkOptions):
    """The adapter of a family whose text encoder, a large language model, stays as it is."""

    backbone: ClassVar[str] = "the transformer"
    train_unet: ClassVar[bool] = True
    train_text_encoder: ClassVar[bool] = False
    frozen_encoders: ClassVar[tuple[str, ...]] = ()
    text_encoder_lr: ClassVar[tuple[float, ...]] = ()
    loraplus_text_encoder_lr_ratio: ClassVar[float | None] = None


class BlocksNetworkOptions(TransformerNetworkOptions):
    """The adapter on the blocks of a transformer."""

    train_block_indices: Indices = "all"
    """Numbers of the transformer blocks that get an adapter, in the order in which they compute: all, or such as 0-18,40."""


class FullOptions(Section):
    """The model's own weights: DreamBooth and fine-tuning."""

    title: ClassVar[str] = "Network"

    unet_lr: Annotated[Rate | None, OF_UNET] = None
    """Learning rate of the UNet or transformer; None takes learning_rate."""
    target_modules: Annotated[tuple[Expression, ...], OF_UNET] = ()
    """Regular expressions on the names of the UNet's or transformer's weights in the diffusers model (for example `attn2`); only matching
    ones are trained. Empty means all."""
    exclude_modules: Annotated[tuple[Expression, ...], OF_UNET] = ()
    """Regular expressions on names of weights; matching ones stay as they are."""

    def backbone_rates(self, learning_rate: float) -> list[float]:
        """Learning rates that weights of the UNet or transformer may have; learning_rate: where none is given."""
        return [*self.part_rates] or [learning_rate if self.unet_lr is None else self.unet_lr]

    @property
    def part_rates(self) -> tuple[float, ...]:
        """Learning rate of each part of a UNet in the original layout; empty for one rate."""
        return ()

    def trains(self, weight: str) -> bool:
        """Whether a weight of the denoising network, by its name in the diffusers model, may be trained."""
        return True


class ScratchOptions(FullOptions):
    """The weights of a model that its run makes."""

    train_unet: ClassVar[bool] = True
    train_text_encoder: ClassVar[bool]
    frozen_encoders: ClassVar[tuple[str, ...]] = ()
    if TYPE_CHECKING:

        @property
        def text_encoder_lr(self) -> tuple[float, ...]:
            """Learning rates of the text encoders; each family says whether there is a choice."""


class UNetFullOptions(FullOptions):
    """The weights of a model with a UNet: UNet and text encoders."""

    frozen_encoders: ClassVar[tuple[str, ...]] = ()

    train_unet: bool = True
    """Train the denoising network, the UNet."""
    train_text_encoder: Annotated[bool, Show(basic=True)] = False
    """Train the text encoders as well. Needs cache_text_encoder_outputs off."""
    text_encoder_lr: Annotated[tuple[Rate, ...], Field(max_length=2), OF_TEXT] = ()
    """Learning rate of the text encoders, one number for all or one for each, in the model's order; 0 leaves an encoder as it is; empty
    takes learning_rate."""

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        if not self.train_unet and not self.train_text_encoder:
            raise_all(["train_unet and train_text_encoder are both off, so nothing would be trained; turn one on"])
        return self


class TransformerFullOptions(FullOptions):
    """The weights of a transformer; its text encoders stay as they are."""

    train_unet: ClassVar[bool] = True
    train_text_encoder: ClassVar[bool] = False
    frozen_encoders: ClassVar[tuple[str, ...]] = ()
    text_encoder_lr: ClassVar[tuple[float, ...]] = ()


AdapterOptions = TextNetworkOptions | TransformerNetworkOptions
"""The network section of a run that trains an adapter."""
WholeOptions = UNetFullOptions | TransformerFullOptions | ScratchOptions
"""That of a run that trains the model itself."""
