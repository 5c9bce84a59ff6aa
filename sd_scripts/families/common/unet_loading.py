"""What loading SD and SDXL share: their networks with a UNet, their noise schedules, and the way from options to parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import DeviceMap, Dtypes, Parts
from sd_scripts.library.loading.common import (
    BASE,
    Base,
    Companion,
    Config,
    FamilySpec,
    FoundNetwork,
    PartSpec,
    adapter,
    base_source,
    check_kind,
    configs_for,
    from_file,
    from_folder,
    given,
    read_json,
    tried,
)
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.loading.quantized import check_whole, read_quantized
from sd_scripts.library.loading.source import Source
from sd_scripts.library.loading.writing import Lazy, original_tensors, write_file, write_folder
from sd_scripts.runs.model_headers import VAE, Header
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.model import UNetModelOptions

from . import original_unet as original
from .tokenizers import TokenizerSpec

logger = logging.getLogger(__name__)

UNET = PartSpec("unet", "UNet2DConditionModel", UNet2DConditionModel.from_config, original.unet, ("model.diffusion_model.",))
AUTOENCODER = PartSpec(
    "vae",
    "AutoencoderKL",
    AutoencoderKL.from_config,
    original.vae,
    ("first_stage_model.",),
    (VAE,),
    companion=Companion("vae", "the VAE"),
)
CLIP_L = PartSpec(
    folder="text_encoder",
    class_name="CLIPTextModel",
    make=lambda config: CLIPTextModel(CLIPTextConfig.from_dict(config)),
    layout=original.clip,
    folder_name=original.clip_in_folders,
    tokenizer=TokenizerSpec("tokenizer", "<|endoftext|>"),
    stem="model",
)
"""Without the beginnings of its names in files, which differ."""
FLOW_SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}

Refine = Callable[[FamilySpec, Source, Header | None], FamilySpec]
"""The version of a family that a folder, or a file with this header, holds; raises OptionError for what is not of the family."""


def load(
    spec: FamilySpec,
    options: UNetModelOptions,
    device: DeviceMap,
    dtype: Dtypes,
    settings: Callable[[Base], dict[str, Any]],
    refine: Refine = lambda spec, source, header: spec,
    without: Collection[str] = (),
) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoders in dtype, the VAE in options.vae_dtype.

    settings makes Parts.settings; networks named in `without` are not read. Raises OptionError with every problem that can be seen
    before weights are read.
    """
    problems: list[Problem] = []
    own = [name for name in spec.parts if name != "vae" or options.vae is None]
    base = tried(problems, lambda: _base(spec, options, own, refine, without))
    given_vae = options.vae
    vae = tried(problems, lambda: given(spec, "vae", "vae", given_vae, options.variant)) if given_vae is not None else None
    adapters = [tried(problems, partial(adapter, value)) for value in options.base_weights]
    if base is None or problems:
        raise OptionError(problems)
    if vae is not None:
        base.networks["vae"] = vae
    check_channels(base.networks)
    files, found = [path for path in adapters if path is not None], settings(base)
    return read_quantized(base, options, device, dtype, without, files, lambda modules: _parts(base, options, found, modules))


def _base(spec: FamilySpec, options: UNetModelOptions, own: list[str], refine: Refine, without: Collection[str]) -> Base:
    needed = [name for name in own if name not in without]
    source = base_source(spec, options.pretrained_model_name_or_path, options.revision, options.variant, needed)
    if not source.is_file:
        return from_folder(refine(spec, source, None), source, options.variant, own, without)
    header = read_header(source.path, BASE)
    check_kind(spec, header, source)
    version = refine(spec, source, header)
    _check_input(header, source)
    return marked(from_file(version, source, header, configs_for(version, source.path), own), header)


_FURTHER = {5: "a depth-to-image model", 8: "an InstructPix2Pix model", 9: "an inpainting model"}
"""What a UNet is that takes so many channels besides four of noise."""


def _check_input(header: Header, source: Source) -> None:
    """Raises OptionError for a single file whose UNet takes a further image."""
    shape = header.shapes.get(f"{UNET.prefixes[0]}input_blocks.0.0.weight", ())
    if len(shape) == 4 and shape[1] in _FURTHER:
        raise OptionError(
            f"{BASE}: {source.label} is {_FURTHER[shape[1]]}: its UNet takes {shape[1]} channels, the latents of a further image among "
            "them. Such models cannot be trained here; take the text-to-image model"
        )


