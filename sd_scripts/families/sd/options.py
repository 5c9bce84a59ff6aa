"""What runs on Stable Diffusion 1.x and 2.x have of their own in each section, and their kinds."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.fields import Show, Side, Size, Verdict
from sd_scripts.schema.memory import UNetFullMemoryOptions
from sd_scripts.schema.model import UNetModelOptions
from sd_scripts.schema.network import RankOrNone, UNetFullOptions, UNetNetworkOptions
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import AdapterOutputOptions, ModelOutputOptions
from sd_scripts.schema.runs import RunOptions, UNetRun


class SdModelOptions(UNetModelOptions):
    """The Stable Diffusion 1.x or 2.x base model; which of the two is told by the model itself."""

    clip_skip: Annotated[int | None, Field(ge=1, le=12)] = None
    """Read the text encoder's N-th last layer, 1 is the last; 2 is usual for models made from anime images. None takes the model's own
    way. Use the same number when you make images."""

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return super().header_values() | {"clip_skip": self.clip_skip}


class SdNetworkOptions(UNetNetworkOptions):
    """The adapter on a model of Stable Diffusion 1.x or 2.x."""

    block_dims: tuple[RankOrNone, ...] = ()
    """Rank of each UNet block in the order input blocks, middle, output blocks of the original layout (12 + 1 + 12 = 25 numbers); 0 leaves
    a block out. Empty means network_dim everywhere."""


class SdDatasetOptions(DatasetOptions):
    """Images, captions, buckets and caches; sizes of Stable Diffusion 1.x."""

    resolution: Annotated[Size, Show(basic=True, unit="px")] = (512, 512)
    """Training size, N or W,H: each image is resized to about this area, in its own aspect ratio when buckets are on. 512 for 1.x and 2.x
    base, 768 for the larger 2.x."""
    max_bucket_reso: Annotated[Side, Show(unit="px")] = 1024


class _SdRun(UNetRun):
    family: ClassVar[str] = "sd"
    verdicts: ClassVar[Mapping[str, Verdict]] = {
        "learning_rate_te1": ("renamed", "text_encoder_lr"),
        "learning_rate_te2": ("not needed", "Stable Diffusion 1.x and 2.x have one text encoder; see text_encoder_lr"),
    }

    model: SdModelOptions
    dataset: SdDatasetOptions


class SdNetwork(_SdRun):
    """LoRA and its relatives on Stable Diffusion 1.x and 2.x."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "sd_train_network.py"
    label: ClassVar[str] = "SD 1.5 / 2.x LoRA"

    network: SdNetworkOptions = SdNetworkOptions()
    output: AdapterOutputOptions = AdapterOutputOptions()


class SdFull(_SdRun):
    """DreamBooth and fine-tuning of Stable Diffusion 1.x and 2.x."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "sd_train.py"
    label: ClassVar[str] = "SD 1.5 / 2.x DreamBooth and fine-tuning"
    verdicts: ClassVar[Mapping[str, Verdict]] = {
        **_SdRun.verdicts,
        "block_lr": ("not supported", "rates of blocks are for SDXL; here target_modules chooses what is trained"),
    }

    network: UNetFullOptions = UNetFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    memory: UNetFullMemoryOptions = UNetFullMemoryOptions()
    output: ModelOutputOptions = ModelOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (
    SdNetwork,
    SdFull,
)
