"""What runs on FLUX.3 Image Klein have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.schema.dataset import PairDatasetOptions
from sd_scripts.schema.fields import NotNegative, Positive, Show, Side
from sd_scripts.schema.memory import FullMemoryOptions
from sd_scripts.schema.model import MAX_CONTROLS, BaseModelOptions, Controls, file_name
from sd_scripts.schema.network import BlocksNetworkOptions, TransformerFullOptions
from sd_scripts.schema.objective import FlowObjectiveOptions
from sd_scripts.schema.optimizer import FullOptimizerOptions
from sd_scripts.schema.output import AdapterOutputOptions, ModelOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import EditSampleOptions


class Flux3ModelOptions(BaseModelOptions):
    """The FLUX.3 Image Klein base model: text to image, and editing with reference images."""

    grid: ClassVar[int] = 16
    latent_side: ClassVar[int] = 16

    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE (FLUX.2's): flux2-vae.safetensors, a diffusers folder or a hub id; None takes the one that comes with the base model."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen3-VL-4B text encoder: a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the one that comes with the
    base model."""
    max_token_length: Annotated[int, Field(ge=80, le=8192)] = 8192
    """Tokens of a caption that are read, with those of the chat template; longer ones are cut. A text fills windows of 80 tokens, whose
    padding the transformer sees."""
    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """Reference images of another size than their target are given to the VAE at about the area of a square of this side, each in its own
    aspect ratio. None takes 1024; less saves memory and time. In previews it bounds several reference images, and a single one only where
    it is set: the model takes that whole, up to 2048 x 2048."""
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"] = "none"
    """Hold the text encoder in 8 bits, which halves its memory while captions are encoded."""

    @property
    def controls(self) -> Controls:
        """See ModelOptions."""
        return Controls(0, MAX_CONTROLS, "FLUX.3 Image Klein")

    @property
    def control_side(self) -> int | None:
        """See ModelOptions."""
        return self.control_resolution

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {"model_type": "flux_3", "max_token_length": self.max_token_length, "vae_name": file_name(self.vae)}


class Flux3FlowObjectiveOptions(FlowObjectiveOptions):
    """The training objective of FLUX.3."""

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "mode", "sigma"] = "shift"
    """Density of the training times: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift = sigmoid shifted by
    discrete_flow_shift; mode (mode_scale); sigma = uniform shifted by discrete_flow_shift."""
    discrete_flow_shift: Positive = 6.93
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times. 6.93 is the model's
    own, for all sizes."""


class Flux3SampleOptions(EditSampleOptions):
    """Previews of a FLUX.3 model, always with its own flow-matching sampler."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    """Denoising steps of a preview without --s."""
    sample_cfg_scale: NotNegative = 3.5
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, above 1 doubles the time."""


class Flux3AdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "comfyui"
    """Names inside the saved .safetensors file. A LoRA is read whole with diffusers' by diffusers; with comfyui's (`diffusion_model.`,
    without alphas) by diffusers; kohya's are for this program alone. verify_lora counts the layers of a file."""


class _Flux3Run(RunOptions):
    family: ClassVar[str] = "flux3"

    model: Flux3ModelOptions
    dataset: PairDatasetOptions
    objective: Flux3FlowObjectiveOptions = Flux3FlowObjectiveOptions()
    samples: Flux3SampleOptions = Flux3SampleOptions()


class Flux3Network(_Flux3Run):
    """LoRA and its relatives on FLUX.3 Image Klein."""

    method: ClassVar[str] = "network"
    script: ClassVar[str] = "flux3_train_network.py"
    label: ClassVar[str] = "FLUX.3 Image Klein LoRA"

    network: BlocksNetworkOptions = BlocksNetworkOptions()
    output: Flux3AdapterOutputOptions = Flux3AdapterOutputOptions()


class Flux3Full(_Flux3Run):
    """DreamBooth and fine-tuning of FLUX.3 Image Klein."""

    method: ClassVar[str] = "full"
    script: ClassVar[str] = "flux3_train.py"
    label: ClassVar[str] = "FLUX.3 Image Klein DreamBooth and fine-tuning"

    network: TransformerFullOptions = TransformerFullOptions()
    optimizer: FullOptimizerOptions = FullOptimizerOptions()
    memory: FullMemoryOptions = FullMemoryOptions()
    output: ModelOutputOptions = ModelOutputOptions()


RUNS: tuple[type[RunOptions], ...] = (Flux3Network, Flux3Full)
