"""The toy Qwen-Image-Edit base: its own classes, instructions that it obeys, and one that it does not know."""

import itertools
import json
import sys
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from safetensors import safe_open
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from sd_scripts import families
from sd_scripts.families.qwen_edit.options import QwenImageModelOptions
from sd_scripts.library.core.protocols import Preview
from sd_scripts.toy import autoencoder, build, editing, edits, measure, qwen_edit, qwen_vae, worlds
from sd_scripts.toy.build import BuildPlan
from sd_scripts.toy.tokens import WORDS
from tests.toy.stored import assert_stored

FOLDER = build.BASES / "qwen_edit"


@pytest.fixture(scope="module")
def base():
    return qwen_edit.load(FOLDER)


@pytest.fixture(scope="module")
def pipeline(base):
    parts, vae = base
    # A key of ours in model_index.json is none of the pipeline's business.
    return QwenImageEditPlusPipeline.from_pretrained(FOLDER, processor=parts.processor, vae=vae, local_files_only=True, dtype=torch.float32)


def test_the_base_has_the_parts_of_edit_2509(pipeline):
    classes = {
        "transformer": QwenImageTransformer2DModel,
        "text_encoder": Qwen2_5_VLForConditionalGeneration,
        "tokenizer": Qwen2Tokenizer,
        "vae": AutoencoderKLQwenImage,
        "scheduler": FlowMatchEulerDiscreteScheduler,
    }
    for name, expected in classes.items():
        assert type(getattr(pipeline, name)) is expected
    config = pipeline.transformer.config
    assert (config.in_channels, config.out_channels, config.zero_cond_t) == (64, 16, False)
    assert config.joint_attention_dim == pipeline.text_encoder.config.text_config.hidden_size
    assert sum(config.axes_dims_rope) == config.attention_head_dim
    assert config.num_layers >= 4
    assert pipeline.vae.config.z_dim == 16
    assert pipeline.vae.config.temperal_downsample == [False, True, True]
    assert not pipeline.scheduler.config.use_dynamic_shifting


