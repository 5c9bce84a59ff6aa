"""Stable Diffusion 1.x and 2.x against diffusers' own pipeline: prompts, layers, whole images; layers that get adapters."""

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from torch.testing import assert_close

from sd_scripts.families.common.samplers import CLASSES, FlowEuler, scheduler_for
from sd_scripts.families.common.unet_loading import FLOW_SCHEDULER, scheduler_config
from sd_scripts.families.sd import loading
from sd_scripts.families.sd.model import Sd
from sd_scripts.families.sd.options import SdModelOptions
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.loading.common import make
from tests.library.loading_in_small import shipped_configs
from tests.small_models import sd_pipeline_of

SD = Sd()
GENERATOR = torch.Generator()
GENERATOR.manual_seed(random.getrandbits(32))


@pytest.fixture(params=[False, True], ids=["sd1", "sd2"])
def parts(request) -> Parts:
    return SD.tiny(second=request.param)


def with_settings(parts: Parts, **settings: object) -> Parts:
    return replace(parts, settings={**parts.settings, **settings})


def of_kind(parts: Parts, prediction_type: str, zero_terminal_snr: bool = False) -> Parts:
    """The same networks, said to be of another kind."""
    options = SdModelOptions(pretrained_model_name_or_path="tiny", prediction_type=prediction_type, zero_terminal_snr=zero_terminal_snr)
    config = scheduler_config(parts.scheduler_config, options, loading.SPEC.configs)
    return replace(parts, scheduler_config=config, path=diffusion.path_of(config), kind=diffusion.kind_of(config))


