"""The small model trained from nothing: its tokenizer, its reading of captions, its U-Net, and what follows from its options."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from diffusers.models.attention_processor import Attention
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from torch.testing import assert_close

from sd_scripts.families.ddpm import caption_tokenizer
from sd_scripts.families.ddpm.caption_encoder import CaptionEncoder
from sd_scripts.families.ddpm.caption_tokenizer import BOS, EOS, PAD, SPECIALS, ids_of, make_tokenizer, read_tokenizer
from sd_scripts.families.ddpm.model import Ddpm
from sd_scripts.families.ddpm.options import DdpmModelOptions
from sd_scripts.library.core.protocols import ESTIMATE, Beginning, Condition, Parts
from sd_scripts.schema.errors import OptionError

DDPM = Ddpm()
CPU = torch.device("cpu")
WORDS = ("red", "green", "blue", "star", "ring", "square", "left", "right", "top", "bottom")
SMALL: dict[str, Any] = {
    "base_channels": 16,
    "channel_multipliers": (1, 2),
    "layers_per_block": 1,
    "attention_levels": (1,),
    "attention_head_dim": 8,
    "text_width": 16,
    "text_layers": 2,
    "text_heads": 2,
    "max_token_length": 16,
    "vocab_size": 300,
}


def sentences(count: int = 30) -> list[str]:
    return [" ".join(random.choices(WORDS, k=random.randint(1, 6))) for _ in range(count)]


SMALL_TOKENIZER = make_tokenizer(sentences(), 300, lowercase=True)


def built(seed: int = 0, sizes: tuple[tuple[int, int], ...] = ((32, 32),), without: Sequence[str] = (), **changes: Any) -> Parts:
    options = DdpmModelOptions(**(SMALL | changes))
    beginning = Beginning(seed, sizes, DDPM.files(options, [" ".join(WORDS), *WORDS]))
    return DDPM.build(options, beginning, CPU, torch.float32, without)


def asked(parts: Parts, captions: list[str], x_t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return DDPM.denoise(parts, x_t, torch.full((len(captions),), 0.5), DDPM.encode_prompts(parts, captions))


# The tokenizer


def alone(tokenizer: Any, caption: str) -> list[str]:
    """The tokens of a caption."""
    ids, lengths = ids_of(tokenizer, [caption])
    assert lengths == [len(ids[0])]
    return [tokenizer.id_to_token(number) for number in ids[0]]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = read_tokenizer(SMALL_TOKENIZER, 512)
    wanted = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(ids_of(tokenizer, [text])[0][0]) == wanted


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=6), st.integers(4, 20))
def test_captions_begin_and_end_and_are_masked_to_their_length_however_long(captions: list[str], limit: int) -> None:
    tokenizer, whole = read_tokenizer(SMALL_TOKENIZER, limit), read_tokenizer(SMALL_TOKENIZER, 10_000)
    ids, lengths = ids_of(tokenizer, captions)
    first, last = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    assert {len(row) for row in ids} == {max(lengths)}
    for caption, row, length in zip(captions, ids, lengths, strict=True):
        assert length == min(limit, ids_of(whole, [caption])[1][0])
        assert row[0] == first and row[length - 1] == last and first not in row[1:] and last not in row[1 : length - 1]
        assert row[length:] == [tokenizer.token_to_id(PAD)] * (len(row) - length)


def test_the_empty_caption_is_beginning_and_end_and_special_words_are_text() -> None:
    tokenizer = read_tokenizer(make_tokenizer(sentences(), 300, lowercase=True), 64)
    assert alone(tokenizer, "") == [BOS, EOS]
    assert not set(alone(tokenizer, f"a {EOS}{PAD} {BOS}")[1:-1]) & set(SPECIALS)
    assert alone(tokenizer, "RED Star") == alone(tokenizer, "red star")
    assert alone(read_tokenizer(make_tokenizer(sentences(), 300, lowercase=False), 64), "RED") != alone(tokenizer, "red")


def slowly(captions: list[str], size: int) -> dict[str, int]:
    """The vocabulary by the definition: all pairs are counted again before each merge."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    words = Counter(piece for caption in captions for piece, _ in split(caption))
    pieces = [(list(word), count) for word, count in words.items()]
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    while len(tokens) < size:
        counts: Counter[tuple[str, str]] = Counter()
        for word, count in pieces:
            for pair in itertools.pairwise(word):
                counts[pair] += count
        if not counts or max(counts.values()) < 2:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        for word, _ in pieces:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == best:
                    word[place : place + 2] = ["".join(best)]
                place += 1
        tokens = list(dict.fromkeys([*tokens, "".join(best)]))
    return {token: number for number, token in enumerate(tokens)}


