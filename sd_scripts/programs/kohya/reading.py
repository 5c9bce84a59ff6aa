"""Settings of kohya_ss (the page's JSON, the TOML it writes for the scripts) and of sd-scripts, as a kind of run, values and a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sd_scripts.families import FACTS, RUNS
from sd_scripts.schema import flat, kohya_words, legacy
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Row
from sd_scripts.schema.sheet import is_empty, is_off, number, switch

from ..command_lines import Command, clear
from . import lora_scripts
from .memory import MEMORY
from .network import ADAPTER, LARGEST_RANK, RATES, adapts_convolutions, type_name, who_is_trained
from .recipe import RECIPE, arguments
from .rules import RULES
from .sheet import KOHYA, KohyaSheet, Rule, Table

TABLE = RULES | RECIPE | RATES | MEMORY | lora_scripts.RULES
"""The rule of each key that has one; adapters have more."""
JSON_ORIGIN = "kohya_ss configuration (JSON)"
DEFAULTS_ORIGIN = "defaults of kohya_ss's page (config.toml)"
LINE_ORIGIN = "command line of sd-scripts"
TOML_ORIGIN = "kohya_ss or sd-scripts configuration (TOML)"

ADAPTER_MARKS = ("LoRA_type", "network_dim", "network_module", "unet_lr", "network_alpha", "lora_network_weights")
FINETUNE_MARKS = ("image_folder", "caption_metadata_filename", "latent_metadata_filename", "train_dir", "in_json", "dataset_repeats")
_EMBEDDING_MARKS = ("num_vectors_per_token", "token_string", "init_word")


_COMMON = frozenset(
    """pretrained_model_name_or_path vae text_encoder resolution learning_rate lr_scheduler lr_warmup_steps lr_scheduler_num_cycles
    lr_scheduler_power max_train_steps max_train_epochs train_batch_size batch_size vae_batch_size text_encoder_batch_size output_dir
    output_name logging_dir log_with seed mixed_precision gradient_accumulation_steps gradient_checkpointing max_grad_norm optimizer
    optimizer_type model_type compile resume epoch loss_type huber_c train_text_encoder train_data_dir noise_offset prior_loss_weight
    guidance_scale weighting_scheme logit_mean logit_std mode_scale num_processes num_machines num_gpus multi_gpu gpu_ids
    dynamo_backend sample_prompts model_version instance_prompt class_prompt num_class_images revision variant use_ema snr_gamma""".split()
)
"""Names that other trainers have as well, so that they are no signs of kohya's."""


def looks_like_kohya(given: Mapping[str, object]) -> bool:
    """Whether these are settings of kohya's programs: at least three names that they have, and either nothing else, or half of all with
    one among them that other trainers lack."""
    known = names()
    found = [name for name in given if name in known]
    if len(found) < min(3, len(given)) or not found:
        return False
    return len(found) == len(given) or (2 * len(found) >= len(given) and not _COMMON.issuperset(found))


def names() -> set[str]:
    """The names of kohya's settings that have an option or a rule."""
    return {name for run in RUNS.values() for name in flat.fields(run)} | TABLE.keys() | ADAPTER.keys()


def from_json(given: Mapping[str, object], name: str = "") -> Imported:
    """The page's configuration. Raises OptionError for one of the page for embeddings, which are not trained here."""
    return from_toml(given, name) if lora_scripts.TYPE in given else _imported(given, name, page=True)


def from_toml(given: Mapping[str, object], name: str = "") -> Imported:
    """Options of a script, tables opened. Raises OptionError for a configuration for embeddings."""
    return _imported(lora_scripts.plain(given) if lora_scripts.TYPE in given else given, name, page=False)


def lines(command: Command, more: Iterable[str] = ()) -> tuple[dict[str, object], dict[str, tuple[object, str]]]:
    """The settings of a command line, of which the script's win over those of its file and the launcher's; and what the line alone does not
    say, with its value and why. more: names that a script has besides kohya's."""
    known_names = {*TABLE, *ADAPTER, *kohya_words.SAME, *kohya_words.OPTIONS_OF_OTHERS, *legacy.NOT_NEEDED, *more}
    options = {kohya_words.whole_name(name, known_names): value for name, value in command.options.items()}
    known, unclear = clear({**command.launcher, **command.file, **options})
    if "config_file" in command.options and not command.file:
        asked = (
            "most settings of the run stand in that file, which was not there to be read: open that file, or the line as a script beside it"
        )
        unclear["config_file"] = (command.options["config_file"], asked)
    known.pop("config_file", None)
    return known, unclear


