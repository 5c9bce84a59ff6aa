"""FLUX.3 Image Klein beside diffusers: the network's call, its modular pipeline with and without reference images, mixed batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, Flux3AutoBlocks, Flux3ModularPipeline
from diffusers.modular_pipelines.flux3.before_denoise import Flux3TextRoPEInputsStep, _prepare_image_ids
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep, Flux3VaeEncoderStep
from PIL import Image

from sd_scripts.families import family as family_of
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.families.flux3.options import Flux3FlowObjectiveOptions
from sd_scripts.library.core.protocols import Parts, Preview
from tests.small_models import Words

FLUX3 = family_of("flux3")
CAPTION = "a far longer caption, which fills more than one window of eighty tokens, since each letter of it may be a token here"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Told(Words):
    """What Qwen3-VL's processor makes of one thing that is said."""

    def apply_chat_template(self, conversation: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        text: str = self.tokenizer.apply_chat_template(
            conversation, chat_template=_TEMPLATE, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text


@pytest.fixture(scope="module")
def parts() -> Parts:
    return FLUX3.tiny()


def image(width: int, height: int, seed: int) -> Image.Image:
    numbers = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(numbers.numpy())


def pipeline_of(parts: Parts, guidance: float = 3.5) -> Flux3ModularPipeline:
    """Without the model that writes longer prompts."""
    blocks = Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    made = blocks.init_pipeline()
    made.update_components(
        text_encoder=parts.text_encoders["te1"],
        tokenizer=Told(parts.tokenizers["te1"]),
        vae=parts.vae,
        transformer=parts.backbone,
        scheduler=scheduler_for("auto", parts.scheduler_config),
        guider=ClassifierFreeGuidance(guidance_scale=guidance),
    )
    made.set_progress_bar_config(disable=True)
    return made


def read_by_diffusers(folder: Path, parts: Parts) -> Flux3ModularPipeline:
    """The pipeline of a saved folder without guidance: its processor cannot be read without torchvision, and is that of the parts."""
    blocks = Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    made = blocks.init_pipeline(str(folder))
    made.load_components(names=["transformer", "vae", "text_encoder", "scheduler"], dtype=torch.float32)
    made.update_components(tokenizer=Told(parts.tokenizers["te1"]), guider=ClassifierFreeGuidance(guidance_scale=1.0))
    made.set_progress_bar_config(disable=True)
    return made


def drawn(pipeline: Flux3ModularPipeline, request: Preview) -> torch.Tensor:
    """What diffusers draws of a request, in [-1, 1]."""
    found = pipeline(
        **({"image": list(request.controls)} if request.controls else {}),
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="pt",
        output="images",
    )
    return 2 * found - 1


def rows(parts: Parts, caption: str) -> torch.Tensor:
    """diffusers' rows of a caption."""
    with torch.no_grad():
        return Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(parts.text_encoders["te1"], Told(parts.tokenizers["te1"]), caption)


@pytest.mark.parametrize("caption", ["", "cat", CAPTION])
def test_captions_are_read_as_diffusers_reads_them(parts, caption):
    with torch.no_grad():
        (condition,) = FLUX3.encode_prompts(parts, [caption])
    wanted = rows(parts, caption)[0]
    assert len(wanted) % 80 == 0 and torch.allclose(condition["text"], wanted, atol=1e-5)


def test_a_long_caption_is_cut_as_diffusers_cuts_it(parts):
    shorter = FLUX3.tiny()
    shorter.settings["max_token_length"] = 100
    with torch.no_grad():
        (condition,) = FLUX3.encode_prompts(shorter, [CAPTION * 2])
        wanted = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            parts.text_encoders["te1"], Told(parts.tokenizers["te1"]), CAPTION * 2, max_sequence_length=100
        )[0]
    assert len(wanted) == 100 and torch.allclose(condition["text"], wanted, atol=1e-5)


@pytest.mark.parametrize("count", [0, 2, 10])
def test_the_network_is_called_as_diffusers_calls_it(parts, count):
    x, t = torch.randn(1, 128, 3, 5), torch.rand(1)
    controls = [torch.randn(128, 1 + number % 3, 2) for number in range(count)]
    text = rows(parts, "cat")
    with torch.no_grad():
        seen = {}
        if controls:
            seen["image_cond_hidden_states"] = torch.cat([one[None].flatten(2).transpose(1, 2) for one in controls], dim=1)
            places = [_prepare_image_ids(*one.shape[-2:], 0.5, l_coord=-(1 + number)) for number, one in enumerate(controls)]
            seen["image_cond_ids"] = torch.cat(places)
        wanted = parts.backbone(
            hidden_states=x.flatten(2).transpose(1, 2),
            encoder_hidden_states=text,
            timestep=t,
            img_ids=_prepare_image_ids(3, 5, 0.5),
            txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(text),
            **seen,
        ).sample
        condition = {"text": text[0]} | {f"control_{number}": control for number, control in enumerate(controls)}
        found = FLUX3.denoise(parts, x, t, [condition])
    assert torch.allclose(found.flatten(2).transpose(1, 2), wanted, atol=1e-5)
    assert FLUX3.num_controls(parts) == (0, 10)


def test_samples_with_other_texts_and_reference_images_in_a_batch_are_as_each_alone(parts):
    x, t = torch.randn(5, 128, 3, 5), torch.rand(5)
    texts = FLUX3.encode_prompts(parts, ["cat", "cat", CAPTION, "cat", CAPTION])
    first, second = torch.randn(128, 2, 4), torch.randn(128, 3, 2)
    more = [{}, {"control_0": first}, {"control_0": second}, {"control_0": first, "control_1": second}, {}]
    conditions = [text | own for text, own in zip(texts, more)]
    with torch.no_grad():
        together = FLUX3.denoise(parts, x, t, conditions)
        alone = torch.cat([FLUX3.denoise(parts, x[row : row + 1], t[row : row + 1], conditions[row : row + 1]) for row in range(5)])
        without = FLUX3.denoise(parts, x, t, texts)
    assert torch.allclose(together, alone, atol=1e-5)
    assert [torch.allclose(a, b, atol=1e-4) for a, b in zip(together, without)] == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("cfg_scale", "steps", "references"),
    [
        (3.5, 2, ()),
        (1.0, 1, ((150, 100),)),
        (3.0, 1, ((150, 100), (90, 33))),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((1.0, 28, ()), (3.5, 4, ((70, 70),)), (1.0, 2, ((1500, 900), (64, 64))))
        ),
    ],
)
def test_a_preview_is_what_the_modular_pipeline_draws(parts, cfg_scale, steps, references):
    controls = tuple(image(*size, seed=number) for number, size in enumerate(references))
    request = Preview("a cat", "blurred", 96, 64, seed=3, steps=steps, cfg_scale=cfg_scale, controls=controls)
    with torch.no_grad():
        assert torch.allclose(FLUX3.render(parts, [request]), drawn(pipeline_of(parts, cfg_scale), request), atol=1e-4)


