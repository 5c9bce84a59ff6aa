"""What kohya's and LyCORIS's adapters and learning rates become: types, ranks, blocks, and who learns how fast."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from sd_scripts.families import FACTS
from sd_scripts.schema import kohya_words as words
from sd_scripts.schema.kohya_words import AdapterType
from sd_scripts.schema.sheet import is_empty, is_off, number, parts, shown, unless_empty, unless_off

from .sheet import KOHYA, TYPES_OF_FAMILIES, KohyaSheet, Table, rules

ADAPTER: Table = {}
"""Rules of adapters; a whole model has none of these settings."""
RATES: Table = {}
"""Rules of learning rates, and of who is trained."""
rule = rules(ADAPTER)
rate = rules(RATES)

LARGEST_RANK = 4096


_ORDINARY = ("standard", "locon", "lora", "dylora", "lora-fa")
"""Types of kohya's own scripts, which read the blocks' ranks and rates."""


def type_name(sheet: KohyaSheet) -> str:
    """kohya's type in small letters without its maker: standard, locon, loha ..."""
    named = sheet.first("LoRA_type")
    if named is not None:
        name = str(named).lower().removeprefix("lycoris/").removeprefix("kohya ")
        return TYPES_OF_FAMILIES.get(name, name)
    module = str(sheet.first("network_module") or "networks.lora").lower()
    if module.startswith("lycoris") or sheet.first("algo") is not None:
        algorithm = str(sheet.first("algo") or "lora").lower()
        return words.ALGORITHMS.get(algorithm, algorithm)
    return (words.MODULES | TYPES_OF_FAMILIES).get(module, "standard")


def _type(sheet: KohyaSheet) -> AdapterType:
    return words.TYPES.get(type_name(sheet), AdapterType("lora", lost="this type is not made; LoRA is the nearest there is"))


def _ours(sheet: KohyaSheet) -> str:
    """Our network_type, DoRA among them."""
    ours = _type(sheet).ours
    return "dora" if ours == "lora" and sheet.on("dora_wd") else ours


def adapts_convolutions(sheet: KohyaSheet) -> bool:
    """Whether the file's type and preset adapt 3x3 convolutions. kohya's script does when it is given conv_dim; the page gives it for
    some types only."""
    if "conv_dim" not in sheet.known or str(sheet.first("LyCORIS_preset", "preset") or "full") in words.LINEAR_ONLY:
        return False
    return _type(sheet).convolutions or (not sheet.page and type_name(sheet) in _ORDINARY and "conv_dim" in sheet.given)


@rule("LoRA_type", "network_module", "algo")
def _kind(sheet: KohyaSheet, key: str) -> None:
    decides = next((name for name in ("LoRA_type", "algo", "network_module") if not is_empty(sheet.value(name))), None)
    if key != decides:
        sheet.skip(key, f"{decides} says it" if decides else "it is empty")
        return
    found, name = _type(sheet), shown(sheet.value(key))
    sheet.take(key, "network_type", _ours(sheet))
    if found.lost:
        sheet.lose(key, f"{name}: {found.lost}. network_type = {_ours(sheet)} was put")
    if found.ours == "oft" and type_name(sheet) == "diag-oft" and (sheet.number("network_dim") or 0) >= 1:
        sheet.put("oft_block_size", int(sheet.number("network_dim") or 32), key)


def _whole_matrices(sheet: KohyaSheet, key: str) -> None:
    """A rank beyond every matrix asks LyCORIS for whole matrices, whose alpha it leaves out."""
    if key.endswith("_dim"):
        sheet.take(key, key, LARGEST_RANK, "large enough for whole matrices, which is what so large a rank asks LyCORIS for")
    else:
        sheet.skip(key, "LyCORIS leaves alpha out where matrices are whole")


