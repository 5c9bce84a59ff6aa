"""What other programs read of adapters on networks that several families have; see library.adapters.readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from sd_scripts.library.adapters.architectures import Architecture, Prefixes
from sd_scripts.library.adapters.layer_names import LayerNames
from sd_scripts.library.adapters.ranks import Ranks
from sd_scripts.library.adapters.readers import LORA, SUMS, Rule

from .transformer_loading import Loader

CLIP_L = "text_encoders.clip_l.transformer."
CLIP_H = "text_encoders.clip_h.transformer."
"""How ComfyUI names text encoders; Forge does not know these."""
TE1 = ("lora_te1_", "lora_te_", "text_encoder.")
COMFYUI_TE1 = Rule("te1", (*TE1, CLIP_L, CLIP_H))
FORGE_TE1 = Rule("te1", TE1)
DIFFUSERS_TE1 = Rule("te1", ("text_encoder.",), kinds=("lora", "dora"))

PUBLISHED = Rule("backbone", ("lora_unet_", "diffusion_model."), "published")
UNET_COMFYUI = (PUBLISHED, Rule("backbone", ("lora_unet_", "lycoris_")), Rule("backbone", ("unet.", ""), "processor"))
"""ComfyUI and Forge."""
UNET_DIFFUSERS = (Rule("backbone", ("unet.",), kinds=("lora", "dora")), Rule("backbone", ("lora_unet_",), kinds=LORA))

TRANSFORMER_PREFIXES = Prefixes(
    kohya={"backbone": ("lora_unet_", "lora_transformer_", "lycoris_")},
    diffusers={"backbone": ("transformer.",)},
    comfyui={"backbone": ("diffusion_model.", "model.diffusion_model.")},
)
"""Of adapters on a transformer alone."""
TRANSFORMER_COMFYUI = (PUBLISHED, Rule("backbone", ("transformer.", "lycoris_", "")))
TRANSFORMER_MUSUBI = (Rule("backbone", ("lora_unet_",), kinds=SUMS),)
TRANSFORMER_DIFFUSERS = (
    Rule("backbone", ("transformer.",), kinds=("lora", "dora")),
    Rule("backbone", ("lora_unet_", "diffusion_model."), kinds=LORA),
)
PUBLISHED_MUSUBI = (Rule("backbone", ("lora_unet_",), "published", SUMS),)
PUBLISHED_DIFFUSERS = (TRANSFORMER_DIFFUSERS[0], Rule("backbone", ("diffusion_model.",), "published", LORA))
"""Of a transformer whose layers have other names in published files."""


def transformer_architecture(
    loader: Loader,
    *,
    told_by: tuple[str, ...],
    layer_names: type[LayerNames],
    ranks: Callable[[Any, Any], Ranks],
    readers: Mapping[str, tuple[Rule, ...]],
    label: str | None = None,
    encoders: tuple[str, ...] = (),
    prefixes: Prefixes = TRANSFORMER_PREFIXES,
    # diffusers stops at an alpha under these names.
    comfyui_endings: Literal["kohya", "peft", "peft without alpha"] = "peft without alpha",
) -> Architecture:
    """What adapters are for in a family of one version; see Architecture."""
    return Architecture(
        name=loader.spec.name,
        label=label or loader.spec.label,
        spec=loader.spec,
        is_backbone=lambda config: True,
        config_of=lambda header, shapes: loader.config_of(shapes),
        files=loader.spec.files,
        encoders=encoders,
        version=loader.version,
        told_by=told_by,
        prefixes=prefixes,
        layer_names=layer_names,
        ranks=ranks,
        has_one_alpha=False,
        comfyui_endings=comfyui_endings,
        readers=readers,
    )
