"""Models of style transfer: styles and mixtures as conditions, time and sign, beginnings, sizes, what training changes."""

from __future__ import annotations

import json
import random

import pytest
import torch
from diffusers import UNet2DModel
from torch.testing import assert_close

from sd_scripts.families.lgt.loading import STYLES, StyleUNet
from sd_scripts.families.lgt.model import STYLE, Lgt, style_weights
from sd_scripts.families.lgt.options import LgtModelOptions
from sd_scripts.library.core.protocols import Beginning, Parts, Preview
from sd_scripts.schema.errors import OptionError

FAMILY = Lgt()
CPU = torch.device("cpu")
TINY = {"vae": "toy", "base_channels": 16, "channel_multipliers": (1, 2), "layers_per_block": 1, "attention_head_dim": 8}


@pytest.fixture(scope="module")
def parts() -> Parts:
    return FAMILY.tiny()


def built(styles: tuple[str, ...] = ("flat", "line"), seed: int = 0, sizes: tuple[tuple[int, int], ...] = ((64, 64),), **changes) -> Parts:
    options = LgtModelOptions(**(TINY | changes))
    return FAMILY.build(options, Beginning(seed, sizes, FAMILY.files(options, styles)), CPU, torch.float32)


def weights(parts: Parts, text: str) -> list[float]:
    (condition,) = FAMILY.encode_prompts(parts, [text])
    assert condition.keys() == {STYLE} and condition[STYLE].dtype == torch.float32
    return condition[STYLE].tolist()


def test_the_styles_are_the_captions_sorted_and_the_empty_one_is_none_of_them() -> None:
    files = FAMILY.files(LgtModelOptions(), ["ukiyo-e", "monet", "", "é", "monet"])
    assert json.loads(files[STYLES]) == ["monet", "ukiyo-e", "é"] and tuple(files) == FAMILY.file_names
    assert built(("monet", "ukiyo-e", "é")).settings["styles"] == ("monet", "ukiyo-e", "é")
    for text, told in (
        ("[", "cannot be read as JSON"),
        ('["a", "a"]', "no list of different names"),
        ("[]", "no list"),
        ('{"a": 1}', "no list"),
    ):
        with pytest.raises(OptionError, match=told):
            FAMILY.build(LgtModelOptions(**TINY), Beginning(0, ((64, 64),), {STYLES: text}), CPU, torch.float32)


def test_a_name_is_one_row_and_no_name_the_last(parts: Parts) -> None:
    assert weights(parts, "flat") == [1, 0, 0, 0] and weights(parts, " night ") == [0, 0, 1, 0]
    assert weights(parts, "") == weights(parts, "average") == [0, 0, 0, 1]


def test_mixtures_are_weighted_and_add_up_to_one(parts: Parts) -> None:
    assert weights(parts, "flat 3, night 1") == [0.75, 0, 0.25, 0]
    assert weights(parts, "flat, line") == [0.5, 0.5, 0, 0]
    assert weights(parts, "line 0.5,average 0.5") == [0, 0.5, 0, 0.5]
    assert weights(parts, "line 0.3, flat 0, line 0.7") == [0, 1, 0, 0]


def test_names_may_have_spaces_commas_and_numbers() -> None:
    parts = built(("van gogh", "van gogh 2", "red, blue", "average"))
    assert parts.settings["styles"] == ("average", "red, blue", "van gogh", "van gogh 2")
    assert weights(parts, "van gogh 2") == [0, 0, 0, 1, 0]
    assert weights(parts, "van gogh 3, van gogh 2 1") == [0, 0, 0.75, 0.25, 0]
    assert weights(parts, "red, blue") == [0, 1, 0, 0, 0]
    assert weights(parts, "average") == [1, 0, 0, 0, 0] and weights(parts, "") == [0, 0, 0, 0, 1], "a folder of this name is a style"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("monet", "knows no style 'monet'; there are flat, line, night, average"),
        ("flat 0.5, nihgt 0.5", "knows no style 'nihgt'"),
        ("flat, ", "knows no style ''"),
        ("flat -1, line 2", "has the weight -1; weights are numbers from 0 on"),
        ("flat nan", "has the weight nan"),
        ("flat inf", "has the weight inf"),
        ("flat 0", "are all 0"),
        ("0.5", "knows no style '0.5'"),
    ],
)
def test_what_is_no_style_is_a_sentence_with_those_there_are(text: str, told: str, parts: Parts) -> None:
    with pytest.raises(OptionError) as raised:
        style_weights(parts, text, "target")
    assert told in str(raised.value) and raised.value.problems[0].option == "target"


