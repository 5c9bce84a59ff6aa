"""Options of drawing images with a model that was trained from nothing."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from sd_scripts.schema.fields import Fraction, NotNegative, Section, Seed, Show, Size, raise_all
from sd_scripts.schema.files import out_problems
from sd_scripts.schema.model import device_problems
from sd_scripts.schema.tools import ReportOptions, ToolOptions

from .options import Clamp, DdpmSampler, StepSpacing


class DrawSection(Section):
    """What is drawn, with which model, and how."""

    title: ClassVar[str] = "Draw"

    ckpt: Annotated[str, Show(basic=True, kind="file")]
    """The model: a saved file or folder, or the folder of a run, of which the newest saved file is taken."""
    prompt: Annotated[str, Show(basic=True)] = ""
    """What the images show; empty draws without a caption."""
    neg_prompt: str = ""
    """What guidance leads away from; counts only with cfg other than 1. Empty is the empty caption."""
    sampler: Annotated[DdpmSampler, Show(basic=True)] = "ddim"
    """How the noise is taken away: docs/ddpm.md has the orders and the network calls of each."""
    steps: Annotated[int, Show(basic=True), Field(ge=1, le=10000)] = 30
    """Steps of the sampler, exactly so many; at least 1 and at most those of the noise schedule."""
    cfg: Annotated[NotNegative, Show(basic=True)] = 3.0
    """How strongly the prompt is followed against neg_prompt; 1 turns guidance off and halves the time."""
    seed: Annotated[Seed | None, Show(basic=True)] = None
    """Decides the noise: image i has that of seed + i, whatever is drawn with it. None draws a seed, which the report tells."""
    n: Annotated[int, Show(basic=True), Field(ge=1, le=256)] = 8
    """How many images, from seeds that count up."""
    size: Annotated[Size | None, Show(unit="px")] = None
    """Width,height of an image; None takes the size the model was trained at."""
    layout: Literal["grid", "single", "both"] = "both"
    """Files to write: one grid, one for each image, or both. A grid has as many columns as the root of n, rounded down; with both, one
    image alone gets none."""
    out: Annotated[str, Show(kind="folder")] = "drawn"
    """Folder for the images, which is made when it is not there, or the name of a .png file for the grid (or for the one image); with
    layout both the single images then lie beside it, with their seeds behind the name. Existing files stay."""
    batch_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Images drawn at once on a GPU. A CPU draws one after another, so that an image has the same bytes whatever it is drawn with; on a
    GPU the last digits depend on its company."""
    spacing: StepSpacing = "trailing"
    """Where the steps lie: trailing = evenly in time, from the noisiest; lambda = evenly in log signal-to-noise; karras = as in Karras et
    al. 2022, with rho 7."""
    eta: Annotated[Fraction, Show(needs="sampler=ddim")] = 0.0
    """Fresh noise of ddim as a share of ddpm's."""
    clamp: Clamp = "auto"
    """What is done to the estimate of the image in each step: none, clamp = to [-1, 1], dynamic = to its own 99.5 % quantile (Saharia et
    al. 2022). auto clamps in pixels and does nothing in latents."""
    guidance_rescale: Fraction = 0.0
    """How far the contrast that guidance adds is taken back (Lin et al. 2023); 0.7 is usual for models with zero_terminal_snr."""
    device: str | None = None
    """Device, such as cpu or cuda:1; None takes the first GPU, or the CPU."""
    precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """Precision of the networks; auto takes bf16 on GPUs that have it, float32 on a CPU."""

    @field_validator("sampler", mode="before")
    @classmethod
    def _by_its_other_name(cls, value: Any) -> Any:
        """`diffusion` is what the program that this one follows called ddpm."""
        return "ddpm" if value == "diffusion" else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        raise_all(device_problems("device", self.device) + out_problems(self.out))
        return self


class DdpmDraw(ToolOptions):
    """Draw images with a small DDPM that was trained from nothing."""

    name: ClassVar[str] = "ddpm_sample"
    work: ClassVar[str] = "sd_scripts.families.ddpm.script:draw"
    family: ClassVar[str] = "ddpm"
    deed: ClassVar[str] = "draw"
    script: ClassVar[str] = "ddpm_sample.py"
    label: ClassVar[str] = "Draw with a DDPM"
    renamed: ClassVar[dict[str, str]] = {
        "negative_prompt": "neg_prompt",
        "cfg_scale": "cfg",
        "guidance_scale": "cfg",
        "num_inference_steps": "steps",
        "num_images": "n",
    }

    draw: DrawSection
    report: ReportOptions = ReportOptions()


TOOLS: tuple[type[ToolOptions], ...] = (DdpmDraw,)
