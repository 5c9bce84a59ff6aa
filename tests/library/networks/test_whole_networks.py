"""Training of a model's own weights: which are trained, at which rates, and which never move."""

from __future__ import annotations

import pytest
import torch

from sd_scripts import families
from sd_scripts.families.common import original_unet as original
from sd_scripts.families.flux.options import FluxFullOptions
from sd_scripts.families.sdxl.options import SdxlFullOptions
from sd_scripts.library.adapters.full import train_whole
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading import layouts
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import UNetFullOptions


def tiny(name: str) -> Parts:
    return families.family(name).tiny()


@pytest.mark.parametrize(("name", "options"), [("sd", UNetFullOptions()), ("sdxl", SdxlFullOptions()), ("flux", FluxFullOptions())])
def test_every_weight_of_the_backbone_is_trained_in_float32_and_nothing_else(name: str, options: UNetFullOptions) -> None:
    parts = tiny(name)
    parts.backbone.half()
    network = train_whole(parts, options, families.family(name))
    weights = dict(parts.backbone.named_parameters())
    assert list(network.named_parameters()) == [f"backbone.{key}" for key in weights]
    assert all(tensor.dtype == torch.float32 and tensor.requires_grad for tensor in weights.values())
    assert not any(tensor.requires_grad for module in (parts.vae, *parts.text_encoders.values()) for tensor in module.parameters())
    (group,) = network.parameter_groups(options, 3e-5)
    assert group["lr"] == 3e-5 and len(group["params"]) == len(weights)


@pytest.mark.parametrize(("name", "options"), [("sd", UNetFullOptions), ("sdxl", SdxlFullOptions)])
def test_weights_of_text_encoders_without_influence_are_not_trained_and_all_others_are(name: str, options: type[UNetFullOptions]) -> None:
    """By changing each weight: a condition changes if and only if the weight is trained."""
    family, parts = families.family(name), tiny(name)
    network = train_whole(parts, options(train_unet=False, train_text_encoder=True), family)
    trained = set(network.named_parameters())
    with torch.no_grad():
        before = family.encode_prompts(parts, ["a cat"])[0]
        for module, encoder in parts.text_encoders.items():
            for key, tensor in encoder.named_parameters():
                kept = tensor.clone()
                tensor.add_(torch.randn_like(tensor) * 0.5)
                after = family.encode_prompts(parts, ["a cat"])[0]
                tensor.copy_(kept)
                changed = any(not torch.equal(after[name], before[name]) for name in before)
                # Only the rows of words that occur have an influence on this text.
                assert changed == (f"{module}.{key}" in trained) or "embedding" in key, f"{module}.{key}"
    assert trained


def test_text_encoders_have_rates_of_their_own_and_zero_leaves_one_alone() -> None:
    options = SdxlFullOptions(train_text_encoder=True, unet_lr=1e-5, text_encoder_lr=(0.0, 2e-6))
    network = train_whole(tiny("sdxl"), options, families.family("sdxl"))
    groups = {group["name"]: group["lr"] for group in network.parameter_groups(options, 1e-3)}
    assert groups == {"unet": 1e-5, "te2": 2e-6}


def test_block_lr_gives_each_part_of_the_original_layout_its_rate() -> None:
    parts = tiny("sdxl")
    names = [key for key, _ in parts.backbone.named_parameters()]
    places = {key: stored.name.split(".") for key, stored in layouts.places(original.unet, names, dict(parts.backbone.config)).items()}
    inputs = 1 + max(int(place[1]) for place in places.values() if place[0] == "input_blocks")
    outputs = 1 + max(int(place[1]) for place in places.values() if place[0] == "output_blocks")
    count = 1 + inputs + 3 + outputs + 1
    rates = tuple(float(number) for number in range(count))  # part 0 has rate 0 and stays as it is
    options = SdxlFullOptions(block_lr=rates)
    network = train_whole(parts, options, families.family("sdxl"))
    by_tensor = {id(tensor): group["lr"] for group in network.parameter_groups(options, 1.0) for tensor in group["params"]}
    for key, tensor in parts.backbone.named_parameters():
        head, number, *_ = places[key]
        part = {"time_embed": 0, "label_emb": 0, "out": count - 1}.get(head)
        if part is None:
            part = {"input_blocks": 1, "middle_block": 1 + inputs, "output_blocks": 4 + inputs}[head] + int(number)
        assert by_tensor.get(id(tensor), 0.0) == part, key
        assert tensor.requires_grad == (part > 0)
    with pytest.raises(OptionError, match=f"block_lr has 2 numbers, but this UNet has {count} parts"):
        train_whole(tiny("sdxl"), SdxlFullOptions(block_lr=(1.0, 2.0)), families.family("sdxl"))


def test_the_published_sdxl_has_the_23_parts_of_kohyas_block_lr() -> None:
    from diffusers import UNet2DConditionModel

    from sd_scripts.families.sdxl.loading import SPEC
    from sd_scripts.library.loading.common import read_json

    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(read_json(SPEC.configs / "unet" / "config.json", "test"))
    parts = tiny("sdxl")
    parts.backbone = unet
    # The text encoders are not asked, so the meta device is enough.
    options = SdxlFullOptions(block_lr=tuple([1e-6] * 23))
    network = train_whole(parts, options, families.family("sdxl"))
    sizes = {group["name"]: len(group["params"]) for group in network.parameter_groups(options, 1.0)}
    assert sizes.keys() == {f"unet_{part}" for part in range(23)}
    assert sum(sizes.values()) == len(list(unet.parameters())) == 1680


def test_patterns_choose_weights_and_wrong_ones_are_sentences_together() -> None:
    options = UNetFullOptions(target_modules=(r"attn2\.", "conv_in"), exclude_modules=("bias",))
    network = train_whole(tiny("sd"), options, families.family("sd"))
    assert all(("attn2." in name or "conv_in" in name) and "bias" not in name for name in network.named_parameters())
    assert len(network.parameters()) > 4
    with pytest.raises(OptionError) as caught:
        train_whole(tiny("sd"), UNetFullOptions(target_modules=("nothing_like_it",), exclude_modules=("nor_this",)), families.family("sd"))
    text = str(caught.value)
    assert "'nothing_like_it' matches no weight" in text and "'nor_this' matches no weight" in text


def test_training_everything_at_rate_zero_is_refused() -> None:
    with pytest.raises(OptionError, match="all learning rates are 0"):
        train_whole(tiny("flux"), FluxFullOptions(unet_lr=0.0), families.family("flux"))


def test_nobody_compares_with_a_model_that_is_not_kept() -> None:
    network = train_whole(tiny("flux"), FluxFullOptions(), families.family("flux"))
    with pytest.raises(TrainingError, match="untouched model"), network.disabled():
        pass
