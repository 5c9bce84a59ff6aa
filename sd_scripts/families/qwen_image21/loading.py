"""Load Qwen-Image-2.1 from a diffusers folder, a hub id, or a transformer file with its VAE and Qwen3-VL; write it again.

The transformer is published with diffusers' names; ComfyUI's files hold gate and up projection of each MLP as one matrix, gate first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLQwenImage21

from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.qwen3vl import QWEN3VL_PART, WORDS
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformer_shapes import count, rotary_axes
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import Base, Companion, FamilySpec, PartSpec
from sd_scripts.library.loading.layouts import Stored

from .facts import TRANSFORMER, VAE
from .network import QwenImage21Network
from .options import QwenImage21ModelOptions

_FUSED = {".img_mlp.gate_layer.": 0, ".img_mlp.proj.": 1}


def layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """Where a transformer's tensors (diffusers names) stand in ComfyUI's files; see layouts.Layout."""
    rows = int(config["num_attention_heads"]) * int(config["attention_head_dim"]) * int(config["mlp_ratio"])

    def stored(key: str) -> Stored:
        for piece, place in _FUSED.items():
            if piece in key:
                return Stored(key.replace(piece, ".img_mlp.gate_up."), "rows", (place * rows, (place + 1) * rows, 2 * rows))
        return Stored(key)

    return stored


def transformer_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """See transformer_loading.config_in."""
    width, channels = shapes["img_in.weight"]
    head, block = shapes["transformer_blocks.0.attn.norm_q.weight"][0], "transformer_blocks.0.img_mlp."
    rows = shapes[f"{block}proj.weight"][0] if f"{block}proj.weight" in shapes else shapes[f"{block}gate_up.weight"][0] // 2
    return {
        "patch_size": 1,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": count(shapes, r"transformer_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "context_in_dim": shapes["txt_in.in_layer.weight"][1],
        "mlp_ratio": rows // width,
        "axes_dims_rope": rotary_axes(head),
    }


def _problems(base: Base, given: Sequence[str], options: QwenImage21ModelOptions, dtype: Dtypes) -> list[str]:
    widths = transformer.text_width(base), base.networks["backbone"].module.config.context_in_dim
    return transformer.channel_problems(base, given) + transformer.width_problems(given, *widths, f"{SPEC.label} reads with Qwen3-VL-8B")


SPEC = FamilySpec(
    name="qwen_image21",
    label="Qwen-Image-2.1",
    files=(TRANSFORMER,),
    pipelines=("QwenImage21",),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": PartSpec("transformer", "QwenImage21Transformer2DModel", QwenImage21Network.from_config, layout, transformer.PREFIXES),
        "vae": PartSpec(
            "vae",
            "AutoencoderKLQwenImage21",
            AutoencoderKLQwenImage21.from_config,
            lambda config: Stored,
            ("vae.",),
            (VAE,),
            companion=Companion("vae", "the VAE", "qwen_image_21_vae.safetensors"),
        ),
        "te1": replace(
            QWEN3VL_PART,
            tokenizer=replace(WORDS, folder="processor"),
            companion=Companion("text_encoder", "the text encoder Qwen3-VL", "qwen3vl_8b.safetensors"),
        ),
    },
)
LOADER = Loader(
    spec=SPEC,
    options=QwenImage21ModelOptions,
    version=Version("qwen_image_21", "Qwen-Image-2.1", "https://github.com/QwenLM/Qwen-Image", is_v2=False),
    config_of=transformer_config,
    untold=("axes_dims_rope", "eps", "causal_condition"),
    problems=_problems,
    also=("processor/preprocessor_config.json", "processor/video_preprocessor_config.json"),
)
