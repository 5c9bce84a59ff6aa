"""Which base model is loaded and how it is read: what all families share, and what each adds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from .fields import Number, Section, Show, raise_all

Quantization = Literal["none", "qint8", "qfloat8", "fp8", "nf4"]
"""How the weights of frozen blocks are held."""
MAX_CONTROLS = 10
"""Control images that the models with the most of them take."""


@dataclass(frozen=True)
class Controls:
    """How many control images a sample of a model has, and what the model is called in messages."""

    fewest: int = 0
    most: int = 0
    model: str = "this model"


class ModelOptions(Section):
    """The model of any family."""

    title: ClassVar[str] = "Model"
    grid: ClassVar[int]
    """Image sides are multiples of this, in pixels."""
    latent_side: ClassVar[int]
    """A latent stands for a square of this side, in pixels; 1 where there may be no VAE."""
    own_controls: ClassVar[Controls] = Controls()
    """How many control images the samples of the family's models have, where all of them take as many."""

    pretrained_model_name_or_path: str | None = None
    """The model that training begins with; families that cannot make one need it."""
    vae_dtype: Literal["float", "fp16", "bf16"] = "float"
    """Precision of the VAE while it encodes and decodes. Some overflow in fp16, so float is the safe choice."""

    @property
    def quantization(self) -> str:
        """In which few bits the frozen denoising network is held; none for all of them."""
        return "none"

    @property
    def undoes_distillation(self) -> bool:
        """Whether a training adapter is active while training."""
        return False

    @property
    def takes_estimate(self) -> bool:
        """Whether the network is told an estimate of the clean image (self-conditioning), which it is called for on some rows."""
        return False

    @property
    def controls(self) -> Controls:
        """How many control images the model's samples have, as far as the options say it."""
        return self.own_controls

    @property
    def control_side(self) -> int | None:
        """Control images have about the area of a square of this side, in pixels; None where the options leave it to the model."""
        return None

    @property
    def encoder_devices(self) -> tuple[str | None, str | None]:
        """Devices on which the VAE and the text encoders encode; None is the training device."""
        return None, None

    def header_values(self) -> dict[str, object]:
        """How the model was read, for the header of saved files, by kohya's names without ss_."""
        raise NotImplementedError

    @property
    def unread(self) -> frozenset[str]:
        """Options whose files such a run does not read, because the model that it begins with brings its own."""
        return frozenset()


class BaseModelOptions(ModelOptions):
    """A published model that training begins with."""

    leading: ClassVar[tuple[str, ...]] = ("pretrained_model_name_or_path", "revision", "variant", "base_weights", "base_weights_multiplier")

    pretrained_model_name_or_path: Annotated[str, Show(basic=True, kind="file", suggestions=("toy",))]
    """Base model: a .safetensors file, a diffusers folder, a hub id, or `toy` for the small built-in model that trains on any CPU."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; None takes the hub's default. Only for hub ids."""
    variant: str | None = None
    """File variant of a hub model or diffusers folder, such as fp16; None takes the plain files."""
    base_weights: Annotated[tuple[str, ...], Show(kind="file")] = ()
    """LoRA files that are merged into the base model before training, in this order."""
    base_weights_multiplier: Annotated[tuple[Number, ...], Show(needs="base_weights")] = ()
    """Strength of each file in base_weights; empty means 1.0 for all."""

    transformer_quantization: Quantization = "none"
    """Hold the frozen blocks of the denoising network in fewer bits; the adapter is trained on top in full precision. qint8 and qfloat8
    have 8 bits and a scale for each row, and qint8 is four to ten times more exact; fp8 has 8 bits and no scale, as the fp8_base of other
    trainers; nf4 has 4 bits, a quarter of the memory of 16."""

    @property
    def quantization(self) -> str:
        return self.transformer_quantization

    @model_validator(mode="after")
    def _one_multiplier_for_each_file(self) -> Self:
        if self.base_weights_multiplier and len(self.base_weights_multiplier) != len(self.base_weights):
            raise ValueError(
                f"base_weights_multiplier has {len(self.base_weights_multiplier)} numbers for {len(self.base_weights)} files in "
                "base_weights; give one for each file, or none"
            )
        return self


class FewStepModelOptions(BaseModelOptions):
    """A base model of a family that has distilled ones, which draw in few steps."""

    training_adapter: Annotated[str | None, Show(kind="file")] = None
    """A LoRA file that undoes the distillation of a few-step model, active while training and left out of previews and saved files, so that
    long runs keep the few steps (ostris has published some); None trains on the model as it is."""
    training_adapter_multiplier: Annotated[Number, Show(needs="training_adapter")] = 1.0
    """Strength of the training adapter."""

    @property
    def undoes_distillation(self) -> bool:
        return self.training_adapter is not None


