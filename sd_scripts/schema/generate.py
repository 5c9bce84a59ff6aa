"""Options of generate.py: images from a prompt with any model. Each family has those that mean something to it."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, create_model, model_validator

from sd_scripts.families import FACTS, RUNS

from .errors import OptionError, Problem
from .fields import NotNegative, Positive, Section, Show, raise_all, show_of
from .model import MAX_CONTROLS, ModelOptions
from .predict import AskSection, PredictOptions
from .samples import SampleOptions, samplers_of

FAMILIES: tuple[str, ...] = tuple(name for name, facts in FACTS.items() if not facts.evaluates)
"""Families that draw from a prompt."""
USUAL_PROMPT = "a photo of an animal that sits on a bench in a park, in the evening, sharp, with warm light"
"""Whose memory is forecast where a forecast is asked for without a prompt."""


class GenerateSection(AskSection):
    """What is drawn."""

    title: ClassVar[str] = "Draw"
    leading: ClassVar[tuple[str, ...]] = ("draw_with", "family", "prompt", "negative_prompt")

    draw_with: Annotated[str, Show(basic=True, kind="file")] = ""
    """What to draw with: the folder of a run, a file that a run saved, any LoRA file, or a model (file, diffusers folder, hub id). Its
    family, base and settings are filled in as far as its files tell them; options that are given besides count more."""
    family: str | None = None
    """Family of the model; None reads it from the files. The built-in `toy` needs it."""
    prompt: Annotated[str, Show(basic=True)] = ""
    """What the images should show. Empty draws the prompts that a run's previews had."""
    prompt_list: Annotated[str, Show(kind="text", unless="prompt")] = ""
    """Several prompts, one a line, or the path of a .txt, .toml or .json file, in place of prompt. kohya's flags work in each: --w --h --d
    (seed) --l (CFG) --s (steps) --n (negative) --ss (sampler) --g (guidance) --ci (control image), those that the family has."""
    wildcard_dir: Annotated[str, Show(kind="folder")] = ""
    """Folder of .txt files: `__name__` in a prompt becomes a line of name.txt, drawn from the image's seed; empty leaves it as it is.
    `{a|b}` becomes one of its parts, with a folder or without."""
    negative_prompt: Annotated[str, Show(basic=True)] = ""
    """What to stay away from; counts only with cfg_scale above 1."""
    cfg_scale: NotNegative = 6.0
    """How strongly the prompt is followed against the negative prompt; 1 turns guidance off."""

    @property
    def guided_scale(self) -> float:
        """See AskSection."""
        return self.cfg_scale


class GenerateOptions(PredictOptions):
    """Draw images from a prompt: with a base model, LoRA files with strengths, a fine-tuned model, or a run."""

    name: ClassVar[str] = "generate"
    script: ClassVar[str] = "generate.py"
    label: ClassVar[str] = "Generate"
    estimates: ClassVar[bool] = True
    renamed: ClassVar[Mapping[str, str]] = {
        "ckpt": "draw_with, or pretrained_model_name_or_path for the base model of LoRA files",
        "network_weights": "lora",
        "network_mul": "lora_weight",
        "from_file": "prompt_list",
        "images_per_prompt": "num_images",
        "scale": "cfg_scale",
        "outdir": "out",
        "W": "size",
        "H": "size",
        "true_cfg_scale": "cfg_scale",
    }

    predict: GenerateSection = GenerateSection()

    @property
    def loads(self) -> ModelOptions:
        """See PredictOptions."""
        made: ModelOptions = _of_runs(self.family, "model").model_validate(self.model.model_dump())
        return made

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        asked, problems = self.predict, []
        if not asked.serve and not self.model.pretrained_model_name_or_path:
            problems.append("draw_with is missing: name a run, a LoRA file, a model, or `toy` for the built-in one")
        if not asked.serve and not asked.prompt.strip() and not asked.prompt_list.strip():
            problems.append("prompt is missing: say what the images should show")
        raise_all(problems)
        return self


