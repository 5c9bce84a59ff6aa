"""Load Qwen-Image and Qwen-Image-Edit from a diffusers folder, a hub id, or a transformer file with VAE and text encoder; write them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from sd_scripts.library import diffusion, quantize
from sd_scripts.library.loading import original_qwen, qwen_processor, qwen_templates
from sd_scripts.library.loading.common import (
    BASE,
    CONFIGS,
    Base,
    Config,
    FamilySpec,
    Found,
    PartSpec,
    adapter,
    base_source,
    check_kind,
    config_of,
    configs_for,
    dtypes_of,
    from_folder,
    given,
    merge_adapters,
    network,
    read_json,
    read_networks,
    structure,
    tokenizer_for,
    tried,
)
from sd_scripts.library.loading.headers import QWEN, QWEN_VAE, QWEN_VL, Header, read_header
from sd_scripts.library.loading.source import Source
from sd_scripts.library.loading.tokenizers import TokenizerSpec
from sd_scripts.library.loading.weights import Entry, Finish, entries
from sd_scripts.library.loading.writing import original_tensors, write_file, write_folder, write_json, write_tokenizer
from sd_scripts.library.protocols import Dtypes, Parts
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.model import QwenImageModelOptions

logger = logging.getLogger(__name__)

_WORDS = TokenizerSpec(
    "tokenizer",
    None,
    Qwen2Tokenizer,
    # Without its configuration the vocabulary does not know the marks of pictures.
    ("vocab.json", "merges.txt", "tokenizer_config.json"),
    (("Qwen/Qwen-Image", "tokenizer/"), ("Qwen/Qwen-Image-Edit-2509", "tokenizer/"), ("Qwen/Qwen-Image-Edit", "tokenizer/")),
    "Qwen2.5-VL's",
    "4.4 MB",
)
SPEC = FamilySpec(
    name="qwen_edit",
    label="Qwen-Image",
    needs="a Qwen-Image or Qwen-Image-Edit transformer",
    files=(QWEN,),
    pipelines=tuple(sorted(set(qwen_templates.PIPELINES.values()))),
    configs=CONFIGS / "qwen_image",
    parts={
        "backbone": PartSpec(
            folder="transformer",
            class_name="QwenImageTransformer2DModel",
            make=QwenImageTransformer2DModel.from_config,
            layout=original_qwen.transformer,
            prefixes=("model.diffusion_model.", "diffusion_model."),
        ),
        "vae": PartSpec(
            folder="vae",
            class_name="AutoencoderKLQwenImage",
            make=AutoencoderKLQwenImage.from_config,
            layout=original_qwen.vae,
            prefixes=("vae.",),
            kinds=(QWEN_VAE,),
        ),
        "te1": PartSpec(
            folder="text_encoder",
            class_name="Qwen2_5_VLForConditionalGeneration",
            make=lambda config: Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(config)),
            layout=original_qwen.text_encoder,
            prefixes=("text_encoders.qwen25_7b.transformer.",),
            kinds=(QWEN_VL,),
            tokenizer=_WORDS,
            stem="model",
            # Rows of text are taken before the head, which some files leave out.
            stand_ins={"lm_head.weight": "model.language_model.embed_tokens.weight"},
        ),
    },
    belongs={QWEN_VAE: "vae", QWEN_VL: "text_encoder"},
)
GIVEN = {"vae": "vae", "te1": "text_encoder"}
"""The option that names each network outside the base model."""
_USUAL = {"vae": "qwen_image_vae.safetensors", "te1": "qwen_2.5_vl_7b.safetensors"}


def load(options: QwenImageModelOptions, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoder in dtype, the VAE in options.vae_dtype.

    Networks named in `without` are not read. Raises OptionError with every problem that can be seen before weights are read.
    """
    problems: list[Problem] = []
    wanted = {"vae": options.vae, "te1": options.text_encoder}
    values = {name: value for name, value in wanted.items() if value is not None}
    base = tried(problems, lambda: _base(options, [name for name in SPEC.parts if name not in values], without))
    spec = replace(SPEC, configs=_described_by(Path(options.pretrained_model_name_or_path).expanduser())) if base is None else base.spec
    others = {
        name: tried(problems, lambda name=name, value=value: given(spec, name, GIVEN[name], value, options.variant))
        for name, value in values.items()
    }
    adapters = [tried(problems, lambda value=value: adapter(value)) for value in options.base_weights]
    if base is None or problems:
        raise OptionError(problems)
    base.networks.update({name: found for name, found in others.items() if found is not None})
    version = _version(base, options)
    if "te1" not in base.tokenizers and base.networks["te1"].tensors:
        base.tokenizers["te1"] = tokenizer_for(base, "te1")
    _check_fit(base, list(values), version)
    paths = [path for path in adapters if path is not None]
    parts = _read(base, options, device, dtype, without, version, quantized_at_once=not paths)
    if paths:
        merge_adapters(parts, paths, options.base_weights_multiplier)
        _quantize_now(parts, options, without)
    return parts


