"""What runs on Qwen-Image-2.1 have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.schema.dataset import PairDatasetOptions
from sd_scripts.schema.fields import NotNegative, Positive, Show, Side
from sd_scripts.schema.memory import FullMemoryOptions
from sd_scripts.schema.model import MAX_CONTROLS, Controls, EncoderDevicesOptions, FewStepModelOptions, file_name
from sd_scripts.schema.network import BlocksNetworkOptions, TransformerFullOptions
from sd_scripts.schema.objective import FlowObjectiveOptions, SizeShift
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import AdapterOutputOptions, ModelOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import EditSampleOptions


class QwenImage21ModelOptions(FewStepModelOptions, EncoderDevicesOptions):
    """The Qwen-Image-2.1 base model: text to image, and editing with reference images."""

    grid: ClassVar[int] = 32
    latent_side: ClassVar[int] = 16

    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE (Qwen-Image-2.1's, of 64 channels): a .safetensors file, a diffusers folder or a hub id; None takes the one that comes with
    the base model."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen3-VL-8B text encoder: a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the one that comes with the
    base model."""
    max_token_length: Annotated[int, Field(ge=16, le=4096)] = 512
    """Tokens of a caption that are read, besides those of the template around it."""
    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """Reference images are shown to the VAE and to the text encoder at about the area of a square of this side, each in its own aspect
    ratio. None takes 1024; less saves memory and time."""
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"] = "none"
    """Hold the text encoder in 8 bits, which halves its memory while captions are encoded."""

    @property
    def controls(self) -> Controls:
        """See ModelOptions."""
        return Controls(0, MAX_CONTROLS, "Qwen-Image-2.1")

    @property
    def control_side(self) -> int | None:
        """See ModelOptions."""
        return self.control_resolution

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {"model_type": "qwen_image_21", "max_token_length": self.max_token_length, "vae_name": file_name(self.vae)}


class QwenImage21FlowObjectiveOptions(FlowObjectiveOptions):
    """The training objective of Qwen-Image-2.1."""

    # scheduler_config.json: max_image_seq_len, max_shift. A token is one latent of 16 x 16 pixels.
    size_shifts: ClassVar[dict[str, SizeShift]] = {"qwen_shift": SizeShift((256, 0.5), (8192, 0.9), patch=1)}

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "qwen_shift", "mode", "sigma"] = "shift"
    """Density of the training times: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift = sigmoid shifted by
    discrete_flow_shift; qwen_shift = sigmoid shifted by the image's size, as the model is sampled; mode (mode_scale); sigma = uniform
    shifted by discrete_flow_shift."""
    discrete_flow_shift: Positive = 2.2
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times."""


class QwenImage21SampleOptions(EditSampleOptions):
    """Previews of a Qwen-Image-2.1 model, shifted by the image's size unless a scheduler is chosen."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 40
    """Denoising steps of a preview without --s."""
    sample_cfg_scale: NotNegative = 1.0
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, as the published model is drawn, above 1 doubles
    the time."""


class QwenImage21AdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "diffusers"
    """Names inside the saved .safetensors file. A LoRA is read whole with diffusers' by ComfyUI, diffusers; with comfyui's
    (`diffusion_model.`, with alphas) by diffusers (ComfyUI leaves parts of the MLPs out); with kohya's here alone. verify_lora counts the
    layers of a file."""


class _QwenImage21Run(RunOptions):
    family: ClassVar[str] = "qwen_image21"

    model: QwenImage21ModelOptions
    dataset: PairDatasetOptions
    objective: QwenImage21FlowObjectiveOptions = QwenImage21FlowObjectiveOptions()
    samples: QwenImage21SampleOptions = QwenImage21SampleOptions()


class QwenImage21Network(_QwenImage21Run):
    """LoRA and its relatives on Qwen-Image-2.1."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "qwen_image21_train_network.py"
    label: ClassVar[str] = "Qwen-Image-2.1 LoRA"

    network: BlocksNetworkOptions = BlocksNetworkOptions()
    output: QwenImage21AdapterOutputOptions = QwenImage21AdapterOutputOptions()


class QwenImage21Full(_QwenImage21Run):
    """DreamBooth and fine-tuning of Qwen-Image-2.1."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "qwen_image21_train.py"
    label: ClassVar[str] = "Qwen-Image-2.1 DreamBooth and fine-tuning"

    network: TransformerFullOptions = TransformerFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    memory: FullMemoryOptions = FullMemoryOptions()
    output: ModelOutputOptions = ModelOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (QwenImage21Network, QwenImage21Full)