def samples_of(family: str) -> type[SampleOptions]:
    """The options of previews of a family's runs."""
    found: type[SampleOptions] = _of_runs(family, "samples")
    return found


def grid_of(family: str) -> int:
    """What the sides of a family's images are multiples of, in pixels."""
    model: type[ModelOptions] = _of_runs(family, "model")
    return model.grid


def _of_runs(family: str, section: str) -> Any:
    run = next(run for (name, _), run in RUNS.items() if name == family)
    return run.model_fields[section].annotation


@cache
def generate_options(family: str) -> type[GenerateOptions]:
    """The options of drawing with this family: its model's, its samplers, and the defaults of its previews. Raises OptionError."""
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        why = "draws from a prompt" if family in FACTS else "is known"
        raise OptionError(Problem("family", f"family: {family} is none that {why}; there are {known}"))
    samples = samples_of(family)
    had = samples.model_fields
    asked: dict[str, Any] = {
        "steps": (Annotated[int, Field(ge=1, le=1000)], Field(had["sample_steps"].default, description="Denoising steps.")),
        "cfg_scale": (NotNegative, _again(GenerateSection, "cfg_scale", had["sample_cfg_scale"].default)),
    }
    if samplers_of(samples):
        asked["sampler"] = (had["sample_sampler"].annotation, _again(samples, "sample_sampler", had["sample_sampler"].default))
    if "sample_scheduler" in had:
        asked["scheduler"] = (had["sample_scheduler"].annotation, _again(samples, "sample_scheduler", had["sample_scheduler"].default))
    if "sample_shift" in had:
        shift = Annotated[Positive | None, Show(needs="scheduler!=auto")]
        asked["shift"] = (shift, _again(samples, "sample_shift", None))
    if "g" in samples.own_flags:
        text = "What the model's embedding of guidance is told, where it has one."
        asked["guidance"] = (NotNegative, Field(samples().embedded_guidance, description=text))
    if "ci" in samples.own_flags:
        text = "Control images, which are edited, as many as the model takes; none to draw from text alone."
        files = Annotated[tuple[str, ...], Show(basic=True, kind="file"), Field(max_length=MAX_CONTROLS)]
        asked["images"] = (files, Field((), description=text))
    section = create_model("GenerateSection", __base__=GenerateSection, __doc__=GenerateSection.__doc__, **asked)
    model = _model_options(family)
    made = create_model(
        "Generate",
        __base__=GenerateOptions,
        __doc__=GenerateOptions.__doc__,
        predict=(section, section()),
        model=(model, model()),
    )
    made.family = family
    return made


def _model_options(family: str) -> type[ModelOptions]:
    """The family's model options, as a run has them, with a base that may be missing; of a family whose runs make their models, those that
    a saved model does not bring itself."""
    model: type[ModelOptions] = _of_runs(family, "model")
    brings_all = not model.model_fields["pretrained_model_name_or_path"].is_required()
    toys = show_of(model.model_fields["pretrained_model_name_or_path"]).suggestions
    text = "Base model of LoRA files: a .safetensors file, a diffusers folder or a hub id; draw_with fills it in where it can."
    if toys:
        text = "Base model of LoRA files: a .safetensors file, a diffusers folder, a hub id, or `toy`; draw_with fills it in where it can."
    base = Annotated[str, Show(basic=True, kind="file", suggestions=toys)]
    fields: dict[str, Any] = {"pretrained_model_name_or_path": (base, Field("", description=text))}
    # Made by a name, because the type checker cannot follow what is made from a variable.
    make: Any = create_model
    found: type[ModelOptions] = make(
        "GenerateModelOptions", __base__=ModelOptions if brings_all else model, __doc__=model.__doc__, **fields
    )
    found.grid = model.grid
    return found


def _again(section: type[Section], name: str, default: Any) -> Any:
    """A field of a section with its help and another default."""
    return Field(default, description=section.model_fields[name].description)
