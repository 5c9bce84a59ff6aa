"""Options of looking for images that a model that looks at images takes for nearly the same."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .fields import Section, Show
from .tools import ReportOptions, ToolOptions


class DuplicateSection(Section):
    """Which images are compared, and what compares them."""

    title: ClassVar[str] = "Near duplicates"

    image_dir: Annotated[str, Show(kind="folder")]
    """Folder with the images, and those in the folders inside; nothing is written there."""
    image_list: Annotated[str | None, Show(kind="file")] = None
    """Compare only what this file names: JSON lines with `file_name`. None takes all images in image_dir."""
    image_model: Annotated[str, Show(basic=True, kind="folder")]
    """What compares the images: a model that looks at images, folder or hub id: DINOv2 or DINOv3 (such as facebook/dinov2-base), CLIP or
    SigLIP."""
    duplicate_distance: Annotated[float, Show(basic=True), Field(ge=0, le=2)] = 0.1
    """Two images are near duplicates up to this cosine distance of what the model makes of them: 0 for the same image, 1 for two that have
    nothing in common. Models differ: take less where too much is found, and more where too little is."""
    vector_dir: Annotated[str | None, Show(kind="folder")] = None
    """Folder in which what the model makes of an image is kept, by the content of both, for the next time; None keeps nothing."""
    device: Literal["auto", "cpu"] = "auto"
    """auto takes a GPU where there is one; cpu the processor."""


class FindDuplicates(ToolOptions):
    """Find images that a model takes for nearly the same, such as mirrored or recoloured copies, which pixels do not tell. Needs a model
    that looks at images; changes nothing."""

    name: ClassVar[str] = "duplicates"
    work: ClassVar[str] = "sd_scripts.library.tools.duplicates:find"
    script: ClassVar[str] = "duplicates.py"
    label: ClassVar[str] = "Find near duplicates with a model"
    tab: ClassVar[str] = "data"
    settled: ClassVar[tuple[str, ...]] = ("image_dir", "image_list", "vector_dir")
    hub: ClassVar[tuple[str, ...]] = ("image_model",)

    duplicates: DuplicateSection
    report: ReportOptions = ReportOptions()

    @property
    def needs_device(self) -> bool:
        return self.duplicates.device == "auto"
