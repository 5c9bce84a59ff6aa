"""What text an image is shown with: the caption pipeline, in kohya's order.

prefix + caption + suffix -> drop the whole caption -> wildcards -> split into kept head, flexible parts, kept tail -> token
warm-up -> shuffle -> per-part dropout -> per-word dropout -> join -> secondary separator becomes the separator.

A caption is a function of (seed, image, variant, step within token warm-up), so all texts of a run are known before it starts
and their embeddings can be cached. Which variant a sample shows, and whether its caption is dropped, are draws of the sample.
Marks (keep_tokens_separator, secondary_separator) never reach the text encoder, whichever options are on.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from sd_scripts.schema.dataset import DatasetOptions

from .draws import choice_for, fraction_for, random_for

_CHOICE = re.compile(r"\{([^{}]+)\}")
_BRACES = re.compile(r"\{\{|\}\}|[{}]")
_OPEN, _CLOSE = "\x01", "\x02"  # stand for {{ and }}, which mean the braces themselves


@dataclass(frozen=True)
class CaptionRules:
    """The caption options of one subset; see the texts in DatasetOptions. warmup_steps counts optimizer steps, 0 is off."""

    separator: str = ","
    shuffle: bool = False
    keep_tokens: int = 0
    keep_separator: str = ""
    secondary_separator: str = ""
    wildcards: bool = False
    prefix: str = ""
    suffix: str = ""
    dropout_rate: float = 0.0
    dropout_every_n_epochs: int = 0
    part_dropout_rate: float = 0.0
    word_dropout_rate: float = 0.0
    warmup_min: int = 1
    warmup_steps: float = 0.0
    variants: int = 16

    @property
    def splits(self) -> bool:
        """Whether captions are taken apart at the separator."""
        return self.shuffle or self._thins or self.warmup_steps > 0

    @property
    def _thins(self) -> bool:
        return self.part_dropout_rate > 0 or self.word_dropout_rate > 0

    @property
    def random(self) -> bool:
        """Whether an image's caption may differ from sample to sample, apart from being dropped and from warm-up."""
        return self.shuffle or self._thins or self.wildcards


def rules_of(options: DatasetOptions, num_steps: int = 0) -> CaptionRules:
    """The caption rules of these options; num_steps is the length of the run, which a token_warmup_step below 1 is a fraction of."""
    warmup = options.token_warmup_step
    return CaptionRules(
        separator=options.caption_separator,
        shuffle=options.shuffle_caption,
        keep_tokens=options.keep_tokens,
        keep_separator=options.keep_tokens_separator,
        secondary_separator=options.secondary_separator,
        wildcards=options.enable_wildcard,
        prefix=options.caption_prefix,
        suffix=options.caption_suffix,
        dropout_rate=options.caption_dropout_rate,
        dropout_every_n_epochs=options.caption_dropout_every_n_epochs,
        part_dropout_rate=options.caption_tag_dropout_rate,
        word_dropout_rate=options.caption_token_dropout_rate,
        warmup_min=options.token_warmup_min,
        warmup_steps=warmup * num_steps if warmup < 1 else warmup,
        variants=options.caption_variants,
    )


def is_dropped(rules: CaptionRules, seed: int, number: int, epoch: int) -> bool:
    """Whether sample `number` is shown with an empty caption; epoch counts from 0, so with N the epochs N - 1, 2 N - 1, ... are."""
    if rules.dropout_every_n_epochs and (epoch + 1) % rules.dropout_every_n_epochs == 0:
        return True
    return rules.dropout_rate > 0 and fraction_for(seed, number, "caption_dropout") < rules.dropout_rate


def variant_of(rules: CaptionRules, seed: int, number: int) -> int:
    """Which version of its caption sample `number` shows: 0 ... variants - 1, or the sample's own number without variants."""
    if not rules.random:
        return 0
    return choice_for(seed, number, "caption_variant", rules.variants) if rules.variants else number


def warmup_stage(rules: CaptionRules, step: int) -> int:
    """The step as far as captions depend on it: -1 once token warm-up is over (or off)."""
    return step if step < rules.warmup_steps else -1


