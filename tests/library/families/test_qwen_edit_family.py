"""Qwen-Image-Edit against diffusers' pipelines and transformer, on tiny models: templates, rows, batches of any shapes, images."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import diffusers
import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as plus
import numpy as np
import pytest
import torch
from diffusers import (
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
)
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from sd_scripts.dataset.buckets import area_size
from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.common.samplers import schedule
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformers import noise
from sd_scripts.families.qwen_edit import loading
from sd_scripts.families.qwen_edit import prompts as qwen_prompts
from sd_scripts.families.qwen_edit import templates as qwen_templates
from sd_scripts.families.qwen_edit.model import QwenEdit, linear_layers
from sd_scripts.library.core.protocols import Condition, Parts, Preview
from sd_scripts.schema.errors import OptionError
from tests.small_models import qwen_pipeline_of

GENERATOR = torch.Generator()
GENERATOR.manual_seed(random.getrandbits(32))
QWEN = QwenEdit()
VERSIONS = ("edit", "edit-2509", "edit-2511", "image")
PIPELINES = {"edit": QwenImageEditPipeline, "edit-2509": QwenImageEditPlusPipeline, "edit-2511": QwenImageEditPlusPipeline}
CAPTIONS = ["make the star red", "put a blue border around it and leave the rest as it is", "", "ein Stern, größer"]


@pytest.fixture(params=VERSIONS)
def version(request) -> str:
    return request.param


def image(width: int = 64, height: int = 64) -> Image.Image:
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=GENERATOR).numpy())


def pixels_of(one: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(one).astype(np.float32) / 127.5 - 1).permute(2, 0, 1)


def controls_for(parts: Parts, most: int = 2) -> list[Image.Image]:
    return [image() for _ in range(min(most, QWEN.num_controls(parts)[1]))]


@contextmanager
def three_axes(parts: Parts) -> Iterator[None]:
    """Within the block the text encoder is told which tokens are images, as transformers 5 wants it and diffusers forgets it."""

    def told(module, arguments, named):
        ids = named.get("input_ids")
        if named.get("image_grid_thw") is not None:
            named["mm_token_type_ids"] = (ids == module.config.image_token_id).int()
        return arguments, named

    handle = parts.text_encoders["te1"].register_forward_pre_hook(told, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def rows_of_pipeline(parts: Parts, images: list[Image.Image], caption: str) -> Tensor:
    pipeline = qwen_pipeline_of(parts)
    more = {} if parts.processor is None else {"image": images if parts.settings["model_version"] != "edit" else images[0]}
    with torch.no_grad(), three_axes(parts):
        rows, mask = pipeline.encode_prompt(prompt=[caption], device=torch.device("cpu"), **more)
    assert mask is None
    return rows[0]


def rows_of_ours(parts: Parts, images: list[Image.Image], caption: str) -> Tensor:
    with torch.no_grad():
        prefix, (suffix,) = QWEN.encode_instructions(parts, [pixels_of(one) for one in images], [caption])
    return torch.cat([prefix, suffix])


def condition(rows: int, *sides: tuple[int, int], width: int = 32) -> Condition:
    latents = {f"control_{i}": torch.randn((16, *side), generator=GENERATOR) for i, side in enumerate(sides)}
    return {"text": torch.randn((rows, width), generator=GENERATOR), **latents}


def test_templates_are_those_of_the_published_models(version):
    template = qwen_templates.template_of(version)
    assert (len(template.text), template.start, template.fingerprint) == {
        "image": (215, 34, "0194d360a674d2f1"),
        "edit": (429, 64, "846b0a7896f4ed82"),
        "edit-2509": (386, 64, "d5d65822319c1228"),
        "edit-2511": (386, 64, "d5d65822319c1228"),
    }[version]
    parts = QWEN.tiny(version)
    tokenizer, mark = parts.tokenizers["te1"], parts.text_encoders["te1"].config.image_token_id
    qwen_templates.check_tokenizer(tokenizer, version, mark, "here")
    with pytest.raises(OptionError, match=r"not the tokenizer of Qwen2\.5-VL"):
        qwen_templates.check_tokenizer(tokenizer, version, mark + 1, "here")
    with pytest.raises(OptionError, match=r"here: the tokenizer cuts .* into \d+ tokens .* where"):
        qwen_templates.check_tokenizer(tiny_qwen_tokenizer(["words of another kind"]), version, mark, "here")


def test_the_settings_that_rows_depend_on_tell_the_versions_apart():
    found = [repr(QWEN.tiny(version).settings) for version in VERSIONS]
    assert len(set(found)) == len(VERSIONS)


def test_rows_are_those_of_the_pipeline_with_positions_on_three_axes(version):
    parts = QWEN.tiny(version)
    for most_pixels, caption in zip((3600, 3600, 20000, 200000), CAPTIONS, strict=True):
        images = [image(96, 32) if index else image() for index, _ in enumerate(controls_for(parts))]
        seen = images
        if parts.processor is not None:
            parts.processor.image_processor.size["longest_edge"] = most_pixels
        if version != "edit":
            # diffusers' pipeline resizes for the text encoder before encode_prompt.
            seen = [one.resize(plus.calculate_dimensions(384 * 384, one.width / one.height), Image.Resampling.LANCZOS) for one in images]
        assert_close(rows_of_ours(parts, images, caption), rows_of_pipeline(parts, seen, caption), atol=3e-6, rtol=1e-6)


def test_plain_positions_would_give_other_rows():
    parts = QWEN.tiny()
    shown = [image(), image()]
    with torch.no_grad():
        plain, _ = qwen_pipeline_of(parts).encode_prompt(prompt=["red"], image=shown, device=torch.device("cpu"))
    assert (rows_of_ours(parts, shown, "red") - plain[0]).abs().max() > 1e-3


def test_positions_are_the_text_encoders_own():
    parts = QWEN.tiny()
    encoder, mark = parts.text_encoders["te1"], parts.text_encoders["te1"].config.image_token_id
    for _ in range(5):
        grids = [tuple(torch.randint(1, 7, (2,), generator=GENERATOR).tolist()) for _ in range(3)]
        ids = [5, 6]
        for rows, columns in grids:
            ids += [mark] * (rows * columns) + [7] * int(torch.randint(1, 4, (), generator=GENERATOR))
        row = torch.tensor([ids])
        grid = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids])
        qwen_prompts.check_positions(encoder)
        own, _ = encoder.model.get_rope_index(row, mm_token_type_ids=(row == mark).int(), image_grid_thw=grid)
        assert torch.equal(own[:, 0], qwen_prompts.positions_of(ids, mark, grids))


def test_a_transformers_with_other_positions_is_noticed(monkeypatch):
    encoder = QWEN.tiny().text_encoders["te1"]
    monkeypatch.setattr(encoder.model, "get_rope_index", lambda ids, image_grid_thw: (torch.arange(ids.shape[1]).expand(3, 1, -1), None))
    with pytest.raises(OptionError, match="gives images other positions than Qwen-Image was trained with"):
        qwen_prompts.check_positions(encoder)


def test_rows_of_the_images_are_shared_and_an_instruction_is_encoded_the_same_in_any_company():
    for version in ("edit", "edit-2509"):
        parts = QWEN.tiny(version)
        images = [pixels_of(one) for one in controls_for(parts)]
        with torch.no_grad():
            prefix, suffixes = QWEN.encode_instructions(parts, images, CAPTIONS)
            for caption, suffix in zip(CAPTIONS, suffixes, strict=True):
                alone, (own,) = QWEN.encode_instructions(parts, images, [caption])
                assert torch.equal(alone, prefix) and torch.equal(own, suffix)
        assert suffixes[2].shape == (5, 32), "an empty instruction has the five closing rows"
        other, _ = QWEN.encode_instructions(parts, [pixels_of(image()) for _ in images], CAPTIONS[:1])
        assert not torch.allclose(other, prefix)


def test_an_instruction_without_images_shares_no_rows():
    parts = QWEN.tiny("image")
    prefix, suffixes = QWEN.encode_instructions(parts, [], CAPTIONS)
    texts = QWEN.encode_prompts(parts, CAPTIONS)
    assert prefix.shape == (0, 32)
    assert all(torch.equal(suffix, text["text"]) for suffix, text in zip(suffixes, texts, strict=True))
    with pytest.raises(OptionError, match="edit reads an instruction only together with its control image"):
        QWEN.encode_prompts(QWEN.tiny("edit"), ["red"])


def test_instructions_are_cut_at_the_limit_and_marks_of_images_are_refused(caplog):
    qwen_prompts._tell_of_cut.cache_clear()
    for version in ("edit-2509", "image"):
        parts = QWEN.tiny(version)
        parts.settings["max_token_length"] = 16
        images = [pixels_of(one) for one in controls_for(parts)]
        word = parts.tokenizers["te1"].decode([300])
        with torch.no_grad():
            _, (long, short) = QWEN.encode_instructions(parts, images, ["x" * 300, "x" * 16])
        assert len(long) == 16 + 5 and torch.equal(long, short), word
        with pytest.raises(OptionError, match="image_pad"):
            QWEN.encode_instructions(parts, images, ["<|image_pad|>"])
    assert sum("longer than 16 tokens are cut" in record.message for record in caplog.records) == 1


def test_images_that_leave_no_room_for_an_instruction_are_refused():
    parts = QWEN.tiny("edit")
    parts.processor.image_processor.size = {"shortest_edge": 3136, "longest_edge": 10**8}
    with pytest.raises(OptionError, match=r"control_resolution: control images of 3584 x 1008 fill \d+ of the 4096 text positions"):
        QWEN.encode_instructions(parts, [torch.zeros(3, 1008, 3584)], ["red"])
    with pytest.raises(OptionError, match="4096 positions"):
        QWEN.denoise(parts, torch.zeros(1, 16, 8, 8), torch.tensor([0.5]), [{"text": torch.zeros(4095, 32)}])
    QWEN.denoise(parts, torch.zeros(1, 16, 8, 8), torch.tensor([0.5]), [{"text": torch.zeros(4094, 32)}])


def test_latents_and_images_are_those_of_the_pipeline(version):
    parts = QWEN.tiny(version)
    shown = pixels_of(image(96, 64))[None]
    latents = QWEN.encode_images(parts, shown)
    plain = parts.vae.encode(shown[:, :, None]).latent_dist.mode()
    mean, std = (torch.tensor(row).view(1, 16, 1, 1, 1) for row in (parts.vae.config.latents_mean, parts.vae.config.latents_std))
    assert latents.shape == (1, 16, 8, 12) and torch.equal(latents, ((plain - mean) / std)[:, :, 0])
    assert_close(QWEN.decode(parts, latents), parts.vae.decode(plain).sample[:, :, 0].clamp(-1, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_denoise_is_the_transformer_on_packed_tokens_with_the_target_first(zero_cond_t):
    parts = QWEN.tiny("edit-2511" if zero_cond_t else "edit-2509")
    x_t, t = torch.randn((2, 16, 8, 6), generator=GENERATOR), torch.tensor([0.31, 0.7])
    conditions = [condition(9, (4, 6), (8, 8)), condition(9, (4, 6), (8, 8))]
    seen: list[dict] = []
    handle = parts.backbone.register_forward_pre_hook(lambda module, arguments, named: seen.append(named), with_kwargs=True)
    found = QWEN.denoise(parts, x_t, t, conditions)
    handle.remove()
    assert seen[0]["img_shapes"] == [[(1, 4, 3), (1, 2, 3), (1, 4, 4)]] * 2 and seen[0]["encoder_hidden_states_mask"] is None
    tokens = [x_t] + [torch.stack([one[f"control_{i}"] for one in conditions]) for i in (0, 1)]
    own = QwenImageEditPlusPipeline
    joined = torch.cat([own._pack_latents(part, 2, 16, *part.shape[-2:]) for part in tokens], dim=1)
    direct = parts.backbone(
        hidden_states=joined,
        timestep=t,
        encoder_hidden_states=torch.stack([one["text"] for one in conditions]),
        img_shapes=[[(1, 4, 3), (1, 2, 3), (1, 4, 4)]] * 2,
    ).sample[:, :12]
    assert torch.equal(found, own._unpack_latents(direct, 64, 48, 8)[:, :, 0])
    assert torch.equal(unpacked(packed(x_t), 8, 6), x_t)


@pytest.mark.parametrize("version_of_plus", ["edit-2509", "edit-2511"])
def test_any_mixture_of_shapes_in_a_batch_equals_single_runs(version_of_plus):
    parts = QWEN.tiny(version_of_plus)
    conditions = [
        condition(20, (8, 8)),
        condition(38, (4, 6), (8, 8)),
        condition(11),
        condition(55, (8, 8)),
        condition(20, (8, 8), (4, 6)),
        condition(7, (6, 4), (6, 6), (2, 2)),
    ]
    x_t, t = torch.randn((6, 16, 6, 8), generator=GENERATOR), torch.rand(6, generator=GENERATOR)
    together = QWEN.denoise(parts, x_t, t, conditions)
    for i, one in enumerate(conditions):
        alone = QWEN.denoise(parts, x_t[i : i + 1], t[i : i + 1], [one])
        assert_close(together[i], alone[0], atol=1e-6, rtol=1e-5)


def test_control_images_and_their_order_matter_and_zero_cond_t_holds_them_at_time_zero():
    x_t, one = torch.randn((1, 16, 8, 8), generator=GENERATOR), condition(9, (8, 8), (8, 8))
    turned = {**one, "control_0": one["control_1"], "control_1": one["control_0"]}
    for version in ("edit-2509", "edit-2511"):
        parts = QWEN.tiny(version)
        t = torch.tensor([0.5])
        found = QWEN.denoise(parts, x_t, t, [one])
        assert not torch.allclose(found, QWEN.denoise(parts, x_t, t, [turned]), atol=1e-4)
    sizes: list[int] = []
    block = parts.backbone.transformer_blocks[0]
    handle = block.img_mod.register_forward_pre_hook(lambda module, arguments: sizes.append(len(arguments[0])))
    QWEN.denoise(parts, x_t, torch.tensor([0.5]), [one])
    handle.remove()
    assert sizes == [2], "one set of modulations for the target's time and one for time 0"


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_times_reach_the_transformer_unrounded_in_bfloat16(zero_cond_t):
    parts = QWEN.tiny("edit-2511" if zero_cond_t else "edit-2509")
    parts.backbone.to(torch.bfloat16)
    seen: list[Tensor] = []
    handle = parts.backbone.time_text_embed.time_proj.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    t = torch.tensor([0.5001, 0.9999])
    QWEN.denoise(parts, torch.randn((2, 16, 8, 8)), t, [condition(9), condition(9)])
    handle.remove()
    assert torch.equal(seen[0], torch.cat([t, torch.zeros(2)]) if zero_cond_t else t)


def call(pipeline: diffusers.DiffusionPipeline, parts: Parts, request: Preview, **more) -> Tensor:
    """The pipeline's image of a request, (3, H, W) in [0, 1], from the rows that we encode."""
    positive, negative = QWEN.conditions_of(parts, [request])
    if request.controls:
        more["image"] = list(request.controls) if parts.settings["model_version"] != "edit" else request.controls[0]
    return pipeline(
        prompt_embeds=positive[0]["text"][None],
        prompt_embeds_mask=torch.ones(1, len(positive[0]["text"])),
        negative_prompt_embeds=None if negative is None else negative[0]["text"][None],
        negative_prompt_embeds_mask=None if negative is None else torch.ones(1, len(negative[0]["text"])),
        true_cfg_scale=request.cfg_scale,
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="pt",
        **more,
    ).images[0]