def test_a_new_model_moves_nothing_and_follows_from_its_seed_alone() -> None:
    seed = random.randrange(1000)
    state = torch.get_rng_state()
    first, again, other = built(seed=seed), built(seed=seed), built(seed=seed + 1)
    assert torch.equal(state, torch.get_rng_state())
    x, t = torch.randn(2, 16, 8, 8), torch.rand(2)
    assert FAMILY.denoise(first, x, t, FAMILY.encode_prompts(first, ["flat", ""])).abs().max() == 0
    state = again.backbone.state_dict()
    for name, tensor in first.backbone.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert not torch.equal(first.backbone.conv_in.weight, other.backbone.conv_in.weight)
    assert first.kind == "velocity" and not any(weight.requires_grad for weight in first.backbone.parameters())


def test_the_network_is_diffusers_own_told_the_row_of_a_style_and_a_thousand_times_the_time(parts: Parts) -> None:
    plain = UNet2DModel.from_config({**parts.backbone.config, "_class_name": "UNet2DModel"}).eval()
    plain.load_state_dict(parts.backbone.state_dict())
    x, t = torch.randn(4, 16, 8, 12), torch.rand(4)
    with torch.no_grad():
        expected = plain(x, 1000 * t, class_labels=torch.tensor([2, 0, 3, 1])).sample
        assert_close(FAMILY.denoise(parts, x, t, FAMILY.encode_prompts(parts, ["night", "flat", "", "line"])), expected, atol=1e-6, rtol=0)
        table = parts.backbone.class_embedding.weight
        plain.class_embedding.weight[3] = 0.25 * table[0] + 0.75 * table[1]
        mixed = plain(x, 1000 * t, class_labels=torch.full((4,), 3)).sample
        assert_close(FAMILY.denoise(parts, x, t, FAMILY.encode_prompts(parts, ["flat 0.25, line 0.75"] * 4)), mixed, atol=1e-5, rtol=0)


def test_time_counts_along_the_whole_way(parts: Parts) -> None:
    """Without the factor 1000 nearly all of the sinusoids stand still between 0 and 1."""
    x = torch.randn(1, 16, 8, 8).expand(11, -1, -1, -1)
    with torch.no_grad():
        velocity = FAMILY.denoise(parts, x, torch.linspace(0, 1, 11), FAMILY.encode_prompts(parts, ["flat"] * 11))
    # Neighbouring times differ by far more than rounding, and so do features of any two times.
    assert (velocity[1:] - velocity[:-1]).abs().amax(dim=(1, 2, 3)).min() > 1e-2
    features = parts.backbone.time_proj(1000 * torch.tensor([0.4, 0.5]))
    assert ((features[0] - features[1]).abs() > 0.1).float().mean() > 0.5


def test_one_step_of_training_tells_styles_apart_and_trains_their_rows_alone() -> None:
    parts = built(("flat", "line", "night"))
    parts.backbone.requires_grad_(True).train()
    optimizer = torch.optim.SGD(parts.backbone.parameters(), lr=0.1)
    x, t = torch.randn(2, 16, 8, 8), torch.tensor([0.3, 0.6])
    conditions = FAMILY.encode_prompts(parts, ["flat", ""])
    before = parts.backbone.class_embedding.weight.detach().clone()
    for _ in range(2):  # the first step only moves the last layer away from zero
        optimizer.zero_grad()
        (FAMILY.denoise(parts, x, t, conditions) - torch.randn(2, 16, 8, 8)).square().mean().backward()
        optimizer.step()
    moved = (parts.backbone.class_embedding.weight - before).abs().amax(dim=1) > 0
    assert moved.tolist() == [True, False, False, True]
    with torch.no_grad():
        flat, line = (FAMILY.denoise(parts, x, t, FAMILY.encode_prompts(parts, [style] * 2)) for style in ("flat", "line"))
    assert (flat - line).abs().max() > 1e-4