def render(rules: CaptionRules, raw: str, seed: int, image: str, variant: int, stage: int = -1) -> str:
    """The caption of an image in one of its variants.

    raw is the content of the caption file, image the name that keeps the draws of images apart, stage what `warmup_stage` gave.
    """
    rng = random_for(seed, variant, f"caption/{image}")
    lines = [line.strip() for line in raw.splitlines() if line.strip()]
    text = ""
    if lines:
        text = rng.choice(lines) if rules.wildcards and len(lines) > 1 else lines[0]
    text = " ".join(part for part in (rules.prefix, text, rules.suffix) if part)
    if rules.wildcards:
        text = choose_wildcards(text, rng)
    if rules.splits:
        text = _rearrange(rules, text, rng, stage)
    elif rules.keep_separator and rules.keep_separator in text:
        sections = [section.strip().strip(rules.separator).strip() for section in text.split(rules.keep_separator)]
        text = _joint(rules).join(section for section in sections if section)
    if rules.secondary_separator and rules.secondary_separator in text:
        separator = re.escape(rules.separator)
        # A mark at the edge of a part would leave two separators side by side.
        text = re.sub(rf"{separator}(\s*{separator})+", rules.separator, text.replace(rules.secondary_separator, rules.separator))
    return text.strip()


def render_plain(rules: CaptionRules, raw: str, seed: int, image: str) -> str:
    """The caption with nothing shuffled, thinned or dropped, for held-out images; wildcards are chosen once for each image."""
    still = CaptionRules(
        separator=rules.separator,
        keep_separator=rules.keep_separator,
        secondary_separator=rules.secondary_separator,
        wildcards=rules.wildcards,
        prefix=rules.prefix,
        suffix=rules.suffix,
    )
    return render(still, raw, seed, image, 0)


def _joint(rules: CaptionRules) -> str:
    return rules.separator if rules.separator.endswith((" ", "\n")) else rules.separator + " "


def choose_wildcards(text: str, rng: random.Random) -> str:
    """{a|b|c} becomes one of its parts, innermost first, so choices may be nested; {{ and }} are braces, unless }} ends two choices."""
    text = _with_marks(text)
    while True:
        text, count = _CHOICE.subn(lambda match: rng.choice(match[1].split("|")), text)
        if not count:
            return text.replace(_OPEN, "{").replace(_CLOSE, "}")


def _with_marks(text: str) -> str:
    """The text with marks for {{ and }} that mean the braces themselves."""
    opened: list[str] = []

    def marked(match: re.Match[str]) -> str:
        brace = match[0]
        if brace[0] == "{":
            opened.append(brace)
            return _OPEN if brace == "{{" else brace
        if brace == "}}" and opened[-2:] != ["{", "{"]:
            if opened[-1:] == ["{{"]:
                opened.pop()
            return _CLOSE
        del opened[-len(brace) :]
        return brace

    return _BRACES.sub(marked, text)


def _parts(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _split(rules: CaptionRules, text: str) -> tuple[list[str], list[str], list[str]]:
    """Kept head, flexible parts, kept tail."""
    mark = rules.keep_separator
    if mark and mark in text:
        head, _, rest = text.partition(mark)
        flexible, _, tail = rest.partition(mark)
        # A third mark means nothing, but it must not be encoded either.
        tail = tail.replace(mark, rules.separator)
        return _parts(head, rules.separator), _parts(flexible, rules.separator), _parts(tail, rules.separator)
    parts = _parts(text, rules.separator)
    return parts[: rules.keep_tokens], parts[rules.keep_tokens :], []


def _rearrange(rules: CaptionRules, text: str, rng: random.Random, stage: int) -> str:
    head, flexible, tail = _split(rules, text)
    if 0 <= stage < rules.warmup_steps:
        grown = int(stage * (len(flexible) - rules.warmup_min) / rules.warmup_steps) if len(flexible) > rules.warmup_min else 0
        flexible = flexible[: rules.warmup_min + grown]
    if rules.shuffle:
        rng.shuffle(flexible)
    if rules.part_dropout_rate > 0:
        flexible = [part for part in flexible if rng.random() >= rules.part_dropout_rate]
    if rules.word_dropout_rate > 0:
        flexible = [thinned for part in flexible if (thinned := _without_words(rules, part, rng))]
    return _joint(rules).join(head + flexible + tail)


def _without_words(rules: CaptionRules, part: str, rng: random.Random) -> str:
    """A part with each of its words left out by chance. Marks of the secondary separator stay between what is left."""
    mark = rules.secondary_separator
    pieces = part.split(mark) if mark else [part]
    left = [" ".join(word for word in piece.split() if rng.random() >= rules.word_dropout_rate) for piece in pieces]
    return mark.join(piece for piece in left if piece)
