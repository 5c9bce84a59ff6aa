"""Options of rating images by models that look at them: how well each shows its prompt, and how like training images it is."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from .fields import Section, Show, raise_all
from .tools import ReportOptions, ToolOptions


class RatingSection(Section):
    """Which images are rated, and by which models."""

    title: ClassVar[str] = "Rating"

    image_list: Annotated[str, Show(kind="file")]
    """The images: JSON lines with `file_name`, and `prompt` for clip_model."""
    train_list: Annotated[str | None, Show(kind="file")] = None
    """The training images that image_model compares with: JSON lines with `file_name`."""
    clip_model: Annotated[str | None, Show(basic=True, kind="folder")] = None
    """A CLIP, SigLIP or SigLIP 2 model in transformers' layout, folder or hub id (such as openai/clip-vit-large-patch14): tells how well
    each image shows its prompt, as the cosine of the two. None does not tell."""
    image_model: Annotated[str | None, Show(basic=True, kind="folder")] = None
    """A model that looks at images, folder or hub id: DINOv2 or DINOv3 (such as facebook/dinov2-base), CLIP, SigLIP, or one for faces in
    transformers' layout. Tells how like each image is to the training images, as the mean of the cosines. None does not tell."""
    device: Literal["auto", "cpu"] = "auto"
    """auto takes a GPU where there is one; cpu the processor."""

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        problems = []
        if self.clip_model is None and self.image_model is None:
            problems.append("clip_model and image_model are missing: name one of them, or both")
        if self.image_model is not None and self.train_list is None:
            problems.append("train_list is missing: image_model compares with training images")
        raise_all(problems)
        return self


class RateImages(ToolOptions):
    """Rate images by models that look at them: how well each shows its prompt, and how like training images it is."""

    name: ClassVar[str] = "rate"
    work: ClassVar[str] = "sd_scripts.library.tools.rating:rate"
    script: ClassVar[str] = "rate.py"
    label: ClassVar[str] = "Rate images"
    tab: ClassVar[str] = "generate"
    settled: ClassVar[tuple[str, ...]] = ("image_list", "train_list", "device")
    hub: ClassVar[tuple[str, ...]] = ("clip_model", "image_model")

    rating: RatingSection
    report: ReportOptions = ReportOptions()
