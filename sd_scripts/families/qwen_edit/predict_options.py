"""Options of prediction with Qwen-Image and Qwen-Image-Edit."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from sd_scripts.schema.fields import Show, raise_all
from sd_scripts.schema.predict import PredictOptions, PredictSection

from .options import QwenImageModelOptions


class PredictModelOptions(QwenImageModelOptions):
    """The Qwen-Image base model that makes the images."""

    pretrained_model_name_or_path: Annotated[str, Show(basic=True, kind="file", suggestions=("toy",))] = ""
    """Base model: a .safetensors file, a diffusers folder, a hub id, or `toy` for the small built-in model that works on any CPU. With
    --serve it may be left out: each request then names it."""


class QwenPredictSection(PredictSection):
    """What is asked of the model."""

    images: Annotated[tuple[str, ...], Show(basic=True, kind="file"), Field(max_length=3)] = ()
    """Control images: one for edit, one to three for edit-2509 and edit-2511, none for image."""


class QwenImagePredict(PredictOptions):
    """Make images with Qwen-Image, or edit images with Qwen-Image-Edit."""

    name: ClassVar[str] = "qwen_image_predict"
    script: ClassVar[str] = "qwen_image_predict.py"
    label: ClassVar[str] = "Qwen-Image-Edit prediction"
    family: ClassVar[str] = "qwen_edit"

    predict: QwenPredictSection = QwenPredictSection()
    model: PredictModelOptions = PredictModelOptions()

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        problems = []
        if not self.predict.serve and not self.model.pretrained_model_name_or_path.strip():
            problems.append("pretrained_model_name_or_path is missing: name the base model, or `toy` for the built-in one")
        if not self.predict.serve and not self.predict.prompt.strip():
            problems.append("prompt is missing: say what the image should show, or what should be changed")
        raise_all(problems)
        return self


PREDICT = QwenImagePredict