def test_images_are_encoded_as_diffusers_encodes_references(parts):
    pixels = torch.rand(1, 3, 64, 96) * 2 - 1
    mean, deviation = parts.vae.bn.running_mean, (parts.vae.bn.running_var + parts.vae.config.batch_norm_eps).sqrt()
    with torch.no_grad():
        squares = Flux3VaeEncoderStep._patchify_latents(parts.vae.encode(pixels).latent_dist.mode())
        assert torch.allclose(
            FLUX3.encode_images(parts, pixels), (squares - mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1), atol=1e-5
        )


def test_the_shift_is_the_published_one_in_training_and_in_previews(parts):
    assert Flux3FlowObjectiveOptions().discrete_flow_shift == parts.scheduler_config["shift"] == 6.93
    assert not parts.scheduler_config["use_dynamic_shifting"]


def test_times_reach_their_embedding_in_full_precision():
    parts, seen, t = FLUX3.tiny(), [], torch.rand(2)
    parts.backbone.time_proj.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    conditions = FLUX3.encode_prompts(parts, ["cat", "dog"])
    parts.backbone.to(torch.bfloat16)
    with torch.no_grad():
        found = FLUX3.denoise(parts, torch.randn(2, 128, 4, 4), t, conditions)
    assert torch.equal(seen[0], 1000 * t) and len(seen) == 2 and not seen[1].any()
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