def told_of_files(sheet: KohyaSheet, command: Command) -> None:
    """The rows of the files that a line names: that of the run, where it was read, and accelerate's."""
    if "config_file" in command.options:
        sheet.given["config_file"] = command.options["config_file"]
    if command.file:
        sheet.write("config_file", "renamed", "what it says has rows of its own; what the line says wins")
    elif "config_file" in command.options:
        sheet.lose(
            "config_file",
            "most settings of the run stand in that file, which was not there to be read; open that file, or this line by its path as a "
            "script beside the file",
        )
    elif "config_file" in command.launcher and "config_file" not in command.options:
        sheet.given["config_file"] = command.launcher["config_file"]
        sheet.skip("config_file", "it is accelerate's, about how processes are started; multi_gpu and num_gpus say that here")


def of_line(name: str, command: Command) -> Imported | None:
    """The settings of a command line of sd-scripts; None for another program's. Raises OptionError for what is not trained here."""
    other = next((what for start, what in kohya_words.SCRIPTS_OF_OTHERS.items() if command.name.startswith(start)), None)
    if other is not None:
        raise OptionError(f"{name} is a command line of sd-scripts for {other}, which is not trained here")
    return _imported(lines(command)[0], name, False, command) if command.name in kohya_words.SCRIPTS else None


def from_defaults(given: Mapping[str, object], name: str, left: list[Row]) -> Imported:
    """The defaults of the page, which have its JSON's names, and rows for what is left out of them."""
    found = _imported(given, name, page=True)
    return replace(found, rows=found.rows + left, origin=found.origin.replace(JSON_ORIGIN, DEFAULTS_ORIGIN))


def guessed(given: Mapping[str, object]) -> str:
    """The family that the page's settings are for."""
    return _family(given, "", True)[0]


def _imported(given: Mapping[str, object], name: str, page: bool, command: Command | None = None) -> Imported:
    if any(mark in given for mark in _EMBEDDING_MARKS):
        raise OptionError(
            f"{name} trains an embedding (textual inversion), which is not part of this version; an adapter does more in less time"
        )
    if "cond_emb_dim" in given:
        raise OptionError(f"{name} trains a ControlNet-LLLite, which is not part of this version")
    unclear: Mapping[str, tuple[object, str]] = lines(command)[1] if command is not None else {}
    merged, split = opened(given)
    tab = _tab(merged)
    family, told_by, other = _family(merged, name, page)
    own, like = kohya_words.MODEL_TYPES.get(str(merged.get("model_type") or "")), ""
    script = command.name if command is not None else kohya_words.SCRIPTS_OF_LORA_SCRIPTS.get(str(merged.get(lora_scripts.TYPE)))
    if script is not None:
        script_family, method, script_tab = kohya_words.SCRIPTS[script]
        tab = script_tab or ("lora" if method == "network" else tab if tab != "lora" else "dreambooth")
        family, told_by = (family, told_by) if other else (script_family, command.name if command is not None else lora_scripts.TYPE)
    if own in FACTS:
        family, told_by, other, like = own, "model_type", False, family
    run = RUNS[family, "network" if tab == "lora" else "full"]
    defaults = KOHYA[like or family].defaults
    shift = number(defaults.get("discrete_flow_shift")) or 3.0
    sheet = KohyaSheet(run, merged, page=page, tab=tab, other_family=other, like=like, usual_shift=shift)
    fill(sheet, split)
    who_is_trained(sheet)
    if command is None or not command.lacks_its_file:
        _assume(sheet, unclear)
    if command is not None:
        sheet.ask(unclear, rule_of(sheet))
        told_of_files(sheet, command)
    origin = f"{JSON_ORIGIN if page else LINE_ORIGIN if command is not None else TOML_ORIGIN}: {run.label}, told by {told_by}"
    if other:
        sheet.conflicts.append(f"{name or 'The file'} is for {told_by}; its recipe was put on {run.label}, so choose a base model")
    return sheet.settle(origin)


