"""What runs on Z-Image have of their own in each section, and their kinds."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.schema.anchored_flow import AnchoredFlowOptions
from sd_scripts.schema.fields import NotNegative, Positive, Show, Verdict
from sd_scripts.schema.memory import FullMemoryOptions
from sd_scripts.schema.model import FewStepModelOptions, file_name
from sd_scripts.schema.network import Indices, TransformerFullOptions, TransformerNetworkOptions
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import AdapterOutputOptions, ModelOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import FlowSampleOptions

from .legacy import OF_ADAPTERS, VERDICTS


class ZImageModelOptions(FewStepModelOptions):
    """The Z-Image base model: Turbo, which draws in 8 steps without guidance, or the base model."""

    grid: ClassVar[int] = 16
    latent_side: ClassVar[int] = 8

    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE (FLUX's): ae.safetensors, a diffusers folder or a hub id; None takes the one that comes with the base model."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen3 text encoder: a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the one that comes with the base
    model."""
    max_token_length: Annotated[int, Field(ge=16, le=1024)] = 512
    """Tokens of a caption that are read, with those of the chat template around it."""
    scheduler_shift: Positive | None = None
    """The s in sigma = s u / (1 + (s - 1) u), by which training and previews place their steps; None reads it from the model's scheduler
    configuration. Turbo's is 3, the base model's 6; a single file does not say it, and None then means 3."""
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"] = "none"
    """Hold the text encoder in 8 bits, which halves its memory while captions are encoded."""

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {
            "model_type": "z_image",
            "max_token_length": self.max_token_length,
            "transformer_quantization": self.transformer_quantization,
            "vae_name": file_name(self.vae),
        }


class ZImageNetworkOptions(TransformerNetworkOptions):
    """The adapter on a Z-Image transformer."""

    lora_targets: Literal["attention", "attention_and_mlp", "all"] = "attention_and_mlp"
    """Layers of each of the 30 blocks that get an adapter: attention alone (120 layers in the full model), the MLPs as well (210, as most
    files for Z-Image have), or also the modulation and the refiner blocks. target_modules, when given, chooses among all."""
    train_block_indices: Indices = "all"
    """Numbers of the transformer blocks that get an adapter: all, or such as 0-14,29."""


_BLOCKS = r"(layers|noise_refiner|context_refiner)\.\d+\."
_TRAINED = {
    "attention": re.compile(_BLOCKS + r"attention\."),
    "mlp": re.compile(_BLOCKS + r"feed_forward\."),
    "norm": re.compile(_BLOCKS + r"(attention\.norm_[qk]|attention_norm[12]|ffn_norm[12])\."),
}
"""Weights of each choice of trained_layers but all."""


class ZImageFullOptions(TransformerFullOptions):
    """The weights of a Z-Image transformer; its text encoder stays as it is."""

    trained_layers: Literal["all", "attention", "mlp", "norm"] = "all"
    """Which layers of the blocks are trained; embeddings and the last layer only with all. target_modules and exclude_modules choose among
    them."""

    def trains(self, weight: str) -> bool:
        """See FullOptions."""
        return self.trained_layers == "all" or _TRAINED[self.trained_layers].match(weight) is not None


class ZImageSampleOptions(FlowSampleOptions):
    """Previews of a Z-Image model, at exactly the steps that the objective acrf trains."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 8
    """Denoising steps of a preview without --s: 8 for Turbo, about 30 to 50 for the base model."""
    sample_cfg_scale: NotNegative = 1.0
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, which is right for Turbo (diffusers'
    guidance_scale is this minus 1). The base model wants about 4 to 5."""


class ZImageAdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "comfyui"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by musubi-tuner, diffusers (ComfyUI leaves the attention
    out); with diffusers' by ComfyUI, diffusers; with comfyui's (`diffusion_model.`, with alphas) by ComfyUI, diffusers. verify_lora counts
    the layers of a file."""


class _ZImageRun(RunOptions):
    family: ClassVar[str] = "zimage"
    defaults_of_version_1: ClassVar[Mapping[str, object]] = {"objective": "acrf"}
    verdicts: ClassVar[Mapping[str, Verdict]] = VERDICTS

    model: ZImageModelOptions
    objective: AnchoredFlowOptions = AnchoredFlowOptions()
    samples: ZImageSampleOptions = ZImageSampleOptions()


class ZImageNetwork(_ZImageRun):
    """LoRA and its relatives on Z-Image."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "zimage_train_network.py"
    label: ClassVar[str] = "Z-Image LoRA"

    network: ZImageNetworkOptions = ZImageNetworkOptions()
    output: ZImageAdapterOutputOptions = ZImageAdapterOutputOptions()


class ZImageFull(_ZImageRun):
    """DreamBooth and fine-tuning of Z-Image."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "zimage_train.py"
    label: ClassVar[str] = "Z-Image DreamBooth and fine-tuning"
    verdicts: ClassVar[Mapping[str, Verdict]] = {**VERDICTS, **OF_ADAPTERS}

    network: ZImageFullOptions = ZImageFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    memory: FullMemoryOptions = FullMemoryOptions()
    output: ModelOutputOptions = ModelOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (
    ZImageNetwork,
    ZImageFull,
)
