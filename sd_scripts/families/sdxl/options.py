"""What runs on Stable Diffusion XL have of their own in each section, and their kinds."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from sd_scripts.schema.fields import Rate, Verdict, raise_all
from sd_scripts.schema.memory import UNetFullMemoryOptions
from sd_scripts.schema.model import UNetModelOptions
from sd_scripts.schema.network import OF_TEXT, OF_UNET, RankOrNone, UNetFullOptions, UNetNetworkOptions
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import AdapterOutputOptions, ModelOutputOptions
from sd_scripts.schema.runs import RunOptions, UNetRun


class SdxlModelOptions(UNetModelOptions):
    """The SDXL base model."""


class SdxlNetworkOptions(UNetNetworkOptions):
    """The adapter on an SDXL model."""

    text_encoder_lr: Annotated[tuple[Rate, ...], Field(max_length=2), OF_TEXT] = ()
    """Learning rate of the text encoders' adapters, one number for both or one for each (CLIP-L, CLIP-G); 0 leaves an encoder as it is;
    empty takes learning_rate."""
    block_dims: tuple[RankOrNone, ...] = ()
    """Rank of each UNet block in the order input blocks, middle, output blocks of the original layout (9 + 1 + 9 = 19 numbers); 0 leaves a
    block out. Empty means network_dim everywhere."""


class SdxlFullOptions(UNetFullOptions):
    """The weights of an SDXL model: UNet and both text encoders."""

    text_encoder_lr: Annotated[tuple[Rate, ...], Field(max_length=2), OF_TEXT] = ()
    """Learning rate of the text encoders, one number for both or one for each (CLIP-L, CLIP-G); 0 leaves an encoder as it is; empty takes
    learning_rate."""
    block_lr: Annotated[tuple[Rate, ...], OF_UNET] = ()
    """Learning rate of each part of the UNet, 23 numbers: time and size embeddings, 9 input blocks, 3 middle blocks, 9 output blocks, the
    last layer; 0 freezes a part. Empty takes unet_lr everywhere."""

    @property
    def part_rates(self) -> tuple[float, ...]:
        """See FullOptions."""
        return self.block_lr

    @model_validator(mode="after")
    def _one_source_of_rates(self) -> Self:
        if self.block_lr and self.unet_lr is not None:
            raise_all(["block_lr and unet_lr both set rates of the UNet; remove one"])
        return self


class _SdxlRun(UNetRun):
    family: ClassVar[str] = "sdxl"
    verdicts: ClassVar[Mapping[str, Verdict]] = {
        "clip_skip": (
            "not supported",
            "SDXL always reads the last but one layer of its text encoders; files made with another fit no tool. Remove it",
        )
    }

    model: SdxlModelOptions


class SdxlNetwork(_SdxlRun):
    """LoRA and its relatives on SDXL."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "sdxl_train_network.py"
    label: ClassVar[str] = "SDXL LoRA"

    network: SdxlNetworkOptions = SdxlNetworkOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class SdxlFull(_SdxlRun):
    """DreamBooth and fine-tuning of SDXL."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "sdxl_train.py"
    label: ClassVar[str] = "SDXL DreamBooth and fine-tuning"

    network: SdxlFullOptions = SdxlFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    memory: UNetFullMemoryOptions = UNetFullMemoryOptions()
    output: ModelOutputOptions = ModelOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (
    SdxlNetwork,
    SdxlFull,
)
