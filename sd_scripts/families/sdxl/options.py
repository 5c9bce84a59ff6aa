"""What runs on Stable Diffusion XL have of their own in each section, and their kinds."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from sd_scripts.schema.fields import (
    Rate,
    raise_all,
)
from sd_scripts.schema.memory import UNetAdapterMemoryOptions
from sd_scripts.schema.model import UNetModelOptions
from sd_scripts.schema.network import (
    _OF_UNET,
    UNetFullOptions,
    UNetNetworkOptions,
)
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import AdapterOutputOptions, ModelOutputOptions
from sd_scripts.schema.runs import RunOptions, UNetRun


class SdxlModelOptions(UNetModelOptions):
    """The SDXL base model."""


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


class _SdxlRun(UNetRun):
    family: ClassVar[str] = "sdxl"

    model: SdxlModelOptions


class SdxlNetwork(_SdxlRun):
    """LoRA and its relatives on SDXL."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "sdxl_train_network.py"
    label: ClassVar[str] = "SDXL LoRA"

    network: UNetNetworkOptions = UNetNetworkOptions()
    memory: UNetAdapterMemoryOptions = UNetAdapterMemoryOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class SdxlFull(_SdxlRun):
    """DreamBooth and fine-tuning of SDXL."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "sdxl_train.py"
    label: ClassVar[str] = "SDXL DreamBooth and fine-tuning"

    network: SdxlFullOptions = SdxlFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    output: ModelOutputOptions = ModelOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (
    SdxlNetwork,
    SdxlFull,
)