def fill(sheet: KohyaSheet, split: Mapping[str, list[str]], table: Table | None = None) -> None:
    """Writes the row of every key. split: what the keys that hold other settings were opened into; table: rules of another program."""
    rule = rule_of(sheet, table)
    for key in sheet.given:
        if key in split:
            _opened_row(sheet, key, split[key])
        else:
            rule(sheet, key)


def rule_of(sheet: KohyaSheet, table: Table | None = None) -> Rule:
    """What writes the row of any key."""
    adapter = sheet.run.method == "network"
    rules = table or (TABLE | ADAPTER if adapter else TABLE)

    def write(sheet: KohyaSheet, key: str) -> None:
        if key in ADAPTER and not adapter:
            sheet.skip(key, "it is a setting of adapters, and this run trains the model itself")
        else:
            rules.get(key, KohyaSheet.plain)(sheet, key)

    return write


def _opened_row(sheet: KohyaSheet, key: str, names: list[str]) -> None:
    if names:
        sheet.write(key, "renamed", f"opened into {', '.join(names)}")
    elif is_off(sheet.value(key)):
        sheet.skip(key, "it is empty")
    else:
        sheet.refuse(key, "it names no setting: " + ("write key=value" if key == "network_args" else "write --name value"))


def opened(given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, list[str]]]:
    """The settings with network_args and pieces of command lines opened into names of their own, which win; and what each became."""
    merged = dict(given)
    split: dict[str, list[str]] = {}
    if "network_args" in given:
        pairs = [item.partition("=") for item in (arguments(given["network_args"]) if not is_empty(given["network_args"]) else [])]
        found: dict[str, object] = {key.strip(): text.strip() for key, equals, text in pairs if key.strip() and equals}
        split["network_args"] = list(found)
        merged |= found
    for key in ("additional_parameters", "extra_accelerate_launch_args"):
        if key in given:
            found = _flags(given[key])
            split[key] = list(found)
            merged |= found
    return merged, split


def _flags(value: object) -> dict[str, object]:
    """The options in a piece of a command line: --name value, --name=value, --name a b c, --name."""
    try:
        words = shlex.split(str(value or ""))
    except ValueError:
        words = str(value).replace('"', "").split()
    found: dict[str, object] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            found[name] = text if equals else True
        elif name:
            before = found[name]
            found[name] = word if before is True else [*before, word] if isinstance(before, list) else [str(before), word]
    return {key: item for key, item in found.items() if key}


def _tab(given: Mapping[str, object]) -> str:
    """The page of kohya_ss that settings are for."""
    if any(mark in given for mark in ADAPTER_MARKS):
        return "lora"
    return "finetune" if any(not is_empty(given.get(mark)) for mark in FINETUNE_MARKS) else "dreambooth"


def _family(given: Mapping[str, object], name: str, page: bool) -> tuple[str, str, bool]:
    """The family, what told it, and whether the settings are really for another family that is not trained here."""
    module = str(given.get("network_module") or "")
    # The page's file has the widgets of all families; options of the scripts tell one.
    marks = {other: mark for mark, other in kohya_words.MARKS_OF_OTHERS.items() if not page and not is_empty(given.get(mark))}
    said = str(given.get("model_type") or "")
    for family, facts in KOHYA.items():
        for other in facts.like:
            box = f"{other}_checkbox"
            told_by = box if switch(given.get(box)) is True else module if module == f"networks.lora_{other}" else marks.get(other)
            if told_by:
                return family, f"{told_by}, a family that is not trained here", True
    if said and (family := next((name for name, facts in KOHYA.items() if facts.model_type not in (None, said)), "")):
        return family, "model_type, a family that is not trained here", True
    for family, facts in KOHYA.items():
        if on := next((box for box in facts.boxes if switch(given.get(box)) is True), None):
            return family, on, False
    *others, last = KOHYA
    # A page with one box alone is older than the families that have others.
    boxed = [family for family in others if not given.keys().isdisjoint(KOHYA[family].boxes)]
    if len(boxed) > 1:
        return last, f"the boxes for {' and '.join(FACTS[family].label for family in boxed)}, which are off", False
    return *_guessed(given, name, page), False


