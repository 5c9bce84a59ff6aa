"""The toy Z-Image base: Z-Image's own classes, its clock and sign, distilled to eight steps without guidance."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import AutoTokenizer, Qwen2Tokenizer, Qwen3Model

from sd_scripts.toy import build, measure, pretraining, worlds, zimage
from sd_scripts.toy.build import BuildPlan
from sd_scripts.toy.render import render_with
from sd_scripts.toy.sharing import load_pipeline, load_vae
from sd_scripts.toy.tokens import WORDS, zimage_tokenizer
from tests.toy.stored import assert_stored

FOLDER = build.BASES / "zimage"
COLORS = worlds.colors_of("zimage")
TINY = zimage.ZImageSettings(
    num_steps=40,
    num_distilled_steps=12,
    batch_size=4,
    learning_rate=2e-3,
    distilled_learning_rate=7e-4,
    num_images=16,
    num_warmup_steps=3,
)


@pytest.fixture(scope="module")
def base():
    return FOLDER


@pytest.fixture(scope="module")
def pipeline(base):
    loaded = load_pipeline(FOLDER)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def parts(pipeline):
    return zimage.ZImageParts(pipeline.transformer, pipeline.text_encoder, pipeline.tokenizer)


@pytest.fixture(scope="module")
def record(base):
    return json.loads((FOLDER / "BUILD.json").read_text(encoding="utf-8"))


def test_the_base_has_the_parts_of_zimage_turbo(pipeline):
    classes = {
        "transformer": ZImageTransformer2DModel,
        "text_encoder": Qwen3Model,
        "tokenizer": Qwen2Tokenizer,
        "vae": AutoencoderKL,
        "scheduler": FlowMatchEulerDiscreteScheduler,
    }
    assert type(pipeline) is ZImagePipeline
    for name, expected in classes.items():
        assert type(getattr(pipeline, name)) is expected
    config = pipeline.transformer.config
    assert config.in_channels == pipeline.vae.config.latent_channels == 16
    assert sum(config.axes_dims) == config.dim // config.n_heads
    assert config.cap_feat_dim == pipeline.text_encoder.config.hidden_size
    assert (pipeline.vae.config.shift_factor, pipeline.vae.config.scaling_factor) == (0.0, 1.0)
    assert (pipeline.scheduler.config.shift, pipeline.scheduler.config.use_dynamic_shifting) == (3.0, False)
    assert all(tensor.isfinite().all() for module in (pipeline.transformer, pipeline.text_encoder) for tensor in module.parameters())


def test_the_base_is_under_5_mb_without_the_shared_vae(base):
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 5_000_000
    assert not list((FOLDER / "vae").glob("*.safetensors"))


@pytest.mark.parametrize("num", [6, pytest.param(24, marks=pytest.mark.long)])
def test_the_base_draws_in_8_steps_what_its_record_says(pipeline, record, num):
    """That it draws old prompts and no stars in as many steps, test_toy_bases measures."""
    scores = record["scores"]
    assert scores["old"]["all"] >= 0.95
    assert scores["held_out"]["all"] >= 0.93
    assert scores["star"]["shape"] == 0
    assert scores["teal"]["color"] < 0.05
    render = render_with(pipeline, num_steps=8, guidance_scale=0.0)
    for kind, right, least, most in (("held_out", "all", 5 / 6, 1), ("teal", "color", 0, 1 / 24)):
        measured = measure.obedience(render, measure.prompts(kind, num, 6, COLORS))
        assert least <= getattr(measured, right) <= most, (kind, measured)


def test_distillation_is_what_makes_eight_steps_enough(record):
    """Of 200 prompts of each kind 1 and 2 went wrong after it, 5 and 5 before, when the base was built."""
    undistilled = record["teacher_scores"]["8 steps, no guidance"]
    for kind in ("old", "held_out"):
        assert 1 - record["scores"][kind]["all"] <= (1 - undistilled[kind]["all"]) / 2


def test_training_feeds_the_transformer_as_the_pipeline_does(pipeline, parts):
    captions = [
        "A red circle at the left",
        "",
        "an image of a star, somewhere I have never been and shall never go, with more words than a line",
    ]
    theirs, nothing = pipeline.encode_prompt(list(captions))
    ours = zimage.encode_captions(parts, captions)
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], nothing[0], atol=1e-5, rtol=1e-5)


def test_velocity_and_anchors_have_the_pipelines_sign_and_clock(pipeline, parts):
    drawn = pipeline(
        "a red circle at the left",
        width=80,
        height=48,
        num_inference_steps=8,
        guidance_scale=0.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
    ).images
    sigmas = zimage.anchor_sigmas()
    torch.testing.assert_close(pipeline.scheduler.sigmas, sigmas, atol=1e-6, rtol=0)
    torch.testing.assert_close(pipeline.scheduler.timesteps / 1000, sigmas[:-1], atol=1e-6, rtol=0)
    x = torch.randn((1, 16, 6, 10), generator=torch.Generator().manual_seed(1))
    text = zimage.encode_captions(parts, ["a red circle at the left"])
    for now, following in itertools.pairwise(sigmas):
        with torch.no_grad():
            x = x + (following - now) * zimage.velocity(parts.transformer, x, now.expand(1), text)
    torch.testing.assert_close(drawn, x, atol=1e-4, rtol=1e-4)


def test_guidance_is_the_pipelines(pipeline, parts):
    captions = ["a red circle at the left", "a blue square in the center"]
    noise = torch.randn((2, 16, 8, 8), generator=torch.Generator().manual_seed(2))
    drawn = pipeline(
        list(captions), width=64, height=64, num_inference_steps=1, guidance_scale=1.5, output_type="latent", latents=noise.clone()
    ).images
    text, (nothing,) = zimage.encode_captions(parts, captions), zimage.encode_captions(parts, [""])
    with torch.no_grad():
        v = zimage.guided(parts.transformer, text, nothing, 1.5)(noise, torch.ones(2))
    torch.testing.assert_close(drawn, noise - v, atol=1e-4, rtol=1e-4)


def test_anchors_are_the_shifted_even_steps():
    for num, shift in ((8, 3.0), (5, 6.0), (8, 1.0)):
        expected = [shift * (1 - i / num) / (1 + (shift - 1) * (1 - i / num)) for i in range(num + 1)]
        assert zimage.anchor_sigmas(num, shift).tolist() == pytest.approx(expected, abs=1e-7)


def test_the_target_is_where_the_teacher_arrives():
    """For the velocity v = c x each Euler step multiplies x by 1 + c (its length), so the target has a closed form."""
    rng = torch.Generator().manual_seed(3)
    for num_substeps in (1, 4):
        c = float(torch.rand((), generator=rng)) * 2 - 1
        x = torch.randn((8, 16, 2, 3), generator=rng, dtype=torch.float64)
        number = torch.arange(8)
        target = zimage.mean_velocity(lambda x, sigma, c=c: c * x, x, number, num_substeps)
        u = 1 - torch.arange(8 * num_substeps + 1, dtype=torch.float64) / (8 * num_substeps)
        lengths = (3 * u / (1 + 2 * u)).diff().reshape(8, num_substeps)
        expected = ((1 + c * lengths).prod(dim=1) - 1) / lengths.sum(dim=1)
        torch.testing.assert_close(target, x * expected[:, None, None, None], atol=1e-5, rtol=1e-5)


def test_the_teacher_is_asked_at_the_sigmas_of_its_own_steps():
    asked = []

    def teacher(x, sigma):
        asked.append(sigma)
        return torch.zeros_like(x)

    zimage.mean_velocity(teacher, torch.zeros(8, 16, 2, 2), torch.arange(8), 4)
    together = torch.stack(asked, dim=1).flatten()
    torch.testing.assert_close(together, zimage.anchor_sigmas(32)[:-1])


def test_walks_begin_with_noise_use_all_anchors_alike_and_can_be_walked_again(parts):
    settings = replace(TINY, num_distilled_steps=100, batch_size=16)
    ways = []
    for _ in range(2):
        visits, first, counted = [], [], torch.zeros(8)
        rounds = {}
        for now in zimage.walks(parts, settings, 7):
            size = now.x.shape[2:]
            rounds[size] = rounds.get(size, 0) + 1
            if rounds[size] > 8:
                counted += torch.bincount(now.number, minlength=8)
            visits.append(now.x.clone())
            first.append(now.x[now.number == 0])
            now.advance(0.1 * now.x)
        ways.append(visits)
    assert all(torch.equal(a, b) for a, b in zip(*ways, strict=True))
    assert counted.min() == counted.max() > 0
    assert {tuple(x.shape[2:]) for x in visits} == {(8, 8), (6, 10), (10, 6)}
    fresh = torch.cat([x.flatten() for x in first])
    assert abs(float(fresh.mean())) < 0.02
    assert abs(float(fresh.std()) - 1) < 0.02


def test_a_step_of_a_walk_is_the_samplers():
    walk = zimage.Walks(torch.ones(2, 16, 2, 2), [torch.empty(0)] * 2, torch.tensor([0, 7]), torch.tensor([8, 8]))
    walk.advance(torch.full((2, 16, 2, 2), 2.0))
    assert walk.number.tolist() == [1, 8]
    assert walk.x[:, 0, 0, 0].tolist() == pytest.approx([1 + 2 * (21 / 22 - 1), 1 + 2 * (0 - 0.3)], abs=1e-6)


def test_a_tiny_training_and_a_tiny_distillation_learn(parts):
    vae = load_vae(build.BASES / "sdxl" / "vae")
    (pool,) = pretraining.encode_world(pretraining.moments_of(vae), 16, 0, worlds.trained(COLORS))[:1]
    (batch,) = pretraining.batches((pool,), replace(TINY, num_steps=1, batch_size=16), 0, pretraining.capitals(TINY.capital_fraction))
    trained, new = zimage.train_teacher(vae, TINY, 0), zimage.new_parts(0)
    with torch.no_grad():
        before, after = zimage.loss_of(new, batch, TINY), zimage.loss_of(trained, batch, TINY)
    assert after < 0.8 * before
    guided = replace(TINY, guidance_scale=1.0, num_substeps=2)
    student = zimage.distil(parts, guided, 0)
    assert student.text_encoder is parts.text_encoder
    text, (nothing,) = zimage.encode_captions(parts, ["a green square, top"] * 8), zimage.encode_captions(parts, [""])
    x, number = torch.randn(8, 16, 8, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(8, dtype=torch.long)
    with torch.no_grad():
        wanted = zimage.mean_velocity(zimage.guided(parts.transformer, text, nothing, 1.0), x, number, 2)
        errors = [(zimage.velocity(one.transformer, x, torch.ones(8), text) - wanted).square().mean() for one in (parts, student)]
    assert errors[1] < 0.8 * errors[0]


def test_a_caption_names_what_is_in_it_and_nothing_else():
    rng = worlds.rng_for(4)
    for scene in worlds.trained(COLORS):
        expected = [worlds.BASE_SHAPES.index(scene.shape), list(worlds.COLORS).index(scene.color), list(worlds.PLACES).index(scene.place)]
        assert zimage.named(worlds.caption(scene, rng).capitalize()) == expected
    assert zimage.named("") == [-100, -100, -100]
    assert zimage.named("a star") == [-100, -100, -100]
    assert zimage.named("sks hexagon, left") == [-100, -100, list(worlds.PLACES).index("left")]


def test_naming_is_the_cross_entropy_of_what_is_named():
    heads, rng = zimage.new_heads(0).requires_grad_(False), torch.Generator().manual_seed(5)
    text = [torch.randn(3, 64, generator=rng), torch.randn(5, 64, generator=rng)]
    loss = zimage.naming_loss(heads, text, ["a red square", ""])
    last = text[0][-1].double()
    last = last / last.square().mean().add(torch.finfo(torch.float32).eps).sqrt()
    expected = 0.0
    for head, number in zip(heads, (worlds.BASE_SHAPES.index("square"), list(worlds.COLORS).index("red")), strict=False):
        scores = head.weight.double() @ last + head.bias.double()
        expected += float(scores.logsumexp(0) - scores[number])
    assert float(loss) == pytest.approx(expected / 2, rel=1e-5)


def test_the_stored_tokenizer_is_the_one_in_code(pipeline):
    text = "<|im_start|>user\nA teal hexagon zug at the top left<|im_end|>"
    expected = zimage_tokenizer()
    for kind in (Qwen2Tokenizer, AutoTokenizer):
        stored = kind.from_pretrained(FOLDER / "tokenizer", local_files_only=True)
        assert stored(text).input_ids == expected(text).input_ids
        assert stored.chat_template == expected.chat_template
        assert len(stored) == pipeline.text_encoder.config.vocab_size


def test_prompts_are_wrapped_as_qwen3_wraps_them_and_words_are_single_tokens():
    tokenizer = zimage_tokenizer()
    chat = [{"role": "user", "content": "a red circle"}]
    wrapped = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert wrapped == "<|im_start|>user\na red circle<|im_end|>\n<|im_start|>assistant\n"
    silent = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert silent == f"{wrapped}<think>\n\n</think>\n\n"
    assert len(tokenizer(wrapped).input_ids) == 11
    for word in WORDS:
        assert len(tokenizer.tokenize(f"{word} {word}")) == 2, word


def test_a_short_build_leaves_a_pipeline_that_zimage_loads(tmp_path):
    plan = BuildPlan(
        "zimage", tmp_path / "zimage", seed=3, num_steps=2, num_distilled_steps=2, vae=build.BASES / "sdxl" / "vae", num_prompts=1
    )
    record = build.build(plan)
    kinds = {"old", "held_out", "star", "teal"}
    assert record["scores"].keys() == kinds
    assert all(scores.keys() == {"old", "held_out"} for scores in record["teacher_scores"].values())
    assert (record["settings"]["num_steps"], record["settings"]["num_distilled_steps"]) == (2, 2)
    built = ZImagePipeline.from_pretrained(plan.out, local_files_only=True, dtype=torch.float32)
    assert built("a red circle at the left", width=64, height=48, num_inference_steps=1).images[0].size == (64, 48)
    settings, vae = zimage.ZImageSettings(num_steps=2, num_distilled_steps=2), load_vae(plan.vae)
    again = zimage.distil(zimage.train_teacher(vae, settings, plan.seed), settings, plan.seed)
    assert_stored(built.components, zimage.as_pipeline(again, vae).components)
