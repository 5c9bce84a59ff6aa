"""Names of the layers of Anima: the published ones in ComfyUI's and kohya's files, diffusers' in its own. Adapters may be on the text
conditioner and on Qwen3, too, where other programs train them."""

from __future__ import annotations

from sd_scripts.families.common import reader_rules as rules
from sd_scripts.families.common.plain_names import BlockNames, ranks_of_parts
from sd_scripts.library.adapters.architectures import Prefixes
from sd_scripts.library.adapters.readers import LORA, Rule

from .loading import LOADER

_CHOICES = {"attention_and_mlp": ("main",), "all": ("main", "modulation")}
_QWEN3 = "text_encoders.qwen3_06b.transformer.model."


def _part_of(name: str) -> str | None:
    match = BlockNames.blocks.fullmatch(name)
    return None if match is None else "modulation" if match[2].startswith("norm") else "main"


ARCHITECTURES = (
    rules.transformer_architecture(
        LOADER,
        encoders=("te2", "te1"),
        told_by=(),
        prefixes=rules.TRANSFORMER_PREFIXES
        | Prefixes(
            kohya={"te2": ("lora_unet_llm_adapter_",), "te1": ("lora_te_",)},
            diffusers={"te2": ("text_conditioner.",), "te1": ("text_encoder.",)},
            comfyui={"te2": ("diffusion_model.llm_adapter.", "model.diffusion_model.llm_adapter."), "te1": (_QWEN3,)},
        ),
        layer_names=BlockNames,
        ranks=ranks_of_parts(_part_of, _CHOICES),
        readers={
            "ComfyUI": (
                rules.PUBLISHED,
                Rule("te2", ("lora_unet_llm_adapter_", "diffusion_model.llm_adapter.")),
                Rule("te1", ("lora_te_", _QWEN3)),
            ),
            "sd-scripts": (
                Rule("backbone", ("lora_unet_",), "published", LORA),
                Rule("te2", ("lora_unet_llm_adapter_",), kinds=LORA, without="out_proj"),
                Rule("te1", ("lora_te_",), kinds=LORA),
            ),
            "diffusers": (
                *rules.PUBLISHED_DIFFUSERS,
                Rule("te2", ("text_conditioner.",), kinds=("lora", "dora")),
                Rule("te2", ("diffusion_model.llm_adapter.",), kinds=LORA),
            ),
        },
    ),
)
