"""Names of the layers of Anima: the published ones in ComfyUI's and kohya's files, diffusers' in its own. Adapters may be on the text
conditioner, too, where other programs train it."""

from __future__ import annotations

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import BlockNames, ranks_of_parts
from sd_scripts.library.adapters.architectures import Prefixes
from sd_scripts.library.adapters.readers import LORA, Rule

from .loading import LOADER

_CHOICES = {"attention_and_mlp": ("main",), "all": ("main", "modulation")}
_EVERYWHERE = rules.TRANSFORMER_PREFIXES


def _part_of(name: str) -> str | None:
    match = BlockNames.blocks.fullmatch(name)
    return None if match is None else "modulation" if match[2].startswith("norm") else "main"


ARCHITECTURES = (
    rules.transformer_architecture(
        LOADER,
        encoders=("te2",),
        told_by=(),
        prefixes=Prefixes(
            kohya={**_EVERYWHERE.kohya, "te2": ("lora_unet_llm_adapter_",)},
            diffusers={**_EVERYWHERE.diffusers, "te2": ("text_conditioner.",)},
            comfyui={**_EVERYWHERE.comfyui, "te2": ("diffusion_model.llm_adapter.", "model.diffusion_model.llm_adapter.")},
        ),
        layer_names=BlockNames,
        ranks=ranks_of_parts(_part_of, _CHOICES),
        readers={
            "ComfyUI": (rules.PUBLISHED, Rule("te2", ("lora_unet_llm_adapter_", "diffusion_model.llm_adapter."))),
            "sd-scripts": (
                Rule("backbone", ("lora_unet_",), "published", LORA),
                Rule("te2", ("lora_unet_llm_adapter_",), kinds=LORA, without="out_proj"),
            ),
            "diffusers": (
                *rules.PUBLISHED_DIFFUSERS,
                Rule("te2", ("text_conditioner.",), kinds=("lora", "dora")),
                Rule("te2", ("diffusion_model.llm_adapter.",), kinds=LORA),
            ),
        },
    ),
)