@pytest.mark.parametrize("size", [260, 275, 400])
def test_the_vocabulary_is_that_of_byte_pair_encoding(size: int) -> None:
    captions = ["".join(random.choices("ab c", k=random.randint(1, 12))) for _ in range(12)] + sentences(10)
    tokenizer = read_tokenizer(make_tokenizer(captions, size, lowercase=False), 64)
    assert tokenizer.get_vocab() == slowly(captions, size)
    assert caption_tokenizer.num_tokens(tokenizer) <= size


def test_a_tokenizer_is_the_same_in_every_process_and_for_every_order_of_the_captions() -> None:
    captions = sentences(200)
    here = make_tokenizer(captions, 320, lowercase=True)
    assert make_tokenizer(random.sample(captions, len(captions)), 320, lowercase=True) == here
    code = (
        "import sys, json; from sd_scripts.families.ddpm.caption_tokenizer import make_tokenizer; "
        "sys.stdout.write(make_tokenizer(json.load(sys.stdin), 320, True))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(captions[::-1]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": str(random.randrange(1000))},
    )
    assert there.stdout == here


def test_a_given_tokenizer_is_used_and_a_wrong_one_is_told(tmp_path: Any) -> None:
    text, file = make_tokenizer(sentences(), 290, lowercase=False), tmp_path / "own.json"

    def files(**options: Any) -> dict[str, str]:
        return DDPM.files(DdpmModelOptions(tokenizer=str(file), **options), ["never seen"])

    with pytest.raises(OptionError, match=r"tokenizer: .*own\.json cannot be read"):
        files()
    file.write_text(text)
    assert files() == {"tokenizer.json": text}
    with pytest.raises(OptionError) as told:
        files(vocab_size=300, lowercase=False)
    assert [problem.option for problem in told.value.problems] == ["vocab_size", "lowercase"]
    file.write_text("{}")
    with pytest.raises(OptionError, match=r"tokenizer: own\.json cannot be used: it is no tokenizer\.json"):
        files()
    file.write_text(text.replace(EOS, "<end>"))
    with pytest.raises(OptionError, match=f"it has no token {EOS}; padding, beginning and end are"):
        files()


# Reading captions


@pytest.fixture
def encoder() -> CaptionEncoder:
    return CaptionEncoder(vocab_size=30, max_length=9, width=16, num_layers=2, num_heads=4, dropout=0.3).eval()


def test_a_word_changes_what_is_read_and_the_number_of_a_padding_does_not(encoder: CaptionEncoder) -> None:
    ids = torch.randint(3, 30, (2, 9))
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    states = encoder(ids, mask)
    padded = ids.clone()
    padded[0, 5:] = (padded[0, 5:] + 1) % 30
    assert torch.equal(encoder(padded, mask)[mask], states[mask])
    for place in range(5):
        other = ids.clone()
        other[0, place] = (other[0, place] + 1) % 30
        changed = (encoder(other, mask) - states).abs().amax(dim=-1)
        assert (changed[0, :5] > 0).all(), "every token sees every other"
        assert (changed[1] == 0).all()
    assert states.isfinite().all()


def test_computing_blocks_again_changes_no_gradient_and_dropout_is_for_training(encoder: CaptionEncoder) -> None:
    ids, mask = torch.randint(0, 30, (3, 7)), torch.ones(3, 7, dtype=torch.bool)

    def gradients() -> list[torch.Tensor]:
        encoder.zero_grad()
        torch.manual_seed(5)
        encoder(ids, mask).square().sum().backward()
        return [weight.grad.clone() for weight in encoder.parameters() if weight.grad is not None]

    assert torch.equal(encoder(ids, mask), encoder(ids, mask))
    encoder.train()
    assert not torch.equal(encoder(ids, mask), encoder(ids, mask))
    plain = gradients()
    encoder.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    again = gradients()
    assert len(plain) == len(list(encoder.parameters())) and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_caption_that_fills_the_length_and_an_empty_one_are_read() -> None:
    parts = built()
    conditions = DDPM.encode_prompts(parts, ["blue " * 100, "", "red"])
    assert [len(condition["text"]) for condition in conditions] == [16, 2, 3]
    x_t = torch.randn(3, 3, 32, 32)
    assert DDPM.denoise(parts, x_t, torch.rand(3), conditions).isfinite().all()


