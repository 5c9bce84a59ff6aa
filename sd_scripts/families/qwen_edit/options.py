"""What runs on Qwen-Image and Qwen-Image-Edit have of their own in each section, and their kinds."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sd_scripts.schema.dataset import PairDatasetOptions
from sd_scripts.schema.fields import NotNegative, Positive, Show, Side, Verdict, raise_all
from sd_scripts.schema.model import BaseModelOptions, Controls, EncoderDevicesOptions, file_name
from sd_scripts.schema.network import Indices, TransformerNetworkOptions
from sd_scripts.schema.objective import FlowObjectiveOptions, SizeShift
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import EditSampleOptions


class QwenImageModelOptions(BaseModelOptions, EncoderDevicesOptions):
    """The Qwen-Image base model: the text-to-image model, or one of the editing models."""

    grid: ClassVar[int] = 16
    latent_side: ClassVar[int] = 8

    model_version: Literal["auto", "edit", "edit-2509", "edit-2511", "image"] = "auto"
    """Which Qwen-Image model it is: edit (one control image), edit-2509 and edit-2511 (one to three), or image (text to image). auto
    reads it from the model's folder; a single file does not say it and needs a choice."""
    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE: a .safetensors file, a diffusers folder or a hub id; None takes the one that comes with the base model."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen2.5-VL text encoder: a .safetensors file, a folder (with tokenizer and processor beside it, if it has them) or a hub id; None
    takes the one that comes with the base model."""
    max_token_length: Annotated[int, Field(ge=16, le=1024)] = 512
    """Tokens of an instruction that are read, besides those of the control images."""
    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """Control images are given to the VAE at about the area of a square of this side, each in its own aspect ratio. None takes the
    model's own, 1024; less saves memory and time. In training a control of the same aspect ratio as its target is cut as the target is, at
    the target's size."""
    modulation_table: bool = False
    """Keep the modulation layers, a third of the transformer's weights, in host RAM, and a table of what they give at each of 1000 times
    instead. Saves 13.6 GB of GPU memory in 16 bit without changing the result; host RAM takes 18 GB. Training times are then
    multiples of 1/1000. Not for adapters on the modulation."""
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"] = "none"
    """Hold the text encoder in 8 bits, which halves its memory while captions are encoded."""

    @property
    def controls(self) -> Controls:
        """With model_version = auto any number is read, and what the model takes is checked when it has been loaded."""
        if self.model_version == "image":
            return Controls()
        if self.model_version == "auto":
            return Controls(0, 3)
        return Controls(1, 1 if self.model_version == "edit" else 3, self.model_version)

    @property
    def control_side(self) -> int | None:
        return self.control_resolution

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {
            "model_type": "qwen_image",
            "max_token_length": self.max_token_length,
            "transformer_quantization": self.transformer_quantization,
            "vae_name": file_name(self.vae),
        }


class QwenImageDatasetOptions(PairDatasetOptions):
    """Pairs of control and target images with instructions; for text to image, images with captions."""

    train_data_dir: Annotated[str | None, Show(basic=True, kind="folder", suggestions=("toy:edit_border", "toy:edits"))] = None
    """Folder with the training pairs: `target` with the edited images and their captions, `control` with the images before, under the
    same names, and `control_1`, `control_2` for further ones. For text to image a folder of images. `toy:edit_border` draws a built-in
    data set."""
    bucket_reso_steps: Annotated[int, Field(ge=16, le=512), Show(unit="px")] = 32


class QwenImageNetworkOptions(TransformerNetworkOptions):
    """The adapter on a Qwen-Image transformer."""

    lora_targets: Literal["image_attention", "attention", "all", "all_with_modulation"] = "all"
    """Layers of each block that get an adapter: the image's attention (240 layers in the full model), all attention (480), the MLPs as
    well (720), or also the modulation (840), whose weights are a third of the model. target_modules, when given, chooses among all."""
    train_block_indices: Indices = "all"
    """Numbers of the transformer blocks that get an adapter: all, or such as 0-29,55."""


class QwenFlowObjectiveOptions(FlowObjectiveOptions):
    """The training objective of Qwen-Image."""

    # scheduler_config.json: max_image_seq_len, max_shift. Tokens are the image's own, without those of control images.
    size_shifts: ClassVar[dict[str, SizeShift]] = {"qwen_shift": SizeShift((256, 0.5), (8192, 0.9))}

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "qwen_shift", "mode", "sigma"] = "shift"
    discrete_flow_shift: Positive = 2.2
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times. 2.2 is usual for
    Qwen-Image."""


class QwenImageSampleOptions(EditSampleOptions):
    """Previews of a Qwen-Image model.

    An instruction without --ci edits the control images of the training pairs in turn.
    """

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 20
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
    verdicts: ClassVar[Mapping[str, Verdict]] = {
        "dit": ("renamed", "pretrained_model_name_or_path"),
        "edit": ("renamed", "model_version = edit"),
        "edit_plus": ("renamed", "model_version = edit-2509"),
        "fp8_vl": ("renamed", "text_encoder_quantization = qint8 (or qfloat8)"),
        "clip_skip": ("not supported", "Qwen-Image always reads the last layer of its text encoder. Remove it"),
        "train_text_encoder": ("not supported", "the text encoder, a language model, stays as it is. Remove it"),
    }

    model: QwenImageModelOptions
    dataset: QwenImageDatasetOptions
    network: QwenImageNetworkOptions = QwenImageNetworkOptions()
    objective: QwenFlowObjectiveOptions = QwenFlowObjectiveOptions()
    samples: QwenImageSampleOptions = QwenImageSampleOptions()
    output: QwenImageAdapterOutputOptions = QwenImageAdapterOutputOptions()

    @model_validator(mode="after")
    def _memory_options_go_together(self) -> Self:
        problems = []
        if self.model.modulation_table and self.network.lora_targets == "all_with_modulation":
            problems.append("modulation_table keeps the modulation as it is, but lora_targets trains it; turn one of them off")
        raise_all(problems)
        return self


RUNS: tuple[type[RunOptions], ...] = (QwenImageNetwork,)
