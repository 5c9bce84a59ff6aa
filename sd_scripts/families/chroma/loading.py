"""Load Chroma1 from a diffusers folder, a hub id, or a transformer file with its autoencoder and T5; write it again.

The published layout of a transformer is that of `double_stream_original`, without the modulation layers, which one network makes for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusers import ChromaTransformer2DModel

from sd_scripts.families.common import double_stream_original as double_stream
from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.t5 import T5_PART, T5_WORDS, settle_t5, t5_problems
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformer_shapes import count
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base, FamilySpec, PartSpec
from sd_scripts.library.loading.layouts import Stored

from .facts import TRANSFORMER
from .options import ChromaModelOptions

_APPROXIMATOR = "distilled_guidance_layer"
_RENAMED = {"linear_1": "in_layer", "linear_2": "out_layer"}
MAX_TOKENS = 512
"""Caption tokens that T5 reads."""


def _layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Where a transformer's tensors (diffusers names) stand in a published file; see layouts.Layout."""
    return double_stream.places(config, _end)


def _end(layer: str, kind: str) -> Stored | None:
    """The network that makes the modulation of all blocks from the time."""
    if not layer.startswith(f"{_APPROXIMATOR}."):
        return None
    start, _, last = layer.rpartition(".")
    return Stored(f"{layer}.scale" if start == f"{_APPROXIMATOR}.norms" else f"{start}.{_RENAMED.get(last, last)}.{kind}")


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """See transformer_loading.config_in."""
    into = shapes[f"{_APPROXIMATOR}.in_proj.weight"]
    return {
        **double_stream.config_of(shapes),
        "approximator_num_channels": into[1],
        "approximator_hidden_dim": into[0],
        "approximator_layers": count(shapes, re.escape(_APPROXIMATOR) + r"\.norms\.(\d+)\."),
    }


def _problems(base: Base, given: Sequence[str], options: ChromaModelOptions, dtype: Dtypes) -> list[str]:
    config = base.networks["backbone"].module.config
    latents, problems = 4 * base.networks["vae"].module.config.latent_channels, []
    if {config.in_channels, config.out_channels or config.in_channels} != {latents}:
        problems.append(f"{BASE}: the transformer takes {config.in_channels} numbers a token, but 2 x 2 latents of the VAE are {latents}")
    return problems + t5_problems(base, "t5xxl" if "te3" in given else BASE, options, dtype)


def _settings(options: ChromaModelOptions, base: Base | None) -> dict[str, Any]:
    room = MAX_TOKENS if base is None or "te3" not in base.tokenizers else base.tokenizers["te3"].model_max_length
    return {"t5xxl_max_token_length": options.t5xxl_max_token_length or min(MAX_TOKENS, room)}


SPEC = FamilySpec(
    name="chroma",
    label="Chroma",
    needed="a Chroma1 transformer",
    files=(TRANSFORMER,),
    pipelines=("ChromaPipeline", "ChromaImg2ImgPipeline"),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": PartSpec(
            "transformer", "ChromaTransformer2DModel", ChromaTransformer2DModel.from_config, _layout, transformer.PREFIXES
        ),
        "vae": transformer.AUTOENCODER,
        "te3": replace(T5_PART, folder="text_encoder", tokenizer=replace(T5_WORDS, folder="tokenizer")),
    },
)
LOADER = Loader(
    spec=SPEC,
    options=ChromaModelOptions,
    version=Version("chroma", "Chroma", "https://github.com/lodestone-rock/flow", is_v2=False),
    config_of=config_of,
    same=("attention_head_dim",),
    untold=("axes_dims_rope",),
    problems=_problems,
    settings=_settings,
    finish=lambda parts: settle_t5(parts.text_encoders["te3"]),
)
