"""Load Qwen-Image and Qwen-Image-Edit from a diffusers folder, a hub id, or a transformer file with VAE and text encoder; write them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.qwen_vae import QWEN_VAE_PART
from sd_scripts.families.common.tokenizers import TokenizerSpec
from sd_scripts.families.common.transformer_loading import tell
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import DeviceMap, Dtypes, Parts, Version
from sd_scripts.library.loading.common import (
    BASE,
    Base,
    Companion,
    Config,
    FamilySpec,
    PartSpec,
    config_of,
    described_by,
    read_json,
    tokenizer_for,
    tried,
)
from sd_scripts.library.loading.quantized import check_whole, read_quantized
from sd_scripts.library.loading.source import Source
from sd_scripts.library.loading.writing import write_folder, write_json, write_tokenizer
from sd_scripts.runs.model_headers import Header
from sd_scripts.schema.errors import OptionError, Problem

from . import original as original_qwen
from . import processor as qwen_processor
from . import templates as qwen_templates
from .facts import TEXT_ENCODER, TRANSFORMER
from .options import QwenImageModelOptions

logger = logging.getLogger(__name__)

_WORDS = TokenizerSpec(
    "tokenizer",
    None,
    Qwen2Tokenizer,
    # Without its configuration the vocabulary does not know the marks of images.
    ("vocab.json", "merges.txt", "tokenizer_config.json"),
    (("Qwen/Qwen-Image", "tokenizer/"), ("Qwen/Qwen-Image-Edit-2509", "tokenizer/"), ("Qwen/Qwen-Image-Edit", "tokenizer/")),
    "Qwen2.5-VL's",
    "4.4 MB",
)
SPEC = FamilySpec(
    name="qwen_edit",
    label="Qwen-Image",
    needed="a Qwen-Image or Qwen-Image-Edit transformer",
    files=(TRANSFORMER,),
    pipelines=tuple(sorted(set(qwen_templates.PIPELINES.values()))),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": PartSpec(
            folder="transformer",
            class_name="QwenImageTransformer2DModel",
            make=QwenImageTransformer2DModel.from_config,
            layout=original_qwen.transformer,
            prefixes=transformer.PREFIXES,
            unread=(original_qwen.CONTROLS_AT_ZERO,),
        ),
        "vae": QWEN_VAE_PART,
        "te1": PartSpec(
            folder="text_encoder",
            class_name="Qwen2_5_VLForConditionalGeneration",
            make=lambda config: Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(config)),
            layout=original_qwen.text_encoder,
            # transformers itself writes the names that it had at first.
            folder_name=lambda name: original_qwen.text_encoder({})(name).name,
            prefixes=("text_encoders.qwen25_7b.transformer.",),
            kinds=(TEXT_ENCODER,),
            tokenizer=_WORDS,
            stem="model",
            # Rows of text are taken before the head, which some files leave out.
            stand_ins={"lm_head.weight": "model.language_model.embed_tokens.weight"},
            companion=Companion("text_encoder", "the text encoder Qwen2.5-VL", "qwen_2.5_vl_7b.safetensors"),
        ),
    },
)
SIDE = "_default_side"
"""Entry of model_index.json with the side of images in a model that was made for another size."""
_LAYOUT = "https://github.com/QwenLM/Qwen-Image"
VERSIONS = {
    "image": Version("qwen_image", "Qwen-Image", _LAYOUT, is_v2=False),
    "edit": Version("qwen_image_edit", "Qwen-Image-Edit", _LAYOUT, is_v2=False),
    "edit-2509": Version("qwen_image_edit", "Qwen-Image-Edit-Plus", _LAYOUT, is_v2=False),
    "edit-2511": Version("qwen_image_edit", "Qwen-Image-Edit-2511", _LAYOUT, is_v2=False),
}
"""By model_version; as musubi-tuner names them."""


def load(options: QwenImageModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoder in dtype, the VAE in options.vae_dtype.

    Networks named in `without` are not read. Raises OptionError with every problem that can be seen before weights are read.
    """

    def in_file(source: Source, header: Header, own: Sequence[str]) -> Base:
        transformer.check_holds(SPEC, source, header, [name for name in own if name not in without])
        return _in_file(source, header, own, options)

    base, given_names, adapters = transformer.gather(SPEC, options, without, in_file)
    version = _version(base, options)
    if "te1" not in base.tokenizers and base.networks["te1"].tensors:
        base.tokenizers["te1"] = tokenizer_for(base, "te1")
    _check_fit(base, given_names, version)
    return read_quantized(base, options, device, dtype, without, adapters, lambda modules: _parts(base, options, version, modules))


