"""What every family promises, on its tiny model: shapes, clock and sign, independence of samples, no trace left behind."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from sd_scripts import families
from sd_scripts.library.core.protocols import Condition, Geometry, ModelFamily, Parts, Preview
from sd_scripts.runs.model_files import BASE, problems_of_file
from sd_scripts.schema.errors import OptionError
from tests.small_models import model_options

GENERATOR = torch.Generator()
GENERATOR.manual_seed(random.getrandbits(32))
UNREAD = {
    "qwen_edit": ("transformer_blocks.1.attn.to_add_out.", "transformer_blocks.1.txt_mlp."),
    "flux3": (
        "mode_blocks.image_cond.",
        "x_embedders.image_cond.",
        "early_stream_modulations.image_c",
        "single_stream_modulations.image_c",
    ),
}
"""Beginnings of the names of weights whose output nothing reads: only the image leaves the last block; no reference image is given."""
CONTROL = Image.fromarray(torch.randint(0, 256, (80, 96, 3), dtype=torch.uint8, generator=GENERATOR).numpy())
CAPTIONS = ["a red star at the top left", "", "a very long caption " * 20]
STYLES = {"lgt": {CAPTIONS[0]: "flat", CAPTIONS[2]: "line 0.7, night 0.3", "a red star": "flat", "a blue ring": "night", "cat": "line"}}
"""What families whose captions are names of styles are told in place of a caption."""


@pytest.fixture(params=families.NAMES)
def family(request) -> ModelFamily:
    return families.family(request.param)


@pytest.fixture
def parts(family) -> Parts:
    return family.tiny()


def said(family: ModelFamily, captions: list[str]) -> list[str]:
    return [STYLES.get(family.name, {}).get(caption, caption) for caption in captions]


def conditions(family: ModelFamily, parts: Parts, captions: list[str], side: int = 64) -> list[Condition]:
    size = family.size_condition(Geometry((side, side), (0, 0), (side, side)))
    with torch.no_grad():
        return [{**text, **size} for text in family.encode_prompts(parts, said(family, captions))]


def noisy(family: ModelFamily, parts: Parts, count: int) -> torch.Tensor:
    with torch.no_grad():
        shape = family.encode_images(parts, torch.zeros(1, 3, 8 * family.grid, 6 * family.grid)).shape[1:]
    return torch.randn((count, *shape), generator=GENERATOR)


def test_the_registry_knows_the_name_each_family_gives_itself(family):
    assert families.family(family.name).name == family.name
    with pytest.raises(OptionError, match=f"nonsense is not known.*{families.NAMES[0]}"):
        families.family("nonsense")


def test_the_tiny_model_is_the_same_each_time_and_ready_to_use(family):
    # One that is made anew, and a copy that is given after another was changed.
    first, spoiled = type(family).tiny.__wrapped__(family).modules(), family.tiny().modules()
    for module in spoiled.values():
        module.train().requires_grad_(True)
        torch.nn.init.zeros_(next(module.parameters()))
    second = family.tiny().modules()
    for name, module in first.items():
        assert not any(part.training for part in module.modules())
        state = second[name].state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in module.state_dict().items())


def test_images_become_latents_and_latents_images(family, parts):
    pixels = torch.rand((2, 3, 8 * family.grid, 6 * family.grid), generator=GENERATOR) * 2 - 1
    latents = family.encode_images(parts, pixels)
    assert latents.dtype == torch.float32 and latents.isfinite().all() and latents.shape[0] == 2 and not latents.requires_grad
    assert torch.equal(latents, family.encode_images(parts, pixels))
    side = model_options(family.name).latent_side
    assert side == 1 or latents.shape[-2:] == (pixels.shape[-2] // side, pixels.shape[-1] // side)
    decoded = family.decode(parts, latents)
    assert decoded.shape == pixels.shape and decoded.dtype == torch.float32 and decoded.abs().max() <= 1
    assert_close(family.encode_images(parts, pixels[1:]), latents[1:], atol=1e-4, rtol=1e-4)


def test_images_off_the_grid_are_refused(family, parts):
    with pytest.raises(ValueError, match="not multiples"):
        family.encode_images(parts, torch.zeros(1, 3, 8 * family.grid + 1, 8 * family.grid))


def test_a_caption_is_encoded_the_same_alone_and_in_a_batch(family, parts):
    captions = said(family, CAPTIONS)
    together = family.encode_prompts(parts, captions)
    assert len(together) == len(captions) and family.encode_prompts(parts, []) == []
    for index, caption in enumerate(captions):
        (alone,) = family.encode_prompts(parts, [caption])
        assert alone.keys() == together[index].keys()
        for name in alone:
            assert_close(alone[name], together[index][name], atol=1e-5, rtol=1e-5)


def test_text_encoders_can_be_trained_through_encode_prompts(family, parts):
    with torch.no_grad():
        assert not any(value.requires_grad for value in family.encode_prompts(parts, said(family, ["cat"]))[0].values())
    for name, encoder in parts.text_encoders.items():
        encoder.requires_grad_(True)
        (condition,) = family.encode_prompts(parts, said(family, ["cat"]))
        sum(value.float().sum() for value in condition.values()).backward()
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters()), name
        encoder.requires_grad_(False)


def test_denoise_keeps_the_shape_and_the_samples_apart(family, parts):
    x_t, t = noisy(family, parts, 3), torch.tensor([0.1, 0.5, 1.0])
    conds = conditions(family, parts, CAPTIONS)
    together = family.denoise(parts, x_t, t, conds)
    assert together.shape == x_t.shape and together.dtype == torch.float32 and together.isfinite().all()
    for index in range(3):
        alone = family.denoise(parts, x_t[index : index + 1], t[index : index + 1], conds[index : index + 1])
        assert_close(alone[0], together[index], atol=1e-4, rtol=1e-4)
    other = family.denoise(parts, x_t, t.flip(0), conds)
    assert not torch.allclose(other, together), "time has no effect"
    assert not torch.allclose(family.denoise(parts, x_t, t, conds[::-1]), together), "the conditions have no effect"


def test_denoise_gives_gradients_to_the_network_and_its_input(family, parts):
    parts.backbone.requires_grad_(True)
    x_t = noisy(family, parts, 1).requires_grad_()
    family.denoise(parts, x_t, torch.tensor([0.5]), conditions(family, parts, ["cat"])).square().mean().backward()
    assert x_t.grad is not None and x_t.grad.abs().sum() > 0
    without = [name for name, parameter in parts.backbone.named_parameters() if parameter.grad is None]
    assert all(name.startswith(UNREAD.get(family.name, ())) for name in without)


def test_adapter_targets_are_layers_of_their_modules(family, parts):
    few, many = family.adapter_targets(parts, conv=False), family.adapter_targets(parts, conv=True)
    assert few.keys() == many.keys() == parts.modules().keys() - {"vae"}
    for name, layers in many.items():
        inside = dict(parts.modules()[name].named_modules())
        assert len(set(layers)) == len(layers) and set(few[name]) <= set(layers)
        assert all(isinstance(inside[layer], torch.nn.Linear | torch.nn.Conv2d) for layer in layers)


def request(family: ModelFamily, seed: int, prompt: str = "a red star") -> Preview:
    controls = (CONTROL,) * family.num_controls(family.tiny())[0]
    (prompt,) = said(family, [prompt])
    return Preview(prompt=prompt, width=8 * family.grid, height=6 * family.grid, seed=seed, steps=3, cfg_scale=3.0, controls=controls)


def test_a_preview_depends_on_its_seed_and_prompt_and_not_on_its_batch(family, parts):
    requests = [request(family, 1), request(family, 2), request(family, 1, "a blue ring")]
    together = [np.asarray(image, dtype=int) for image in family.preview(parts, requests)]
    assert [image.shape for image in together] == [(6 * family.grid, 8 * family.grid, 3)] * 3
    for index, one in enumerate(requests):
        (alone,) = family.preview(parts, [one])
        # A batch rounds in the last bit, which may fall on the other side of a half.
        assert np.abs(np.asarray(alone, dtype=int) - together[index]).max() <= 1
    assert (together[0] != together[1]).any() and (together[0] != together[2]).any()
    assert family.preview(parts, []) == []


def test_nothing_draws_from_or_seeds_the_global_random_state(family):
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    parts = family.tiny()
    family.decode(parts, family.encode_images(parts, torch.zeros(1, 3, 8 * family.grid, 8 * family.grid)))
    family.denoise(parts, noisy(family, parts, 1), torch.tensor([0.5]), conditions(family, parts, ["cat"]))
    for sampler in ("auto", "euler"):
        family.preview(parts, [replace(request(family, 3), sampler=sampler)])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_preview_leaves_modes_gradients_and_weights_as_they_were(family, parts):
    parts.backbone.train()
    first = next(iter(parts.backbone.children()))
    first.eval()
    parts.backbone.requires_grad_(True)
    modes = {name: module.training for name, module in parts.backbone.named_modules()}
    weights = {name: tensor.clone() for name, tensor in parts.backbone.state_dict().items()}
    family.preview(parts, [request(family, 0)])
    assert {name: module.training for name, module in parts.backbone.named_modules()} == modes
    assert all(parameter.requires_grad and parameter.grad is None for parameter in parts.backbone.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in parts.backbone.state_dict().items())
    assert torch.is_grad_enabled()


def load(family: ModelFamily, path: Path) -> Parts:
    options = model_options(family.name)
    return family.load(options(pretrained_model_name_or_path=str(path)), torch.device("cpu"), torch.float32)


def test_a_saved_folder_loads_as_the_same_model(family, parts, tmp_path):
    family.save(parts, tmp_path / "model", "diffusers", None, {})
    again = load(family, tmp_path / "model")
    for name, module in parts.modules().items():
        state = again.modules()[name].state_dict()
        assert state.keys() == module.state_dict().keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in module.state_dict().items()), name
    assert (again.kind, again.settings) == (parts.kind, parts.settings)
    x_t, t = noisy(family, parts, 1), torch.tensor([0.5])
    with torch.no_grad():
        expected = family.denoise(parts, x_t, t, conditions(family, parts, ["a red star"]))
        assert torch.equal(family.denoise(again, x_t, t, conditions(family, again, ["a red star"])), expected)
    one = request(family, 3)
    assert family.preview(again, [one])[0].tobytes() == family.preview(parts, [one])[0].tobytes()


@pytest.mark.parametrize("save_model_as", ["safetensors", "diffusers"])
def test_saving_twice_gives_the_same_bytes_and_leaves_the_model_as_it_was(family, parts, tmp_path, save_model_as):
    before = {name: {key: tensor.clone() for key, tensor in module.state_dict().items()} for name, module in parts.modules().items()}
    files = []
    for name in ("one", "two"):
        place = tmp_path / name / "model.safetensors"
        family.save(parts, place, save_model_as, torch.bfloat16, {"title": "x"})
        files.append({str(file.relative_to(place.parent)): file.read_bytes() for file in place.parent.rglob("*") if file.is_file()})
    assert files[0] == files[1] and files[0]
    for name, module in parts.modules().items():
        assert all(torch.equal(tensor, before[name][key]) for key, tensor in module.state_dict().items())


def test_an_original_file_may_be_started_with_and_is_loaded_and_saved_again_in_the_same_bytes(family, parts, tmp_path):
    # In its own folder, where configurations, tokenizers and what the file does not hold are found.
    family.save(parts, tmp_path / "model", "diffusers", None, {})
    first, second = tmp_path / "model" / "one.safetensors", tmp_path / "two.safetensors"
    family.save(parts, first, "safetensors", None, {"title": "x"})
    options = model_options(family.name)
    own = {
        "anima": {"vae": "vae", "text_encoder": "text_encoder"},
        "chroma": {"ae": "vae", "t5xxl": "text_encoder"},
        "flux2": {"vae": "vae", "text_encoder": "text_encoder"},
        "flux2_dev": {"vae": "vae", "text_encoder": "text_encoder"},
        "flux3": {"vae": "vae", "text_encoder": "text_encoder"},
        "flux": {"ae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"},
        "kontext": {"ae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"},
        "qwen_edit": {"vae": "vae", "text_encoder": "text_encoder"},
        "krea2": {"vae": "vae", "text_encoder": "text_encoder"},
        "qwen_image21": {"vae": "vae", "text_encoder": "text_encoder"},
        "zimage": {"vae": "vae", "text_encoder": "text_encoder"},
    }
    given = {option: str(tmp_path / "model" / folder) for option, folder in own.get(family.name, {}).items()}
    # As Start sees it, which loads nothing.
    named = {BASE: first, **given} if families.FACTS[family.name].bases else given
    assert [problems_of_file(family.name, option, str(value), False) for option, value in named.items()] == [[]] * len(named)
    again = family.load(options(pretrained_model_name_or_path=str(first), **given), torch.device("cpu"), torch.float32)
    family.save(again, second, "safetensors", None, {"title": "x"})
    assert first.read_bytes() == second.read_bytes()
