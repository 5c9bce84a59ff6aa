"""What runs on Qwen-Image and Qwen-Image-Edit have of their own in each section, and their kinds."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.fields import (
    NotNegative,
    Positive,
    Show,
    Side,
    raise_all,
)
from sd_scripts.schema.memory import AdapterMemoryOptions
from sd_scripts.schema.model import BaseModelOptions, device_problems
from sd_scripts.schema.network import (
    Indices,
    TransformerNetworkOptions,
)
from sd_scripts.schema.objective import FlowObjectiveOptions
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import SampleOptions


class QwenImageModelOptions(BaseModelOptions):
    """The Qwen-Image base model: the text-to-image model, or one of the editing models."""

    grid: ClassVar[int] = 16

    model_version: Literal["auto", "edit", "edit-2509", "edit-2511", "image"] = "auto"
    """Which Qwen-Image model it is: edit (one control picture), edit-2509 and edit-2511 (one to three), or image (text to image). auto
    reads it from the model's folder; a single file does not say it and needs a choice."""
    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE: a .safetensors file, a diffusers folder or a hub id; None takes the one that comes with the base model."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen2.5-VL text encoder: a .safetensors file, a folder (with tokenizer and processor beside it, if it has them) or a hub id; None
    takes the one that comes with the base model."""
    max_token_length: Annotated[int, Field(ge=16, le=1024)] = 512
    """Tokens of an instruction that are read, besides those of the control pictures."""
    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """Control pictures are given to the VAE at about the area of a square of this side, each in its own aspect ratio. None takes the
    model's own, 1024; less saves memory and time. In training a control of the same aspect ratio as its target is cut as the target is, at
    the target's size."""
    modulation_table: bool = False
    """Keep the modulation layers, a third of the transformer's weights, in main memory, and a table of what they give at each of 1000 times
    instead. Saves 13.6 GB of a device's memory in 16 bit without changing the result; main memory takes 18 GB. Training times are then
    multiples of 1/1000. Not for adapters on the modulation."""
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"] = "none"
    """Hold the text encoder in 8 bits, which halves its memory while captions are encoded."""
    vae_device: str | None = None
    """Device of the VAE, such as cpu or cuda:1; None takes the training device."""
    text_encoder_device: str | None = None
    """Device of the text encoder, such as cpu or cuda:1; None takes the training device."""

    @model_validator(mode="after")
    def _devices_are_names(self) -> Self:
        raise_all([problem for name in ("vae_device", "text_encoder_device") for problem in device_problems(name, getattr(self, name))])
        return self


class QwenImageDatasetOptions(DatasetOptions):
    """Pairs of control and target pictures with instructions; for text to image, pictures with captions."""

    train_data_dir: Annotated[str | None, Show(basic=True, kind="folder", suggestions=("toy:edit_border", "toy:edits"))] = None
    """Folder with the training pairs: `target` with the edited pictures and their captions, `control` with the pictures before, under the
    same names, and `control_1`, `control_2` for further ones. For text to image a folder of pictures. `toy:edit_border` draws a built-in
    data set."""
    control_data_dir: Annotated[tuple[str, ...], Show(kind="folder")] = ()
    """Folders with the control pictures, the first, second and third of each sample, under the names of the pictures in train_data_dir.
    Empty takes the folders inside train_data_dir."""
    bucket_reso_steps: Annotated[int, Field(ge=16, le=512), Show(unit="px")] = 32
    """Bucket sides are multiples of this."""


class QwenImageNetworkOptions(TransformerNetworkOptions):
    """The adapter on a Qwen-Image transformer."""

    lora_targets: Literal["image_attention", "attention", "all", "all_with_modulation"] = "all"
    """Layers of each block that get an adapter: the picture's attention (240 layers in the full model), all attention (480), the MLPs as
    well (720), or also the modulation (840), whose weights are a third of the model. target_modules, when given, chooses among all."""
    train_block_indices: Indices = "all"
    """Numbers of the transformer blocks that get an adapter: all, or such as 0-29,55."""


class QwenFlowObjectiveOptions(FlowObjectiveOptions):
    """The training objective of Qwen-Image."""

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "qwen_shift", "mode", "sigma"] = "shift"
    """Density of the training times: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift = sigmoid shifted by
    discrete_flow_shift; qwen_shift = sigmoid shifted by the picture's size, as Qwen-Image is sampled; mode (mode_scale); sigma = uniform
    shifted by discrete_flow_shift."""
    discrete_flow_shift: Positive = 2.2
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times. 2.2 is usual for
    Qwen-Image."""


class QwenImageSampleOptions(SampleOptions):
    """Previews of a Qwen-Image model, with its own flow-matching sampler.

    An instruction without --ci edits the control pictures of the training pairs in turn.
    """

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Denoising steps of a preview without --s."""
    sample_cfg_scale: NotNegative = 4.0
    """True guidance scale of a preview without --l, with the negative prompt; 1 turns it off, above 1 doubles the time."""


class QwenImageAdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "kohya"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by ComfyUI, musubi-tuner, diffusers; with diffusers' by
    ComfyUI, diffusers; with comfyui's (`diffusion_model.`) by ComfyUI, diffusers. verify_lora counts the layers of a file."""


class QwenImageNetwork(RunOptions):
    """LoRA and its relatives on Qwen-Image and Qwen-Image-Edit."""

    family: ClassVar[str] = "qwen_edit"
    method: ClassVar[str] = "network"
    script: ClassVar[str] = "qwen_image_train_network.py"
    label: ClassVar[str] = "Qwen-Image-Edit LoRA"

    model: QwenImageModelOptions
    dataset: QwenImageDatasetOptions
    network: QwenImageNetworkOptions = QwenImageNetworkOptions()
    memory: AdapterMemoryOptions = AdapterMemoryOptions()
    objective: QwenFlowObjectiveOptions = QwenFlowObjectiveOptions()
    samples: QwenImageSampleOptions = QwenImageSampleOptions()
    output: QwenImageAdapterOutputOptions = QwenImageAdapterOutputOptions()

    @model_validator(mode="after")
    def _levers_go_together(self) -> Self:
        problems = []
        if self.model.modulation_table and self.network.lora_targets == "all_with_modulation":
            problems.append("modulation_table keeps the modulation as it is, but lora_targets trains it; turn one of them off")
        raise_all(problems)
        return self


RUNS: tuple[type[RunOptions], ...] = (QwenImageNetwork,)
