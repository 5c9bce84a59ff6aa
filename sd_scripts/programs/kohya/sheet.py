"""A sheet for kohya's settings: it knows whether they come from the page's own JSON or are options of a script, and who is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sd_scripts.families import FACTS
from sd_scripts.schema import kohya_words as words
from sd_scripts.schema import legacy
from sd_scripts.schema.facts import KohyaFacts
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.sheet import Sheet, is_empty, is_off, switch


class KohyaSheet(Sheet):
    """Settings of kohya_ss or sd-scripts."""

    def __init__(
        self,
        run: type[RunOptions],
        given: Mapping[str, object],
        *,
        page: bool,
        tab: str,
        other_family: bool = False,
        program: str = "",
        like: str = "",
        usual_shift: float = 3.0,
    ) -> None:
        self.kohya = FACTS[run.family].kohya or (FACTS[like].kohya if like in FACTS else None)
        """None where kohya's programs do not train the family. like names another family whose scripts train it."""
        given, called = self._in_plain_names(given) if page else (given, {})
        super().__init__(run, given)
        self.called |= called
        self.program = program or ("kohya_ss" if page else "sd-scripts")
        self.page = page
        """Whether the names and values are those of the page's widgets (JSON) and not of the scripts' options (TOML)."""
        self.tab = tab
        """lora, dreambooth or finetune: the page of kohya_ss that the settings are for."""
        self.usual_shift = usual_shift
        """The shift of the steps with timestep_sampling = sigma where the file says none."""
        self.other_family = other_family
        """Whether the settings are for a family that is not trained here."""
        self.trains_unet, self.trains_text = self._who_is_trained()

    def _in_plain_names(self, given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
        """The page's settings with the widgets that it has for this family alone under the names that scripts have, and what the page calls
        them. A widget of other families with such a name stands aside, under a name with a star."""
        own = {name: plain for name, plain in (self.kohya.names if self.kohya else {}).items() if not is_empty(given.get(name))}
        found: dict[str, object] = {}
        called: dict[str, str] = {}
        for key, value in given.items():
            name = own.get(key, f"{key}{ASIDE}" if key in own.values() else key)
            found[name] = value
            called |= {name: key} if name != key else {}
        return found, called

    def is_of_others(self, key: str) -> bool:
        """Whether a name of the page is for other families alone."""
        return key in NAMES and (self.kohya is None or key not in self.kohya.names)

    @property
    def has_texts_of_its_own(self) -> bool:
        """Whether kohya's scripts of this very family train text encoders, which are not trained here."""
        cached = self.on(*named("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"))
        return FACTS[self.run.family].kohya is not None and "train_text_encoder" not in self.known and not cached

    @property
    def flows(self) -> bool:
        """Whether the family is trained by flow matching, and has no noise schedule."""
        return "noise_offset" not in self.known

    @property
    def sets_its_own_rate(self) -> bool:
        """Whether kohya's Adafactor leaves the given rates aside, which it does unless it is told relative_step=False."""
        said = str(self.value("optimizer_args") or "").replace(" ", "").lower()
        return "adafactor" in str(self.first("optimizer", "optimizer_type") or "").lower() and "relative_step=false" not in said

    def _who_is_trained(self) -> tuple[bool, bool]:
        if self.run.method == "full":
            return True, self._trains_text_of_whole_model()
        if self.on("network_train_unet_only"):
            return True, False
        if self.on("network_train_text_encoder_only"):
            return False, True
        if not self.page:
            return True, True
        # The page: a rate of 0 leaves a part out, unless both are 0, which means learning_rate for both.
        unet = 1e-4 if self.value("unet_lr") is None else self.number("unet_lr") or 0
        text = self.number("text_encoder_lr") or 0
        return (unet != 0, text != 0) if unet or text else (True, True)

    def _trains_text_of_whole_model(self) -> bool:
        if "train_text_encoder" not in self.known:
            return False
        if self.kohya is not None and self.kohya.dreambooth_trains_text and self.tab == "dreambooth":
            stopped = self.number("stop_text_encoder_training", "stop_text_encoder_training_pct") == -1
            return not stopped and self.value("learning_rate_te") != 0
        return switch(self.value("train_text_encoder")) is True

    def plain(self, key: str) -> None:
        """What becomes of a key without a rule: the same option, or what legacy knows about the name."""
        value = self.value(key)
        found = legacy.find(key, self.run)
        if key.endswith(ASIDE):
            own = self.called.get(key.removesuffix(ASIDE), "a widget of its own")
            self.skip(key, f"it is for other families; {FACTS[self.run.family].label} has {own}")
        elif is_empty(value):
            self.skip(key, "it is empty")
        elif key in self.known:
            self.take(key, key, value)
        elif is_off(value):
            self.skip(key, "it is off")
        elif found is not None and (found[0] == "not needed" or key in words.SAME_RESULT):
            self.skip(key, found[1].removesuffix("; remove it"))
        elif key in words.OPTIONS_OF_OTHERS and not self.other_family:
            self.skip(key, "it is for a family that this run does not train")
        elif found is None and (families := self.families_with(key)):
            self.skip(key, f"it has no effect here; it is for {families}")
        elif (family := _foreign_prefix(key)) is not None:
            self.skip(key, f"it is for {family}, which this run does not train")
        elif found is None:
            self.unknown(key, self.program, list(self.known))
        elif self.other_family or key in words.BESIDE_THE_RESULT:
            self.refuse(key, self.advice(key, value))
        else:
            self.lose(key, self.advice(key, value))


ASIDE = "*"
"""Ends the names of the page's widgets that a widget of the family replaces."""
KOHYA: dict[str, KohyaFacts] = dict(
    sorted(((name, facts.kohya) for name, facts in FACTS.items() if facts.kohya is not None), key=lambda item: item[1].asked)
)
"""The families that kohya's programs train as well, in the order in which a file is asked."""
NAMES: dict[str, str] = {name: plain for facts in KOHYA.values() for name, plain in facts.names.items()}
"""What the page calls otherwise for one family, with the name that others have for it."""
TYPES_OF_FAMILIES = {name: kind for facts in KOHYA.values() for name, kind in facts.types.items()}
"""Modules and types of adapters for one family alone."""
OPTIONS = {name: option for facts in KOHYA.values() for option, names in facts.options.items() for name in names}
"""What the scripts of single families call options that have another name here."""
_PREFIXES = {
    "sd3_": "Stable Diffusion 3",
    "hunyuan_": "HunyuanImage",
    "lumina_": "Lumina",
    **{facts.prefix: FACTS[name].label for name, facts in KOHYA.items() if facts.prefix},
}


def named(*options: str) -> tuple[str, ...]:
    """These options, and what the page calls them for single families."""
    return (*options, *(name for name, plain in NAMES.items() if plain in options))


def families_of(mark: str) -> str:
    """The families for which a name of the page is, in words."""
    return " and ".join(FACTS[name].label for name, facts in KOHYA.items() if mark in facts.names)


def _foreign_prefix(key: str) -> str | None:
    return next((family for prefix, family in _PREFIXES.items() if key.startswith(prefix)), None)


Rule = Callable[[KohyaSheet, str], None]
"""Writes the row of one key."""
Table = dict[str, Rule]


def rules(table: Table) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator maker that enters rules into a table under the keys they are for."""

    def under(*names: str) -> Callable[[Rule], Rule]:
        def enter(rule: Rule) -> Rule:
            for name in names:
                assert name not in table, name
                table[name] = rule
            return rule

        return enter

    return under