def texts(parts: Parts, captions: list[str]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([condition["prompt_embeds"] for condition in SD.encode_prompts(parts, captions)])


def image(parts: Parts, one: Preview, scheduler=None) -> torch.Tensor:
    """The pipeline's image, in [0, 1]."""
    pipeline = sd_pipeline_of(parts, scheduler)
    return pipeline(
        one.prompt,
        negative_prompt=one.negative_prompt or None,
        width=one.width,
        height=one.height,
        num_inference_steps=one.steps,
        guidance_scale=one.cfg_scale,
        generator=torch.Generator().manual_seed(one.seed),
        output_type="pt",
    ).images[0]


def test_prompts_are_encoded_as_the_pipeline_encodes_them(parts):
    captions = ["a red star, very nice", "", "Ünïcode ☂ (brackets) [too]", "a long caption " * 30]
    with torch.no_grad():
        expected, _ = sd_pipeline_of(parts).encode_prompt(captions, "cpu", 1, do_classifier_free_guidance=False)
    assert_close(texts(parts, captions), expected, atol=1e-6, rtol=0)


def test_clip_skip_counts_from_the_last_layer_and_keeps_the_final_norm(parts):
    captions = ["a red star", "blue"]
    assert torch.equal(texts(with_settings(parts, clip_skip=1), captions), texts(parts, captions))
    # An encoder with the last layer cut off does what clip_skip 2 means.
    encoder = parts.text_encoders["te1"]
    shorter = type(encoder)(replace_layers(encoder.config, 1)).eval()
    state = {key: tensor for key, tensor in encoder.state_dict().items() if ".layers.1." not in key}
    shorter.load_state_dict(state)
    cut = replace(parts, text_encoders={"te1": shorter})
    assert_close(texts(with_settings(parts, clip_skip=2), captions), texts(cut, captions), atol=1e-6, rtol=0)
    assert not torch.allclose(texts(with_settings(parts, clip_skip=2), captions), texts(parts, captions))


def replace_layers(config, num_layers: int):
    return type(config).from_dict({**config.to_dict(), "num_hidden_layers": num_layers})


def test_long_captions_are_read_in_chunks(parts):
    room = parts.tokenizers["te1"].model_max_length - 2
    caption = "x" * room + "y" * room + "z"
    # The tiny tokenizer joins nothing: a letter is a token, and only the last of a word is marked as its end.
    one = texts(with_settings(parts, max_token_length=225), [caption])[0]
    assert one.shape[0] == 3 * (room + 2)
    assert_close(one[2 * (room + 2) :], texts(parts, ["z"])[0], atol=1e-6, rtol=0)
    assert_close(one[: room + 2], texts(parts, [caption])[0], atol=1e-6, rtol=0)


def test_weights_in_captions_scale_the_embeddings_of_their_words_only(parts):
    weighted = with_settings(parts, weighted_captions=True)
    plain, strong = texts(parts, ["red cat"])[0], texts(weighted, ["(red:1.5) cat"])[0]
    factor = torch.ones(len(plain))
    factor[1:4] = 1.5  # start, r, e, d, c, a, t, end
    assert_close(strong, plain * factor[:, None], atol=1e-6, rtol=1e-5)


def test_latents_have_the_scale_of_sd(parts):
    pixels = torch.rand((1, 3, 32, 48), generator=GENERATOR) * 2 - 1
    with torch.no_grad():
        mean = parts.vae.encode(pixels).latent_dist.mean
    assert_close(SD.encode_images(parts, pixels), mean * 0.18215)


@pytest.mark.parametrize("kind, zero_snr", [("epsilon", False), ("v_prediction", False), ("v_prediction", True), ("flow", False)])
def test_a_preview_is_the_pipelines_image(parts, kind, zero_snr):
    parts = of_kind(parts, kind, zero_snr)
    one = Preview("a red star", negative_prompt="ugly", width=64, height=48, seed=11, steps=4, cfg_scale=5.0, sampler="euler")
    scheduler = FlowEuler.from_config(FLOW_SCHEDULER) if kind == "flow" else EulerDiscreteScheduler.from_config(parts.scheduler_config)
    theirs = image(parts, one, scheduler)
    assert_close(SD.render(parts, [one])[0] / 2 + 0.5, theirs, atol=1e-5, rtol=0)
    other = replace(one, prompt="a blue ring", negative_prompt="", seed=12)
    # Convolutions of a batch round otherwise in the last bit, and 5 steps with guidance enlarge that.
    assert_close(SD.render(parts, [other, one])[1] / 2 + 0.5, theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("sampler", CLASSES)
def test_every_sampler_renders_as_the_pipeline_does_with_it(sampler):
    parts = SD.tiny()
    one = Preview("a red star", width=32, height=32, seed=5, steps=3, cfg_scale=1.0, sampler=sampler)
    theirs = image(parts, one, scheduler_for(sampler, parts.scheduler_config))
    assert_close(SD.render(parts, [one])[0] / 2 + 0.5, theirs, atol=1e-5, rtol=0)


def test_a_preview_reads_the_layer_that_training_reads(parts):
    one = Preview("a red star", width=32, height=32, seed=5, steps=2, cfg_scale=1.0)
    skipped = with_settings(parts, clip_skip=2)
    pipeline = sd_pipeline_of(parts, scheduler_for("auto", parts.scheduler_config))
    theirs = pipeline(
        prompt_embeds=texts(skipped, [one.prompt]),
        width=32,
        height=32,
        num_inference_steps=2,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(5),
        output_type="pt",
    ).images[0]
    assert_close(SD.render(skipped, [one])[0] / 2 + 0.5, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampler", ["auto", "euler", "ddim", "lms"])
def test_schedulers_of_the_first_months_are_read_as_the_pipeline_reads_them(sampler):
    parts = SD.tiny()
    old = {key: value for key, value in parts.scheduler_config.items() if key not in ("steps_offset", "clip_sample")}
    parts = replace(parts, scheduler_config={**old, "steps_offset": 0})
    one = Preview("a red star", width=32, height=32, seed=5, steps=3, cfg_scale=1.0, sampler=sampler)
    ours = SD.render(parts, [one])[0] / 2 + 0.5
    scheduler = scheduler_for(sampler, parts.scheduler_config)
    with pytest.warns(FutureWarning, match="is outdated") if "steps_offset" in scheduler.config else nullcontext():
        theirs = image(parts, one, scheduler)
    assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("spec, text_layers", [(loading.SPEC, 72), (loading.SPEC2, 138)], ids=["sd1", "sd2"])
def test_the_full_size_networks_get_adapters_on_kohyas_layers(spec, text_layers):
    with torch.device("meta"):
        made = {name: make(spec, name, config, "", name) for name, config in shipped_configs(spec)}
    full = replace(SD.tiny(), backbone=made["backbone"], text_encoders={"te1": made["te1"]})
    # kohya's numbers: 192 modules of the UNet with linear layers and 1x1 convolutions, 6 for each layer of the encoder.
    assert {name: len(layers) for name, layers in SD.adapter_targets(full, conv=False).items()} == {"backbone": 192, "te1": text_layers}