@pytest.mark.parametrize("cfg_scale", [1.0, 4.0])
def test_images_are_bit_for_bit_those_of_the_pipeline(version, cfg_scale):
    parts = QWEN.tiny(version)
    # edit has its area of a million pixels in the code: it is given latents of control images instead.
    request = Preview(
        "make it red",
        "dull",
        96,
        64,
        seed=7,
        steps=3,
        cfg_scale=cfg_scale,
        controls=() if version == "image" else tuple(controls_for(parts)),
    )
    pipeline = qwen_pipeline_of(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plus, "VAE_IMAGE_SIZE", 64 * 64)
        if version == "edit":
            own = diffusers.pipelines.qwenimage.pipeline_qwenimage_edit
            patch.setattr(own, "calculate_dimensions", lambda area, ratio: (64, 64, None))
        theirs = call(pipeline, parts, request)
    assert torch.equal((QWEN.render(parts, [request])[0] / 2 + 0.5).clamp(0, 1), theirs)


def test_the_whole_way_from_words_and_images_is_the_pipelines():
    parts = QWEN.tiny()
    request = Preview("make it red", " ", 64, 64, seed=7, steps=2, cfg_scale=4.0, controls=(image(96, 96), image()))
    with pytest.MonkeyPatch.context() as patch, three_axes(parts):
        patch.setattr(plus, "VAE_IMAGE_SIZE", 64 * 64)
        # An image at its own size already: the text encoder is shown what the VAE is given.
        sized = tuple(one.resize(QWEN.control_size(parts, one.size), Image.Resampling.LANCZOS) for one in request.controls)
        theirs = qwen_pipeline_of(parts)(
            image=list(sized),
            prompt="make it red",
            negative_prompt=" ",
            true_cfg_scale=4.0,
            width=64,
            height=64,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(7),
            output_type="pt",
        ).images[0]
    assert_close(QWEN.render(parts, [replace(request, controls=sized)])[0] / 2 + 0.5, theirs, atol=1e-4, rtol=1e-4)
    assert_close(QWEN.render(parts, [request])[0] / 2 + 0.5, theirs, atol=1e-4, rtol=1e-4)


