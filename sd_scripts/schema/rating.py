"""Options of rating images by models that look at them: how well each shows its prompt, how like training images it is, and its face."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from .fields import Fraction, Section, Show, raise_all
from .tools import ReportOptions, ToolOptions


class RatingSection(Section):
    """Which images are rated, and by which models."""

    title: ClassVar[str] = "Rating"

    image_list: Annotated[str, Show(kind="file")]
    """The images: JSON lines with `file_name`, and `prompt` for clip_model."""
    train_list: Annotated[str | None, Show(kind="file")] = None
    """The training images that image_model and face_likeness_model compare with: JSON lines with `file_name`."""
    clip_model: Annotated[str | None, Show(basic=True, kind="folder")] = None
    """A CLIP, SigLIP or SigLIP 2 model in transformers' layout, folder or hub id (such as openai/clip-vit-large-patch14): tells how well
    each image shows its prompt, as the cosine of the two. None does not tell."""
    image_model: Annotated[str | None, Show(basic=True, kind="folder")] = None
    """A model that looks at images, folder or hub id: DINOv2 or DINOv3 (such as facebook/dinov2-base), CLIP or SigLIP. Tells how
    like each image is to the training images, as the mean of the cosines. None does not tell."""
    face_model: Annotated[str | None, Show(basic=True, kind="folder")] = None
    """What finds the faces that face_likeness_model looks at: a folder or hub id of a transformers model for object detection (such as DETR
    or YOLOS) that knows faces."""
    face_labels: tuple[str, ...] = ("face",)
    """Names of face_model's classes that count as faces."""
    face_threshold: Fraction = 0.5
    """A face is believed from this probability on."""
    face_likeness_model: Annotated[str | None, Show(basic=True, kind="folder")] = None
    """A model that looks at faces: a file in ONNX as ArcFace's are (square RGB from -1 to 1), a folder with one, or a model in
    transformers' layout, folder or hub id. Tells how like the largest face of each image is to those of the training images, as the mean
    of the cosines; each face is cut out by its box with a tenth more on each side, and is not turned upright. None does not tell."""
    device: Literal["auto", "cpu"] = "auto"
    """auto takes a GPU where there is one; cpu the processor."""

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        problems = []
        if self.clip_model is None and self.image_model is None and self.face_likeness_model is None:
            problems.append("clip_model, image_model and face_likeness_model are missing: name one of them, or more")
        if (self.face_model is None) != (self.face_likeness_model is None):
            missing, there = ("face_model", "face_likeness_model") if self.face_model is None else ("face_likeness_model", "face_model")
            problems.append(f"{missing} is missing: {there} works with it, one finds faces and the other compares them")
        if (self.image_model or self.face_likeness_model) is not None and self.train_list is None:
            problems.append("train_list is missing: image_model and face_likeness_model compare with training images")
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
    hub: ClassVar[tuple[str, ...]] = ("clip_model", "image_model", "face_model", "face_likeness_model")

    rating: RatingSection
    report: ReportOptions = ReportOptions()