def test_checkpointing_the_activations_changes_no_gradient(parts: Parts) -> None:
    x, conditions = torch.randn(2, 16, 8, 8), FAMILY.encode_prompts(parts, ["flat", "line"])

    def gradients(checkpointed: bool) -> dict[str, torch.Tensor]:
        model = FAMILY.tiny()
        model.backbone.requires_grad_(True).train()
        if checkpointed:
            model.backbone.enable_gradient_checkpointing()
            assert model.backbone.is_gradient_checkpointing
        FAMILY.denoise(model, x, torch.tensor([0.2, 0.9]), conditions).square().mean().backward()
        return {name: weight.grad for name, weight in model.backbone.named_parameters()}

    plain, again = gradients(False), gradients(True)
    assert all(torch.equal(gradient, again[name]) for name, gradient in plain.items()) and len(plain) > 20


def test_every_size_that_the_levels_can_halve_is_taken_and_others_are_a_sentence() -> None:
    parts = built(sizes=((64, 96), (32, 128), (80, 80)))
    assert parts.backbone.config.sample_size == (10, 10)
    for height, width in ((2, 2), (6, 16), (10, 4)):
        x = torch.randn(1, 16, height, width)
        assert FAMILY.denoise(parts, x, torch.tensor([0.5]), FAMILY.encode_prompts(parts, [""])).shape == x.shape
    FAMILY.check_sizes(parts, [(48, 16), (128, 64)])
    for sizes in (((72, 64),), ((64, 64), (64, 24))):
        told = rf"2 levels halve the sides 1 times.* multiples of 16, but there are {sizes[-1][0]} x {sizes[-1][1]}"
        with pytest.raises(OptionError, match=told):
            FAMILY.check_sizes(parts, sizes)
        with pytest.raises(OptionError, match=told):
            built(sizes=sizes)


def test_a_network_of_the_earlier_programs_size_can_be_made_and_left_unread() -> None:
    """It had 20 to 22 million weights."""
    options = LgtModelOptions(vae="toy", base_channels=96, channel_multipliers=(1, 2, 3), attention_head_dim=32)
    beginning = Beginning(0, ((256, 256),), FAMILY.files(options, ["a", "b"]))
    parts = FAMILY.build(options, beginning, CPU, torch.float32, without=("backbone",))
    assert next(parts.backbone.parameters()).device.type == "meta"
    assert 20e6 < sum(weight.numel() for weight in parts.backbone.parameters()) < 25e6
    assert isinstance(parts.backbone, StyleUNet) and parts.backbone.config.num_class_embeds == 3


def test_attention_and_groups_are_where_the_options_put_them() -> None:
    parts = built(channel_multipliers=(1, 3, 2), attention_levels=(1,), base_channels=24)
    config = parts.backbone.config
    assert config.down_block_types == ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D")
    assert config.up_block_types == ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    # Each level's channels are split into groups of at least two.
    assert all(width % config.norm_num_groups == 0 and width >= 2 * config.norm_num_groups for width in config.block_out_channels)
    assert parts.backbone.mid_block.attentions[0].group_norm.num_groups == config.norm_num_groups
    assert parts.backbone.mid_block.attentions[0].heads == 48 // 8


def test_a_model_goes_on_with_its_own_styles_alone(parts: Parts) -> None:
    FAMILY.check_captions(parts, ["night", "flat", "line"])
    with pytest.raises(OptionError, match=r"has dots, which the model does not know and lacks line, night") as raised:
        FAMILY.check_captions(parts, ["flat", "dots"])
    assert raised.value.problems[0].option == "train_data_dir"


def test_previews_name_a_style_and_are_drawn_from_noise(parts: Parts) -> None:
    def drawn(prompt: str, **changes) -> bytes:
        given = {"width": 64, "height": 48, "seed": 3, "steps": 2, "cfg_scale": 1.0} | changes
        return FAMILY.preview(parts, [Preview(prompt, **given)])[0].tobytes()

    assert drawn("flat") == drawn("flat", sampler="midpoint") != drawn("flat", sampler="euler")
    assert len({drawn("flat"), drawn("night"), drawn(""), drawn("flat", seed=4), drawn("flat", cfg_scale=2.0)}) == 5
    assert drawn("flat", cfg_scale=2.0) == drawn("flat", cfg_scale=2.0, negative_prompt="average")
    assert drawn("flat", cfg_scale=2.0) != drawn("flat", cfg_scale=2.0, negative_prompt="night")
    for changes, told in (({"sampler": "ddim"}, "ddim cannot draw.*euler, midpoint, heun"), ({"height": 56}, "multiples of 16")):
        with pytest.raises(OptionError, match=told):
            drawn("flat", **changes)
    with pytest.raises(OptionError, match="knows no style 'a red star'"):
        drawn("a red star")
