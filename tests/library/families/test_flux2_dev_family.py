"""FLUX.2 dev beside diffusers: the texts, the network's call, the pipeline with and without reference images; files of Mistral."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaModel, Mistral3Config, Mistral3ForConditionalGeneration

from sd_scripts.families import family as family_of
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.families.flux2_dev.loading import LOADER, SPEC, mistral
from sd_scripts.families.flux2_dev.options import Flux2DevModelOptions
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.loading.common import read_json
from sd_scripts.runs.model_headers import Header, what_is
from sd_scripts.schema.errors import OptionError

DEV, CPU = family_of("flux2_dev"), torch.device("cpu")
CAPTION = "a far longer caption"


@pytest.fixture(scope="module")
def parts() -> Parts:
    return DEV.tiny()


def image(width: int, height: int, seed: int) -> Image.Image:
    numbers = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(numbers.numpy())


def pipeline_of(parts: Parts) -> Flux2Pipeline:
    encoder, words = parts.text_encoders["te1"], parts.tokenizers["te1"]
    made = Flux2Pipeline(scheduler_for("auto", parts.scheduler_config), parts.vae, encoder, words, parts.backbone)
    made.set_progress_bar_config(disable=True)
    return made


def drawn(parts: Parts, request: Preview) -> torch.Tensor:
    """What diffusers draws of a request, in [-1, 1]."""
    found = pipeline_of(parts)(
        image=list(request.controls) or None,
        prompt=request.prompt,
        guidance_scale=request.guidance,
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        generator=[torch.Generator().manual_seed(request.seed)],
        max_sequence_length=parts.settings["max_token_length"],
        text_encoder_out_layers=(1, 2, 3),
        output_type="pt",
    ).images
    return 2 * found - 1


@pytest.mark.parametrize("caption", ["", CAPTION, "a [IMG]cat[IMG]", "cats and dogs " * 30])
def test_texts_are_read_as_the_pipeline_reads_them(caption: str, parts: Parts) -> None:
    with torch.no_grad():
        wanted, _ = pipeline_of(parts).encode_prompt(caption, max_sequence_length=64, text_encoder_out_layers=(1, 2, 3))
        (found,) = DEV.encode_prompts(parts, [caption])
    assert found["text"].shape == (64, 96) and torch.allclose(found["text"], wanted[0], atol=1e-6)


def test_padding_which_the_network_sees_is_read_as_something(parts: Parts) -> None:
    """Rows of zeros stay zeros up to the first norms of the small transformer, whose slope is a thousandfold there."""
    (found,) = DEV.encode_prompts(parts, [CAPTION])
    assert found["text"].norm(dim=1).min() > 0.01


def test_the_network_is_called_as_diffusers_calls_it(parts: Parts) -> None:
    pipeline, x, t, told = pipeline_of(parts), torch.randn(1, 128, 3, 5), torch.rand(1), replace(parts, denoising={"guidance_scale": 2.5})
    controls = [torch.randn(128, 2, 4), torch.randn(128, 3, 2)]
    with torch.no_grad():
        (condition,) = DEV.encode_prompts(parts, [CAPTION])
        tokens = torch.cat([pipeline._pack_latents(one) for one in (x, *(control[None] for control in controls))], dim=1)
        places = torch.cat([pipeline._prepare_latent_ids(x), pipeline._prepare_image_ids([one[None] for one in controls])], dim=1)
        wanted = parts.backbone(
            tokens,
            encoder_hidden_states=condition["text"][None],
            timestep=t,
            txt_ids=pipeline._prepare_text_ids(condition["text"][None]),
            img_ids=places,
            guidance=torch.full((1,), 2.5),
            return_dict=False,
        )[0][:, :15]
        seen = condition | {"control_0": controls[0], "control_1": controls[1]}
        found, other = DEV.denoise(told, x, t, [seen]), DEV.denoise(parts, x, t, [seen])
    assert torch.allclose(pipeline._pack_latents(found), wanted, atol=1e-5) and not torch.allclose(found, other, atol=1e-3)


@pytest.mark.parametrize(
    ("guidance", "steps", "controls"),
    [(4.0, 4, ()), (2.5, 1, ((150, 100), (1500, 900))), pytest.param(1.0, 28, (), marks=pytest.mark.long)],
)
def test_a_preview_is_what_the_pipeline_draws(guidance: float, steps: int, controls: Any, parts: Parts) -> None:
    shown = tuple(image(*size, seed) for seed, size in enumerate(controls))
    request = Preview(CAPTION, "", 96, 64, seed=3, steps=steps, cfg_scale=1.0, guidance=guidance, controls=shown)
    trained = replace(parts, denoising={"guidance_scale": 9.0})
    with torch.no_grad():
        assert torch.allclose(DEV.render(trained, [request]), drawn(parts, request), atol=1e-4)


@pytest.mark.parametrize("tokens", [64, 4300, 4301])
def test_the_shift_of_previews_is_diffusers(tokens: int, parts: Parts) -> None:
    assert DEV.mu(parts, tokens, 28) == pytest.approx(compute_empirical_mu(tokens, 28), rel=1e-6)


def test_times_and_guidance_reach_their_embedding_in_full_precision() -> None:
    parts, seen, t = DEV.tiny(), [], torch.rand(2)
    parts.backbone.time_guidance_embed.time_proj.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    conditions, parts.denoising = DEV.encode_prompts(parts, [CAPTION] * 2), {"guidance_scale": 2.345}
    parts.backbone.to(torch.bfloat16)
    with torch.no_grad():
        found = DEV.denoise(parts, torch.randn(2, 128, 4, 4), t, conditions)
    assert torch.equal(torch.cat(seen), torch.cat([1000 * t, torch.full((2,), 2345.0)]))
    assert found.dtype == torch.float32 and torch.isfinite(found).all()


def whole(parts: Parts) -> Mistral3ForConditionalGeneration:
    """The published class, which sees too, with a tiny model's layers."""
    text = {key: value for key, value in parts.text_encoders["te1"].config.to_dict().items() if key != "num_whole_layers"}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 16,
        "image_size": 28,
    }
    made = Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=text | {"num_hidden_layers": 4},
            vision_config=vision | {"model_type": "pixtral", "patch_size": 14, "image_size": 28},
        )
    )
    made.model.language_model.load_state_dict(parts.text_encoders["te1"].state_dict())
    return made