class EncoderDevicesOptions(ModelOptions):
    """A base model whose encoders may compute on devices of their own."""

    vae_device: str | None = None
    """Device of the VAE, such as cpu or cuda:1; None takes the training device."""
    text_encoder_device: str | None = None
    """Device of the text encoder, such as cpu or cuda:1; None takes the training device."""

    @model_validator(mode="after")
    def _devices_are_names(self) -> Self:
        raise_all([problem for name in ("vae_device", "text_encoder_device") for problem in device_problems(name, getattr(self, name))])
        return self

    @property
    def encoder_devices(self) -> tuple[str | None, str | None]:
        """See ModelOptions."""
        return self.vae_device, self.text_encoder_device


class UNetModelOptions(BaseModelOptions):
    """A base model with a UNet on a noise schedule, CLIP text encoders and a VAE."""

    grid: ClassVar[int] = 8
    latent_side: ClassVar[int] = 8

    vae: Annotated[str | None, Show(kind="file")] = None
    """A VAE to use instead of the base model's: a .safetensors file, a diffusers folder or a hub id; None keeps the base's own."""
    prediction_type: Literal["auto", "epsilon", "v_prediction", "flow"] = "auto"
    """What the network predicts: noise (epsilon), v, or flow-matching velocity; auto reads it from the model's scheduler configuration,
    or from the header of a single .safetensors file (modelspec.prediction_type, or the `v_pred` mark), and is epsilon where none says."""
    zero_terminal_snr: bool = False
    """Rescale the noise schedule so that the last step is pure noise (Lin et al. 2023). On in any case when the model's scheduler
    configuration says so. Meant for v_prediction."""
    max_token_length: Literal[75, 150, 225] = 75
    """Caption tokens that are read; 150 and 225 are encoded in two or three chunks of 75 and concatenated, each with its start and end, as
    ComfyUI and Forge read prompts (kohya's scripts leave out those in between)."""
    weighted_captions: bool = False
    """Read (word:1.2), (word) and [word] in captions as attention weights."""

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {
            "max_token_length": self.max_token_length,
            "clip_skip": None,
            "zero_terminal_snr": self.zero_terminal_snr,
            "vae_name": file_name(self.vae),
        }


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".pkl")


def file_name(value: str | None) -> str | None:
    """The name of a file or folder without those that it is in, for headers; None without one."""
    return None if value is None else Path(value).name


def is_hub_id(value: str) -> bool:
    """Whether a text that is no path on this disk may name a model on the hub."""
    return _HUB_ID.fullmatch(value) is not None and not value.lower().endswith(_FILE_SUFFIXES)


def only_on_hub(value: str) -> bool:
    """Whether a text is no path on this disk and may name a model on the hub."""
    return is_hub_id(value) and not Path(value).expanduser().exists()


def built_in(value: str, family: str) -> str | None:
    """The folder in toy/bases that `toy` (of this family) or `toy:<name>` stands for; None for what names no built-in model."""
    found = re.fullmatch(r"toy(?::([\w-]+))?", value)
    return None if found is None else found[1] or family


def not_there(option: str, value: str, has_toy: bool) -> str:
    """A sentence for a model that is neither on this disk nor named as on the hub. has_toy: there is a built-in one."""
    if has_toy:
        return f"{option}: there is no file or folder {value}. Give a .safetensors file, a diffusers folder, a hub id (owner/name) or toy"
    return f"{option}: there is no file or folder {value}. Give a .safetensors file, a diffusers folder or a hub id (owner/name)"


def level_problems(base_channels: int, multipliers: Sequence[int], attention_levels: Sequence[int], head_dim: int) -> list[str]:
    """What is wrong with the levels of a U-Net that a run makes; the middle, as wide as the last level, always has attention."""
    problems = []
    levels = len(multipliers)
    beyond = [level for level in attention_levels if level >= levels]
    if beyond:
        problems.append(
            f"attention_levels: there is no {', '.join(map(str, beyond))}; channel_multipliers makes {levels} levels, 0 to {levels - 1}"
        )
    if len(set(attention_levels)) != len(attention_levels):
        problems.append(f"attention_levels names a level twice: {tuple(attention_levels)}")
    for level in sorted({*(level for level in attention_levels if level < levels), levels - 1}):
        channels = base_channels * multipliers[level]
        if channels % head_dim:
            problems.append(
                f"attention_head_dim: level {level} has {channels} channels, not a multiple of {head_dim}; change attention_head_dim, "
                "base_channels or channel_multipliers"
            )
    return problems


def device_problems(option: str, name: str | None) -> list[str]:
    """What is wrong with the name of a device; whether the machine has it is asked when it is used."""
    if name is None or re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        return []
    return [f"{option}: {name!r} is not a device; write cpu, cuda, cuda:0, cuda:1 ... or mps"]