def test_a_batch_of_requests_gives_the_images_of_single_ones():
    parts = QWEN.tiny()
    shown = controls_for(parts, 3)
    requests = [
        Preview("red", "dull", 64, 64, 1, 3, 4.0, controls=tuple(shown[:1])),
        Preview("blue, and larger", " ", 64, 64, 2, 3, 4.0, controls=tuple(shown[:1])),
        Preview("green", "grey and dull", 64, 64, 3, 3, 4.0, controls=tuple(shown)),
    ]
    together = QWEN.render(parts, requests)
    for i, request in enumerate(requests):
        assert_close(QWEN.render(parts, [request])[0], together[i], atol=2e-5, rtol=1e-4)


def test_noise_is_of_the_seed_alone():
    both = noise([5, 9], 16, 8, 6)
    assert torch.equal(both[1:], noise([9], 16, 8, 6))
    assert torch.equal(both[0], torch.randn((1, 1, 16, 8, 6), generator=torch.Generator().manual_seed(5))[0, 0])


def test_one_step_goes_straight_from_noise_to_image():
    scheduler = schedule("auto", loading.published_scheduler(), 1, 4096, torch.device("cpu"))
    assert scheduler.sigmas.tolist() == [1.0, 0.0]
    parts = QWEN.tiny()
    request = Preview("red", "", 64, 64, 4, 1, 1.0, controls=(image(),))
    (positive,), _ = QWEN.conditions_of(parts, [request])
    start = noise([4], 16, 8, 8)
    expected = start - QWEN.denoise(parts, start, torch.ones(1), [positive])
    assert_close(QWEN.draw(parts, [request], [positive], None), expected)


