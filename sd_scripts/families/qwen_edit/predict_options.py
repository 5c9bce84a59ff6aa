"""Options of prediction: one model, its adapters, and the pictures that are asked of it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sd_scripts.schema.fields import NotNegative, Number, Section, Seed, Show, Size, raise_all
from sd_scripts.schema.files import out_problems
from sd_scripts.schema.model import device_problems
from sd_scripts.schema.tools import ReportOptions, ToolOptions

from .options import QwenImageModelOptions


class PredictModelOptions(QwenImageModelOptions):
    """The Qwen-Image base model that makes the pictures."""

    pretrained_model_name_or_path: Annotated[str, Show(basic=True, kind="file", suggestions=("toy",))] = ""
    """Base model: a .safetensors file, a diffusers folder, a hub id, or `toy` for the small built-in model that works on any CPU. With
    --serve it may be left out: each request then names it."""


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
    """Keep each network in main memory and bring it to its device only while it works: less device memory, slower."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = device_problems("transformer_device", self.transformer_device)
        if self.lora_weight and len(self.lora_weight) != len(self.lora):
            problems.append(
                f"lora_weight has {len(self.lora_weight)} numbers for {len(self.lora)} files in lora; give one for each, or none"
            )
        raise_all(problems)
        return self


class PredictSection(Section):
    """What is asked of the model."""

    title: ClassVar[str] = "Predict"

    prompt: Annotated[str, Show(basic=True)] = ""
    """The instruction, such as `make the sky red`; for text to image a description."""
    images: Annotated[tuple[str, ...], Show(basic=True, kind="file"), Field(max_length=3)] = ()
    """Control pictures: one for edit, one to three for edit-2509 and edit-2511, none for image."""
    negative_prompt: str = " "
    """What to stay away from; counts only with true_cfg_scale above 1. A space is the usual empty one."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 40
    """Denoising steps. Lightning adapters take 4 or 8."""
    true_cfg_scale: NotNegative = 4.0
    """How strongly the instruction is followed against the negative prompt; 1 turns guidance off and halves the time."""
    seed: Seed | None = None
    """Decides the noise; the same seed gives the same picture. None draws one, which the picture's file tells."""
    size: Annotated[Size | None, Show(unit="px")] = None
    """Width,height of the result; None takes the model's own area in the aspect ratio of the last control picture."""
    num_images: Annotated[int, Field(ge=1, le=64)] = 1
    """Pictures to make, from seeds that count up."""
    out: Annotated[str, Show(kind="folder")] = "predictions"
    """Folder for the pictures, which is made when it is not there, or the name of a .png file. Existing files stay."""
    serve: Annotated[bool, Show(cli_only=True)] = False
    """Keep the model loaded and take requests as JSON lines on standard input; what the studio starts."""

    @model_validator(mode="after")
    def _out_is_a_place(self) -> Self:
        raise_all(out_problems(self.out))
        return self


class QwenImagePredict(ToolOptions):
    """Make pictures with Qwen-Image, or edit pictures with Qwen-Image-Edit."""

    name: ClassVar[str] = "qwen_image_predict"
    script: ClassVar[str] = "qwen_image_predict.py"
    label: ClassVar[str] = "Qwen-Image-Edit prediction"
    family: ClassVar[str] = "qwen_edit"

    predict: PredictSection = PredictSection()
    model: PredictModelOptions = PredictModelOptions()
    loading: LoadingSection = LoadingSection()
    report: ReportOptions = ReportOptions()

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        problems = []
        if not self.predict.serve and not self.model.pretrained_model_name_or_path.strip():
            problems.append("pretrained_model_name_or_path is missing: name the base model, or `toy` for the built-in one")
        if not self.predict.serve and not self.predict.prompt.strip():
            problems.append("prompt is missing: say what the picture should show, or what should be changed")
        raise_all(problems)
        return self
