"""Convert an adapter file between the names of kohya, diffusers and ComfyUI, some layers at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.adapters.layouts import LAYOUT, PEFT_CONFIG, Layout, layout_for, tensors_of
from sd_scripts.library.adapters.maths import AdapterLayer, product_distance
from sd_scripts.schema.errors import OptionError, Problem, gathering, refuse
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.tools import ConvertSection

from .adapters import DTYPES, AdapterFile, header_of_new, in_precision, layers_for, on_layers, open_adapter, with_alpha
from .low_rank import product_norm
from .report import Report, size_text
from .tensor_files import Spool, open_file

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def convert(options: ConvertSection) -> Report:
    """Writes the file under other names, then reads it back and compares. Raises OptionError, and writes nothing, where that cannot be."""
    opened = open_adapter(options.model, "model")
    target = Path(options.save_to).expanduser()
    if target.suffix != ".safetensors":
        raise OptionError(f"save_to: {target.name} has to end with .safetensors")
    layers, sized = layers_for(opened, options.base_model)
    source = on_layers(opened, layers, checks_shapes=sized)
    alphas = _alphas(source)
    stored = [dtype for dtype in sorted(opened.dtypes, key=lambda dtype: -opened.dtypes[dtype]) if dtype in _FLOATS]
    dtype = DTYPES.get(options.save_precision) or (stored[0] if stored else torch.float32)
    texts: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    with Spool(target) as spool:
        for group in Bar(source.groups, desc="converting", unit="layer", delay=2, leave=False):
            by_kind: dict[Layout, dict[str, AdapterLayer]] = {}
            for name, adapter in source.read(group).items():
                by_kind.setdefault(layout_for(adapter.kind, options.save_model_as), {})[name] = _settled(name, adapter, alphas)
                kinds[adapter.kind] += 1
            for layout, members in by_kind.items():
                tensors, own = tensors_of(members, layers.names, layout, torch.float32)
                spool.add(in_precision(tensors, dtype))
                texts = _joined(texts, own)
        spool.finish(header_of_new([opened], texts))
    try:
        distance = _distance(source, on_layers(open_file(target, "save_to"), layers, checks_shapes=sized))
    except OptionError:
        target.unlink()
        raise
    lines = [
        f"converted {source.label} ({layers.architecture.label}, {_counts(kinds)}) to {texts[LAYOUT]} names: {target.name}, "
        f"{size_text(target.stat().st_size)}",
        f"read back: largest relative difference of a layer {distance:.2g}",
    ]
    values = {"family": layers.architecture.name, "layout": texts[LAYOUT], "kinds": dict(kinds), "largest_relative_difference": distance}
    return Report(lines, values)


def _alphas(source: AdapterFile) -> dict[str, float]:
    """The commonest alpha of each network. Reads everything once and so finds what is broken before anything is written."""
    found: Counter[tuple[str, float]] = Counter()
    problems: list[Problem] = []
    for group in Bar(source.groups, desc=f"checking {source.label}", unit="layer", delay=2, leave=False):
        with gathering(problems):
            for name, adapter in source.read(group).items():
                if adapter.rank is not None:
                    found[name.partition(".")[0], torch.tensor(adapter.scale * adapter.rank).item()] += 1
    refuse(problems)
    return {module: alpha for (module, alpha), _ in reversed(found.most_common())}


def _settled(name: str, adapter: AdapterLayer, alphas: Mapping[str, float]) -> AdapterLayer:
    """The same update with the alpha that is commonest in its network; see with_alpha."""
    alpha = alphas.get(name.partition(".")[0])
    if alpha is None or alpha <= 0 or adapter.kind not in ("lora", "dora") or adapter.scale == 0:
        return adapter
    return with_alpha(adapter, alpha)


def _joined(texts: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Header texts of several parts of a file: peft's configurations are put together."""
    joined = {**texts, **more}
    if PEFT_CONFIG in texts and PEFT_CONFIG in more:
        configs: dict[str, Any] = json_of(texts[PEFT_CONFIG])
        for component, config in json_of(more[PEFT_CONFIG]).items():
            known = configs.setdefault(component, config)
            if known is not config:
                known["target_modules"] += config["target_modules"]
                for pattern in ("rank_pattern", "alpha_pattern"):
                    if pattern in config:
                        known.setdefault(pattern, {}).update(config[pattern])
        joined[PEFT_CONFIG] = json.dumps(configs, sort_keys=True)
    return joined


def _distance(source: AdapterFile, written: AdapterFile) -> float:
    """The largest relative difference of a lora or dora layer's update. Raises OptionError when a layer was lost."""
    largest = 0.0
    for group in Bar(source.groups, desc="reading back", unit="layer", delay=2, leave=False):
        old, new = source.read(group), written.read(group)
        if lost := [name for name, adapter in old.items() if name not in new and norm_of(adapter) != 0.0]:
            raise OptionError(f"save_to: the written file lacks {lost[0]}; please report this")
        for name, adapter in old.items():
            if adapter.kind in ("lora", "dora") and name in new and norm_of(adapter):
                largest = max(largest, product_distance(adapter, new[name]) / norm_of(adapter))
    return largest


def norm_of(adapter: AdapterLayer) -> float:
    """Frobenius norm of the update of a lora or dora before its normalisation; 1 for other kinds."""
    if adapter.kind not in ("lora", "dora"):
        return 1.0
    up, down = adapter.tensors["lora_B.weight"].flatten(1), adapter.tensors["lora_A.weight"].flatten(1)
    return abs(adapter.scale) * product_norm(up, down)


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} layers: {count}" for kind, count in kinds.items())
