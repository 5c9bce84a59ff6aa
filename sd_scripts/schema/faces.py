"""Options of looking for faces that training would cut."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .fields import Fraction, Section, Show
from .tools import ReportOptions, ToolOptions


class FaceSection(Section):
    """Which images are looked at, and what finds faces in them."""

    title: ClassVar[str] = "Faces"

    image_dir: Annotated[str, Show(kind="folder")]
    """Folder with the images, and those in the folders inside; nothing is written there."""
    image_list: Annotated[str | None, Show(kind="file")] = None
    """Look only at what this file names: JSON lines with `file_name` and, where training cuts the image, `frame`: left, top, width and
    height of the cut as shares of the image. None takes all images in image_dir, whole."""
    face_model: Annotated[str, Show(basic=True, kind="folder")]
    """What finds faces: a folder or hub id of a transformers model for object detection (such as DETR or YOLOS) that knows faces."""
    face_labels: Annotated[tuple[str, ...], Show(basic=True)] = ("face",)
    """Names of the model's classes that count as faces."""
    face_threshold: Annotated[Fraction, Show(basic=True)] = 0.5
    """A face is believed from this probability on."""
    max_image_side: Annotated[int, Show(unit="px"), Field(ge=64, le=8192)] = 1024
    """Larger images are shrunk to this longer side before the model gets them."""
    device: Literal["auto", "cpu"] = "auto"
    """auto takes a GPU where there is one; cpu the processor."""


class FindFaces(ToolOptions):
    """Find faces that the edge of the image, or the cut to the training size, goes through. Needs a model that finds faces; changes
    nothing."""

    name: ClassVar[str] = "faces"
    work: ClassVar[str] = "sd_scripts.library.tools.faces:find"
    script: ClassVar[str] = "faces.py"
    label: ClassVar[str] = "Find faces cut off"
    tab: ClassVar[str] = "data"
    settled: ClassVar[tuple[str, ...]] = ("image_dir", "image_list")
    hub: ClassVar[tuple[str, ...]] = ("face_model",)

    faces: FaceSection
    report: ReportOptions = ReportOptions()

    @property
    def needs_device(self) -> bool:
        return self.faces.device == "auto"
