"""What families state about their networks is what these are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sd_scripts import families
from sd_scripts.families import FACTS, RUNS
from sd_scripts.library.core.protocols import Condition
from sd_scripts.library.memory.forecast.structure import structure_of
from sd_scripts.library.memory.kernels import head_sizes_of
from sd_scripts.library.memory.quantize import blocks_of
from sd_scripts.schema.model import ModelOptions

LOADED = [name for name in families.NAMES if families.maker_of(families.family(name)) is None]
SHORT, LONG = "a star", "a star in the middle of a square, " * 6


def model_options(name: str, **given: Any) -> ModelOptions:
    run = next(run for (family, _), run in RUNS.items() if family == name)
    kind = run.model_fields["model"].annotation
    return kind(**{"pretrained_model_name_or_path": "toy", **given} if name in LOADED else given)


@pytest.mark.parametrize("name", families.NAMES)
def test_options_and_networks_that_facts_name_are_there(name: str) -> None:
    options, facts, parts = model_options(name), FACTS[name], families.family(name).tiny()
    assert [option for option in facts.companions if option not in type(options).model_fields] == []
    encoder = facts.network.quantized_encoder
    assert (encoder is not None) == ("text_encoder_quantization" in type(options).model_fields)
    if encoder is not None:
        # What is quantised is most of it: words and eyes are left as they are.
        network = parts.text_encoders[encoder]
        held = [
            layer for name in blocks_of(network) for layer in network.get_submodule(name).modules() if isinstance(layer, torch.nn.Linear)
        ]
        linear = [layer for path, layer in network.named_modules() if isinstance(layer, torch.nn.Linear) and "visual" not in path]
        assert held and len(held) >= len(linear) - 1
    assert facts.edits == (families.family(name).num_controls(parts)[1] > 0)


@pytest.mark.parametrize(("name", "given"), [*((name, {}) for name in families.NAMES), ("flux", {"apply_t5_attn_mask": True})])
def test_texts_vary_in_length_where_the_facts_say_so(name: str, given: dict[str, Any]) -> None:
    family, options = families.family(name), model_options(name, **given)
    parts = family.tiny()
    parts.settings |= given
    captions = parts.settings.get("styles", (SHORT, LONG))[:2]
    short, long = ({key: tuple(rows.shape) for key, rows in one.items()} for one in family.encode_prompts(parts, captions))
    assert (short != long) == FACTS[name].network.text_lengths_vary(options)


@pytest.mark.parametrize("name", LOADED)
def test_the_published_network_has_the_heads_of_the_facts_and_texts_like_its_own(name: str) -> None:
    family, options = families.family(name), model_options(name, pretrained_model_name_or_path="somebody/something")
    published = structure_of(family, options, {}).parts
    assert head_sizes_of(published.backbone) == FACTS[name].network.head_sizes(options)
    tiny = family.tiny()
    (own,), (like,) = family.encode_prompts(tiny, [LONG]), family.texts_like(tiny, LONG, 1, 0)
    assert _widths(own) == _widths(like)
    assert all(rows.device == torch.device("meta") for rows in like.values())


def _widths(condition: Condition) -> dict[str, tuple[int, int]]:
    return {name: (rows.ndim, rows.shape[-1]) for name, rows in condition.items()}


def test_a_forecast_of_flux_counts_no_padding_where_the_options_hide_it() -> None:
    family, options = families.family("flux"), model_options("flux", pretrained_model_name_or_path="a/b", apply_t5_attn_mask=True)
    (condition,) = family.texts_like(structure_of(family, options, {}).parts, SHORT, 1, 0)
    assert len(condition["t5"]) < 10
