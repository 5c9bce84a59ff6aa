"""kohya's words for what there is here as well: the one list that command lines, files of options and the page's settings are read with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sd_scripts.families import FACTS

from .optimizer import OPTIMIZERS
from .samples import SAMPLERS as OUR_SAMPLERS

DEFAULTS: dict[str, object] = {
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "enable_bucket": False,
    "bucket_no_upscale": False,
    "max_bucket_reso": 1024,
    "learning_rate": 2e-6,
    "network_dim": 4,
    "network_alpha": 1.0,
}
"""Defaults of kohya's scripts of all families, where they are others than ours and change what is trained; a family's own are facts."""

OPTIMIZERS_BY_NAME = {**{name.lower(): name for name in OPTIMIZERS}, "pagedadamw32bit": "AdamW", "pagedlion8bit": "Lion8bit"}
"""Optimizers that compute the same, in small letters: pages and bits save memory only."""
FILE_PRECISIONS = {"float32": "float", "fp32": "float", "float16": "fp16", "bfloat16": "bf16"}
SAMPLERS = {"dpmsolver": "dpmsolver++", "dpmsingle": "dpmsolver++", "auto": "auto"} | {name: name for name in OUR_SAMPLERS}
"""Samplers of previews, without the k_ before their names."""
LINEAR_ONLY = ("attn-mlp", "attn-only", "unet-transformer-only", "full-lin")
"""LyCORIS's presets that leave convolutions alone."""
SWITCHES: Mapping[str, Mapping[str, object]] = {
    "use_8bit_adam": {"optimizer_type": "AdamW8bit"},
    "use_lion_optimizer": {"optimizer_type": "Lion"},
    "v_parameterization": {"prediction_type": "v_prediction"},
    "no_half_vae": {"vae_dtype": "float"},
    "no_metadata": {"metadata": "minimal"},
    "fp8_base": {"transformer_quantization": "fp8"},
    "fp8_base_unet": {"transformer_quantization": "fp8"},
    "fp8_scaled": {"transformer_quantization": "qfloat8"},
    "cpu_offload_checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_cpu_offload": True},
    "unsloth_offload_checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_cpu_offload": True},
    "torch_compile": {"compile": True},
    "network_train_unet_only": {"train_text_encoder": False},
    "network_train_text_encoder_only": {"train_text_encoder": True, "train_unet": False, "cache_text_encoder_outputs": False},
}
"""Switches whose meaning, when they are on, is that of these options."""


@dataclass(frozen=True)
class AdapterType:
    """One of kohya's or LyCORIS's types: ours, whether it adapts convolutions, and what is lost."""

    ours: str
    convolutions: bool = False
    lost: str = ""


_DYLORA = "ranks are not trained one by one (DyLoRA); an ordinary LoRA of the full rank is, and the resize tool makes it smaller"
_FROZEN = "both matrices are trained; LoRA-FA, which freezes one of them, is not made"
TYPES = {
    "standard": AdapterType("lora"),
    "lora": AdapterType("lora"),
    "lora-fa": AdapterType("lora", lost=_FROZEN),
    "locon": AdapterType("lora", convolutions=True),
    "dylora": AdapterType("lora", convolutions=True, lost=_DYLORA),
    "loha": AdapterType("loha", convolutions=True),
    "lokr": AdapterType("lokr", convolutions=True),
    "oft": AdapterType("oft"),
    "diag-oft": AdapterType("oft", lost="peft's OFT takes its place; its blocks have oft_block_size, and convolutions are left alone"),
    "transformer": AdapterType("lora"),
    "transformer oft": AdapterType("oft", lost="kohya's rank is the number of blocks, oft_block_size here is their side; check it"),
    "boft": AdapterType("oft", lost="orthogonal blocks without butterflies (OFT) are the nearest there is"),
    "glora": AdapterType("lora", convolutions=True, lost="GLoRA is not made; LoRA is the nearest there is"),
    "ia3": AdapterType("lora", lost="iA3 is not made; a LoRA of a small rank is the nearest there is, with a learning rate about a tenth"),
    "native fine-tuning": AdapterType(
        "lora", lost="a whole model in an adapter file is not made; use the DreamBooth and fine-tuning script"
    ),
}
MODULES = {
    "networks.lora": "standard",
    "networks.lora_fa": "lora-fa",
    "networks.dylora": "dylora",
    "networks.oft": "diag-oft",
    "networks.loha": "loha",
    "networks.lokr": "lokr",
}
OF_ONE_FAMILY = {name: kind for facts in FACTS.values() if facts.kohya for name, kind in facts.kohya.types.items()}
"""Modules and types of adapters for one family alone."""
ALGORITHMS = {"lora": "locon", "locon": "locon", "full": "native fine-tuning"}
"""LyCORIS's algorithms whose names are others than those of the types."""