# The network


def test_a_word_changes_the_image_through_attention_and_through_the_mean() -> None:
    parts = built()
    x_t = torch.randn(1, 3, 32, 32)
    before, after = asked(parts, ["red star"], x_t), asked(parts, ["blue star"], x_t)
    assert (before - after).abs().max() > 1e-5
    with torch.no_grad():
        kept = parts.backbone.class_embedding.weight.clone()
        parts.backbone.class_embedding.weight.zero_()
        assert (asked(parts, ["red star"], x_t) - asked(parts, ["blue star"], x_t)).abs().max() > 1e-5, "attention does not see the words"
        parts.backbone.class_embedding.weight.copy_(kept)
        for module in parts.backbone.modules():
            if isinstance(module, Attention) and module.is_cross_attention:
                module.to_v.weight.zero_()
        assert (asked(parts, ["red star"], x_t) - asked(parts, ["blue star"], x_t)).abs().max() > 1e-6, "the mean does not see the words"


def test_padding_to_the_longest_caption_of_a_batch_changes_nothing() -> None:
    parts = built()
    x_t, t = torch.randn(2, 3, 32, 32), torch.rand(2)
    conditions = DDPM.encode_prompts(parts, ["red", "a long caption about a blue ring at the top"])
    together = DDPM.denoise(parts, x_t, t, conditions)
    for row in range(2):
        assert_close(DDPM.denoise(parts, x_t[row : row + 1], t[row : row + 1], [conditions[row]])[0], together[row], atol=1e-5, rtol=1e-5)


def test_self_conditioning_takes_an_estimate_and_zeros_are_none() -> None:
    parts = built(self_conditioning=True)
    x_t, t, estimates = torch.randn(2, 3, 32, 32), torch.rand(2), torch.randn(2, 3, 32, 32)
    texts = DDPM.encode_prompts(parts, ["red star", "blue ring"])

    def told(*rows: torch.Tensor | None) -> list[Condition]:
        return [text if row is None else {**text, ESTIMATE: row} for text, row in zip(texts, rows, strict=True)]

    none = DDPM.denoise(parts, x_t, t, told(None, None))
    assert torch.equal(DDPM.denoise(parts, x_t, t, told(*torch.zeros(2, 3, 32, 32))), none)
    mixed = DDPM.denoise(parts, x_t, t, told(None, estimates[1]))
    assert_close(mixed[0], none[0], atol=1e-6, rtol=1e-5)
    assert (mixed[1] - none[1]).abs().max() > 1e-5
    assert DDPM.is_self_conditioned(parts) and not DDPM.is_self_conditioned(built())
    assert none.shape == x_t.shape


ARCHITECTURES: list[dict[str, Any]] = [
    {},
    {"channel_multipliers": (1,), "attention_levels": ()},
    {"channel_multipliers": (1, 2, 3), "attention_levels": (0, 2), "layers_per_block": 2, "unet_dropout": 0.1},
    {"channel_multipliers": (2, 1, 1, 4), "attention_levels": (3,), "scale_shift_norm": False, "attention_head_dim": 16},
    {"self_conditioning": True, "base_channels": 24, "attention_levels": (), "attention_head_dim": 12, "text_heads": 1},
    {"vae": "toy"},
]


