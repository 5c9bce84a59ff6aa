"""Options of transferring images with a model that learned styles."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sd_scripts.schema.fields import Fraction, NotNegative, Positive, Section, Seed, Show, Size, raise_all
from sd_scripts.schema.files import out_problems
from sd_scripts.schema.model import device_problems
from sd_scripts.schema.tools import ReportOptions, ToolOptions

from .options import Integrator, TransferStart, start_problems


class TransferSection(Section):
    """Which images take on which style, with which model, and how."""

    title: ClassVar[str] = "Transfer"

    ckpt: Annotated[str, Show(basic=True, kind="file")]
    """The model: a saved file or folder, or the folder of a run, of which the newest saved file is taken."""
    image: Annotated[str, Show(basic=True, kind="file")]
    """The image to transfer, or a folder, of which all images are."""
    target: Annotated[str, Show(basic=True)]
    """The style to take on, by the name of its folder; several with weights are mixed, such as `monet 0.7, ukiyo-e 0.3`."""
    source: Annotated[str, Show(basic=True)] = "auto"
    """The style the image has; auto takes the one under which the model predicts the image best. `average` is none in particular."""
    strength: Annotated[Positive, Field(le=1), Show(basic=True)] = 1.0
    """How far the image is taken towards noise before it comes back in the other style: 1 all the way, less keeps more of it."""
    steps: Annotated[int, Show(basic=True), Field(ge=1, le=1000)] = 15
    """Steps of the inversion, and as many of the generation."""
    sampler: Integrator = "midpoint"
    """How a step is made: euler asks the network once, midpoint and heun twice and are much more exact."""
    start: TransferStart = "inversion"
    """How the image gets towards noise: inversion follows the velocity of its own style backwards, so that the same image comes back in
    its own style; noise mixes it with noise, as in training."""
    start_noise: Annotated[Fraction, Field(lt=1)] = 0.0
    """Noise level that an image is mixed to before its inversion, which goes on from there: plain areas become noise as the model knows
    it, and the finest detail is lost. 0.3 to 0.5 does well; 0 adds none."""
    cfg: NotNegative = 1.0
    """Guidance towards the target style and away from the average one; 1 turns it off and halves the time."""
    temperature: NotNegative = 0.0
    """Strength of the noise that is added and taken away again while generating, with the score term that keeps the distribution; 0 adds
    none."""
    seed: Annotated[Seed | None, Show(basic=True)] = None
    """Decides the noise of start = noise, start_noise and temperature: image i has that of seed + i. None draws a seed, which the report
    tells."""
    size: Annotated[Size | None, Show(unit="px")] = None
    """Width,height to work at; None takes the area that the model was trained at, in the image's own aspect ratio."""
    layout: Literal["grid", "single", "both"] = "both"
    """Files to write: one sheet with each image beside what became of it, each result alone, or both."""
    out: Annotated[str, Show(kind="folder")] = "transferred"
    """Folder for the images, which is made when it is not there, or the name of a .png file for the result; the sheet then has the same
    name with -sheet. Existing files stay."""
    device: str | None = None
    """Device, such as cpu or cuda:1; None takes the first GPU, or the CPU."""
    precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """Precision of the networks; auto takes bf16 on GPUs that have it, float32 on a CPU."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        raise_all(
            start_problems("start_noise", self.start_noise, "strength", self.strength)
            + device_problems("device", self.device)
            + out_problems(self.out)
        )
        return self


class LgtTransfer(ToolOptions):
    """Give images another style, with a model that learned styles."""

    name: ClassVar[str] = "lgt_infer"
    work: ClassVar[str] = "sd_scripts.families.lgt.script:transfer"
    family: ClassVar[str] = "lgt"
    deed: ClassVar[str] = "transfer"
    script: ClassVar[str] = "lgt_infer.py"
    label: ClassVar[str] = "Transfer a style"
    renamed: ClassVar[dict[str, str]] = {
        "checkpoint": "ckpt",
        "cfg_scale": "cfg",
        "num_steps": "steps",
        "source_style": "source",
        "target_style": "target",
        "temperature_lambda": "temperature",
    }

    transfer: TransferSection
    report: ReportOptions = ReportOptions()


TOOLS: tuple[type[ToolOptions], ...] = (LgtTransfer,)
