"""What the tensors of an adapter file mean, whoever wrote it. Knows contents of files; opening them is the business of `files`.

Understood are the names of kohya, LyCORIS, diffusers, peft, ComfyUI, ai-toolkit, SimpleTuner, OneTrainer and XLabs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

from .fusing import MAGNITUDE, split
from .layer_names import Names, Target
from .layers import examples
from .layouts import PEFT_CONFIG
from .maths import AdapterLayer, Kind

# Every ending of a key that is understood, and the tensor it is in peft's words.
_ENDINGS = {
    "lora_down.weight": "lora_A.weight",
    "lora_up.weight": "lora_B.weight",
    "dora_scale": MAGNITUDE,
    "alpha": "alpha",
    "lora_A.weight": "lora_A.weight",
    "lora_B.weight": "lora_B.weight",
    "lora_A.default.weight": "lora_A.weight",
    "lora_B.default.weight": "lora_B.weight",
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "lora.down.weight": "lora_A.weight",
    "lora.up.weight": "lora_B.weight",
    "lora_linear_layer.down.weight": "lora_A.weight",
    "lora_linear_layer.up.weight": "lora_B.weight",
    "lora_magnitude_vector": MAGNITUDE,
    "lora_magnitude_vector.weight": MAGNITUDE,
    "lora_magnitude_vector.default.weight": MAGNITUDE,
    "oft_R.weight": "oft_R.weight",
    **{name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
    **{name: name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
}
_KEY = re.compile(r"(.+?)\.(" + "|".join(re.escape(ending) for ending in sorted(_ENDINGS, key=len, reverse=True)) + r")")
# Written before peft: unet...attn1.processor.to_q_lora.down.weight, and x-flux's double_blocks.0.processor.qkv_lora1.down.weight
_PROCESSOR = re.compile(r"(.+)\.processor\.(\w+?_lora\d?)\.(down|up)\.weight")
_ATTENTION = re.compile(r"to_(q|k|v|out)_lora")

# Endings whose meaning is known and which nothing here can do, and why.
_UNSUPPORTED = {
    "CP-decomposed (tucker) convolutions": ("lora_mid.weight", "hada_t1", "hada_t2", "lokr_t1", "lokr_t2"),
    "whole differences of weights or biases": ("diff", "diff_b", "set_weight", "w_norm", "b_norm"),
    "GLoRA matrices": ("a1.weight", "a2.weight", "b1.weight", "b2.weight"),
    "kohya's or LyCORIS's oft, which turns outputs where peft's turns inputs": ("oft_blocks", "oft_diag", "rescale"),
}


def adapters_of(
    tensors: Mapping[str, Tensor], header: Mapping[str, str], names: Names, file: str, shapes: Mapping[str, torch.Size] | None = None
) -> dict[str, AdapterLayer]:
    """The adapter of each layer `<module>.<layer>` from a file's tensors, float32. A missing alpha means the rank.

    shapes: of the layers' weights, to check that the file is for this model; None checks nothing. Raises OptionError, listing some, for
    keys that fit no layer.
    """
    found: dict[Target, dict[str, Tensor]] = {}
    unknown, twice = [], []
    for key, tensor in tensors.items():
        place = place_of(key, names)
        if place is None:
            unknown.append(key)
            continue
        target, rest = place
        held = found.setdefault(target, {})
        value = _canonical_magnitude(tensor, key) if rest == MAGNITUDE else tensor.float()
        # A dora's lengths may stand there for two programs, each by its own name.
        twice += [key] if rest in held and not (rest == MAGNITUDE and torch.equal(held[rest], value)) else []
        held[rest] = value
    if unknown or not found:
        raise OptionError(refusal(file, unknown, len(tensors)))
    scales = _header_scales(header, names, found)
    adapters: dict[str, AdapterLayer] = {}
    for target, held in found.items():
        for name, adapter in _split(target, _adapter(target, held, scales.get(target.layers[0]), file), file).items():
            twice += [name] if name in adapters else []
            adapters[name] = adapter
    if twice:
        raise OptionError(f"{file} holds some layers twice, under two names: {examples(twice, 3)}; it is not clear which one counts")
    if shapes is not None:
        for name, adapter in adapters.items():
            _check_fit(name, adapter, shapes[name], file)
    return adapters


def refusal(file: str, unknown: list[str], count: int) -> str:
    """The sentence about a file with these keys, of `count`, that fit no layer; with none it is empty."""
    for what, endings in _UNSUPPORTED.items():
        held = [key for key in unknown if key.endswith(tuple(f".{ending}" for ending in endings))]
        if held:
            return f"{file} cannot be used: it holds {what} ({examples(held, 3)}), which are not supported"
    what = f"{len(unknown)} of {count} keys fit no layer of this model, such as {examples(unknown, 3)}" if unknown else "it is empty"
    return f"{file} cannot be used: {what}. It must be an adapter for this model family, with kohya's, diffusers' or ComfyUI's names"


def split_key(key: str) -> tuple[str, str] | None:
    """The name of a layer as the file writes it, and the tensor in peft's words (or `alpha`); None for no adapter's key."""
    old = _PROCESSOR.fullmatch(key)
    if old:
        return f"{old[1]}.processor.{old[2]}", "lora_A.weight" if old[3] == "down" else "lora_B.weight"
    match = _KEY.fullmatch(key)
    return None if match is None else (match[1], _ENDINGS[match[2]])


def place_of(key: str, names: Names) -> tuple[Target, str] | None:
    """What a key stands for, and which tensor it is in peft's words; None for neither. Takes what torch.compile and peft put before it."""
    parts = split_key(key.replace("_orig_mod.", "").replace("base_model.model.", ""))
    if parts is None:
        return None
    block, processor, which = parts[0].rpartition(".processor.")
    attention = _ATTENTION.fullmatch(which) if processor else None
    stem = f"{block}.to_{attention[1]}{'.0' if attention[1] == 'out' else ''}" if attention else parts[0]
    target = names.find(stem)
    return None if target is None else (target, parts[1])