def test_the_published_schedule_has_the_published_figures():
    sigmas = schedule("auto", loading.published_scheduler(), 20, 4096, torch.device("cpu")).sigmas
    assert len(sigmas) == 21
    assert_close(sigmas[[0, 1, 2, 18, 19, 20]], torch.tensor([1.0, 0.9722, 0.943, 0.1138, 0.02, 0.0]), atol=1e-4, rtol=0)


def test_every_step_is_told_and_may_end_the_rendering():
    parts = QWEN.tiny("image")
    steps: list[tuple[int, int, tuple[int, ...]]] = []
    request = Preview("red", "", 64, 32, 4, 3, 1.0)
    QWEN.render(parts, [request], lambda step, total, latents: steps.append((step, total, tuple(latents.shape))))
    assert steps == [(1, 3, (1, 16, 4, 8)), (2, 3, (1, 16, 4, 8)), (3, 3, (1, 16, 4, 8))]

    def stop(step: int, total: int, latents: Tensor) -> None:
        if step == 2:
            raise KeyboardInterrupt

    parts.backbone.train()
    with pytest.raises(KeyboardInterrupt):
        QWEN.render(parts, [request], stop)
    assert parts.backbone.training


@pytest.mark.parametrize(
    ("version_given", "count", "words"),
    [("edit", 0, "0 were given, but Qwen-Image edit takes 1"), ("edit-2509", 4, "takes 1 to 3"), ("image", 1, "takes 0")],
)
def test_a_number_of_control_images_that_the_model_does_not_take_is_refused(version_given, count, words):
    parts = QWEN.tiny(version_given)
    with pytest.raises(OptionError, match=words):
        QWEN.render(parts, [Preview("red", width=64, height=64, steps=1, controls=tuple(image() for _ in range(count)))])


