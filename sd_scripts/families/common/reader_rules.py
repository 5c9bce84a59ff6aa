"""What other programs read of adapters on networks that several families have; see library.adapters.readers."""

from __future__ import annotations

from sd_scripts.library.adapters.architectures import Prefixes
from sd_scripts.library.adapters.readers import LORA, SUMS, Rule

CLIP_L = "text_encoders.clip_l.transformer."
CLIP_G = "text_encoders.clip_g.transformer."
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