@pytest.mark.parametrize("changes", ARCHITECTURES, ids=str)
def test_every_weight_is_used_and_attention_is_where_and_as_wide_as_asked(changes: dict[str, Any]) -> None:
    options = DdpmModelOptions(**(SMALL | changes))
    width, height = (128, 64) if options.vae else (32, 16)
    parts = built(**changes, sizes=((width, height),))
    modules = {"unet": parts.backbone, "te1": parts.text_encoders["te1"]}
    for module in modules.values():
        module.requires_grad_(True).train()
    x0 = DDPM.encode_images(parts, torch.rand(2, 3, height, width) * 2 - 1)
    texts = DDPM.encode_prompts(parts, ["red star", "a blue ring at the left"])
    told = [{**text, ESTIMATE: row} for text, row in zip(texts, x0, strict=True)]
    DDPM.denoise(parts, torch.randn(x0.shape), torch.rand(2), told).square().mean().backward()
    unused = [f"{name}.{weight}" for name, module in modules.items() for weight, tensor in module.named_parameters() if tensor.grad is None]
    still = [
        f"{name}.{weight}" for name, module in modules.items() for weight, tensor in module.named_parameters() if not tensor.grad.any()
    ]
    assert unused == [] and still == []
    assert not any(weight.requires_grad for weight in parts.vae.parameters())
    levels = len(options.channel_multipliers)
    blocks = {
        **{f"down_blocks.{level}": level for level in range(levels)},
        **{f"up_blocks.{levels - 1 - level}": level for level in range(levels)},
        "mid_block": levels - 1,
    }
    for name, level in blocks.items():
        found = [module for module in parts.backbone.get_submodule(name).modules() if isinstance(module, Attention)]
        assert bool(found) == (level in options.attention_levels or name == "mid_block"), name
        assert {module.inner_dim // module.heads for module in found} <= {options.attention_head_dim}
        widths = {module.inner_dim for module in found}
        assert widths <= {options.base_channels * options.channel_multipliers[level]}


@pytest.mark.parametrize("vae", [None, "toy"])
def test_sizes_that_cannot_be_halved_are_refused_with_the_multiple(vae: str | None) -> None:
    multiple = 4 if vae is None else 32
    fitting = tuple((multiple * random.randint(1, 3), multiple * random.randint(1, 3)) for _ in range(3))
    changes: dict[str, Any] = {"vae": vae, "channel_multipliers": (1, 1, 1)}
    width, height = max(fitting, key=lambda size: (min(size) / max(size), size[0] * size[1]))
    parts = built(sizes=fitting, **changes)
    factor = 1 if vae is None else 8
    assert tuple(parts.backbone.config.sample_size) == (height // factor, width // factor)
    wrong = (multiple * 3, multiple + random.choice([1, 2, multiple // 2]))
    with pytest.raises(OptionError) as told:
        built(sizes=(*fitting, wrong), **changes)
    text = str(told.value)
    assert f"multiples of {multiple}, but there are {wrong[0]} x {wrong[1]}." in text and "bucket_reso_steps" in text
    x_t = torch.randn(1, parts.backbone.config.out_channels, height // factor, width // factor)
    assert asked(parts, ["red"], x_t).shape == x_t.shape


def test_weights_follow_from_the_seed_alone_and_what_is_left_out_has_none() -> None:
    before = torch.get_rng_state()
    first, second, other = built(7), built(7, without=("backbone",)), built(8)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.is_meta for weight in second.backbone.parameters())
    assert second.backbone.state_dict().keys() == first.backbone.state_dict().keys()
    for name, weight in first.text_encoders["te1"].state_dict().items():
        assert torch.equal(weight, second.text_encoders["te1"].state_dict()[name])
    assert torch.equal(built(7).backbone.conv_in.weight, first.backbone.conv_in.weight)
    assert not torch.equal(other.backbone.conv_in.weight, first.backbone.conv_in.weight)
    assert not torch.equal(other.text_encoders["te1"].tokens.weight, first.text_encoders["te1"].tokens.weight)
    assert not any(module.training for part in first.modules().values() for module in part.modules())


def test_pixels_are_their_own_latents() -> None:
    parts = built()
    pixels = torch.rand(2, 3, 16, 24) * 2 - 1
    assert torch.equal(DDPM.encode_images(parts, pixels), pixels)
    assert torch.equal(DDPM.decode(parts, pixels * 2), (pixels * 2).clamp(-1, 1))
    with pytest.raises(ValueError, match="not multiples of 8"):
        DDPM.encode_images(parts, torch.zeros(1, 3, 12, 16))


@pytest.mark.parametrize("beta_schedule", ["linear", "scaled_linear", "cosine"])
@pytest.mark.parametrize("zero", [False, True])
def test_the_schedule_is_the_one_that_diffusers_makes_of_the_saved_configuration(beta_schedule: Any, zero: bool) -> None:
    steps = random.randint(10, 1500)
    kind = random.choice(["v_prediction", "sample"])
    parts = built(beta_schedule=beta_schedule, zero_terminal_snr=zero, num_train_timesteps=steps, prediction_type=kind)
    theirs = DDIMScheduler.from_config(parts.scheduler_config)
    assert_close(parts.path.alphas_cumprod.float(), theirs.alphas_cumprod, atol=2e-6, rtol=1e-4)
    assert parts.kind == kind == theirs.config.prediction_type
    assert (float(parts.path.alphas_cumprod[-1]) == 0) == zero
