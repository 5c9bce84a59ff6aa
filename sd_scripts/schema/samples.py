"""Previews during training."""

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from .fields import Count, NotNegative, Positive, Section, Show, Size

ELSEWHERE = {"euler_ancestral": "euler_a", "dpmpp_2m": "dpmsolver++", "dpm_2_ancestral": "dpm_2_a"}
"""ComfyUI's names of samplers that have another one here."""
_named = BeforeValidator(lambda name: ELSEWHERE.get(name, name) if isinstance(name, str) else name)
SAMPLERS = ("ddim", "euler", "euler_a", "heun", "dpmsolver++", "dpmpp_2m_sde", "dpm_2", "dpm_2_a", "lms", "pndm")
Sampler = Literal["auto", "ddim", "euler", "euler_a", "heun", "dpmsolver++", "dpmpp_2m_sde", "dpm_2", "dpm_2_a", "lms", "pndm"]
FlowSampler = Literal["auto", "euler", "euler_a", "heun", "dpmsolver++", "dpmpp_2m_sde"]
Scheduler = Literal["auto", "comfyui", "normal", "karras", "exponential", "simple", "sgm_uniform", "ddim_uniform", "beta"]


class SampleOptions(Section):
    """Preview images rendered by the same function that serves inference after training."""

    title: ClassVar[str] = "Samples"
    own_flags: ClassVar[tuple[str, ...]] = ()
    by_prompt: ClassVar[bool] = True
    """Whether each preview is of a prompt."""
    """kohya's flags in a line of sample_prompts that mean something to this family, besides those of all."""

    sample_prompts: Annotated[str, Show(basic=True, kind="text")] = ""
    """Prompts, one a line, or the path of a .txt, .toml or .json file. kohya's flags work: --w --h --d (seed) --l (CFG) --s (steps) --n
    (negative) --ss (sampler). Empty makes no previews."""
    sample_every_n_steps: Annotated[Count | None, Show(unit="steps")] = None
    """Render the prompts every this many steps; None renders with each save."""
    sample_every_n_epochs: Annotated[Count | None, Show(unit="epochs")] = None
    """Render the prompts every this many epochs as well."""
    sample_at_first: bool = True
    """Render the prompts before the first step too, to compare with."""
    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 28
    """Denoising steps of a preview without --s."""
    sample_cfg_scale: NotNegative = 6.0
    """Guidance scale of a preview without --l; 1 turns guidance off."""
    sample_negative_prompt: str = ""
    """Negative prompt of a preview without --n."""
    sample_size: Annotated[Size | None, Show(unit="px")] = None
    """Width,height of a preview without --w and --h; None takes resolution."""

    @property
    def embedded_guidance(self) -> float:
        """What an embedding of guidance is told in a preview without --g; without effect on a model that has none."""
        return 3.5

    @property
    def sampler(self) -> str:
        """Sampler of the previews; auto where there is one only."""
        return "auto"

    @property
    def scheduler(self) -> str:
        """What chooses their noise levels; auto is the model's own way."""
        return "auto"

    @property
    def shift(self) -> float | None:
        """Of the scheduler's levels; None as usual."""
        return None


class SamplerSampleOptions(SampleOptions):
    """Previews of a model that different samplers can render; each family has its own list of them."""

    sample_sampler: str = "auto"
    """Sampler of the previews."""

    @property
    def sampler(self) -> str:
        return self.sample_sampler


class ScheduledSampleOptions(SamplerSampleOptions):
    """Previews of a model whose noise levels can be chosen as ComfyUI does."""

    sample_scheduler: Scheduler = "auto"
    """What chooses the noise levels: auto the model's own way, which is diffusers'; another name ComfyUI's scheduler of that name, with
    its samplers, for the image that ComfyUI shows; comfyui is the scheduler that the model is usually drawn with there."""

    @property
    def scheduler(self) -> str:
        return self.sample_scheduler


class UNetSampleOptions(ScheduledSampleOptions):
    """Previews of a model on a noise schedule."""

    sample_sampler: Annotated[Sampler, _named] = "auto"
    """Sampler of the previews; auto takes the one in the model's scheduler configuration, or euler. With a scheduler: euler, euler_a
    (ComfyUI's euler_ancestral), heun, dpmsolver++ (dpmpp_2m), dpmpp_2m_sde, ddim."""


class FlowSampleOptions(ScheduledSampleOptions):
    """Previews of a flow-matching model."""

    sample_sampler: Annotated[FlowSampler, _named] = "auto"
    """Sampler of the previews; auto is euler. ComfyUI calls euler_a euler_ancestral, and dpmsolver++ dpmpp_2m."""
    sample_shift: Annotated[Positive | None, Show(needs="sample_scheduler!=auto")] = None
    """Shift of a scheduler's noise levels, as ComfyUI's nodes ModelSamplingSD3 and ModelSamplingAuraFlow take it; None takes the one that
    the model usually has there."""

    @property
    def shift(self) -> float | None:
        return self.sample_shift


class EditSampleOptions(FlowSampleOptions):
    """Previews of a flow-matching model that edits.

    A prompt without --ci edits the control images of the training pairs in turn.
    """

    own_flags: ClassVar[tuple[str, ...]] = ("ci",)

    sample_prompts: Annotated[str, Show(basic=True, kind="text")] = ""
    """Prompts, one a line, or the path of a .txt, .toml or .json file. kohya's flags work: --w --h --d (seed) --l (CFG) --s (steps) --n
    (negative) --ci (control image). Empty makes no previews."""


def samplers_of(options: type[SampleOptions]) -> tuple[str, ...]:
    """Names of the samplers that a family's previews can be rendered with; none for families with one of their own."""
    field = options.model_fields.get("sample_sampler")
    return () if field is None else get_args(field.annotation)
