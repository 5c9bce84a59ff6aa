"""Lines and files written for kohya's scripts: what has one clear meaning here is taken, with a sentence that says as what.

What would change the training stays as it is, and is refused with the advice of `legacy`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from sd_scripts.families import FACTS

from . import kohya_words as words
from . import legacy
from .optimizer import SCHEDULE_FREE
from .runs import RunOptions
from .sleeping import asleep

_CHANGES_SOMETHING = {"config_file", "dataset_class", "no_token_padding", "train_blocks", "huggingface_token", "wandb_api_key", "wandb_key"}
"""Names that `legacy` calls not needed, but without which a run would end otherwise."""
_OF_ONE_FAMILY = {name: kind for facts in FACTS.values() if facts.kohya for name, kind in facts.kohya.types.items()}
_TYPES = {name: words.TYPES[kind].ours for name, kind in (words.MODULES | _OF_ONE_FAMILY).items() if not words.TYPES[kind].lost} | {
    "lycoris.kohya": "lora"
}
"""Modules whose adapter is made here just so."""
_ALGORITHMS = {name: words.TYPES[name].ours for name in ("lora", "locon", "loha", "lokr")} | {"dora": "dora"}
_NO_EFFECT = {"preset": ("full", "attn-mlp"), **dict.fromkeys(("use_tucker", "use_cp", "use_scalar", "train_norm"), ("false", "0"))}
"""Network arguments that say what is done here anyway."""

Meaning = tuple[dict[str, object], str]
"""Options that say the same here, and a sentence."""


def _switch(**options: object) -> Callable[[Any], Meaning]:
    return lambda value: (
        ({}, "it is off")
        if _is_off(value)
        else (options, "taken as " + ", ".join(f"{name} = {_shown(one)}" for name, one in options.items()))
    )


def _value(option: str) -> Callable[[Any], Meaning]:
    return lambda value: ({option: value}, f"taken as {option} = {_shown(value)}")


_MEANINGS: dict[str, Callable[[Any], Meaning]] = {
    "caption_extention": _value("caption_extension"),
    **{name: _switch(**options) for name, options in words.SWITCHES.items()},
}
_LEFT = ("network_args", *words.TEXT_RATES)
"""Names that have a step of their own."""


class _Line:
    """One line, or file, for one kind of run, while it is translated."""

    def __init__(self, run: type[RunOptions], known: Mapping[str, Any], given: Mapping[str, object]) -> None:
        self.run, self.known = run, known
        self.kohya = FACTS[run.family].kohya
        self.given = dict(given)
        self.values = dict(given)
        self.notes: list[str] = []
        self.is_kohyas = False
        """Whether a name that only kohya's scripts have was among them."""

    def become(self, name: str, options: Mapping[str, object], note: str) -> None:
        """Puts options in the place of a name; what is given under its own name wins."""
        self.values.pop(name, None)
        self.values = {**options, **self.values}
        self.is_kohyas = True
        self.notes.append(f"--{name}: {note}")

    def meaning(self, name: str, value: object) -> Meaning | None:
        """What a name that is no option here says; None where it would change the training, or nobody knows it."""
        if name == "network_module":
            if value == "lycoris.kohya" and any(str(item).startswith("algo=") for item in _items(self.given.get("network_args"))):
                return {}, "its algo says the type"
            kind = _TYPES.get(str(value))
            return None if kind is None or "network_type" not in self.known else ({"network_type": kind}, f"taken as network_type = {kind}")
        option = next((option for option, names in (self.kohya.options if self.kohya else {}).items() if name in names), None)
        if option is not None:
            return _value(option)(value)
        if name == "clip_skip" and str(value) in ("0", "1"):
            return {}, f"{value} is the model's own way"
        if name == "clip_skip" and self.kohya is not None:
            return {}, "without effect, as in kohya's scripts for this family: it always reads the same layer of its text encoders"
        if name in _MEANINGS:
            options, note = _MEANINGS[name](value)
            return (options, note) if options.keys() <= self.known.keys() else None
        if name == "dynamo_backend" and "compile_backend" in self.known and str(value) in self.known["compile_backend"].choices:
            compiled = not _is_off(self.given.get("torch_compile"))
            return ({"compile_backend": value}, f"taken as compile_backend = {value}") if compiled else ({}, "it is for torch_compile")
        if (whole := words.whole_name(name, words.SAME)) != name and whole in self.known:
            return _value(whole)(value)
        found = legacy.find(name, self.run)
        # What the trainers of other families call not needed may be the choice of what is trained.
        if found is None or name in _CHANGES_SOMETHING or (self.kohya is None and name not in legacy.NOT_NEEDED):
            return None
        kind, text = found
        return (
            ({}, f"not needed, because {text.removesuffix('. Remove it').removesuffix('; remove it')}")
            if (kind == "not needed" or name in words.SAME_RESULT)
            else None
        )

    def values_in_our_words(self) -> None:
        """Names of optimizers in any case, kohya's word for our file, zeros that mean off."""
        for name, value in list(self.values.items()):
            choices = self.known[name].choices if name in self.known else ()
            text = str(value).strip()
            meant: object = value
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and name in self.known
                and Ellipsis in get_args(self.known[name].type)
            ):
                self.values[name] = [value]
                continue
            if name == "optimizer_type":
                meant = words.OPTIMIZERS_BY_NAME.get(words.bare_name(text), value)
                # By our own name, the option says what is done.
                if meant in SCHEDULE_FREE and meant != text and self.values.get("lr_scheduler") != "constant":
                    self.values["lr_scheduler"] = "constant"
                    self.notes.append(f"--lr_scheduler: {meant} has none, so constant is taken")
            elif name == "save_model_as" and text == "safetensors" and text not in choices:
                meant = "kohya"
            elif name == "save_precision":
                meant = words.FILE_PRECISIONS.get(text.lower(), value)
            elif name == "sample_sampler":
                meant = words.SAMPLERS.get(text.removeprefix("k_"), text.removeprefix("k_"))
            elif name in words.ZERO_IS_NONE and text in ("0", "0.0") and self.known[name].optional:
                meant = None
            if isinstance(meant, str) and choices and meant not in choices:
                meant = next((word for word in choices if str(word).lower() == meant.lower()), meant)
            if meant is not value and meant != value:
                self.values[name] = meant
                self.notes.append(f"--{name}: {text} is taken as {_shown(meant)}")

    def network_arguments(self) -> None:
        """LyCORIS's names of algorithms; its convolutions get the rank of the rest where conv_dim does not say another."""
        pairs = [item.partition("=") for item in _items(self.values.get("network_args"))]
        kept: list[str] = []
        algorithm = ""
        for key, equals, text in pairs:
            if key == "algo" and text.lower() in _ALGORITHMS:
                algorithm = text.lower()
            elif key == "dora_wd" and (_is_off(text) or not {"algo=loha", "algo=lokr"} & {"".join(pair).lower() for pair in pairs}):
                self.values |= {"network_type": "dora"} if not _is_off(text) else {}
            elif text.lower() not in _NO_EFFECT.get(key, ()):
                kept.append(f"{key}{equals}{text}")
        if kept != [f"{key}{equals}{text}" for key, equals, text in pairs]:
            self.values["network_args"] = kept
        if algorithm:
            self.values.setdefault("network_type", _ALGORITHMS[algorithm])
            self.notes.append(f"--network_args algo={algorithm}: taken as network_type = {_shown(self.values['network_type'])}")
        if self.given.get("network_module") != "lycoris.kohya" or any(text in words.LINEAR_ONLY for _, _, text in pairs):
            return
        said = {*self.values, *(key for key, _, _ in pairs)}
        for option, other in (("conv_dim", "network_dim"), ("conv_alpha", "network_alpha")):
            if option in self.known and option not in said and (same := self.values.get(other, self.known[other].default)) is not None:
                self.values[option] = same
                self.notes.append(f"--network_module lycoris.kohya: {option} = {same}, {other} of the rest, as there")

    def text_encoders(self) -> None:
        """Rates of the text encoders by kohya's names; and an adapter of kohya's trains them unless it is told not to."""
        if "train_text_encoder" not in self.known:
            return
        rates = [self.values.pop(name) for name in words.TEXT_RATES if name in self.values]
        if rates:
            self.values.setdefault("text_encoder_lr", [str(rate) for rate in rates])
            self.notes.append(f"text_encoder_lr = {', '.join(map(str, rates))} holds the rates of the text encoders")
        if self.run.method != "network" or "network_module" not in self.given or "train_text_encoder" in self.values:
            return
        if _is_off(self.given.get("cache_text_encoder_outputs")):
            self.values["train_text_encoder"] = True
            self.notes.append("--network_module: the text encoders are trained as well, as there without network_train_unet_only")
        elif self.values.pop("text_encoder_lr", None):
            self.notes.append("text_encoder_lr: without effect, because cached text encoders are not trained")

    def caches(self) -> None:
        """A cache that nobody asked for gives way to what it cannot show; T5 may stay as it is while CLIP is trained."""
        texts = "train_t5xxl" not in self.known or not _is_off(self.values.get("train_t5xxl"))
        for option, cache in (("train_text_encoder", "cache_text_encoder_outputs"), ("color_aug", "cache_latents")):
            on = not _is_off(self.values.get(option)) and (option != "train_text_encoder" or texts)
            if on and cache in self.known and cache not in self.values:
                self.values[cache] = False
                self.notes.append(f"--{option}: {cache} is off, because nobody asked for it and it cannot show what changes in every step")

    def counts_here(self) -> None:
        """A sentence for each given option that kohya's scripts take no notice of in such a run."""
        if not _is_off(self.values.get("bucket_no_upscale")):
            limits = [name for name in ("min_bucket_reso", "max_bucket_reso") if name in self.values]
            self.notes += [f"--{name}: it holds here; there it has no effect with bucket_no_upscale" for name in limits]
        if self.kohya is not None and "discrete_flow_shift" in self.known:
            bounds = [name for name in ("min_timestep", "max_timestep") if name in self.values]
            self.notes += [f"--{name}: it counts here; kohya's scripts for this family train on all times" for name in bounds]

    def defaults(self) -> None:
        """A sentence on what the line leaves out and kohya's scripts would take otherwise."""
        opened, _ = legacy.network_args(self.values.get("network_args", ()), self.known)
        values = {**opened, **self.values}
        left = [
            f"{name} = {_shown(self.known[name].default)} ({_shown(theirs)} there)"
            for name, theirs in ({**words.DEFAULTS, **self.kohya.defaults} if self.kohya else {}).items()
            if name in self.known and name not in values and self.known[name].default != theirs
            if name not in asleep(self.known, {**values, name: theirs})
        ]
        if left:
            self.notes.append(f"what is not given has the defaults of this program: {', '.join(left)}")