def marked(base: Base, header: Header) -> Base:
    """The base model with what its single file says about its schedule: in its header, or by the tensors without content v_pred, ztsnr."""
    told = prediction_in(header)
    if told is not None:
        base.scheduler["prediction_type"] = told
    if "ztsnr" in header.shapes:
        base.scheduler["rescale_betas_zero_snr"] = True
    return base


_PREDICTIONS = {"epsilon": "epsilon", "eps": "epsilon", "v": "v_prediction", "v_prediction": "v_prediction", "vpred": "v_prediction"}


def prediction_in(header: Header) -> str | None:
    """What a single file says that its network predicts; None where it does not."""
    text = str(header.metadata.get("modelspec.prediction_type") or "").strip().lower().replace("-", "_")
    if text and text not in _PREDICTIONS:
        logger.warning(
            "%s says in its header that it predicts %r (modelspec.prediction_type); known are epsilon and v, so that is not looked at",
            header.path.name,
            text[:40],
        )
    return "v_prediction" if "v_pred" in header.shapes else _PREDICTIONS.get(text)


def _parts(base: Base, options: UNetModelOptions, settings: dict[str, Any], modules: Mapping[str, nn.Module]) -> Parts:
    """The model of these networks."""
    scheduler = scheduler_config(base.scheduler, options, base.spec.configs)
    return Parts(
        backbone=modules["backbone"],
        vae=modules["vae"],
        text_encoders={name: modules[name] for name in base.spec.tokenizers},
        tokenizers=base.tokenizers,
        path=diffusion.path_of(scheduler),
        kind=diffusion.kind_of(scheduler),
        scheduler_config=scheduler,
        source=base.source.label,
        settings=settings,
    )


def scheduler_config(config: Config, options: UNetModelOptions, configs: Path) -> Config:
    """The model's scheduler configuration with what the options say about it; configs is the folder of the published model's own."""
    wanted = options.prediction_type
    if wanted == "flow":
        return dict(config) if diffusion.is_flow(config) else dict(FLOW_SCHEDULER)
    changed = dict(config)
    if diffusion.is_flow(config):
        if options.zero_terminal_snr and wanted == "auto":
            raise OptionError("zero_terminal_snr belongs to noise schedules; this model is a flow-matching model and has none. Turn it off")
        if wanted != "auto":
            changed = read_json(configs / "scheduler" / "scheduler_config.json", BASE)
    if wanted != "auto":
        changed["prediction_type"] = wanted
    if options.zero_terminal_snr or changed.get("rescale_betas_zero_snr"):
        changed |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return changed


def check_channels(networks: Mapping[str, FoundNetwork]) -> None:
    """Raises OptionError when the UNet does not work on the VAE's latents, as inpainting models do not."""
    have, need = networks["backbone"].module.config.in_channels, networks["vae"].module.config.latent_channels
    if have != need:
        raise OptionError(
            f"{BASE}: the UNet takes {have} channels, but the VAE makes latents of {need}. "
            "Inpainting and edit models cannot be trained here, and the VAE must be one for this model"
        )


def save(
    spec: FamilySpec,
    parts: Parts,
    path: Path,
    save_model_as: str,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str],
    index: Mapping[str, Any],
) -> None:
    """Writes a whole model, in dtype or as it is: `safetensors` is one file of the original layout with all networks, `diffusers` a folder.

    The file carries the marks v_pred and ztsnr of such a model, tensors without content that other programs look for, too.
    """
    check_whole(*parts.modules().values())
    if save_model_as == "diffusers":
        write_folder(spec, parts, path, dtype, metadata, index)
        return
    assert save_model_as == "safetensors", f"{save_model_as} is no form of a whole model"
    tensors: dict[str, Lazy] = {}
    for name, part in spec.parts.items():
        tensors |= original_tensors(part, parts.modules()[name], dtype, part.prefixes[0])
    marks = {"v_pred": parts.kind == "v_prediction", "ztsnr": bool(parts.scheduler_config.get("rescale_betas_zero_snr"))}
    tensors |= {name: Lazy((0,), torch.float32, lambda: torch.empty(0)) for name, is_so in marks.items() if is_so}
    write_file(path, tensors, metadata)