@pytest.mark.parametrize(
    ("ratio", "large", "small"),
    [
        (1.0, (1024, 1024), (384, 384)),
        (4 / 3, (1184, 896), (448, 320)),
        (3 / 2, (1248, 832), (480, 320)),
        (16 / 9, (1376, 768), (512, 288)),
        (2.0, (1440, 736), (544, 256)),
    ],
)
def test_sizes_follow_the_published_rule(ratio, large, small):
    parts = QWEN.tiny()
    parts.settings["control_area"] = 1024 * 1024
    assert QWEN.control_size(parts, (round(ratio * 3600), 3600)) == large
    assert area_size((round(1000 * ratio), 1000), qwen_templates.CONDITION_AREA) == small == plus.calculate_dimensions(384 * 384, ratio)
    assert area_size((6400, 64), 64 * 64)[1] == 16, "no side is ever 0"
    assert area_size((80, 48), 64 * 64) == (80, 48), "small models do not squeeze images out of shape"


def test_adapters_go_on_the_fourteen_layers_of_a_block_that_have_a_gradient():
    parts = QWEN.tiny()
    names = linear_layers(parts)
    first = {name.removeprefix("transformer_blocks.0.") for name in names if name.startswith("transformer_blocks.0.")}
    last = {name.removeprefix("transformer_blocks.1.") for name in names if name.startswith("transformer_blocks.1.")}
    attention = {f"attn.{name}" for name in "to_q to_k to_v add_q_proj add_k_proj add_v_proj to_out.0 to_add_out".split()}
    others = {"img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2", "img_mod.1", "txt_mod.1"}
    assert first == attention | others and first - last == {"attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"}
    parts.backbone.requires_grad_(True)
    QWEN.denoise(parts, torch.randn((1, 16, 8, 8)), torch.tensor([0.5]), [condition(9, (8, 8))]).square().sum().backward()
    layers = dict(parts.backbone.named_modules())
    assert all(layers[name].weight.grad.abs().sum() > 0 for name in names)
    for name in first - last:
        gradient = layers[f"transformer_blocks.1.{name}"].weight.grad
        assert gradient is None or gradient.abs().sum() == 0


def test_the_real_transformer_has_840_layers_for_adapters_in_twenty_billion_numbers():
    with torch.device("meta"):
        real = QwenImageTransformer2DModel()
    assert round(sum(parameter.numel() for parameter in real.parameters()) / 1e9, 3) == 20.430
    assert len(linear_layers(replace(QWEN.tiny(), backbone=real))) == 840 - 4
