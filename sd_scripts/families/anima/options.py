"""What runs on Anima have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.families.common.transformer_options import QwenVaeModelOptions, UnsizedObjectiveOptions, transformer_runs
from sd_scripts.schema.fields import NotNegative, Positive, Show
from sd_scripts.schema.model import EncoderDevicesOptions, FewStepModelOptions
from sd_scripts.schema.network import BlocksNetworkOptions
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.samples import SampleOptions

from .facts import FACTS


class AnimaModelOptions(QwenVaeModelOptions, FewStepModelOptions, EncoderDevicesOptions):
    """The Anima base model: Base is made to be trained, Aesthetic and Turbo to draw with."""

    model_type: ClassVar[str] = "anima"

    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen3-0.6B text encoder: a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the one that comes with the
    base model."""
    text_conditioner: Annotated[str | None, Show(kind="file")] = None
    """The text conditioner (llm_adapter), which makes of Qwen3's states what the transformer reads: a .safetensors file, a folder or a hub
    id; None takes the one of the base model, also in a single file. It stays as it is in training."""
    max_token_length: Annotated[int, Field(ge=16, le=512)] = 512
    """Tokens of a caption that are read, of Qwen3's and of T5's."""


class AnimaNetworkOptions(BlocksNetworkOptions):
    """The adapter on an Anima transformer."""

    lora_targets: Literal["attention_and_mlp", "all"] = "attention_and_mlp"
    """Layers of each of the 28 blocks that get an adapter: attention and MLP (280 layers in the full model, as most files for Anima have),
    or the modulation as well. target_modules, when given, chooses among all."""


class AnimaFlowObjectiveOptions(UnsizedObjectiveOptions):
    """The training objective of Anima."""

    discrete_flow_shift: Positive = 3.0
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times. 3 is the model's own
    in drawing."""


class AnimaSampleOptions(SampleOptions):
    """Previews of an Anima model, always with its own flow-matching sampler."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    """Denoising steps of a preview without --s; 8 to 12 with Turbo."""
    sample_cfg_scale: NotNegative = 4.0
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, which is right for Turbo, above 1 doubles the
    time."""


class AnimaAdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "comfyui"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by ComfyUI, sd-scripts; with diffusers' by diffusers;
    with comfyui's (`diffusion_model.`, without alphas) by ComfyUI, diffusers. verify_lora counts the layers of a file."""


RUNS = transformer_runs(
    "anima", FACTS.label, AnimaModelOptions, AnimaFlowObjectiveOptions, AnimaSampleOptions, AnimaAdapterOutputOptions, AnimaNetworkOptions
)
