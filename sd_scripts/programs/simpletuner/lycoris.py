"""What SimpleTuner's files for LyCORIS (lycoris_config.json) say: the kind of adapter, its rank and alpha."""

from __future__ import annotations

from sd_scripts.schema.sheet import is_off, parts

from ..table import ForeignSheet, Rule, Table, only, to, unneeded, where

KEY = "lycoris_config"
_CLASSES = {
    "Attention": r"(^|\.)(attn\d?|attention)\.",
    "FeedForward": r"(^|\.)(ff|ff_context|img_mlp|txt_mlp|feed_forward)\.",
    **dict.fromkeys(("Transformer2DModel", "BasicTransformerBlock"), r"(^|\.)attentions\."),
}
"""Classes of diffusers' modules, and the names under which they lie."""
_WHOLE = 4096
"""A rank from which on no LoKr is divided."""


def looks_like(given: object) -> bool:
    """Whether this is such a file: LyCORIS alone has an algorithm beside the rank of linear layers or a preset of modules."""
    return isinstance(given, dict) and "algo" in given and bool({"linear_dim", "apply_preset", "full_matrix"} & given.keys())


def _algorithm(sheet: ForeignSheet, key: str) -> None:
    name = str(sheet.value(key)).lower()
    ours = "lora" if name == "locon" else name
    if sheet.has("network_type", ours):
        sheet.take(key, "network_type", ours)
    else:
        sheet.lose(key, f"{name} is no kind of adapter here; network_type = lora is put")


def _is_whole(sheet: ForeignSheet) -> bool:
    """Whether the factors of a LoKr are whole matrices, which have no alpha."""
    of_lokr = str(sheet.value(f"{KEY}.algo")).lower() == "lokr"
    return of_lokr and ((sheet.number(f"{KEY}.linear_dim") or 0) >= _WHOLE or not is_off(sheet.value(f"{KEY}.full_matrix")))


def _rank(sheet: ForeignSheet, key: str) -> None:
    if _is_whole(sheet):
        sheet.take(key, "network_dim", _WHOLE, "whole matrices, which is what it asks for")
    else:
        sheet.take(key, "network_dim", int(sheet.number(key) or 0))


def _alpha(sheet: ForeignSheet, key: str) -> None:
    if _is_whole(sheet):
        if "network_alpha" in sheet.known:
            sheet.put("network_alpha", None, key)
        sheet.skip(key, "LyCORIS leaves alpha out where matrices are whole")
    else:
        to("network_alpha")(sheet, key)


def _of_lokr(rule: Rule) -> Rule:
    return where(lambda sheet: str(sheet.value(f"{KEY}.algo")).lower() == "lokr", rule, "it is for lokr")


def _whole(sheet: ForeignSheet, key: str) -> None:
    if is_off(sheet.value(key)) or f"{KEY}.linear_dim" in sheet.given:
        sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "network_dim says it")
    else:
        sheet.take(key, "network_dim", _WHOLE, "whole matrices")


def _preset(sheet: ForeignSheet, key: str) -> None:
    """Classes of modules that get an adapter, and what some of them have of their own."""
    if key.endswith(".factor") and sheet.number(key) == sheet.number(f"{KEY}.factor"):
        sheet.skip(key, "the factor of all says it")
    elif key.endswith((".target_module", ".target_modules")) and set(parts(sheet.value(key))) <= _CLASSES.keys():
        sheet.take(key, "target_modules", [_CLASSES[name] for name in parts(sheet.value(key))], "the layers inside such modules")
    elif key.endswith((".target_module", ".target_modules")):
        sheet.lose(key, "classes of modules are no names of layers; target_modules chooses layers here, and empty it takes the usual ones")
    else:
        sheet.lose(key, "one kind of adapter with one factor is for all layers; network_reg_dims gives layers ranks of their own")


_RULES: Table = {
    "algo": _algorithm,
    "linear_dim": _rank,
    "linear_alpha": _alpha,
    "conv_dim": to("conv_dim"),
    "conv_alpha": to("conv_alpha"),
    "factor": _of_lokr(to("lokr_factor")),
    "full_matrix": _whole,
    "dropout": to("network_dropout"),
    "multiplier": only(1.0, "an adapter is trained at its full strength"),
    "bypass_mode": unneeded("it says how the same is computed"),
    "apply_preset.*": _preset,
}
TABLE: Table = {f"{KEY}.{name}": rule for name, rule in _RULES.items()}