def published_scheduler() -> Config:
    """Scheduler configuration of all published versions."""
    return read_json(SPEC.configs / "scheduler" / "scheduler_config.json", BASE)


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model in dtype or as it is: `diffusers` is a folder with everything, `safetensors` the transformer alone."""
    assert not any(quantize.is_quantized(module) for module in parts.modules().values()), "a quantised model has lost its weights"
    if save_model_as == "safetensors":
        write_file(path, original_tensors(SPEC.parts["backbone"], parts.backbone, dtype, prefix=""), metadata)
        return
    index: dict[str, Any] = {"_class_name": qwen_templates.PIPELINES[parts.settings["model_version"]]}
    if parts.settings["area"] != qwen_templates.AREA:
        index["_default_side"] = round(parts.settings["area"] ** 0.5)
    if parts.processor is None:
        write_folder(SPEC, parts, path, dtype, metadata, index)
        return
    index["processor"] = ["transformers", "Qwen2VLProcessor"]

    def processor(folder: Path) -> None:
        write_tokenizer(folder / "processor", parts.tokenizers["te1"])
        write_json(folder / "processor" / "preprocessor_config.json", qwen_processor.config_of(parts.processor))

    write_folder(SPEC, parts, path, dtype, metadata, index, also=processor)


def _base(options: QwenImageModelOptions, own: Sequence[str], without: Collection[str]) -> Base:
    """The base model with the networks named in own, of which a file needs to hold only the transformer."""
    needed = [name for name in own if name not in without]
    source = base_source(SPEC, options.pretrained_model_name_or_path, options.revision, options.variant, needed)
    if not source.is_file:
        return from_folder(replace(SPEC, configs=_described_by(source.path)), source, options.variant, own, without)
    header = read_header(source.path, BASE)
    check_kind(SPEC, header, source)
    missing = [name for name in needed if name != "backbone" and not header.starts(*SPEC.parts[name].prefixes)]
    if missing:
        raise OptionError(
            f"{BASE}: {source.label} lacks {' and '.join(_NOUNS[name] for name in missing)}. Set "
            f"{' and '.join(f'{GIVEN[name]} ({_USUAL[name]})' for name in missing)}, or give a whole diffusers folder or a hub id"
        )
    configs = _described_by(source.path)
    networks = {"backbone": _transformer_in(header, source, configs, options)}
    for name in own[1:]:
        folder = configs / SPEC.parts[name].folder
        tensors = _tensors(header, name)
        if tensors and header.starts(*SPEC.parts[name].prefixes):
            config = read_json(folder / "config.json", BASE)
            networks[name] = network(SPEC, name, config, tensors, BASE, f"{_NOUNS[name]} of {source.label}")
        else:
            networks[name] = structure(SPEC, name, folder, None, BASE, f"{_NOUNS[name]} for {source.label}")
    scheduler = read_json(configs / "scheduler" / "scheduler_config.json", BASE)
    # What the published index says besides classes is not about this file.
    index = {} if configs == SPEC.configs else read_json(configs / "model_index.json", BASE)
    if not index and header.has(original_qwen.CONTROLS_AT_ZERO):
        index = {"_class_name": qwen_templates.PIPELINES["edit-2511"]}
    return Base(replace(SPEC, configs=configs), source, networks, {}, scheduler, index)


def _described_by(place: Path) -> Path:
    """The folder with the configuration of a model at this place: its own where there is one, or the published one."""
    if place.is_file():
        return configs_for(SPEC, place)
    complete = all((place / part.folder / "config.json").is_file() for part in SPEC.parts.values())
    return place if complete else SPEC.configs


_NOUNS = {"vae": "the VAE", "te1": "the text encoder Qwen2.5-VL"}


def _tensors(header: Header, name: str) -> dict[str, Entry]:
    """A network's tensors in a file, names without prefix; a transformer alone may have none."""
    prefix = next((prefix for prefix in SPEC.parts[name].prefixes if header.starts(prefix)), "")
    found = entries(header, BASE, prefix)
    return {key: entry for key, entry in found.items() if key != original_qwen.CONTROLS_AT_ZERO}


