"""Small models, adapters and texts whose numbers follow from their names, for which tests/data/comfyui has what ComfyUI drew."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sd_scripts import families
from sd_scripts.families import FACTS, RUNS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.core.protocols import Condition, Parts, Preview

WIDTH, HEIGHT = 64, 32
STEPS, CFG, GUIDANCE, SEED, SHIFT = 6, 2.5, 3.0, 17, 2.2
NORMS = {"block_out_channels": (32, 64), "norm_num_groups": 32}
"""ComfyUI's normalisation has 32 groups, whatever the size."""

CHROMA = {"num_layers": 19, "num_single_layers": 38, "approximator_num_channels": 64}
"""The table of modulations has the published depth there, and is asked with 64 numbers."""


KREA2 = {"intermediate_size": 128, "text_intermediate_size": 128}
"""MLPs there have multiples of 128 numbers."""


@dataclass(frozen=True)
class Case:
    """A model: its family, what of its small network is another size, and the shape of each tensor of a condition; None is a text's."""

    family: str
    texts: Mapping[str, tuple[int | None, ...]]
    changes: Mapping[str, Any]
    variant: str = ""


CASES = {
    "sd1": Case("sd", {"prompt_embeds": (77, 24)}, NORMS),
    "sd2": Case("sd", {"prompt_embeds": (77, 24)}, NORMS, "second"),
    "sdxl": Case("sdxl", {"prompt_embeds": (77, 40), "pooled": (20,)}, NORMS),
    "flux": Case("flux", {"t5": (None, 24), "pooled": (16,)}, {}),
    "zimage": Case("zimage", {"text": (None, 32)}, {}),
    "qwen_edit": Case("qwen_edit", {"text": (None, 32)}, {}, "edit-2509"),
    "qwen_image": Case("qwen_edit", {"text": (None, 32)}, {}, "image"),
    "chroma": Case("chroma", {"t5": (None, 24)}, CHROMA),
    "flux2": Case("flux2", {"text": (512, 96)}, {}),
    "kontext": Case("kontext", {"text": (None, 24)}, {}),
    "krea2": Case("krea2", {"text": (None, 384)}, KREA2),
    "anima": Case("anima", {"text": (32, 24)}, {}),
    "qwen_image21": Case("qwen_image21", {"text": (None, 32)}, {}),
}


def numbers(name: str, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """Normal numbers that follow from a name alone."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return torch.from_numpy(scale * drawn).float()


@torch.no_grad()
def settle(module: nn.Module) -> None:
    """Gives every parameter numbers that follow from its name, of a size with which the network does something."""
    for name, weight in module.named_parameters():
        if weight.ndim == 1:
            # Norms begin with ones, or with zeros where 1 is added to their weights.
            around = float(name.endswith("weight") and bool(weight.any()))
            weight.copy_(around + numbers(name, tuple(weight.shape), 0.1))
        else:
            weight.copy_(numbers(name, tuple(weight.shape), 1 / prod(weight.shape[1:]) ** 0.5))


def parts_of(name: str) -> Parts:
    """The small model of a case."""
    case = CASES[name]
    family: Any = families.family(case.family)
    if case.variant:
        parts: Parts = family.tiny(second=True) if case.variant == "second" else family.tiny(case.variant)
    else:
        parts = family.tiny()
    if name == "sd2":
        parts.scheduler_config["prediction_type"] = parts.kind = "v_prediction"
    if case.changes:
        network: Any = parts.backbone
        parts.backbone = type(network).from_config({**network.config, **case.changes})
    parts.backbone.eval().requires_grad_(False)
    settle(parts.backbone)
    return parts


def lora_of(name: str, parts: Parts, path: Path) -> None:
    """Writes a LoRA file for the network of a case, in the form that runs of its family save."""
    family, kind = families.family(CASES[name].family), RUNS[CASES[name].family, "network"].model_fields
    options: Any = kind["network"].default.model_copy(update={"network_dim": 4, "network_alpha": 3.0})
    targets = {"backbone": family.adapter_targets(parts, False)["backbone"]}
    network = attach(parts, options, targets, 0)
    network.load({key: numbers(key, tuple(tensor.shape), 0.25) for key, tensor in network.state().items()})
    saved: Any = kind["output"].default
    export(network, parts, path, save_model_as=saved.save_model_as, precision="float")
    network.detach()


def conditions_of(name: str) -> tuple[Condition, Condition]:
    """What the prompt and the negative prompt became."""
    case, found = CASES[name], []
    for side, length in (("positive", 9), ("negative", 6)):
        one = {
            entry: numbers(f"{side} {entry}", tuple(length if length_of is None else length_of for length_of in shape))
            for entry, shape in case.texts.items()
        }
        if case.family == "sdxl":
            one["time_ids"] = torch.tensor([HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH]).float()
        if controls := controls_of(name):
            one |= {f"control_{number}": control for number, control in enumerate(controls)}
        found.append(one)
    return found[0], found[1]


def controls_of(name: str) -> list[Tensor]:
    """Encoded control images, in the scale of the network."""
    shapes = {"qwen_edit": [(16, 8, 4), (16, 4, 4)], "flux2": [(128, 4, 2)], "kontext": [(16, 8, 4)]}
    return [numbers(f"control {number}", shape) for number, shape in enumerate(shapes.get(name, []))]


def request_of(sampler: str, scheduler: str, shift: float | None = None) -> Preview:
    """What is drawn."""
    return Preview("", "", WIDTH, HEIGHT, SEED, STEPS, CFG, sampler, GUIDANCE, (), scheduler, shift)


def file_of(name: str, parts: Parts, path: Path) -> None:
    """Writes the model as one file, as a run saves it."""
    families.family(CASES[name].family).save(parts, path, "safetensors", torch.float32, {})


def whole(name: str) -> bool:
    """Whether that file has all networks in it."""
    return FACTS[CASES[name].family].whole_files
