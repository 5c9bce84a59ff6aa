"""Load Stable Diffusion 1.x and 2.x from a diffusers folder, a hub id or a single file, and write them.

Which of the two a model is, is told by the model itself.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from sd_scripts.families.common import original_unet as original
from sd_scripts.families.common import unet_loading as unet
from sd_scripts.families.common.tokenizers import TokenizerSpec
from sd_scripts.library.core.protocols import DeviceMap, Dtypes, Parts, Version
from sd_scripts.library.loading import common
from sd_scripts.library.loading.common import Base, FamilySpec, read_json
from sd_scripts.library.loading.source import Source
from sd_scripts.runs.model_headers import Header, what_is
from sd_scripts.schema.errors import OptionError

from .facts import FIRST, SECOND
from .options import SdModelOptions

logger = logging.getLogger(__name__)


def is_second(config: dict[str, Any]) -> bool:
    """Whether a UNet's configuration is one of SD 2.x: its transformers have linear projections, where SD 1.x has 1x1 convolutions."""
    return bool(config.get("use_linear_projection"))


def _second_in(folder: Path) -> bool:
    return is_second(read_json(folder / "unet" / "config.json", common.BASE))


_BLOCK = tuple(
    f"{layer}{kind}"
    for layer in ("attn.in_proj_", "ln_1.", "ln_2.", "mlp.c_fc.", "mlp.c_proj.", "attn.out_proj.")
    for kind in ("weight", "bias")
)
_LOGIT_SCALE = 4.6052
"""ln 100, the largest that CLIP is trained with."""


def _open_clip_extras(config: Mapping[str, Any]) -> dict[str, str | Tensor]:
    """What SD 2.x files have of OpenCLIP's text encoder beyond the layers that are used: the last layer, projection and scale.

    Nothing reads their numbers, as the text is taken before the last layer, but programs that build the whole encoder want them there.
    So a copy of the layer before it stands for the last layer, and a projection that changes nothing for the projection.
    """
    last, width = config["num_hidden_layers"], config["hidden_size"]
    block = {f"transformer.resblocks.{last}.{name}": f"transformer.resblocks.{last - 1}.{name}" for name in _BLOCK}
    return {**block, "text_projection": torch.eye(width), "logit_scale": torch.tensor(_LOGIT_SCALE)}


# Files of the first months were written by a transformers without the level text_model.
_CLIP_L = replace(unet.CLIP_L, prefixes=("cond_stage_model.transformer.text_model.", "cond_stage_model.transformer."))
_OPEN_CLIP_H = replace(
    _CLIP_L,
    layout=original.open_clip,
    prefixes=("cond_stage_model.model.",),
    extras=_open_clip_extras,
    tokenizer=TokenizerSpec("tokenizer", "!"),
)
_CONFIGS = Path(__file__).parent / "configs"

SPEC = FamilySpec(
    name="sd",
    label="SD 1.x / 2.x",
    needed=f"{FIRST} or {SECOND} with UNet, VAE and text encoder",
    files=(FIRST, SECOND),
    pipelines=("StableDiffusionPipeline", "StableDiffusionImg2Img", "StableDiffusionInpaint", "StableDiffusionPipelineSafe"),
    configs=_CONFIGS / "sd1",
    parts={"backbone": unet.UNET, "vae": unet.AUTOENCODER, "te1": _CLIP_L},
    describes=lambda folder: not _second_in(folder),
)
SPEC2 = replace(SPEC, configs=_CONFIGS / "sd2", parts={**SPEC.parts, "te1": _OPEN_CLIP_H}, describes=_second_in)
_LAYOUT = "https://github.com/Stability-AI/generative-models"
VERSION1 = Version("sd_v1", "stable-diffusion-v1", _LAYOUT, is_v2=False)
VERSION2 = Version("sd_v2", "stable-diffusion-v2-512", _LAYOUT, is_v2=True)
VERSION2_V = Version("sd_v2_768_v", "stable-diffusion-v2-768-v", _LAYOUT, is_v2=True)
"""Of models that predict v."""


def spec_of(backbone: nn.Module) -> FamilySpec:
    """SPEC or SPEC2, whichever a UNet belongs to."""
    assert isinstance(backbone, UNet2DConditionModel), f"{type(backbone).__name__} is no UNet"
    return SPEC2 if is_second(dict(backbone.config)) else SPEC


def load(options: SdModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoder in dtype, the VAE in options.vae_dtype.

    A single file does not say what its network predicts: noise is assumed, unless its header or its `v_pred` mark or options say otherwise.
    Networks named in `without` are not read. Raises OptionError with every problem that can be seen before weights are read.
    """

    def refine(spec: FamilySpec, source: Source, header: Header | None) -> FamilySpec:
        if header is None:
            return SPEC2 if (source.path / "unet" / "config.json").is_file() and _second_in(source.path) else SPEC
        second = what_is(header) == SECOND
        if second and options.prediction_type == "auto" and unet.prediction_in(header) is None:
            logger.warning(
                "%s is a single file of SD 2.x, which does not say what its network predicts; epsilon is assumed, as for 2.0-base and "
                "2.1-base. For 2.0 and 2.1 (768 pixels) and models made from them set prediction_type to v_prediction",
                source.label,
            )
        return SPEC2 if second else SPEC

    return unet.load(SPEC, options, device, dtype, lambda base: _settings(base, options), refine, without)


def _settings(base: Base, options: SdModelOptions) -> dict[str, Any]:
    num_layers = base.networks["te1"].module.config.num_hidden_layers
    if options.clip_skip is not None and options.clip_skip > num_layers:
        raise OptionError(f"clip_skip: {options.clip_skip} is more than the {num_layers} layers of this model's text encoder")
    return {
        "max_token_length": options.max_token_length,
        "weighted_captions": options.weighted_captions,
        "clip_skip": options.clip_skip,
    }


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model; see unet.save."""
    unet.save(spec_of(parts.backbone), parts, path, save_model_as, dtype, metadata, {})