def _transformer_in(header: Header, source: Source, configs: Path, options: QwenImageModelOptions) -> Found:
    """The transformer in a file, configured by the shapes of its tensors, its own folder, and the version that it is."""
    tensors = _tensors(header, "backbone")
    marked = options.model_version == "edit-2511" or header.has(original_qwen.CONTROLS_AT_ZERO)
    try:
        config = original_qwen.config_of({name: entry.shape for name, entry in tensors.items()}, marked)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as err:
        raise OptionError(
            f"{BASE}: the transformer of {source.label} lacks the tensor {err.args[0]}, or it has no shape of Qwen-Image's"
        ) from err
    if configs != SPEC.configs:
        beside = read_json(configs / SPEC.parts["backbone"].folder / "config.json", BASE)
        if all(beside.get(key) == config[key] for key in ("attention_head_dim", "num_attention_heads")):
            config |= {key: beside[key] for key in ("axes_dims_rope", "zero_cond_t") if key in beside}
    return network(SPEC, "backbone", config, tensors, BASE, f"the transformer of {source.label}")


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
    problems = []
    if {config.in_channels, 4 * config.out_channels} != {4 * vae.z_dim}:
        problems.append(
            f"{BASE}: the transformer takes {config.in_channels} numbers a token and makes {4 * config.out_channels}, but 2 x 2 latents of "
            f"the VAE are {4 * vae.z_dim}. Layered and ControlNet models cannot be trained here"
        )
    if config.use_additional_t_cond or config.use_layer3d_rope:
        problems.append(f"{BASE}: {base.source.label} is a Qwen-Image-Layered model, which cannot be trained here")
    encoder = config_of(networks["te1"].module)
    option = GIVEN["te1"] if "te1" in given_names else BASE
    width = encoder["text_config"]["hidden_size"]
    if width != config.joint_attention_dim:
        problems.append(
            f"{option}: the text encoder makes rows of {width} numbers, but the transformer takes {config.joint_attention_dim}; "
            "Qwen-Image reads with Qwen2.5-VL-7B"
        )
    found = [Problem(problem.partition(":")[0], problem) for problem in problems]
    if "te1" in base.tokenizers:
        words, mark = base.tokenizers["te1"], encoder["image_token_id"]
        tried(found, lambda: qwen_templates.check_tokenizer(words, version, mark, option))
    if found:
        raise OptionError(found)


def _read(
    base: Base,
    options: QwenImageModelOptions,
    device: torch.device,
    dtype: Dtypes,
    without: Collection[str],
    version: str,
    quantized_at_once: bool,
) -> Parts:
    """Reads the weights, but not of the networks named in `without`."""
    side = int(base.index.get("_default_side", 0))
    area = side**2 or qwen_templates.AREA
    control_area = area if options.control_resolution is None else options.control_resolution**2
    pictures = None if version == "image" else qwen_processor.pictures_of(_picture_config(base))
    words = base.tokenizers.get("te1")
    settings = qwen_templates.settings_of(version, options.max_token_length, area, control_area, pictures)
    finishing, reports = _quantizing(base, options, without) if quantized_at_once else ({}, [])
    modules = read_networks(
        base.networks, base.source.label, device, dtypes_of(base.networks, dtype, options.vae_dtype), without, finishing
    )
    for report in reports:
        report.log()
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
        processor=None if pictures is None or words is None else qwen_processor.PictureProcessor(pictures, words),
    )


def _picture_config(base: Base) -> Config:
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


def _chosen(options: QwenImageModelOptions, without: Collection[str]) -> dict[str, str]:
    """Kind of quantisation of each network that is quantised."""
    wanted = {"backbone": options.transformer_quantization, "te1": options.text_encoder_quantization}
    return {name: kind for name, kind in wanted.items() if kind != "none" and name not in without}


def _quantizing(
    base: Base, options: QwenImageModelOptions, without: Collection[str]
) -> tuple[dict[str, tuple[Sequence[str], Finish]], list[quantize.Report]]:
    """What makes each network smaller block by block while it is read, and what there is to tell about it afterwards."""
    finishing: dict[str, tuple[Sequence[str], Finish]] = {}
    reports = []
    for name, kind in _chosen(options, without).items():
        report = quantize.Report(kind, type(base.networks[name].module).__name__)
        finishing[name] = (quantize.blocks_of(base.networks[name].module), report.quantize)
        reports.append(report)
    return finishing, reports


def _quantize_now(parts: Parts, options: QwenImageModelOptions, without: Collection[str]) -> None:
    """Quantises networks that are read already."""
    for name, kind in _chosen(options, without).items():
        quantize.quantize_network(parts.modules()[name], kind)