def _guessed(given: Mapping[str, object], name: str, page: bool) -> tuple[str, str]:
    """The family without a box that says it: by the adapter, the options of one family, names, and last the resolution."""
    module = str(given.get("network_module") or given.get("LoRA_type") or "").lower()
    for family, facts in KOHYA.items():
        if facts.prefix and facts.prefix in module:
            return family, "the type of the adapter"
    for family, facts in () if page else KOHYA.items():
        # What is off says nothing: pages for several families write the options of all.
        mark = next((mark for mark in facts.marks if not is_off(given.get(mark))), None)
        if mark:
            return family, mark
    for text, what in (
        (str(given.get("pretrained_model_name_or_path") or ""), "the name of the base model"),
        (name, "the name of the file"),
    ):
        for family, facts in KOHYA.items():
            if any(piece in text.lower() for piece in facts.models):
                return family, what
    for family, facts in KOHYA.items():
        if on := next((one.switch for one in facts.versions if switch(given.get(one.switch)) is True), None):
            return family, on
    for family, facts in () if page else KOHYA.items():
        if hint := next((hint for hint in facts.hints if switch(given.get(hint)) is True), None):
            return family, hint
    sides = [number(side) or 0 for side in str(given.get("max_resolution") or given.get("resolution") or "").strip("[]() ").split(",")]
    family, side = next(
        (family, facts.side) for family, facts in KOHYA.items() if facts.side is not None and max(0, min(sides)) >= facts.side
    )
    return family, f"{'the resolution' if side else 'the lack of any other sign'}; choose another kind of run if that is wrong"


_PAGE_DEFAULTS: dict[str, object] = {"network_dim": 8, "network_alpha": 1.0, "lr_decay_steps": 0}
"""As kohya_words.DEFAULTS, for the page."""
_SAID_BY = {"lr_scheduler": "lr_scheduler_type", "lr_warmup_steps": "lr_warmup", "enable_bucket": "dataset_config"}
"""Another key that decides an option as well."""


def _assume(sheet: KohyaSheet, unclear: Mapping[str, object]) -> None:
    """What the file leaves at kohya's default, where that is not ours. unclear: what it says in words that only a shell knows."""
    program = "kohya_ss" if sheet.page else "sd-scripts"
    rank_from_file = sheet.on("dim_from_weights") or type_name(sheet) in ("diag-oft", "boft", "transformer oft")
    own = sheet.kohya.defaults if sheet.kohya is not None else {}
    files = {"save_model_as": "kohya"} if sheet.run.method == "network" else {}
    lycoris = not sheet.page and str(sheet.value("network_module")).startswith("lycoris")
    for option, default in {**(_PAGE_DEFAULTS if sheet.page else kohya_words.DEFAULTS), **own, **files}.items():
        if option not in sheet.known or option in sheet.given or option in unclear:
            continue
        if not is_empty(sheet.value(_SAID_BY.get(option, ""))) or option in sheet.values:
            continue
        if option in ("network_dim", "network_alpha") and rank_from_file:
            continue
        if option == "network_alpha" and (sheet.number("network_dim") or 0) > LARGEST_RANK:
            continue
        if option in ("bucket_no_upscale", "max_bucket_reso") and not sheet.on("enable_bucket"):
            continue
        if option == "max_bucket_reso" and sheet.on("bucket_no_upscale"):
            continue
        if option == "conv_alpha" and lycoris:
            continue
        if sheet.known[option].default != default and option not in flat.asleep(sheet.run, {**sheet.values, option: default}):
            sheet.assume(option, default, program)
    if lycoris and adapts_convolutions(sheet):
        for option, other in (("conv_dim", "network_dim"), ("conv_alpha", "network_alpha")):
            if option not in sheet.given and (same := sheet.values.get(other, sheet.known[other].default)) is not None:
                sheet.assume(option, same, "LyCORIS")
