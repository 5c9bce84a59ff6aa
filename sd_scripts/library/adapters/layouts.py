"""Adapter layouts: the tensors and header texts that adapters by layer become in a file.

- kohya: `lora_unet_input_blocks_4_1_proj_in.lora_down.weight`, with `.alpha`, and `.dora_scale` for dora; loha and lokr by LyCORIS's names.
  diffusers leaves `.dora_scale` out when it reads (with a warning), so a dora for diffusers needs the diffusers layout; ComfyUI divides
  by the length of the base weight instead of the updated one, so it shows a dora slightly differently.
- comfyui: the same tensors under `diffusion_model.<original path>` and `text_encoders.<clip>.transformer.<path>`; with
  `lora_A` and `lora_B` and the alpha where most files of an architecture are written so, or without an alpha where diffusers refuses one.
  diffusers and ComfyUI read these files as they are, ComfyUI not all of those with kohya's names.
- diffusers: `unet.down_blocks.1.attentions.0.proj_in.lora_A.weight` for lora and dora, the lengths of dora under peft's name, which
  diffusers reads, and as `.dora_scale`, which ComfyUI reads and diffusers leaves out.
- peft: `unet.<layer>.hada_w1_a` with peft's configuration of each network as JSON in the header (`kohya_like.peft_config`). For what
  has no common names: loha and lokr when diffusers names are asked for, and oft always (peft rotates a layer's input, kohya's and
  LyCORIS's oft its output, so no numbers in their names mean the same).

Nothing in the last two carries an alpha that all readers respect, so the scale is multiplied into one of the matrices, and every reader's
default, alpha = rank, is right.

Where kohya's name stands for several layers and no single adapter does what theirs do together (lokr, or a dora on some of them), each
layer stands under `lycoris_<its own path>`, as SimpleTuner writes it and ComfyUI reads it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from sd_scripts.library.core.protocols import StateDict

from .fusing import MAGNITUDE, fuse
from .layer_names import Names
from .maths import AdapterLayer, Kind

Layout = Literal["kohya", "diffusers", "comfyui", "peft"]
SaveModelAs = Literal["kohya", "diffusers", "comfyui"]

PEFT_CONFIG = "kohya_like.peft_config"
LAYOUT = "kohya_like.layout"

_KOHYA_REST = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight", MAGNITUDE: "dora_scale"}
_PEFT_REST = {MAGNITUDE: "dora_scale"}
"""lora_A and lora_B, with an alpha."""


def layout_for(kind: Kind, save_model_as: SaveModelAs) -> Layout:
    """The layout that a kind of adapter is written in when these names are asked for."""
    if kind == "oft" or (kind in ("loha", "lokr") and save_model_as == "diffusers"):
        return "peft"
    return save_model_as


def tensors_of(adapters: Mapping[str, AdapterLayer], names: Names, layout: Layout, dtype: torch.dtype) -> tuple[StateDict, dict[str, str]]:
    """Tensors and header texts of a file in this layout, from adapters by `<module>.<layer>`."""
    tensors: StateDict = {}
    if layout in ("kohya", "comfyui"):
        stem_of = names.to_kohya if layout == "kohya" else names.to_comfyui
        agreeing = adapters if layout == "comfyui" or not names.architecture.has_one_alpha else _one_alpha(adapters)
        wanted = names.architecture.comfyui_endings if layout == "comfyui" else "kohya"
        for stem, adapter in _stems(agreeing, names, stem_of):
            if wanted == "peft without alpha" and adapter.kind in ("lora", "dora"):
                found = _kohya_tensors(stem, adapter.rescaled(1.0), dtype, _PEFT_REST)
                tensors |= {key: tensor for key, tensor in found.items() if key != f"{stem}.alpha"}
            else:
                tensors |= _kohya_tensors(stem, adapter, dtype, _KOHYA_REST if wanted == "kohya" else _PEFT_REST)
        return tensors, {LAYOUT: layout}
    for name, adapter in adapters.items():
        stem = names.to_diffusers(name)
        for rest, tensor in adapter.rescaled(1.0).tensors.items():
            tensors[f"{stem}.{rest}"] = _magnitude_shape(rest, tensor, adapter).to(dtype)
            if rest == MAGNITUDE:
                tensors[f"{stem}.dora_scale"] = _column(tensor, adapter).to(dtype)
    return tensors, {LAYOUT: layout} | ({} if layout == "diffusers" else {PEFT_CONFIG: _peft_configs(adapters, names)})


def _stems(adapters: Mapping[str, AdapterLayer], names: Names, stem_of: Callable[[str], str]) -> Iterator[tuple[str, AdapterLayer]]:
    """The name and the adapter of every matrix of the original layout."""
    done: set[str] = set()
    for name, adapter in adapters.items():
        target = names.fused(name)
        if target is None:
            yield stem_of(name), adapter
            continue
        if name in done:
            continue
        members = {layer: adapters[layer] for layer in target.layers if layer in adapters}
        done |= members.keys()
        whole = fuse(target, members)
        if whole is not None:
            yield stem_of(name), whole
        else:
            yield from ((names.to_lycoris(layer), member) for layer, member in members.items())


def _one_alpha(adapters: Mapping[str, AdapterLayer]) -> dict[str, AdapterLayer]:
    """The same updates with one alpha for all layers of a module.

    The commonest alpha stays, so a file whose layers agree is untouched.
    """
    alphas = {name: torch.tensor(adapter.scale * adapter.rank).item() for name, adapter in adapters.items() if adapter.rank is not None}
    found = Counter((name.partition(".")[0], alpha) for name, alpha in alphas.items())
    common = {module: alpha for (module, alpha), _ in reversed(found.most_common())}
    changed = {}
    for name, adapter in adapters.items():
        alpha = common.get(name.partition(".")[0])
        if adapter.kind not in ("lora", "dora") or alpha is None or adapter.rank is None or alpha == alphas[name]:
            changed[name] = adapter
        else:
            changed[name] = adapter.rescaled(alpha / adapter.rank)
    return changed


def _magnitude_shape(rest: str, tensor: Tensor, adapter: AdapterLayer) -> Tensor:
    """peft keeps the magnitudes of a convolution as (1, o, 1, 1)."""
    if rest.startswith("lora_magnitude_vector") and adapter.tensors["lora_A.weight"].dim() == 4:
        return tensor.reshape(1, -1, 1, 1)
    return tensor


def _column(lengths: Tensor, adapter: AdapterLayer) -> Tensor:
    """LyCORIS: a length for each output is a column, (o, 1) or (o, 1, 1, 1)."""
    return lengths.reshape(-1, *[1] * (adapter.tensors["lora_A.weight"].dim() - 1))


def _kohya_tensors(stem: str, adapter: AdapterLayer, dtype: torch.dtype, endings: Mapping[str, str]) -> StateDict:
    """One adapter with kohya's or LyCORIS's endings, or those that are given."""
    rank = adapter.rank
    if rank is None:
        # Readers multiply a lokr whose two factors are both full by 1, whatever alpha says, so the scale goes into the factor.
        adapter, rank = adapter.rescaled(1.0), 1
    tensors = {}
    for rest, tensor in adapter.tensors.items():
        if rest == MAGNITUDE:
            tensor = _column(tensor, adapter)
        tensors[f"{stem}.{endings.get(rest, rest)}"] = tensor.to(dtype)
    alpha = torch.tensor(adapter.scale * rank, dtype=torch.float32)
    # In the file's precision where that is exact, as kohya's files have it; else in float32: a rounded alpha would scale everything.
    tensors[f"{stem}.alpha"] = alpha.to(dtype) if alpha.to(dtype).float() == alpha else alpha
    return tensors


def _peft_configs(adapters: Mapping[str, AdapterLayer], names: Names) -> str:
    """peft's configuration of each network, as JSON by component. It names no folder."""
    configs: dict[str, dict[str, Any]] = {}
    for name, adapter in sorted(adapters.items()):
        component, _, layer = names.to_diffusers(name).partition(".")
        config = configs.setdefault(component, {"peft_type": adapter.kind.upper(), "base_model_name_or_path": None, "target_modules": []})
        config["target_modules"].append(layer)
        if adapter.kind == "oft":
            side = round((1 + math.sqrt(1 + 8 * adapter.tensors["oft_R.weight"].shape[1])) / 2)
            config |= {"r": 0, "oft_block_size": side, "use_cayley_neumann": False}
            continue
        rank = adapter.rank or max(adapter.tensors["lokr_w2"].shape)
        config.setdefault("r", rank)
        config.setdefault("alpha", rank)
        config.setdefault("rank_pattern", {})[f"^{layer}$"] = rank
        config.setdefault("alpha_pattern", {})[f"^{layer}$"] = rank
    return json.dumps(configs, sort_keys=True)
