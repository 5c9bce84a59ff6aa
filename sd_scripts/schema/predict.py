"""Options of prediction: one model, its adapters, and the images that are asked of it. Families that edit add their model."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .fields import NotNegative, Number, Section, Seed, Show, Size, WholeNumber, raise_all
from .files import out_problems
from .model import ModelOptions, device_problems
from .tools import ReportOptions, ToolOptions


class LoadingSection(Section):
    """How the model is held while it predicts, and the adapters on it."""

    title: ClassVar[str] = "Loading"

    lora: Annotated[tuple[str, ...], Show(basic=True, kind="file")] = ()
    """LoRA files to apply, in the layout of any trainer; their own alpha is respected."""
    lora_weight: Annotated[tuple[Number, ...], Show(needs="lora")] = ()
    """Strength of each file in lora; empty means 1.0 for all, 0 leaves a file out."""
    precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """Precision of transformer and text encoder; auto takes bf16 on GPUs that have it, float32 on a CPU."""
    transformer_device: str | None = None
    """Device of the transformer, such as cpu or cuda:1; None takes the first GPU, or the CPU."""
    offload: bool = False
    """Keep each network in host RAM and bring it to its device only while it works: less device memory, slower, the same image."""
    blocks_to_swap: WholeNumber = 0
    """Keep this many of the network's blocks in host RAM and bring each to the device when it is due, while the block before computes. The
    same image, less device memory, and some of the speed. The largest number is that of the blocks."""
    vae_tiling: bool = False
    """Decode images in tiles: large ones then need little memory. Seams are blended, so images differ a little."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = device_problems("transformer_device", self.transformer_device)
        if self.lora_weight and len(self.lora_weight) != len(self.lora):
            problems.append(
                f"lora_weight has {len(self.lora_weight)} numbers for {len(self.lora)} files in lora; give one for each, or none"
            )
        raise_all(problems)
        return self


class AskSection(Section):
    """What is asked of a model that draws, whatever its family."""

    prompt: Annotated[str, Show(basic=True)] = ""
    """What the image should show."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 40
    """Denoising steps."""
    seed: Seed | None = None
    """Decides the noise; the same seed gives the same image. None draws one, which the image's file tells."""
    size: Annotated[Size | None, Show(unit="px")] = None
    """Width,height of the result; None takes the model's own, or that of a run's previews; with control images the model's own area in the
    aspect ratio of the last of them."""
    num_images: Annotated[int, Field(ge=1, le=64)] = 1
    """Images to make of each prompt, from seeds that count up."""
    out: Annotated[str, Show(kind="folder")] = "predictions"
    """Folder for the images, which is made when it is not there, or the name of a .png file. Existing files stay."""
    serve: Annotated[bool, Show(cli_only=True)] = False
    """Keep the model loaded and take requests as JSON lines on standard input; what the studio starts."""

    @property
    def guided_scale(self) -> float:
        """Strength of guidance; 1 is none."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _out_is_a_place(self) -> Self:
        raise_all(out_problems(self.out))
        return self


class PredictSection(AskSection):
    """What is asked of the model."""

    title: ClassVar[str] = "Predict"

    prompt: Annotated[str, Show(basic=True)] = ""
    """The instruction, such as `make the sky red`; for text to image a description."""
    images: Annotated[tuple[str, ...], Show(basic=True, kind="file"), Field(max_length=3)] = ()
    """Control images, as many as the model takes."""
    negative_prompt: str = " "
    """What to stay away from; counts only with true_cfg_scale above 1. A space is the usual empty one."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 40
    """Denoising steps. Lightning adapters take 4 or 8."""
    true_cfg_scale: NotNegative = 4.0
    """How strongly the instruction is followed against the negative prompt; 1 turns guidance off and halves the time."""

    @property
    def guided_scale(self) -> float:
        """See AskSection."""
        return self.true_cfg_scale


class PredictOptions(ToolOptions):
    """Images made with one model."""

    predict: AskSection
    model: ModelOptions
    loading: LoadingSection = LoadingSection()
    report: ReportOptions = ReportOptions()

    @property
    def loads(self) -> ModelOptions:
        """The model options with which its family loads it."""
        return self.model
