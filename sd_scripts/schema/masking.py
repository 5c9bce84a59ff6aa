"""Options of making loss masks with a model, or from the images' alpha channels."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .captioning import CaptionImages
from .duplicates import FindDuplicates
from .faces import FindFaces
from .fields import Section, Show, raise_all
from .tools import ReportOptions, ToolOptions

ALPHA = "alpha"


class MaskSection(Section):
    """Which images get masks, what separates the object from the background, and where the object is."""

    title: ClassVar[str] = "Masks"

    image_dir: Annotated[str, Show(kind="folder")]
    """Folder with the images, and those in the folders inside. Masks are written beside them as NAME-masklabel.png unless mask_dir or
    image_list says where; their history is kept in this folder."""
    image_list: Annotated[str | None, Show(kind="file")] = None
    """Make masks only for what this file names: JSON lines with `file_name` and, where it is another place, `mask_file`. None takes all
    images in image_dir."""
    mask_dir: Annotated[str | None, Show(kind="folder")] = None
    """Folder of masks, as conditioning_data_dir of a training; None writes them beside the images."""
    mask_model: Annotated[str, Show(basic=True, kind="folder", suggestions=(ALPHA,))]
    """What finds the object: alpha takes the images' own alpha channels; a folder or hub id of a transformers model for semantic, panoptic
    or instance segmentation (such as nvidia/segformer-b0-finetuned-ade-512-512 or facebook/mask2former-swin-tiny-coco-panoptic), which
    needs mask_labels, or of SAM 2 or SAM 3 (such as facebook/sam2.1-hiera-tiny), which needs mask_points or mask_box; SAM 3 (such as
    facebook/sam3) also finds what mask_labels says in words."""
    mask_labels: Annotated[tuple[str, ...], Show(basic=True)] = ()
    """What counts in the loss, by the names of the model's classes, such as person, dog; for SAM 3 in words, such as a red hat. Empty takes
    all but the background, where the model has a class of that name."""
    mask_points: Annotated[tuple[str, ...], Show(basic=True)] = ()
    """SAM: points on the object, as shares of width and height such as 0.5:0.4; with a minus, points to exclude, such as -0.1:0.9."""
    mask_box: Annotated[str | None, Show(basic=True)] = None
    """SAM: a box around the object: left:top:right:bottom as shares of width and height, such as 0.2:0.1:0.8:0.9."""
    invert_mask: Annotated[bool, Show(basic=True)] = False
    """Train on everything but what was found: for logos, watermarks, hands."""
    overwrite: Annotated[bool, Show(basic=True)] = False
    """Also write anew what has a mask already. The masks before stay in the history, from which Undo brings them back."""
    max_image_side: Annotated[int, Show(unit="px"), Field(ge=64, le=8192)] = 2048
    """Larger images are shrunk to this longer side first; the mask has that size, which training brings to the image's."""
    device: Literal["auto", "cpu"] = "auto"
    """auto takes a GPU where there is one; cpu the processor."""
    history_order: str | None = None
    """Name of this work in the history of masks. Given again, it goes on with the images that are left; Undo takes all of it back at once.
    None makes a new name."""

    @property
    def points(self) -> tuple[tuple[float, float, bool], ...]:
        """mask_points as shares of width and height, and whether each is on the object."""
        return tuple((*_shares(text.removeprefix("-"), 2), not text.startswith("-")) for text in self.mask_points)  # type: ignore[misc]

    @property
    def box(self) -> tuple[float, ...] | None:
        """mask_box: left, top, right and bottom as shares of width and height."""
        return None if self.mask_box is None else _shares(self.mask_box, 4)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        for text in self.mask_points:
            if not _shares(text.removeprefix("-"), 2):
                problems.append(f"mask_points: {text!r} is not a point such as 0.5:0.4, of shares of width and height from 0 to 1")
        if self.mask_points and all(text.startswith("-") for text in self.mask_points) and self.mask_box is None:
            problems.append("mask_points: one point at least must lie on the object, without a minus; or give mask_box")
        if self.mask_box is not None:
            box = _shares(self.mask_box, 4)
            if not box or box[0] >= box[2] or box[1] >= box[3]:
                problems.append(f"mask_box: {self.mask_box!r} is not left:top:right:bottom in shares from 0 to 1, such as 0.2:0.1:0.8:0.9")
        raise_all(problems)
        return self


def _shares(text: str, count: int) -> tuple[float, ...]:
    """So many numbers from 0 to 1 between colons; empty for anything else."""
    try:
        numbers = tuple(float(part) for part in text.split(":"))
    except ValueError:
        return ()
    return numbers if len(numbers) == count and all(0 <= number <= 1 for number in numbers) else ()


class MaskImages(ToolOptions):
    """Make loss masks: from alpha channels, with a segmentation model, or with SAM from points, a box or words. With a history, only where
    they are missing or for all."""

    name: ClassVar[str] = "mask"
    work: ClassVar[str] = "sd_scripts.library.tools.masking:mask"
    script: ClassVar[str] = "mask.py"
    label: ClassVar[str] = "Make masks"
    tab: ClassVar[str] = "data"
    settled: ClassVar[tuple[str, ...]] = ("image_dir", "image_list", "mask_dir", "history_order")
    hub: ClassVar[tuple[str, ...]] = ("mask_model",)

    masks: MaskSection
    report: ReportOptions = ReportOptions()

    @property
    def needs_device(self) -> bool:
        return self.masks.mask_model != ALPHA and self.masks.device == "auto"


DATA_TOOLS: tuple[type[ToolOptions], ...] = (CaptionImages, MaskImages, FindFaces, FindDuplicates)
"""Those of the Data tab, for the images of a data set."""