def translated(run: type[RunOptions], known: Mapping[str, Any], given: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Given options with kohya's words turned into ours, and a sentence for each that was; what has no clear meaning stays.

    known has the options of this kind of run by name (see flat.fields).
    """
    line = _Line(run, known, given)
    line.network_arguments()
    for name, value in given.items():
        if name not in known and name not in _LEFT and (found := line.meaning(name, value)) is not None:
            line.become(name, *found)
    line.values_in_our_words()
    line.text_encoders()
    line.caches()
    if line.is_kohyas:
        line.counts_here()
        line.defaults()
    return line.values, line.notes


def split(run: type[RunOptions], known: Mapping[str, Any], argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """A command line without the flags that are no options here but have one clear meaning, and these with their values."""
    line = _Line(run, known, {})
    rest: list[str] = []
    found: dict[str, object] = {}
    left = list(argv)
    while left:
        word = left.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        after: list[str] = []
        while word.startswith("--") and not equals and left and not left[0].startswith("--"):
            after.append(left.pop(0))
        value: object = text if equals else after[0] if len(after) == 1 else after or True
        rate = name in words.TEXT_RATES and "text_encoder_lr" in known
        if word.startswith("--") and name not in known and (rate or line.meaning(name, value) is not None):
            found[name] = value
        else:
            rest += [word, *after]
    return rest, found


def _items(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else str(value or "").split()


def _is_off(value: object) -> bool:
    return value is None or str(value).strip().lower() in ("", "false", "0", "no", "none")


def _shown(value: object) -> str:
    return "on" if value is True else "off" if value is False else "none" if value is None else str(value)