def _header_scales(header: Mapping[str, str], names: Names, found: Mapping[Target, Mapping[str, Tensor]]) -> dict[str, float]:
    """alpha / rank of the layers for which a header of peft's or diffusers' says it."""
    scales = _peft_scales(header, names)
    for target, held in found.items():
        name = target.layers[0]
        if target.is_plain and name not in scales and "alpha" not in held and "lora_A.weight" in held:
            component, _, layer = names.to_diffusers(name).partition(".")
            scale = diffusers_scale(header, component, layer, held["lora_A.weight"].shape[0])
            scales |= {} if scale is None else {name: scale}
    return scales


def _peft_scales(header: Mapping[str, str], names: Names) -> dict[str, float]:
    """alpha / rank of each layer from the peft configuration that files in the peft layout carry."""
    scales = {}
    for component, config in json_of(header.get(PEFT_CONFIG, "{}")).items():
        for layer in config["target_modules"]:
            target = names.from_diffusers(f"{component}.{layer}")
            if target is not None and config["r"]:
                scales[target.layers[0]] = config["alpha_pattern"][f"^{layer}$"] / config["rank_pattern"][f"^{layer}$"]
    return scales


def diffusers_scale(header: Mapping[str, str], component: str, layer: str, rank: int) -> float | None:
    """alpha / rank of a layer from the header that diffusers' save_lora_weights writes, or None without one."""
    config = json_of(header.get("lora_adapter_metadata", "{}"))
    alpha = config.get(f"{component}.lora_alpha")
    if alpha is None:
        return None
    for pattern, own in (config.get(f"{component}.alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            alpha = own
            break
    return alpha / (math.sqrt(rank) if config.get(f"{component}.use_rslora") else rank)


def _adapter(target: Target, held: dict[str, Tensor], scale: float | None, file: str) -> AdapterLayer:
    """The adapter of one target, checked to be complete."""
    alpha = held.pop("alpha", None)
    kind = _kind(held)
    if kind is None:
        has = ", ".join(sorted(held)) or "alpha"
        raise OptionError(f"{file}: {target.layers[0]} has only {has}, which is not a whole adapter; the file is incomplete")
    adapter = AdapterLayer(kind, held)
    rank = adapter.rank
    if scale is None:
        scale = 1.0 if alpha is None or rank is None else float(alpha) / rank
    return AdapterLayer(kind, held, scale)


def _split(target: Target, adapter: AdapterLayer, file: str) -> dict[str, AdapterLayer]:
    try:
        return split(target, adapter)
    except ValueError as err:
        raise OptionError(f"{file}: the {adapter.kind} of {examples(target.layers)} cannot be taken apart: {err}") from err


_WHOLE: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("lora", frozenset({"lora_A.weight", "lora_B.weight"})),
    ("dora", frozenset({"lora_A.weight", "lora_B.weight", MAGNITUDE})),
    ("loha", frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"})),
    ("oft", frozenset({"oft_R.weight"})),
)


def _kind(held: Mapping[str, Tensor]) -> Kind | None:
    """The kind of adapter that exactly these tensors make."""
    names = frozenset(held)
    for kind, whole in _WHOLE:
        if names == whole:
            return kind
    first = names & {"lokr_w1", "lokr_w1_a", "lokr_w1_b"}
    second = names & {"lokr_w2", "lokr_w2_a", "lokr_w2_b"}
    halves = ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"}), ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"})
    return "lokr" if names == first | second and first in halves[0] and second in halves[1] else None


