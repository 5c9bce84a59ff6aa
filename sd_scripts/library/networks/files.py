"""Adapter files: kohya's and diffusers' names out and in, and the proof that a written file does what was trained.

Layouts
- kohya: `lora_unet_input_blocks_4_1_proj_in.lora_down.weight`, with `.alpha`, and `.dora_scale` for dora; loha and lokr by LyCORIS's names.
  diffusers leaves `.dora_scale` out when it reads (with a warning), so a dora for diffusers needs the diffusers layout; ComfyUI divides
  by the length of the base weight instead of the updated one, so it shows a dora slightly differently.
- diffusers: `unet.down_blocks.1.attentions.0.proj_in.lora_A.weight` for lora and dora. Nothing in this layout carries an alpha that
  all readers respect, so the scale is multiplied into the up matrix and every reader's default, alpha = rank, is right.
- peft: `unet.<layer>.hada_w1_a` with peft's configuration of each network as JSON in the header (`kohya_like.peft_config`). For what
  has no common names: loha and lokr when diffusers names are asked for, and oft always (peft rotates a layer's input, kohya's and
  LyCORIS's oft its output, so no numbers in their names mean the same).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sd_scripts.library import metadata as metadata_texts
from sd_scripts.library.errors import TrainingError
from sd_scripts.library.protocols import Parts, StateDict
from sd_scripts.library.safetensors_file import read_file, serialise
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically

from .layer_names import Names, layers_of
from .layers import examples
from .maths import AdapterLayer, Kind, low_rank_update, product_distance
from .names import names_of
from .network import Network

Layout = Literal["kohya", "diffusers", "peft"]
Precision = Literal["float", "fp16", "bf16"]

DTYPES: dict[str, torch.dtype] = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PEFT_CONFIG = "kohya_like.peft_config"
LAYOUT = "kohya_like.layout"

_KOHYA_REST = {
    "lora_A.weight": "lora_down.weight",
    "lora_B.weight": "lora_up.weight",
    "lora_magnitude_vector.weight": "dora_scale",
}
# Every ending of a key that is understood, and the tensor it is in peft's words. Longer ones come first.
_ENDINGS = {
    "lora_down.weight": "lora_A.weight",
    "lora_up.weight": "lora_B.weight",
    "dora_scale": "lora_magnitude_vector.weight",
    "alpha": "alpha",
    "lora_A.weight": "lora_A.weight",
    "lora_B.weight": "lora_B.weight",
    "lora_A.default.weight": "lora_A.weight",
    "lora_B.default.weight": "lora_B.weight",
    "lora.down.weight": "lora_A.weight",
    "lora.up.weight": "lora_B.weight",
    "lora_linear_layer.down.weight": "lora_A.weight",
    "lora_linear_layer.up.weight": "lora_B.weight",
    "lora_magnitude_vector": "lora_magnitude_vector.weight",
    "lora_magnitude_vector.weight": "lora_magnitude_vector.weight",
    "lora_magnitude_vector.default.weight": "lora_magnitude_vector.weight",
    "oft_R.weight": "oft_R.weight",
    **{name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
    **{name: name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
}
_KEY = re.compile(r"(.+?)\.(" + "|".join(re.escape(ending) for ending in sorted(_ENDINGS, key=len, reverse=True)) + r")")
# diffusers before peft: unet...attn1.processor.to_q_lora.down.weight
_OLD_ATTENTION = re.compile(r"(.+)\.processor\.(to_q|to_k|to_v|to_out)_lora\.(down|up)\.weight")


def layout_for(kind: Kind, save_model_as: Literal["kohya", "diffusers"]) -> Layout:
    """The layout that a kind of adapter is written in when these names are asked for."""
    if kind == "oft":
        return "peft"
    if kind in ("loha", "lokr") and save_model_as == "diffusers":
        return "peft"
    return save_model_as


def export(
    network: Network,
    parts: Parts,
    path: Path,
    *,
    save_model_as: Literal["kohya", "diffusers"] = "kohya",
    precision: Precision = "fp16",
    metadata: Mapping[str, str] | None = None,
    state: StateDict | None = None,
) -> None:
    """Writes the adapter whole or not at all, then reads the file back and compares every layer with the trained one.

    metadata: header texts as `metadata.build` makes them; hashes of the tensors are added. state: values to write instead of the live
    ones, such as a moving average, named as `network.state` names them. Raises TrainingError naming the layer when a value does not
    survive the precision, and OSError when the file cannot be written.
    """
    adapters = {name: adapter.to(torch.float32, torch.device("cpu")) for name, adapter in network.adapters(state).items()}
    layout = layout_for(network.kind, save_model_as)
    tensors, texts = tensors_of(adapters, network.names, layout, DTYPES[precision])
    _check_finite(tensors, precision)
    header = metadata_texts.with_hashes({**(metadata or {}), **texts}, tensors)
    write_atomically(path, serialise(tensors, header))
    prove(path, adapters, parts, network.names, precision)


def tensors_of(adapters: Mapping[str, AdapterLayer], names: Names, layout: Layout, dtype: torch.dtype) -> tuple[StateDict, dict[str, str]]:
    """Tensors and header texts of a file in this layout."""
    if layout == "kohya":
        tensors: StateDict = {}
        for name, adapter in _one_alpha(adapters).items():
            tensors |= _kohya_tensors(names.to_kohya(name), adapter, dtype)
        return tensors, {LAYOUT: layout}
    tensors = {}
    for name, adapter in adapters.items():
        folded = adapter.rescaled(1.0) if layout == "diffusers" else adapter
        for rest, tensor in folded.tensors.items():
            tensors[f"{names.to_diffusers(name)}.{rest}"] = _magnitude_shape(rest, tensor, folded).to(dtype)
    texts = {LAYOUT: layout} if layout == "diffusers" else {LAYOUT: layout, PEFT_CONFIG: _peft_configs(adapters, names)}
    return tensors, texts


def _one_alpha(adapters: Mapping[str, AdapterLayer]) -> dict[str, AdapterLayer]:
    """The same updates with one alpha for all layers of a module: diffusers' reader loses the alphas of attention layers when they differ.

    The commonest alpha stays, so a file whose layers agree is untouched.
    """
    alphas = {name: torch.tensor(adapter.scale * adapter.rank).item() for name, adapter in adapters.items() if adapter.rank is not None}
    found = Counter((name.partition(".")[0], alpha) for name, alpha in alphas.items())
    common = {module: alpha for (module, alpha), _ in reversed(found.most_common())}
    changed = {}
    for name, adapter in adapters.items():
        alpha = common.get(name.partition(".")[0])
        agrees = adapter.kind not in ("lora", "dora") or alpha == alphas[name]
        changed[name] = adapter if agrees else adapter.rescaled(alpha / adapter.rank)
    return changed


def _magnitude_shape(rest: str, tensor: Tensor, adapter: AdapterLayer) -> Tensor:
    """peft keeps the magnitudes of a convolution as (1, o, 1, 1)."""
    if rest.startswith("lora_magnitude_vector") and adapter.tensors["lora_A.weight"].dim() == 4:
        return tensor.reshape(1, -1, 1, 1)
    return tensor


def _kohya_tensors(name: str, adapter: AdapterLayer, dtype: torch.dtype) -> StateDict:
    """One layer under kohya's or LyCORIS's names."""
    rank = adapter.rank
    if rank is None:
        # Readers multiply a lokr whose two factors are both full by 1, whatever alpha says, so the scale goes into the factor.
        adapter, rank = adapter.rescaled(1.0), 1
    tensors = {}
    for rest, tensor in adapter.tensors.items():
        if rest == "lora_magnitude_vector.weight":
            # LyCORIS: a length for each output is a column, (o, 1) or (o, 1, 1, 1).
            tensor = tensor.reshape(-1, *[1] * (adapter.tensors["lora_A.weight"].dim() - 1))
        tensors[f"{name}.{_KOHYA_REST.get(rest, rest)}"] = tensor.to(dtype)
    alpha = torch.tensor(adapter.scale * rank, dtype=torch.float32)
    # In the file's precision where that is exact, as kohya's files have it; else in float32: a rounded alpha would scale everything.
    tensors[f"{name}.alpha"] = alpha.to(dtype) if alpha.to(dtype).float() == alpha else alpha
    return tensors


def _peft_configs(adapters: Mapping[str, AdapterLayer], names: Names) -> str:
    """peft's configuration of each network, as JSON by component. It names no folder."""
    configs: dict[str, dict[str, object]] = {}
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
        config.setdefault("alpha", adapter.scale * rank)
        config.setdefault("rank_pattern", {})[f"^{layer}$"] = rank
        config.setdefault("alpha_pattern", {})[f"^{layer}$"] = adapter.scale * rank
    return json.dumps(configs, sort_keys=True)