@rule("network_dim", "network_alpha")
@unless_empty
def _rank(sheet: KohyaSheet, key: str) -> None:
    rank = sheet.number("network_dim") or 0
    if _ours(sheet) == "oft":
        sheet.skip(key, "oft has oft_block_size instead of a rank")
    elif type_name(sheet) == "ia3":
        sheet.skip(key, "iA3 has no rank")
    elif rank > LARGEST_RANK:
        _whole_matrices(sheet, key)
    elif key == "network_alpha" and number(sheet.value(key)) == 0:
        sheet.skip(key, "0 means alpha = rank, which is what none means here")
    elif key == "network_alpha" and sheet.number(key) == sheet.number("network_dim"):
        sheet.skip(key, "it equals the rank, which is what none means here")
    else:
        sheet.plain(key)


@rule("conv_dim", "conv_alpha")
def _convolutions(sheet: KohyaSheet, key: str) -> None:
    rank = sheet.number("conv_dim") or 0
    if is_off(sheet.value(key)):
        sheet.skip(key, "it is 0 or empty")
    elif not adapts_convolutions(sheet):
        sheet.skip(key, f"this type ({type_name(sheet)}) leaves 3x3 convolutions alone, so it was not used")
    elif not rank:
        sheet.skip(key, "it has no effect without conv_dim")
    elif rank > LARGEST_RANK:
        whole = "large enough for whole matrices, which is what so large a rank asks LyCORIS for"
        sheet.take(key, key, LARGEST_RANK, whole) if key == "conv_dim" else sheet.skip(
            key, "LyCORIS leaves alpha out where matrices are whole"
        )
    else:
        sheet.plain(key)


_LYCORIS_PRESETS = {"attn-only": [r"attn\d?\."], "unet-convblock-only": [r"resnets\."]}


@rule("LyCORIS_preset", "preset")
def _lycoris_preset(sheet: KohyaSheet, key: str) -> None:
    name = str(sheet.value(key) or "")
    if type_name(sheet) in ("standard", "transformer", "transformer oft", "lora-fa"):
        sheet.skip(key, "this type has no LyCORIS preset")
    elif name in _LYCORIS_PRESETS:
        sheet.take(key, "target_modules", _LYCORIS_PRESETS[name])
    elif name in ("unet-only", "unet-transformer-only") and sheet.trains_text:
        sheet.put("train_text_encoder", False, key)
        sheet.write(key, "renamed", "train_text_encoder = off")
    elif name in ("", "full", "full-lin", "attn-mlp", "unet-only", "unet-transformer-only"):
        sheet.skip(key, "attention and MLP layers are what an adapter gets here, and convolutions when conv_dim is given")
    else:
        sheet.lose(key, "files of targets are not read; choose layers with target_modules")


@rule("decompose_both", "factor", "lokr_factor")
def _kronecker(sheet: KohyaSheet, key: str) -> None:
    option = "lokr_factor" if key != "decompose_both" else "lokr_decompose_both"
    if _ours(sheet) != "lokr":
        sheet.skip(key, "it is for LoKr")
    elif is_off(sheet.value(key)):
        sheet.skip(key, "it is off")
    else:
        sheet.take(key, option, sheet.value(key))


@rule("dora_wd")
@unless_off
def _dora(sheet: KohyaSheet, key: str) -> None:
    if _ours(sheet) == "dora":
        sheet.write(key, "renamed", "network_type = dora")
    else:
        sheet.lose(key, f"weights are decomposed (DoRA) for LoRA only, not for {_ours(sheet)}")


@rule("use_cp", "use_tucker", "use_scalar", "rank_dropout_scale", "train_norm", "rescaled", "constrain", "constraint", "enable_all_linear")
@unless_off
def _lycoris_extras(sheet: KohyaSheet, key: str) -> None:
    what = {
        "use_cp": "Tucker factors are not made; layers are factored without them",
        "use_tucker": "Tucker factors are not made; layers are factored without them",
        "use_scalar": "a trained scale for each layer is not made; alpha is the scale",
        "rank_dropout_scale": "what is kept is scaled up by itself where that belongs to the type",
        "train_norm": "norms are not trained; what an adapter trains are linear layers and convolutions",
        "enable_all_linear": "target_modules chooses the layers",
    }
    if sheet.page and type_name(sheet) in _ORDINARY and not str(sheet.value("LoRA_type")).startswith("LyCORIS"):
        sheet.skip(key, f"this type ({type_name(sheet)}) does not use it")
    else:
        sheet.lose(key, what.get(key, "limits on rotations are not part of this version; a lower learning rate does the same in part"))


