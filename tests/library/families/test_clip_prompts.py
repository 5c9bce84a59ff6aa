"""Attention weights in captions."""

import pytest

from sd_scripts.families import family
from sd_scripts.families.common.clip_prompts import parse_weights, tokenize

TOKENIZER = family("sdxl").tiny().tokenizers["te2"]


@pytest.mark.parametrize(
    "caption, pieces",
    [
        ("a cat", [("a cat", 1.0)]),
        ("", [("", 1.0)]),
        ("a (red) cat", [("a ", 1.0), ("red", 1.1), (" cat", 1.0)]),
        ("a [red] cat", [("a ", 1.0), ("red", 1 / 1.1), (" cat", 1.0)]),
        ("(red:1.3)(blue:.5)", [("red", 1.3), ("blue", 0.5)]),
        ("((red))", [("red", 1.1 * 1.1)]),
        ("(a (red:2) cat:0.5)", [("a ", 0.5), ("red", 1.0), (" cat", 0.5)]),
        (r"smile \(big\) \[x\] \\", [(r"smile (big) [x] " + "\\", 1.0)]),
        ("a (red", [("a ", 1.0), ("red", 1.1)]),
        ("a red) cat]", [("a red) cat]", 1.0)]),
        ("time 10:30", [("time 10:30", 1.0)]),
        ("ratio :2) x", [("ratio :2) x", 1.0)]),
        ("(red:)", [("red:", 1.1)]),
        ("(a]b)", [("a]b", 1.1)]),
        ("[a:1.5)", [("a:1.5)", 1 / 1.1)]),
    ],
)
def test_brackets_become_weights(caption, pieces):
    parsed = parse_weights(caption)
    assert [text for text, _ in parsed] == [text for text, _ in pieces]
    assert [weight for _, weight in parsed] == pytest.approx([weight for _, weight in pieces])


@pytest.mark.parametrize("caption", ["", "cat", "x" * 29, "x" * 30, "x" * 31, "x" * 90, "word " * 40])
def test_one_chunk_without_weights_is_what_the_tokenizer_makes(caption):
    own = TOKENIZER([caption], padding="max_length", max_length=TOKENIZER.model_max_length, truncation=True).input_ids
    assert tokenize(TOKENIZER, [caption], 1, weighted=False).ids[:, 0].tolist() == own


def test_every_chunk_has_its_own_start_and_end():
    tokens = tokenize(TOKENIZER, ["x" * 40, "y"], 3, weighted=True)
    assert tokens.ids.shape == tokens.weights.shape == (2, 3, 32)
    assert (tokens.ids[..., 0] == TOKENIZER.bos_token_id).all() and tokens.weights.eq(1).all()
    full, part, empty = tokens.ids[0]
    assert full[31] == TOKENIZER.eos_token_id and part[11] == TOKENIZER.eos_token_id and (part[12:] == TOKENIZER.pad_token_id).all()
    assert empty[1] == TOKENIZER.eos_token_id and (empty[2:] == TOKENIZER.pad_token_id).all()