def published_scheduler() -> Config:
    """Scheduler configuration of all published versions."""
    return transformer.scheduler_in(SPEC.configs)


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model in dtype or as it is: `diffusers` is a folder with everything, `safetensors` the transformer alone."""
    check_whole(*parts.modules().values())
    if save_model_as == "safetensors":
        transformer.save_transformer(SPEC, parts, path, dtype, metadata)
        return
    index: dict[str, Any] = {"_class_name": qwen_templates.PIPELINES[parts.settings["model_version"]]}
    if parts.settings["area"] != qwen_templates.AREA:
        index[SIDE] = round(parts.settings["area"] ** 0.5)
    images = parts.processor
    if images is None:
        write_folder(SPEC, parts, path, dtype, metadata, index)
        return
    index["processor"] = ["transformers", "Qwen2VLProcessor"]

    def processor(folder: Path) -> None:
        write_tokenizer(folder / "processor", parts.tokenizers["te1"])
        write_json(folder / "processor" / "preprocessor_config.json", qwen_processor.config_of(images))

    write_folder(SPEC, parts, path, dtype, metadata, index, also=processor)


def _in_file(source: Source, header: Header, own: Sequence[str], options: QwenImageModelOptions) -> Base:
    """The base model in a single file, its transformer configured by the shapes of its tensors, its own folder, and the version it is."""
    spec = replace(SPEC, configs=described_by(SPEC, source.path))
    marked = options.model_version == "edit-2511" or header.has(original_qwen.CONTROLS_AT_ZERO)
    config = transformer.config_in(SPEC, source, header, "Qwen-Image", lambda shapes: original_qwen.config_of(shapes, marked))
    # What the published index says besides classes is not about this file.
    index: Config = {}
    if spec.configs != SPEC.configs:
        index = read_json(spec.configs / "model_index.json", BASE)
        beside = read_json(spec.configs / SPEC.parts["backbone"].folder / "config.json", BASE)
        if all(beside.get(key) == config[key] for key in ("attention_head_dim", "num_attention_heads")):
            config |= {key: beside[key] for key in ("axes_dims_rope", "zero_cond_t") if key in beside}
    if not index and header.has(original_qwen.CONTROLS_AT_ZERO):
        index = {"_class_name": qwen_templates.PIPELINES["edit-2511"]}
    networks = transformer.networks_in(spec, source, header, config, own)
    return Base(spec, source, networks, {}, transformer.scheduler_in(spec.configs), index)


def _version(base: Base, options: QwenImageModelOptions) -> str:
    """Which version a model is. Raises OptionError where nobody says it, or where the choice contradicts the transformer."""
    at_zero = bool(base.networks["backbone"].module.config.zero_cond_t)
    name = base.index.get("_class_name")
    own = next((version for version, pipeline in qwen_templates.PIPELINES.items() if pipeline == name), None)
    if own == "edit-2509" and at_zero:
        own = "edit-2511"
    chosen = options.model_version
    if chosen == "auto":
        if own is None:
            raise OptionError(
                f"model_version: the single file {base.source.label} does not say which Qwen-Image it is; choose edit, edit-2509, "
                "edit-2511 or image"
            )
        return own
    if at_zero != (chosen == "edit-2511"):
        what = "has zero_cond_t, as only edit-2511 has" if at_zero else "has no zero_cond_t, as edit-2511 has"
        raise OptionError(f"model_version: {chosen} is chosen, but the transformer of {base.source.label} {what}; take auto")
    if own is not None and chosen != own:
        logger.warning("model_version: %s says that it is %s; it is used as %s, as was chosen", base.source.label, own, chosen)
    return chosen


def _check_fit(base: Base, given_names: Sequence[str], version: str) -> None:
    """Raises OptionError when the transformer does not work on the VAE's latents or the encoder's text, or the tokenizer is another."""
    networks = base.networks
    config, vae = networks["backbone"].module.config, networks["vae"].module.config
    problems: list[str | Problem] = []
    if {config.in_channels, 4 * config.out_channels} != {4 * vae.z_dim}:
        problems.append(
            f"{BASE}: the transformer takes {config.in_channels} numbers a token and makes {4 * config.out_channels}, but 2 x 2 latents of "
            f"the VAE are {4 * vae.z_dim}. Layered and ControlNet models cannot be trained here"
        )
    if config.use_additional_t_cond or config.use_layer3d_rope:
        problems.append(f"{BASE}: {base.source.label} is a Qwen-Image-Layered model, which cannot be trained here")
    encoder = config_of(networks["te1"].module)
    option = "text_encoder" if "te1" in given_names else BASE
    width = transformer.text_width(base)
    problems += transformer.width_problems(given_names, width, config.joint_attention_dim, "Qwen-Image reads with Qwen2.5-VL-7B")
    if "te1" in base.tokenizers:
        words, mark = base.tokenizers["te1"], encoder["image_token_id"]
        tried(problems, lambda: qwen_templates.check_tokenizer(words, version, mark, option))
    tell(problems)


def _parts(base: Base, options: QwenImageModelOptions, version: str, modules: Mapping[str, nn.Module]) -> Parts:
    """The model of these networks."""
    side = int(base.index.get(SIDE, 0))
    area = side**2 or qwen_templates.AREA
    control_area = area if options.control_resolution is None else options.control_resolution**2
    images = None if version == "image" else qwen_processor.images_of(_image_config(base))
    words = base.tokenizers.get("te1")
    settings = qwen_templates.settings_of(version, options.max_token_length, area, control_area, images)
    return Parts(
        backbone=modules["backbone"],
        vae=modules["vae"],
        text_encoders={"te1": modules["te1"]},
        tokenizers=base.tokenizers,
        path=diffusion.path_of(base.scheduler),
        kind=diffusion.kind_of(base.scheduler),
        scheduler_config=dict(base.scheduler),
        source=base.source.label,
        settings=settings,
        processor=None if images is None or words is None else qwen_processor.ImageProcessor(images, words),
    )


def _image_config(base: Base) -> Config:
    """Configuration of the image processor: of the base model, of the text encoder's folder, or the published one."""
    entry = next(iter(base.networks["te1"].tensors.values()), None)
    beside = [] if entry is None else [entry[0].path.parent, entry[0].path.parent.parent]
    own = base.source.path.parent if base.source.is_file else base.source.path
    for root in (own, *beside):
        for folder in (root / "processor", root):
            if (folder / "preprocessor_config.json").is_file():
                return read_json(folder / "preprocessor_config.json", BASE)
            if (folder / "processor_config.json").is_file():
                config = read_json(folder / "processor_config.json", BASE).get("image_processor")
                if config is not None:
                    return dict(config)
    return read_json(SPEC.configs / "processor" / "preprocessor_config.json", BASE)
