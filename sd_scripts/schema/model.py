"""Which base model is loaded and how it is read."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from .fields import Section, Show


class SdxlModelOptions(Section):
    """The SDXL base model."""

    title: ClassVar[str] = "Model"

    pretrained_model_name_or_path: Annotated[str, Show(basic=True, kind="file", suggestions=("toy",))]
    """Base model: a .safetensors file, a diffusers folder, a hub id, or `toy` for the small built-in model that trains on any CPU."""
    vae: Annotated[str | None, Show(kind="file")] = None
    """A VAE to use instead of the base model's: a .safetensors file, a diffusers folder or a hub id; None keeps the base's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; None takes the hub's default. Only for hub ids."""
    variant: str | None = None
    """File variant of a hub model or diffusers folder, such as fp16; None takes the plain files."""
    prediction_type: Literal["auto", "epsilon", "v_prediction", "flow"] = "auto"
    """What the network predicts: noise (epsilon), v, or flow-matching velocity; auto reads it from the model's scheduler configuration,
    which a single .safetensors file does not have (there auto means epsilon, or v_prediction when the file carries the `v_pred` mark)."""
    zero_terminal_snr: bool = False
    """Rescale the noise schedule so that the last step is pure noise (Lin et al. 2023). On in any case when the model's scheduler
    configuration says so. Meant for v_prediction."""
    vae_dtype: Literal["float", "fp16", "bf16"] = "float"
    """Precision of the VAE while it encodes and decodes. SDXL's own VAE overflows in fp16, so float is the safe choice."""
    max_token_length: Literal[75, 150, 225] = 75
    """Caption tokens that are read; 150 and 225 are encoded in two or three chunks of 75 and concatenated."""
    weighted_captions: bool = False
    """Read (word:1.2), (word) and [word] in captions as attention weights."""
    base_weights: Annotated[tuple[str, ...], Show(kind="file")] = ()
    """LoRA files that are merged into the base model before training, in this order."""
    base_weights_multiplier: tuple[float, ...] = ()
    """Strength of each file in base_weights; empty means 1.0 for all."""

    @model_validator(mode="after")
    def _one_multiplier_for_each_file(self) -> Self:
        if self.base_weights_multiplier and len(self.base_weights_multiplier) != len(self.base_weights):
            raise ValueError(
                f"base_weights_multiplier has {len(self.base_weights_multiplier)} numbers for {len(self.base_weights)} files in "
                "base_weights; give one for each file, or none"
            )
        return self
