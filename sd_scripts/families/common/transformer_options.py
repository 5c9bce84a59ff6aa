"""Options of families whose model is a transformer with its companions, and their kinds of run. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import create_model

from sd_scripts.schema.dataset import DatasetOptions, PairDatasetOptions
from sd_scripts.schema.fields import NotNegative, Show, Side
from sd_scripts.schema.memory import FullMemoryOptions
from sd_scripts.schema.model import BaseModelOptions, ModelOptions, file_name
from sd_scripts.schema.network import BlocksNetworkOptions, TransformerFullOptions
from sd_scripts.schema.objective import FlowObjectiveOptions
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import AdapterOutputOptions, ModelOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import EditSampleOptions, SampleOptions

AREA = 1024 * 1024
"""Pixels of a control image, where the options do not say it."""


def control_area(options: ModelOptions) -> int:
    """Pixels of a control image."""
    return AREA if options.control_side is None else options.control_side**2


class LanguageModelOptions(BaseModelOptions):
    """A base model with a VAE, whose captions a large language model reads."""

    model_type: ClassVar[str]
    """What headers of saved files call it."""

    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE: a .safetensors file, a diffusers folder or a hub id; None takes the one that comes with the base model."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The text encoder: a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the one that comes with the base
    model."""
    max_token_length: int = 512
    """Tokens of a caption that are read."""
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"] = "none"
    """Hold the text encoder in 8 bits, which halves its memory while captions are encoded."""

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {"model_type": self.model_type, "max_token_length": self.max_token_length, "vae_name": file_name(self.vae)}


class QwenVaeModelOptions(LanguageModelOptions):
    """A base model whose latents Qwen-Image's VAE makes."""

    grid: ClassVar[int] = 16
    latent_side: ClassVar[int] = 8

    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE (Qwen-Image's): a .safetensors file, a diffusers folder or a hub id; None takes the one that comes with the base model."""


class SquareVaeModelOptions(LanguageModelOptions):
    """A base model whose latents FLUX.2's VAE makes."""

    grid: ClassVar[int] = 16
    latent_side: ClassVar[int] = 16

    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE (FLUX.2's): flux2-vae.safetensors, a diffusers folder or a hub id; None takes the one that comes with the base model."""


class Qwen3VL4BModelOptions(LanguageModelOptions):
    """A base model whose captions Qwen3-VL-4B reads."""

    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen3-VL-4B text encoder: a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the one that comes with the
    base model."""


class ReferenceModelOptions(BaseModelOptions):
    """A base model that draws from text alone, or with reference images."""

    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """Reference images have about the area of a square of this side, each in its own aspect ratio. None takes 1024; less saves memory and
    time."""

    @property
    def control_side(self) -> int | None:
        """See ModelOptions."""
        return self.control_resolution


class UnsizedObjectiveOptions(FlowObjectiveOptions):
    """The training objective of a model that is shifted alike for all sizes of images."""

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "mode", "sigma"] = "shift"
    """Density of the training times: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift = sigmoid shifted by
    discrete_flow_shift; mode (mode_scale); sigma = uniform shifted by discrete_flow_shift."""


class GuidedEditSampleOptions(EditSampleOptions):
    """Previews of a model that edits and is told a guidance scale."""

    own_flags: ClassVar[tuple[str, ...]] = ("ci", "g")

    sample_prompts: Annotated[str, Show(basic=True, kind="text")] = ""
    """Prompts, one a line, or the path of a .txt, .toml or .json file. kohya's flags work: --w --h --d (seed) --l (CFG) --s (steps) --n
    (negative) --g (embedded guidance) --ci (control image). Empty makes no previews."""
    sample_cfg_scale: NotNegative = 1.0
    """True guidance scale of a preview without --l, with the negative prompt; 1 turns it off, as the model is meant, above 1 doubles the
    time."""
    sample_guidance_scale: NotNegative = 3.5
    """Guidance that the model's embedding is told in a preview without --g."""

    @property
    def embedded_guidance(self) -> float:
        return self.sample_guidance_scale


def transformer_runs(
    family: str,
    label: str,
    model: type[BaseModelOptions],
    objective: type[FlowObjectiveOptions],
    samples: type[SampleOptions],
    output: type[AdapterOutputOptions],
    network: type[BlocksNetworkOptions] = BlocksNetworkOptions,
) -> tuple[type[RunOptions], ...]:
    """A family's kinds of run, an adapter and the transformer itself, with these sections; output, network: of the adapter. A model that
    takes reference images is trained on pairs."""
    common = {"objective": objective, "samples": samples}
    of_adapters = {**common, "network": network, "output": output}
    of_models = {
        **common,
        "network": TransformerFullOptions,
        "optimizer": FullOptimizerOptions,
        "memory": FullMemoryOptions,
        "output": ModelOutputOptions,
    }
    dataset = PairDatasetOptions if issubclass(model, ReferenceModelOptions) else DatasetOptions

    def made(method: str, script: str, noun: str, about: str, sections: dict[str, Any]) -> type[RunOptions]:
        fields: dict[str, Any] = {name: (section, section()) for name, section in sections.items()}
        run: type[RunOptions] = create_model(
            f"{family}_{method}", __base__=RunOptions, __doc__=f"{about} {label}.", model=(model, ...), dataset=(dataset, ...), **fields
        )
        run.family, run.method, run.script, run.label = family, method, f"{family}_{script}.py", f"{label} {noun}"
        return run

    return (
        made("network", "train_network", "LoRA", "LoRA and its relatives on", of_adapters),
        made("full", "train", "DreamBooth and fine-tuning", "DreamBooth and fine-tuning of", of_models),
    )
