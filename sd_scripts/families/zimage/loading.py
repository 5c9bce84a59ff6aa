"""Load Z-Image from a diffusers folder, a hub id, or a transformer file with VAE and text encoder; write it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diffusers import ZImageTransformer2DModel

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.qwen3 import QWEN3_PART, template_problems
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, Companion, Config, FamilySpec, PartSpec

from . import original as original_zimage
from .facts import TRANSFORMER
from .options import ZImageModelOptions

SPEC = FamilySpec(
    name="zimage",
    label="Z-Image",
    needed="a Z-Image transformer (Turbo or base)",
    files=(TRANSFORMER,),
    pipelines=("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": PartSpec(
            folder="transformer",
            class_name="ZImageTransformer2DModel",
            make=ZImageTransformer2DModel.from_config,
            layout=original_zimage.transformer,
            prefixes=transformer.PREFIXES,
            unread=(original_zimage.UNREAD,),
        ),
        "vae": replace(transformer.AUTOENCODER, companion=Companion("vae", "the VAE", "ae.safetensors")),
        "te1": QWEN3_PART,
    },
)


def _problems(base: Base, given_names: Sequence[str], options: ZImageModelOptions, dtype: Dtypes) -> list[str]:
    """Why the transformer does not work on the VAE's latents or the encoder's text, or cannot be trained here."""
    config, problems = base.networks["backbone"].module.config, transformer.channel_problems(base, given_names)
    if config.siglip_feat_dim is not None:
        problems.append(f"{BASE}: {base.source.label} is a Z-Image-Omni model, which cannot be trained here")
    option = "text_encoder" if "te1" in given_names else BASE
    problems += transformer.width_problems(given_names, transformer.text_width(base), config.cap_feat_dim, "Z-Image reads with Qwen3-4B")
    # Text is padded to a multiple of 32 tokens, and the image stands one place behind it.
    room = (config.axes_lens[0] - 2) // 32 * 32
    if options.max_token_length > room:
        problems.append(
            f"max_token_length: {options.max_token_length} tokens do not fit into the {config.axes_lens[0]} positions of the transformer; "
            f"take at most {room}"
        )
    if base.scheduler.get("use_dynamic_shifting") and options.scheduler_shift is None:
        problems.append(
            f"scheduler_shift: the scheduler configuration of {base.source.label} shifts by the size of the image, which Z-Image does "
            "not; set scheduler_shift (3 for Turbo, 6 for the base model)"
        )
    return problems + template_problems(base.tokenizers.get("te1"), option, SPEC.label)


def _scheduler(options: ZImageModelOptions, found: Config) -> Config:
    shift = options.scheduler_shift
    return found if shift is None else found | {"shift": shift, "use_dynamic_shifting": False}


LOADER = Loader(
    spec=SPEC,
    options=ZImageModelOptions,
    # As musubi-tuner names it.
    version=Version("z_image", "Z-Image", "https://github.com/Tongyi-MAI/Z-Image", is_v2=False),
    config_of=original_zimage.config_of,
    same=("dim", "n_heads"),
    untold=("axes_dims", "axes_lens", "norm_eps", "rope_theta", "t_scale"),
    problems=_problems,
    settings=lambda options, base: {"max_token_length": options.max_token_length},
    scheduler=_scheduler,
)