def _canonical_magnitude(magnitude: Tensor, key: str) -> Tensor:
    """(o,) for dora lengths by output; LyCORIS's lengths by input, (1, i) and (1, i, 1, 1), stay. See maths.magnitude_like.

    peft's are always by output, though it writes (1, o, 1, 1) for a convolution.
    """
    by_input = key.endswith("dora_scale") and magnitude.dim() > 1 and magnitude.shape[0] == 1
    return magnitude.float() if by_input else magnitude.float().flatten()


def _check_fit(name: str, adapter: AdapterLayer, shape: torch.Size, file: str) -> None:
    if not _fits(adapter, shape):
        sizes = ", ".join(f"{rest} {tuple(tensor.shape)}" for rest, tensor in sorted(adapter.tensors.items()))
        raise OptionError(f"{file}: {name} has {sizes}, which does not fit a layer of size {tuple(shape)}; it is for another model")


def _fits(adapter: AdapterLayer, shape: torch.Size) -> bool:
    """Whether the update has as many numbers as the layer's weight, and the factors its sides."""
    out, inputs = shape[0], math.prod(shape[1:])
    t = adapter.tensors
    if adapter.kind in ("lora", "dora"):
        down, up = t["lora_A.weight"].flatten(1), t["lora_B.weight"].flatten(1)
        good = down.shape[1] == inputs and up.shape == (out, down.shape[0])
        magnitude = t.get(MAGNITUDE)
        return good and (magnitude is None or magnitude.numel() == (out if magnitude.dim() == 1 else shape[1]))
    if adapter.kind == "loha":
        return all(t[f"hada_w{i}_a"].shape[0] == out and t[f"hada_w{i}_b"].flatten(1).shape[1] == inputs for i in (1, 2))
    if adapter.kind == "lokr":
        sides = [_lokr_sides(t, factor) for factor in ("lokr_w1", "lokr_w2")]
        return sides[0][0] * sides[1][0] == out and sides[0][1] * sides[1][1] == inputs
    blocks, elements = t["oft_R.weight"].shape
    return len(shape) == 2 and blocks * round((1 + math.sqrt(1 + 8 * elements)) / 2) == inputs


def _lokr_sides(tensors: Mapping[str, Tensor], factor: str) -> tuple[int, int]:
    if factor in tensors:
        return tensors[factor].shape[0], tensors[factor].flatten(1).shape[1]
    return tensors[f"{factor}_a"].shape[0], tensors[f"{factor}_b"].flatten(1).shape[1]
