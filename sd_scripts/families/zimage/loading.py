"""Load Z-Image from a diffusers folder, a hub id, or a transformer file with VAE and text encoder; write it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import ZImageTransformer2DModel
from torch import nn

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.qwen3 import QWEN3_PART, template_problems
from sd_scripts.families.common.qwen3_signs import TEXT_ENCODER
from sd_scripts.families.common.training_adapter import checks
from sd_scripts.families.common.transformer_loading import Companion, tell
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import DeviceMap, Dtypes, Parts, Version
from sd_scripts.library.loading.common import (
    BASE,
    Base,
    Config,
    FamilySpec,
    PartSpec,
    config_of,
    described_by,
    read_json,
    tokenizer_for,
)
from sd_scripts.library.loading.quantized import read_quantized
from sd_scripts.library.loading.source import Source
from sd_scripts.runs.model_headers import VAE, Header

from . import original as original_zimage
from .facts import TRANSFORMER
from .options import ZImageModelOptions

SPEC = FamilySpec(
    name="zimage",
    label="Z-Image",
    needs="a Z-Image transformer (Turbo or base)",
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
        "vae": transformer.AUTOENCODER,
        "te1": QWEN3_PART,
    },
    belongs={VAE: "vae", TEXT_ENCODER: "text_encoder"},
)
COMPANIONS = {
    "vae": Companion("vae", "the VAE", "ae.safetensors"),
    "te1": Companion("text_encoder", "the text encoder Qwen3", "qwen_3_4b.safetensors"),
}
VERSION = Version("z_image", "Z-Image", "https://github.com/Tongyi-MAI/Z-Image", is_v2=False)
"""As musubi-tuner names it."""


def load(options: ZImageModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoder in dtype, the VAE in options.vae_dtype.

    Networks named in `without` are not read. Raises OptionError with every problem that can be seen before weights are read, also with a
    training adapter, which is put on afterwards.
    """

    def in_file(source: Source, header: Header, own: Sequence[str]) -> Base:
        transformer.check_holds(SPEC, COMPANIONS, source, header, [name for name in own if name not in without])
        return _in_file(source, header, own)

    wanted = {"vae": options.vae, "te1": options.text_encoder}
    base, given_names, adapters = transformer.gather(SPEC, COMPANIONS, options, wanted, without, in_file, checks(options))
    if "te1" not in base.tokenizers and base.networks["te1"].tensors:
        base.tokenizers["te1"] = tokenizer_for(base, "te1")
    _check_fit(base, given_names, options)
    return read_quantized(base, options, device, dtype, without, adapters, lambda modules: _parts(base, options, modules))


def published_scheduler() -> Config:
    """Scheduler configuration of Turbo."""
    return transformer.scheduler_in(SPEC.configs)


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model in dtype or as it is: `diffusers` is a folder with everything, `safetensors` the transformer as it is published."""
    transformer.save(SPEC, parts, path, save_model_as, dtype, metadata)


def _in_file(source: Source, header: Header, own: Sequence[str]) -> Base:
    """The base model in a single file, its transformer configured by the shapes of its tensors and by the file's own folder."""
    spec = replace(SPEC, configs=described_by(SPEC, source.path))
    config = transformer.config_in(SPEC, source, header, "Z-Image", original_zimage.config_of)
    if spec.configs != SPEC.configs:
        beside = read_json(spec.configs / SPEC.parts["backbone"].folder / "config.json", BASE)
        if (beside.get("dim"), beside.get("n_heads")) == (config["dim"], config["n_heads"]):
            config |= {key: beside[key] for key in ("axes_dims", "axes_lens", "norm_eps", "rope_theta", "t_scale") if key in beside}
    networks = transformer.networks_in(spec, COMPANIONS, source, header, config, own)
    return Base(spec, source, networks, {}, transformer.scheduler_in(spec.configs), read_json(spec.configs / "model_index.json", BASE))


def _check_fit(base: Base, given_names: Sequence[str], options: ZImageModelOptions) -> None:
    """Raises OptionError when the transformer does not work on the VAE's latents or the encoder's text, or cannot be trained here."""
    config, vae = base.networks["backbone"].module.config, base.networks["vae"].module.config
    encoder = config_of(base.networks["te1"].module)
    problems = transformer.channel_problems(base, given_names, vae.latent_channels)
    if config.siglip_feat_dim is not None:
        problems.append(f"{BASE}: {base.source.label} is a Z-Image-Omni model, which cannot be trained here")
    option = "text_encoder" if "te1" in given_names else BASE
    problems += transformer.width_problems(given_names, encoder["hidden_size"], config.cap_feat_dim, "Z-Image reads with Qwen3-4B")
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
    problems += template_problems(base.tokenizers.get("te1"), option, "Z-Image")
    tell(problems)


def _parts(base: Base, options: ZImageModelOptions, modules: Mapping[str, nn.Module]) -> Parts:
    """The model of these networks."""
    scheduler = dict(base.scheduler)
    if options.scheduler_shift is not None:
        scheduler |= {"shift": options.scheduler_shift, "use_dynamic_shifting": False}
    return Parts(
        backbone=modules["backbone"],
        vae=modules["vae"],
        text_encoders={"te1": modules["te1"]},
        tokenizers=base.tokenizers,
        path=diffusion.path_of(scheduler),
        kind=diffusion.kind_of(scheduler),
        scheduler_config=scheduler,
        source=base.source.label,
        settings={"max_token_length": options.max_token_length},
    )