def _check_finite(tensors: StateDict, precision: Precision) -> None:
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise TrainingError(
            f"values of {examples(broken)} do not fit into save_precision = {precision} or are not finite numbers; "
            "use save_precision = bf16 or float, and a lower learning rate if they are not finite in float either. No file was written"
        )


def read(path: Path, parts: Parts) -> dict[str, AdapterLayer]:
    """The adapter of each layer in a file with kohya's, LyCORIS's, diffusers' or peft's names, float32, by `<module>.<layer>`.

    Also takes keys with torch.compile's `_orig_mod.` in them. Raises OptionError, listing some, for keys that fit no layer of this model.
    """
    tensors, header = read_file(path)
    return adapters_of(tensors, header, names_of(parts), layers_of(parts), path.name)


def adapters_of(
    tensors: StateDict, header: Mapping[str, str], names: Names, bases: Mapping[str, nn.Module], file: str
) -> dict[str, AdapterLayer]:
    """The adapter of each layer from a file's tensors; see `read`."""
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        place = _place(key.replace("_orig_mod.", ""), names)
        if place is None:
            unknown.append(key)
        else:
            lengths = place[1].startswith("lora_magnitude_vector")
            found.setdefault(place[0], {})[place[1]] = _canonical_magnitude(tensor, key) if lengths else tensor.float()
    if unknown or not found:
        what = (
            f"{len(unknown)} of {len(tensors)} keys fit no layer of this model, such as {examples(unknown, 3)}"
            if unknown
            else "it is empty"
        )
        raise OptionError(f"{file} cannot be used: {what}. It must be an adapter for this model family, with kohya's or diffusers' names")
    scales = _peft_scales(header, names)
    for name, held in found.items():
        if name not in scales and "alpha" not in held and "lora_A.weight" in held:
            scale = _diffusers_scale(header, *names.to_diffusers(name).split(".", 1), held["lora_A.weight"].shape[0])
            scales |= {} if scale is None else {name: scale}
    return {name: _adapter(name, held, scales.get(name), bases[name], file) for name, held in found.items()}