@pytest.mark.parametrize("before", ["model.language_model.", "language_model.model."])
def test_the_published_encoder_is_read_under_the_names_of_any_transformers(before: str, parts: Parts, tmp_path: Path) -> None:
    DEV.save(parts, tmp_path / "model", "diffusers", None, {})
    for file in (tmp_path / "model" / "text_encoder").iterdir():
        file.unlink()
    whole(parts).save_pretrained(tmp_path / "model" / "text_encoder")
    file = tmp_path / "model" / "text_encoder" / "model.safetensors"
    start = next(name for name in load_file(file) if "language_model" in name and "layers.0." in name).partition("layers.")[0]
    save_file({name.replace(start, before): tensor for name, tensor in load_file(file).items()}, file)
    found = LOADER.load(Flux2DevModelOptions(pretrained_model_name_or_path=str(tmp_path / "model")), CPU, torch.float32)
    expected = parts.text_encoders["te1"].state_dict()
    assert found.text_encoders["te1"].state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.text_encoders["te1"].state_dict().items())


def test_comfyuis_encoder_of_full_size_ends_with_the_last_layer_that_is_read() -> None:
    """Of 40 layers 31 are made, the last of which nobody reads; states of all that is taken are there in a file of 30."""
    with torch.device("meta"):
        made = mistral(read_json(SPEC.configs / "text_encoder" / "config.json", "model"))
    part = SPEC.parts["te1"]
    assert len(made.layers) == 31 and made.config.num_whole_layers == 40
    pruned = {name for name in made.state_dict() if not name.startswith(("layers.30.", "norm."))}
    assert set(part.stand_ins) == made.state_dict().keys() - pruned and set(part.stand_ins.values()) <= pruned
    shapes = {name: tensor.shape for name, tensor in made.state_dict().items()}
    assert all(shapes[name] == shapes[other] for name, other in part.stand_ins.items())
    assert all(f"layers.{number}.x".startswith(part.unread) == (number > 30) for number in range(40))


LLAMAS = {
    "3.1 8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "3.2 1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "2 13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40},
}
"""Sizes of Llamas, from their config.json; 13B has the width of Mistral Small 3."""


@pytest.mark.parametrize("llama", [None, *LLAMAS])
def test_files_of_mistral_are_told_from_those_of_llama_by_their_shapes(llama: str | None) -> None:
    """All names of the one are the other's. Weights in few bits have their rows still, and norms are never in few bits."""
    with torch.device("meta"):
        published = mistral(read_json(SPEC.configs / "text_encoder" / "config.json", "model"))
        made = published if llama is None else LlamaModel(LlamaConfig(num_hidden_layers=1, **LLAMAS[llama]))
    assert made.state_dict().keys() <= published.state_dict().keys()
    for start in ("", "model.", "language_model.model."):
        for shrunk in (1, 2):
            shapes = {
                f"{start}{name}": (*one.shape[:1], *(side // shrunk for side in one.shape[1:])) for name, one in made.state_dict().items()
            }
            kind = "Mistral" if llama is None else "Llama"
            assert what_is(Header(Path("model.safetensors"), shapes, {})) == f"a {kind} text encoder"


def test_klein_is_refused_with_a_sentence(parts: Parts, tmp_path: Path) -> None:
    other = replace(parts, backbone=Flux2Transformer2DModel.from_config(dict(parts.backbone.config) | {"guidance_embeds": False}))
    DEV.save(other, tmp_path / "model", "diffusers", None, {})
    assert json.loads((tmp_path / "model" / "model_index.json").read_text())["_class_name"] == "Flux2Pipeline"
    with pytest.raises(OptionError, match=r"embeds no guidance scale, so it is FLUX\.2 Klein"):
        LOADER.load(Flux2DevModelOptions(pretrained_model_name_or_path=str(tmp_path / "model")), CPU, torch.float32)


def test_the_transformer_has_the_published_size() -> None:
    with torch.device("meta"):
        made = Flux2Transformer2DModel.from_config(read_json(SPEC.configs / "transformer" / "config.json", "model"))
    assert sum(weight.numel() for weight in made.parameters()) == pytest.approx(32.2e9, rel=2e-3)
