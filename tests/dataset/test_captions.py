"""Every step of the caption pipeline, and that captions are functions of (seed, image, variant)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sd_scripts.dataset.captions import CaptionRules, is_dropped, render, render_plain, rules_of, variant_of, warmup_stage
from sd_scripts.dataset.draws import choice_for, fraction_for, seed_for
from sd_scripts.schema.dataset import DatasetOptions

TAGS = "1girl, solo, hat, red dress, garden, smile, sky"
SHUFFLED = CaptionRules(shuffle=True)


def shown(rules: CaptionRules, raw: str, variant: int = 0, stage: int = -1, image: str = "0/a.png", seed: int = 7) -> str:
    return render(rules, raw, seed, image, variant, stage)


def parts(text: str) -> list[str]:
    return text.split(", ")


def test_plain_captions_pass_unchanged() -> None:
    text = "a 1,000 year old tree,with odd , spacing"
    assert shown(CaptionRules(), text) == text


def test_only_the_first_line_counts_without_wildcards() -> None:
    assert shown(CaptionRules(), "\n  first \nsecond") == "first"


def test_prefix_and_suffix_are_put_around_with_a_space() -> None:
    rules = CaptionRules(prefix="photo of", suffix="in style")
    assert shown(rules, "a cat") == "photo of a cat in style"
    assert shown(rules, "") == "photo of in style"


def test_the_prefix_takes_part_in_what_follows_it() -> None:
    rules = CaptionRules(prefix="token,", keep_tokens=1, shuffle=True)
    assert {parts(shown(rules, TAGS, variant))[0] for variant in range(20)} == {"token"}


def test_dropped_captions_are_about_the_rate_and_depend_on_the_sample_only() -> None:
    rules = CaptionRules(dropout_rate=0.3)
    dropped = [is_dropped(rules, 5, number, 0) for number in range(4000)]
    assert abs(sum(dropped) / 4000 - 0.3) < 0.03
    assert dropped == [is_dropped(rules, 5, number, 99) for number in range(4000)]


def test_every_nth_epoch_is_dropped_whole() -> None:
    rules = CaptionRules(dropout_every_n_epochs=3)
    assert [is_dropped(rules, 5, 0, epoch) for epoch in range(7)] == [False, False, True, False, False, True, False]


def test_wildcards_choose_evenly_among_lines_and_alternatives() -> None:
    rules = CaptionRules(wildcards=True, variants=0)
    counts = Counter(shown(rules, "a {red|blue} cat\na dog", variant) for variant in range(4000))
    assert counts.keys() == {"a red cat", "a blue cat", "a dog"}
    assert abs(counts["a dog"] / 4000 - 0.5) < 0.04 and abs(counts["a red cat"] / 4000 - 0.25) < 0.04


def test_wildcards_may_be_nested_and_double_braces_are_braces() -> None:
    rules = CaptionRules(wildcards=True)
    found = {shown(rules, "{a|{b|c} d} {{e}}", variant) for variant in range(60)}
    assert found == {"a {e}", "b d {e}", "c d {e}"}


@pytest.mark.parametrize(
    ("caption", "wanted"),
    [
        ("{a|{b|c}}", {"a", "b", "c"}),
        ("{a|{b|{c|d}}} e", {"a e", "b e", "c e", "d e"}),
        # Braces that are meant themselves stay so within a choice and around one.
        ("{a|{{b}}}", {"a", "{b}"}),
        ("{{ {a|b} }}", {"{ a }", "{ b }"}),
        ("{:}}|:D}", {":}", ":D"}),
        ("a {} b", {"a {} b"}),
    ],
)
def test_choices_that_end_together_are_two_choices(caption: str, wanted: set[str]) -> None:
    assert {shown(CaptionRules(wildcards=True), caption, variant) for variant in range(80)} == wanted


def test_without_wildcards_braces_stay() -> None:
    assert shown(CaptionRules(), "a {red|blue} cat") == "a {red|blue} cat"


def test_keep_tokens_stay_in_front_in_order() -> None:
    rules = CaptionRules(shuffle=True, keep_tokens=2, part_dropout_rate=0.9)
    for variant in range(30):
        assert parts(shown(rules, TAGS, variant))[:2] == ["1girl", "solo"]


def test_the_keep_separator_wins_over_keep_tokens_and_keeps_a_tail() -> None:
    rules = CaptionRules(shuffle=True, keep_tokens=4, keep_separator="|||")
    for variant in range(30):
        text = parts(shown(rules, "1girl ||| a, b, c, d ||| tail, end", variant))
        assert text[0] == "1girl" and text[-2:] == ["tail", "end"] and sorted(text[1:-2]) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("raw", ["a, b ||| c", "a, b, ||| , c", "a ||| b ||| c ||| d", "||| a", "a |||", "|||"])
def test_marks_never_reach_the_encoder(shuffle: bool, raw: str) -> None:
    rules = CaptionRules(shuffle=shuffle, keep_separator="|||", secondary_separator=";;;")
    text = shown(rules, raw + ";;; x")
    assert "|||" not in text and ";;;" not in text
    assert ",," not in text.replace(" ", "")


def test_a_mark_without_shuffling_becomes_a_separator() -> None:
    assert shown(CaptionRules(keep_separator="|||"), "1girl, solo ||| hat, cat") == "1girl, solo, hat, cat"


def test_the_secondary_separator_moves_parts_together() -> None:
    rules = CaptionRules(shuffle=True, secondary_separator=";;;")
    for variant in range(30):
        text = shown(rules, "a, b;;;c;;;d, e", variant)
        assert "b,c,d" in text


def test_shuffling_reaches_every_order_and_keeps_every_part() -> None:
    orders = {shown(SHUFFLED, "a, b, c", variant) for variant in range(200)}
    assert len(orders) == 6


def test_part_dropout_leaves_out_about_the_rate() -> None:
    rules = CaptionRules(part_dropout_rate=0.25)
    kept = [len([part for part in parts(shown(rules, TAGS, variant)) if part]) for variant in range(2000)]
    assert abs(sum(kept) / 2000 / 7 - 0.75) < 0.02


def test_word_dropout_leaves_out_about_the_rate_of_the_words_and_keeps_their_order() -> None:
    rules, words = CaptionRules(word_dropout_rate=0.3), [f"w{number}" for number in range(50)]
    assert rules.random and not CaptionRules().random
    left = [shown(rules, " ".join(words), variant).split() for variant in range(200)]
    assert 0.67 < sum(map(len, left)) / (200 * 50) < 0.73
    assert all(some == sorted(some, key=words.index) for some in left) and len({tuple(some) for some in left}) > 150


def test_word_dropout_leaves_kept_parts_alone_and_no_empty_part() -> None:
    kept = CaptionRules(word_dropout_rate=0.9, keep_separator="|||")
    for variant in range(60):
        text = shown(kept, "zwx dog, old ||| red hat, blue sky, hill ||| by nobody at all", variant)
        assert text.startswith("zwx dog, old") and text.endswith("by nobody at all") and ", ," not in text
        assert {*parts(text)} <= {"zwx dog", "old", "red hat", "red", "hat", "blue sky", "blue", "sky", "hill", "by nobody at all"}
    counted = CaptionRules(word_dropout_rate=0.9, keep_tokens=2)
    assert all(shown(counted, "zwx dog, old man, red hat", variant).startswith("zwx dog, old man") for variant in range(60))


def test_word_dropout_keeps_what_moves_together_apart_from_its_words() -> None:
    rules = CaptionRules(word_dropout_rate=0.5, secondary_separator=";;;")
    found = {shown(rules, "red hat;;;blue sky", variant) for variant in range(200)}
    whole = {"", "red", "hat", "red hat"}
    assert found == {",".join(filter(None, (a, b))) for a in whole for b in {"", "blue", "sky", "blue sky"}}


def test_word_dropout_leaves_held_out_captions_whole_and_changes_no_other_draw() -> None:
    assert render_plain(CaptionRules(word_dropout_rate=0.9), TAGS, 7, "0/a.png") == TAGS
    assert shown(replace(SHUFFLED, word_dropout_rate=1e-12), TAGS, 3) == shown(SHUFFLED, TAGS, 3)


def test_part_dropout_without_shuffle_keeps_the_order() -> None:
    rules = CaptionRules(part_dropout_rate=0.4)
    order = parts(TAGS)
    for variant in range(50):
        kept = [part for part in parts(shown(rules, TAGS, variant)) if part]
        assert kept == [part for part in order if part in kept]


@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 50), st.integers(0, 60))
def test_token_warmup_grows_as_the_formula_says(count: int, least: int, steps: int, step: int) -> None:
    rules = CaptionRules(warmup_min=least, warmup_steps=steps)
    tags = [f"t{index}" for index in range(count)]
    text = shown(rules, ", ".join(tags), stage=warmup_stage(rules, step))
    wanted = min(count, least + int(step * max(0, count - least) / steps)) if step < steps else count
    assert [part for part in text.split(", ") if part] == tags[:wanted]


def test_token_warmup_counts_kept_parts_apart() -> None:
    rules = CaptionRules(warmup_min=1, warmup_steps=10, keep_tokens=2)
    assert shown(rules, TAGS, stage=0) == "1girl, solo, hat"


def test_a_warmup_below_one_is_a_fraction_of_the_run() -> None:
    options = DatasetOptions(train_data_dir="x", token_warmup_step=0.25)
    assert rules_of(options, 400).warmup_steps == 100
    assert rules_of(options.model_copy(update={"token_warmup_step": 30.0}), 400).warmup_steps == 30


def test_a_caption_is_a_function_of_seed_image_and_variant() -> None:
    texts = {(seed, name, k): shown(SHUFFLED, TAGS, k, image=name, seed=seed) for seed in (1, 2) for name in ("a", "b") for k in (0, 1)}
    assert len(set(texts.values())) == 8
    assert all(shown(SHUFFLED, TAGS, k, image=name, seed=seed) == text for (seed, name, k), text in texts.items())


def test_variants_bound_how_many_texts_there_are() -> None:
    rules = replace(SHUFFLED, variants=4)
    numbers = [variant_of(rules, 3, number) for number in range(1000)]
    assert set(numbers) == {0, 1, 2, 3}
    assert min(Counter(numbers).values()) > 200
    assert variant_of(replace(SHUFFLED, variants=0), 3, 77) == 77
    assert variant_of(CaptionRules(), 3, 77) == 0


def test_held_out_captions_are_neither_shuffled_nor_thinned() -> None:
    rules = CaptionRules(shuffle=True, part_dropout_rate=0.5, dropout_rate=1, warmup_steps=10, keep_separator="|||", prefix="p,")
    assert render_plain(rules, "a ||| b, c, d", 1, "x") == "p, a, b, c, d"


def test_seeds_are_those_of_the_engine() -> None:
    from sd_scripts.library.core import rng

    for seed, number, stream in [(0, 0, ""), (42, 17, "noise"), (2**40, 2**33, "x/y")]:
        assert seed_for(seed, number, stream) == rng.seed_for(seed, number, stream)


def test_single_draws_are_even() -> None:
    values = [fraction_for(1, number, "s") for number in range(5000)]
    assert abs(sum(values) / 5000 - 0.5) < 0.02 and 0 <= min(values) < 0.01 and 0.99 < max(values) < 1
    assert min(Counter(choice_for(1, number, "s", 5) for number in range(5000)).values()) > 850