def _place(key: str, names: Names) -> tuple[str, str] | None:
    """(`<module>.<layer>`, tensor in peft's words) of a key, or None."""
    key = key.removeprefix("base_model.model.")
    old = _OLD_ATTENTION.fullmatch(key)
    if old:
        target = names.find(f"{old[1]}.{old[2]}{'.0' if old[2] == 'to_out' else ''}")
        return None if target is None else (target.layers[0], "lora_A.weight" if old[3] == "down" else "lora_B.weight")
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    target = names.find(match[1])
    return None if target is None else (target.layers[0], _ENDINGS[match[2]])


def _adapter(name: str, held: dict[str, Tensor], scale: float | None, base: nn.Module, file: str) -> AdapterLayer:
    """One layer, checked to be complete and to fit the model's layer."""
    alpha = held.pop("alpha", None)
    kind = _kind(held)
    if kind is None:
        raise OptionError(
            f"{file}: {name} has only {', '.join(sorted(held)) or 'alpha'}, which is not a whole adapter; the file is incomplete"
        )
    adapter = AdapterLayer(kind, held)
    rank = adapter.rank
    if scale is None:
        scale = 1.0 if alpha is None or rank is None else float(alpha) / rank
    adapter = AdapterLayer(kind, held, scale)
    if not _fits(adapter, base):
        sizes = ", ".join(f"{rest} {tuple(tensor.shape)}" for rest, tensor in sorted(held.items()))
        raise OptionError(
            f"{file}: {name} has {sizes}, which does not fit a layer of size {tuple(base.weight.shape)}; it is for another model"
        )
    return adapter


_WHOLE: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("lora", frozenset({"lora_A.weight", "lora_B.weight"})),
    ("dora", frozenset({"lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight"})),
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


def _fits(adapter: AdapterLayer, base: nn.Module) -> bool:
    """Whether the update has as many numbers as the layer's weight, and the factors its sides."""
    weight = base.weight
    out, inputs = weight.shape[0], weight[0].numel()
    t = adapter.tensors
    if adapter.kind in ("lora", "dora"):
        down, up = t["lora_A.weight"].flatten(1), t["lora_B.weight"].flatten(1)
        good = down.shape[1] == inputs and up.shape == (out, down.shape[0])
        magnitude = t.get("lora_magnitude_vector.weight")
        return good and (magnitude is None or magnitude.numel() == (out if magnitude.dim() == 1 else weight.shape[1]))
    if adapter.kind == "loha":
        return all(t[f"hada_w{i}_a"].shape[0] == out and t[f"hada_w{i}_b"].flatten(1).shape[1] == inputs for i in (1, 2))
    if adapter.kind == "lokr":
        sides = [_lokr_sides(t, factor) for factor in ("lokr_w1", "lokr_w2")]
        return sides[0][0] * sides[1][0] == out and sides[0][1] * sides[1][1] == inputs
    blocks, elements = t["oft_R.weight"].shape
    return isinstance(base, nn.Linear) and blocks * round((1 + math.sqrt(1 + 8 * elements)) / 2) == inputs