@rule("bypass_mode", "train_on_input", "unit", "block_size", "block_lr_zero_threshold")
def _without_effect(sheet: KohyaSheet, key: str) -> None:
    why = {
        "bypass_mode": "it is another way to compute the same",
        "train_on_input": "it is for iA3",
        "unit": "it is for DyLoRA",
        "block_lr_zero_threshold": "a factor of 0 in block_lr_weight freezes a block",
    }
    if key == "block_size" and _ours(sheet) == "oft" and not is_off(sheet.value(key)):
        sheet.take(key, "oft_block_size", sheet.value(key))
    else:
        sheet.skip(key, why.get(key, "it is for OFT and DyLoRA"))


@rule("lora_network_weights", "network_weights")
@unless_empty
def _start(sheet: KohyaSheet, key: str) -> None:
    if key == "lora_network_weights" and not is_empty(sheet.value("network_weights")):
        sheet.skip(key, "network_weights says it")
    else:
        sheet.take(key, "network_weights", sheet.value(key))


# --- ranks and rates of blocks ---------------------------------------------------------------------------------------


_PARTS_DIFFER = "the parts of the middle differ, which are one block here"


def _middle(sheet: KohyaSheet, texts: Sequence[str]) -> list[float] | None:
    """The number of the middle block, from those of its parts there; parts without one have 1. Layers that get an adapter without
    convolutions are all in the second of three. None where parts differ that one number cannot stand for."""
    count = sheet.kohya.middle_parts if sheet.kohya is not None else 1
    found = [number(text) or 0.0 for text in texts[:count]]
    found += [1.0] * (count - len(found))
    return found[count // 2 : count // 2 + 1] if len(set(found)) == 1 or not adapts_convolutions(sheet) else None


def _of_blocks(sheet: KohyaSheet, texts: list[str]) -> list[str] | None:
    """One number for each block, from a list that has the layers before and after the blocks as well, and each part of the middle."""
    blocks, count = (sheet.kohya.unet_blocks, sheet.kohya.middle_parts) if sheet.kohya is not None else (None, 1)
    if blocks is None or count == 1 or len(texts) != sum(blocks) + count + 1:
        return texts
    down, middle, up = texts[1 : 1 + blocks[0]], texts[1 + blocks[0] : 1 + blocks[0] + count], texts[1 + blocks[0] + count : -1]
    one = _middle(sheet, middle)
    return None if one is None else [*down, *(f"{factor:g}" for factor in one), *up]


@rule("block_dims", "block_alphas", "conv_block_dims", "conv_dims", "conv_block_alphas", "conv_alphas")
@unless_empty
def _blocks(sheet: KohyaSheet, key: str) -> None:
    option = {"conv_dims": "conv_block_dims"}.get(key, key)
    wanted = sum(sheet.kohya.unet_blocks or ()) if sheet.kohya is not None else 0
    if not wanted:
        sheet.skip(key, "it is for UNets; see network_reg_dims")
    elif option in ("conv_block_alphas", "conv_alphas"):
        sheet.lose(key, "convolutions have one alpha in all blocks: conv_alpha")
    elif type_name(sheet) not in _ORDINARY:
        sheet.skip(key, f"this type ({type_name(sheet)}) does not use it")
    elif (values := _of_blocks(sheet, parts(sheet.value(key)))) is None:
        sheet.lose(key, _PARTS_DIFFER)
    elif len(values) != wanted:
        sheet.lose(key, f"it has {len(values)} numbers, and {sheet.run.label} has {wanted} blocks; give {wanted}")
    else:
        sheet.take(key, option, values)


def _curve(text: str, count: int) -> list[float] | None:
    """One factor for each block: a list, or one of kohya's curves (cosine, sine, linear, reverse_linear, zeros, with +base)."""
    name, _, base = text.strip().partition("+")
    rise = [index / max(count - 1, 1) for index in range(count)]
    curves = {
        "cosine": [math.sin(math.pi / 2 * (1 - part)) for part in rise],
        "sine": [math.sin(math.pi / 2 * part) for part in rise],
        "linear": rise,
        "reverse_linear": rise[::-1],
        "zeros": [0.0] * count,
    }
    if name in curves:
        return [round(factor + (number(base) or 0.0), 4) for factor in curves[name]]
    numbers = [number(part) for part in parts(text)]
    return [factor for factor in numbers if factor is not None] if len(numbers) == count and None not in numbers else None


_SIDES = {"down_lr_weight": 0, "mid_lr_weight": 1, "up_lr_weight": 2}


@rule(*_SIDES)
@unless_empty
def _block_rates(sheet: KohyaSheet, key: str) -> None:
    counts = sheet.kohya.unet_blocks if sheet.kohya is not None else None
    if counts is None:
        sheet.skip(key, "it is for UNets; see network_reg_lrs")
    elif type_name(sheet) not in _ORDINARY:
        sheet.skip(key, f"this type ({type_name(sheet)}) does not use it")
    else:
        given = {name: str(sheet.value(name)) for name in _SIDES if not is_empty(sheet.value(name))}
        curves = {name: _curve(text, counts[_SIDES[name]]) for name, text in given.items()}
        if "mid_lr_weight" in given:
            curves["mid_lr_weight"] = _middle(sheet, parts(given["mid_lr_weight"]))
        if curves[key] is None and key == "mid_lr_weight":
            sheet.lose(key, _PARTS_DIFFER)
            return
        if curves[key] is None:
            sheet.lose(key, f"it is neither {counts[_SIDES[key]]} numbers nor one of kohya's curves; write block_lr_weight yourself")
            return
        factors: list[float] = []
        for name, side in _SIDES.items():
            factors += curves.get(name) or [1.0] * counts[side]
        limit = sheet.number("block_lr_zero_threshold") or 0.0
        whole = [0.0 if factor <= limit else factor for factor in factors]
        sheet.put("block_lr_weight", whole, key)
        note = f"its part of block_lr_weight, {len(whole)} factors in the order of the blocks"
        if key == "mid_lr_weight" and len(parts(given[key])) < (count := sheet.kohya.middle_parts if sheet.kohya is not None else 1):
            note += f"; there are {count} parts of the middle there, and those without a number have 1"
        sheet.write(key, "renamed", note)


# --- double and single blocks ---------------------------------------------------------------------------------------


@rule("train_blocks")
def _kinds_of_blocks(sheet: KohyaSheet, key: str) -> None:
    if sheet.page and not sheet.on("split_mode"):
        sheet.skip(key, "kohya_ss uses it in split mode only")
    else:
        sheet.plain(key)


@rule("in_dims", "train_double_block_indices", "train_single_block_indices")
def _lists_of_blocks(sheet: KohyaSheet, key: str) -> None:
    if is_empty(sheet.value(key)) or key not in sheet.known:
        sheet.plain(key)
    elif key == "in_dims":
        sheet.take(key, key, parts(sheet.value(key)))
    else:
        sheet.take(key, key, "".join(str(sheet.value(key)).split()).strip("[]"))


@rule("train_lora_ggpo", "ggpo_beta", "ggpo_sigma")
def _perturbed(sheet: KohyaSheet, key: str) -> None:
    if is_off(sheet.value("train_lora_ggpo")) and sheet.page:
        sheet.skip(key, "it is off")
    else:
        sheet.lose(key, sheet.advice("ggpo_beta", True))


# --- patterns of names -----------------------------------------------------------------------------------------------


@rule("exclude_patterns", "include_patterns")
def _patterns(sheet: KohyaSheet, key: str) -> None:
    """Lists of expressions, as Python writes them, on names of the original layout."""
    try:
        found = ast.literal_eval(str(sheet.value(key)))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    found = [found] if isinstance(found, str) else found
    if is_empty(sheet.value(key)):
        sheet.skip(key, "it is empty")
    elif not isinstance(found, list):
        sheet.lose(key, "it is not a list of expressions")
    elif key == "exclude_patterns":
        sheet.take(key, "exclude_modules", [str(item) for item in found], "on the names of the diffusers model")
    else:
        sheet.lose(key, "layers that are left out by default come back with lora_targets or target_modules")


@rule("train_llm_adapter")
@unless_off
def _conditioner(sheet: KohyaSheet, key: str) -> None:
    sheet.lose(key, "the text conditioner stays as it is here; the transformer alone has an adapter")


# --- rates ----------------------------------------------------------------------------------------------------------


@rate("network_train_unet_only", "network_train_text_encoder_only", "train_text_encoder")
def _who_learns(sheet: KohyaSheet, key: str) -> None:
    if key == "train_text_encoder" and sheet.run.method == "full" and key in sheet.known:
        who_is_trained(sheet, key)
        same = sheet.on(key) == sheet.trains_text
        sheet.write(key, "taken", "as it is" if same else "on, as kohya's DreamBooth trains the text encoder in any case")
    elif is_off(sheet.value(key)):
        sheet.skip(key, "it is off")
    elif sheet.run.method == "full":
        sheet.skip(key, sheet.advice(key, True))
    elif "train_text_encoder" not in sheet.known:
        alone = "the transformer alone is trained here"
        sheet.skip(key, alone) if key == "network_train_unet_only" else sheet.lose(key, f"{alone}; remove it")
    elif key == "network_train_unet_only" or (key == "train_text_encoder" and not sheet.trains_text):
        sheet.write(key, "renamed", "train_text_encoder = off")
    else:
        sheet.write(key, "renamed", "train_text_encoder = on, train_unet = " + ("on" if sheet.trains_unet else "off"))


def who_is_trained(sheet: KohyaSheet, key: str = "") -> None:
    """Sets which parts are trained; what is encoded anew in each step cannot be cached."""
    if "train_unet" in sheet.known and not sheet.trains_unet:
        sheet.put("train_unet", False, key)
    if sheet.run.method == "network" and sheet.trains_text and sheet.trains_unet and sheet.has_texts_of_its_own:
        sheet.conflicts.append(f"The text encoder has an adapter in {sheet.program} as well; here the transformer alone has one")
    if sheet.run.method == "full" and "text_conditioner" in sheet.known and is_empty(sheet.value("llm_adapter_lr")):
        sheet.conflicts.append(f"The text conditioner is trained in {sheet.program} as well; here it stays as it is")
    if "train_text_encoder" in sheet.known and sheet.trains_text:
        sheet.put("train_text_encoder", True, key)
        sheet.put("cache_text_encoder_outputs", False, key)


def _own_rate(sheet: KohyaSheet, key: str) -> None:
    default = sheet.known["learning_rate"].default
    sheet.lose(key, f"Adafactor found its own rate there, which is not done here; learning_rate stays {default:g}: check it")


@rate("learning_rate")
def _rate(sheet: KohyaSheet, key: str) -> None:
    if sheet.sets_its_own_rate and not is_empty(sheet.value(key)):
        _own_rate(sheet, key)
    else:
        sheet.plain(key)


@rate("unet_lr")
@unless_empty
def _unet_rate(sheet: KohyaSheet, key: str) -> None:
    if not sheet.trains_unet:
        sheet.write(key, "renamed", "train_unet = off, because it is 0 and text_encoder_lr is not")
    elif is_off(sheet.value(key)) and sheet.page:
        sheet.skip(key, "0 means learning_rate")
    elif sheet.sets_its_own_rate:
        _own_rate(sheet, key)
    else:
        sheet.plain(key)


@rate("text_encoder_lr", "t5xxl_lr")
def _text_rate(sheet: KohyaSheet, key: str) -> None:
    value = sheet.value(key)
    if not sheet.trains_text or sheet.run.method == "full":
        sheet.skip(key, "the text encoders are not trained")
    elif is_off(value):
        sheet.skip(key, "0 means " + ("learning_rate" if key == "text_encoder_lr" else "text_encoder_lr"))
    elif sheet.sets_its_own_rate:
        _own_rate(sheet, key)
    elif key == "t5xxl_lr":
        sheet.put("text_encoder_lr", [str(sheet.number("text_encoder_lr") or 0), str(sheet.number(key))], key)
        sheet.write(key, "renamed", "the second number of text_encoder_lr")
    else:
        rates = parts(value)
        if len(rates) > 1 and len({number(rate) for rate in rates}) == 1:
            rates = rates[:1]
        if sheet.page and "train_t5xxl" in sheet.known and (sheet.number("t5xxl_lr") or 0) > 0:
            rates = [rates[0], str(sheet.number("t5xxl_lr"))]
        sheet.take(key, key, rates)


_ADAPTER_RATES = ("text_encoder_lr1", "text_encoder_lr2")


@rate(*_ADAPTER_RATES)
@unless_empty
def _text_rates_of_adapter(sheet: KohyaSheet, key: str) -> None:
    """Rates of the text encoders one by one, as the documents of sd-scripts write them."""
    rates = [sheet.number(name) for name in _ADAPTER_RATES if sheet.number(name) is not None]
    if not sheet.trains_text or sheet.run.method == "full" or "text_encoder_lr" not in sheet.known:
        sheet.skip(key, "the text encoders are not trained")
    else:
        sheet.take(key, "text_encoder_lr", [str(rate) for rate in (rates[:1] if len(set(rates)) == 1 else rates)])


@rate("learning_rate_te", "learning_rate_te1", "learning_rate_te2")
@unless_empty
def _text_rates_of_model(sheet: KohyaSheet, key: str) -> None:
    names = sheet.kohya.text_rates if sheet.kohya is not None else ()
    if not sheet.trains_text or sheet.run.method == "network":
        sheet.skip(key, "the text encoders are not trained" if sheet.run.method == "full" else "adapters have text_encoder_lr")
    elif key not in names:
        others = [FACTS[family].label for family, facts in KOHYA.items() if key in facts.text_rates]
        sheet.skip(key, f"it is for {' and '.join(others)}")
    elif sheet.sets_its_own_rate:
        _own_rate(sheet, key)
    else:
        rates = [sheet.number(name) if sheet.number(name) is not None else sheet.number("learning_rate") for name in names]
        rates = rates[:1] if len(set(rates)) == 1 else rates
        sheet.put("text_encoder_lr", [str(rate) for rate in rates], key)
        sheet.write(key, "renamed", f"text_encoder_lr = {', '.join(f'{rate:g}' for rate in rates if rate is not None)}")


@rate("stop_text_encoder_training", "stop_text_encoder_training_pct")
def _stopping(sheet: KohyaSheet, key: str) -> None:
    value = sheet.number(key) or 0
    if value == 0:
        sheet.skip(key, "0 is off")
    elif value < 0 and not sheet.trains_text:
        sheet.write(key, "renamed", "train_text_encoder = off")
    elif value < 0:
        sheet.skip(key, "the rates say who is trained")
    elif not sheet.trains_text:
        sheet.skip(key, "the text encoders are not trained")
    else:
        sheet.lose(key, sheet.advice("stop_text_encoder_training", value))


@rate("llm_adapter_lr", "self_attn_lr", "cross_attn_lr", "mlp_lr", "mod_lr")
def _rates_of_parts(sheet: KohyaSheet, key: str) -> None:
    """Rates of parts of a whole model; 0 leaves a part as it is."""
    if is_empty(sheet.value(key)) or sheet.run.method == "network":
        sheet.skip(key, "it is empty" if is_empty(sheet.value(key)) else "it is for whole models; network_reg_lrs is for adapters")
    elif not (sheet.kohya is not None and sheet.kohya.options):
        sheet.skip(key, "it is for a family that this run does not train")
    elif key == "llm_adapter_lr":
        there = "the text conditioner stays as it is here"
        sheet.skip(key, f"{there}, too") if is_off(sheet.value(key)) else sheet.lose(key, there)
    elif sheet.number(key) == sheet.number("learning_rate"):
        sheet.skip(key, "it is learning_rate")
    else:
        sheet.lose(key, "all layers have one learning rate here, learning_rate; none is left out")