def test_its_folder_says_how_large_its_images_are_and_how_it_was_made():
    index = json.loads((FOLDER / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == "QwenImageEditPlusPipeline"
    assert index["_default_side"] == 64
    record = json.loads((FOLDER / "BUILD.json").read_text(encoding="utf-8"))
    assert record["family"] == "qwen_edit"
    assert record["vae"]["settings"]["num_steps"] > 0
    scores = [record["scores"][kind] for kind in edits.OLD_KINDS]
    assert sum(score["obeyed"] for score in scores) / len(scores) >= 0.85
    assert min(score["held_out"] for score in scores) >= 0.7, "moving is the hardest"
    assert record["scores"]["border"]["obeyed"] < 0.05


def test_the_folder_is_small_half_precision_and_names_no_machine():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_500_000
    for path in files:
        if path.suffix == ".json":
            assert not json.loads(path.read_text(encoding="utf-8")).get("_name_or_path")
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as tensors:
                assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.float16}, path  # noqa: SIM118


def test_the_base_obeys_instructions_and_knows_no_border(base):
    render = qwen_edit.render_with(*base)
    tasks = [task for kind in edits.OLD_KINDS for held in (False, True) for task in measure.edit_tasks(kind, 9, 2, held)]
    assert measure.edit_obedience(render, tasks) >= 0.75
    assert measure.edit_obedience(render, measure.edit_tasks("border", 12, 2)) == 0


@pytest.mark.long
def test_the_base_obeys_most_instructions_seen_and_held_out(base):
    render = qwen_edit.render_with(*base)
    for held_out in (False, True):
        obeyed = [measure.edit_obedience(render, measure.edit_tasks(kind, 100, 3, held_out)) for kind in edits.OLD_KINDS]
        assert min(obeyed) >= 0.6, obeyed
        assert sum(obeyed) / len(obeyed) >= 0.8, obeyed
    assert measure.edit_obedience(render, measure.edit_tasks("border", 100, 3)) < 0.05


def test_an_instruction_without_a_meaning_leaves_the_image_as_it_is(base):
    assert measure.edit_obedience(qwen_edit.render_with(*base), measure.edit_tasks("keep", 15, 2)) >= 0.7


def test_a_result_does_not_depend_on_what_is_edited_beside_it(base):
    tasks = [task for task in measure.edit_tasks("recolour", 9, 5) if task.source.size == (64, 64)]
    render = qwen_edit.render_with(*base, num_steps=4)
    together = render([t.edit.instruction for t in tasks], [t.source for t in tasks], [t.seed for t in tasks])
    alone = render([tasks[1].edit.instruction], [tasks[1].source], [tasks[1].seed])
    difference = autoencoder.to_pixels([together[1]]) - autoencoder.to_pixels(alone)
    assert difference.abs().max() <= 2 / 127.5


@torch.no_grad()
def test_training_encodes_instructions_as_the_pipeline_does_once_it_is_told_which_tokens_are_the_images(base, pipeline):
    parts, _ = base
    image_id = parts.processor.image_token_id

    def with_true_positions(module, arguments, given):
        given["mm_token_type_ids"] = (given["input_ids"] == image_id).int()
        return arguments, given

    for size, num_vision in zip(worlds.SIZES, (4, 2, 2), strict=True):
        image = measure.edit_tasks("recolour", 3, 6)[worlds.SIZES.index(size)].source
        assert image.size == size
        patches, grid = qwen_edit.patches_of(parts.processor, [image])
        assert int(grid.prod()) // 4 == num_vision
        ours, mask = qwen_edit.encode_instructions(parts, ["make it red"], patches, grid)
        assert mask.all()
        hook = pipeline.text_encoder.register_forward_pre_hook(with_true_positions, with_kwargs=True)
        theirs, _ = pipeline.encode_prompt("make it red", [qwen_edit.condition_image(image)])
        hook.remove()
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_short_instructions_are_padded_behind_a_mask_without_changing_them(base):
    parts, _ = base
    image = measure.edit_tasks("recolour", 1, 6)[0].source
    patches, grid = qwen_edit.patches_of(parts.processor, [image, image])
    rows, mask = qwen_edit.encode_instructions(parts, ["", "move the circle to the top left"], patches, grid)
    alone, _ = qwen_edit.encode_instructions(parts, [""], patches[:1], grid)
    num_rows = int(mask[0].sum())
    assert num_rows == alone.shape[1] < rows.shape[1]
    torch.testing.assert_close(rows[:1, :num_rows], alone, atol=1e-5, rtol=1e-5)
    assert not rows[0, num_rows:].any()
    assert not torch.allclose(rows[0, -1], rows[1, -1])


@torch.no_grad()
def test_training_feeds_the_transformer_as_the_familys_pipeline_does(base, pipeline, monkeypatch):
    parts, vae = base
    task = next(task for task in measure.edit_tasks("move", 3, 7) if task.source.size == (64, 64))
    module = sys.modules[type(pipeline).__module__]
    monkeypatch.setattr(module, "VAE_IMAGE_SIZE", 64 * 64)
    patches, grid = qwen_edit.patches_of(parts.processor, [task.source])
    text, mask = qwen_edit.encode_instructions(parts, [task.edit.instruction], patches, grid)
    drawn = pipeline(
        image=task.source,
        prompt_embeds=text,
        prompt_embeds_mask=mask,
        width=64,
        height=64,
        num_inference_steps=1,
        true_cfg_scale=1.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
    ).images
    # One step of Euler's method from t = 1 to 0 shows the velocity that the pipeline got.
    noise = torch.randn((1, 1, 16, 8, 8), generator=torch.Generator().manual_seed(1))[:, 0]
    v = qwen_edit.velocity(parts, noise, qwen_vae.encode(vae, [task.source]), torch.ones(1), text, mask)
    torch.testing.assert_close(qwen_edit.unpacked(drawn, 8, 8), noise - qwen_edit.unpacked(v, 8, 8), atol=1e-4, rtol=1e-4)


def test_the_family_reads_the_base_and_renders_what_the_base_is_measured_with(base):
    options = QwenImageModelOptions(pretrained_model_name_or_path=str(FOLDER))
    parts = families.family("qwen_edit").load(options, torch.device("cpu"), torch.float32)
    assert parts.settings["model_version"] == "edit-2509"
    tasks = [task for task in measure.edit_tasks("recolour", 6, 10) if task.source.size == (64, 64)]
    previews = [
        Preview(task.edit.instruction, "", 64, 64, task.seed, steps=6, cfg_scale=qwen_edit.CFG_SCALE, controls=(task.source,))
        for task in tasks
    ]
    theirs = families.family("qwen_edit").preview(parts, previews)
    render = qwen_edit.render_with(*base, num_steps=6)
    ours = render([t.edit.instruction for t in tasks], [t.source for t in tasks], [t.seed for t in tasks])
    difference = autoencoder.to_pixels(theirs) - autoencoder.to_pixels(ours)
    assert difference.abs().max() <= 3 / 127.5


def test_the_tokenizer_has_the_beginnings_of_the_templates_in_as_many_tokens_as_the_real_one_and_each_word_as_one(base):
    parts, _ = base
    for template, num_dropped in qwen_edit.templates().values():
        beginning = template.split("{}")[0].split("<|vision_start|>")[0]
        assert len(parts.tokenizer(beginning).input_ids) == num_dropped
    for word in WORDS:
        assert len(parts.tokenizer.tokenize(word)) == 1, word
        assert len(parts.tokenizer.tokenize(f" {word}")) == 1, word
    assert len(parts.tokenizer) == parts.text_encoder.config.text_config.vocab_size
    for text in ("Ein Äpfelchen? 42 日本", "make it\n\tred!"):
        assert parts.tokenizer.decode(parts.tokenizer(text).input_ids) == text


def test_the_stored_tokenizer_is_the_one_in_code(base):
    """That it is the same in any process, test_toy_flux asks for all tokenizers."""
    parts, _ = base
    assert parts.tokenizer.get_vocab() == qwen_edit.new_tokenizer().get_vocab()


def test_the_vae_keeps_shapes_and_borders(base):
    _, vae = base
    right = []
    for kind in (*edits.OLD_KINDS, "border"):
        for task in measure.edit_tasks(kind, 15, 8):
            (seen,) = qwen_vae.decode(vae, qwen_vae.encode(vae, [task.target]))
            right.append(edits.obeyed(task.edit, task.source, seen))
    assert sum(right) >= 0.95 * len(right)


def test_normalised_latents_of_the_world_have_mean_0_and_deviation_1(base):
    _, vae = base
    images = [task.target for kind in edits.OLD_KINDS for task in measure.edit_tasks(kind, 90, 9) if task.target.size == (64, 64)]
    per_channel = qwen_vae.encode(vae, images).transpose(0, 1).flatten(1)
    assert per_channel.mean(dim=1).abs().max() < 0.2
    assert (per_channel.std(dim=1) - 1).abs().max() < 0.2


@torch.no_grad()
def test_one_image_goes_through_the_fast_vae_as_through_the_ordinary_one(base):
    _, vae = base
    pixels = torch.rand((2, 3, 48, 80), generator=torch.Generator().manual_seed(0)) * 2 - 1
    slow = vae.encode(pixels[:, :, None]).latent_dist
    with qwen_vae.single_images(vae):
        fast = qwen_vae.posterior_of(vae, pixels)
        drawn = qwen_vae.decoded(vae, fast.mean)
    torch.testing.assert_close(fast.mean, slow.mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drawn.clamp(-1, 1), vae.decode(slow.mean).sample[:, :, 0], atol=1e-4, rtol=1e-4)
    again = vae.encode(pixels[:, :, None]).latent_dist.mean
    assert torch.equal(again, slow.mean), "outside, it is the ordinary one again"


def test_batches_leave_out_instructions_and_ask_for_nothing_as_often_as_set():
    settings = qwen_edit.QwenEditSettings(num_steps=30, batch_size=8, num_images=120)
    parts, vae = qwen_edit.new_parts(0), qwen_vae.new_vae(0).eval().requires_grad_(False)
    pools = qwen_edit.encode_world(vae, parts.processor, settings, 0)
    assert [(pool.size, len(pool.edits)) for pool in pools] == [((64, 64), 40), ((80, 48), 40), ((48, 80), 40)]
    assert all(worlds.HELD_OUT.isdisjoint(edit.things()) for pool in pools for edit in pool.edits)
    kinds = [edit.kind for pool in pools for edit in pool.edits]
    assert set(kinds) == {*edits.OLD_KINDS, "keep"}
    assert 0.03 < kinds.count("keep") / len(kinds) < 0.25
    assert kinds.count("move") > kinds.count("remove") > kinds.count("recolour"), "the hardest most often"
    shown = list(editing.batches(pools, settings, 0))
    texts = [text for batch in shown for text in batch.instructions]
    assert 0.02 < sum(text.strip() == "" for text in texts) / len(texts) < 0.2
    assert {"", " "} <= set(texts)
    assert 0.05 < sum(text[:1].isupper() for text in texts) / len(texts) < 0.25
    again = next(editing.batches(pools, settings, 0))
    assert again.instructions == shown[0].instructions
    assert torch.equal(again.noise, shown[0].noise)


def test_a_short_build_leaves_a_base_that_loads_and_the_same_seed_the_same_one(tmp_path):
    plan = BuildPlan("qwen_edit", tmp_path / "qwen_edit", seed=3, num_steps=2, vae=FOLDER / "vae", num_images=24, num_prompts=2)
    record = build.build(plan)
    assert record["scores"].keys() == set(edits.KINDS)
    parts, vae = qwen_edit.load(plan.out)
    task = measure.edit_tasks("recolour", 1, 0)[0]
    assert qwen_edit.sample(parts, vae, ["make it red"], [task.source], [0], num_steps=1)[0].size == (64, 64)
    again = qwen_edit.train_qwen_edit(vae, qwen_edit.QwenEditSettings(num_steps=2, num_images=24), plan.seed)
    assert_stored(vars(parts), again.components)


@pytest.mark.long
def test_late_rounds_have_their_own_times_and_leave_the_text_encoder_as_it_is():
    _, vae = qwen_edit.load(FOLDER)
    first = qwen_edit.QwenEditSettings(num_steps=2, num_rounds=1, num_images=24, late_move_fractions=())
    late = replace(first, late_move_fractions=(0.6,))
    once, twice, nearer = (
        qwen_edit.train_qwen_edit(vae, settings, seed=3) for settings in (first, late, replace(late, late_time_mean=late.time_mean))
    )
    transformers = [list(pipeline.transformer.parameters()) for pipeline in (once, twice, nearer)]
    for a, b in itertools.combinations(transformers, 2):
        assert not all(map(torch.equal, a, b))
    assert all(map(torch.equal, once.text_encoder.parameters(), twice.text_encoder.parameters()))