def _lokr_sides(tensors: Mapping[str, Tensor], factor: str) -> tuple[int, int]:
    if factor in tensors:
        return tensors[factor].shape[0], tensors[factor].flatten(1).shape[1]
    return tensors[f"{factor}_a"].shape[0], tensors[f"{factor}_b"].flatten(1).shape[1]


def _peft_scales(header: Mapping[str, str], names: Names) -> dict[str, float]:
    """alpha / rank of each layer from the peft configuration that files in the peft layout carry."""
    scales = {}
    for component, config in json.loads(header.get(PEFT_CONFIG, "{}")).items():
        for layer in config["target_modules"]:
            target = names.from_diffusers(f"{component}.{layer}")
            if target is not None and config["r"]:
                scales[target.layers[0]] = config["alpha_pattern"][f"^{layer}$"] / config["rank_pattern"][f"^{layer}$"]
    return scales


def _diffusers_scale(header: Mapping[str, str], component: str, layer: str, rank: int) -> float | None:
    """alpha / rank of a layer from the header that diffusers' save_lora_weights writes, or None without one."""
    config = json.loads(header.get("lora_adapter_metadata", "{}"))
    alpha = config.get(f"{component}.lora_alpha")
    if alpha is None:
        return None
    for pattern, own in (config.get(f"{component}.alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            alpha = own
            break
    return alpha / (math.sqrt(rank) if config.get(f"{component}.use_rslora") else rank)


def prove(path: Path, trained: Mapping[str, AdapterLayer], parts: Parts, names: Names, precision: Precision) -> None:
    """Reads a written file back through its key map and compares every layer with the trained one, to the precision's rounding.

    Raises TrainingError naming the layer. Shows progress when it takes more than two seconds.
    """
    tensors, header = read_file(path)
    bases = layers_of(parts)
    try:
        found = adapters_of(tensors, header, names, bases, path.name)
    except OptionError as err:
        raise TrainingError(f"the saved file cannot be read back: {err}") from err
    if found.keys() != trained.keys():
        raise TrainingError(
            f"the saved file {path.name} lacks layers: {examples(sorted(trained.keys() - found.keys()))}; please report this"
        )
    for name, adapter in tqdm(trained.items(), desc="checking the saved file", unit="layer", delay=2, leave=False):
        if not _same(adapter, found[name], bases[name].weight.shape, torch.finfo(DTYPES[precision])):
            raise TrainingError(
                f"the saved file {path.name} does not do what was trained at {names.to_diffusers(name)} (save_precision = {precision}); "
                "save_precision = float keeps every value"
            )


def _same(trained: AdapterLayer, found: AdapterLayer, shape: torch.Size, rounding: torch.finfo) -> bool:
    """Whether two adapters of a layer update it alike, up to the rounding of each factor."""
    if trained.kind != found.kind:
        return False
    lengths = [adapter.tensors.get("lora_magnitude_vector.weight") for adapter in (trained, found)]
    if lengths[0] is not None and not _equal(lengths[0], lengths[1], rounding):
        return False
    if trained.kind == "oft":
        return _equal(trained.tensors["oft_R.weight"], found.tensors["oft_R.weight"], rounding)
    if trained.kind in ("lora", "dora"):
        distance = product_distance(trained, found)
    else:
        distance = float((low_rank_update(trained, shape).double() - low_rank_update(found, shape).double()).norm())
    return distance <= _product_error(trained, rounding)


def _rounding_error(tensor: Tensor, rounding: torch.finfo) -> float:
    """A bound of the norm of what rounding takes from a tensor.

    Numbers below the smallest normal one lose more digits than others: at most one smallest step each. A float32 product rounds
    too, so nothing is stricter than a few of its units.
    """
    relative = max(rounding.eps, 8 * torch.finfo(torch.float32).eps)
    return relative * float(tensor.double().norm()) + rounding.smallest_normal * rounding.eps * math.sqrt(tensor.numel())


def _product_error(adapter: AdapterLayer, rounding: torch.finfo) -> float:
    """A bound of the norm of what rounding each factor takes from their product; it holds for matrix, Hadamard and Kronecker products."""
    factors = [tensor for rest, tensor in adapter.tensors.items() if not rest.startswith("lora_magnitude_vector")]
    norms = [float(tensor.double().norm()) for tensor in factors]
    errors = [_rounding_error(tensor, rounding) for tensor in factors]
    # Product of (norm + error) minus product of norms: every way to take at least one error.
    return abs(adapter.scale) * (math.prod(norm + error for norm, error in zip(norms, errors)) - math.prod(norms))


def _equal(a: Tensor, b: Tensor | None, rounding: torch.finfo) -> bool:
    return b is not None and a.shape == b.shape and float((a.double() - b.double()).norm()) <= _rounding_error(a, rounding)
