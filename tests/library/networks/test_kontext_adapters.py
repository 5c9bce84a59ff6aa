"""Files of FLUX.1 Kontext: diffusers' own pipeline on adapters that are written here, ComfyUI's files of the model, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file

from sd_scripts.families.kontext.loading import LOADER
from sd_scripts.families.kontext.model import Kontext
from sd_scripts.families.kontext.options import KontextModelOptions
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.layouts import places
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import BlocksNetworkOptions
from tests.library.families.test_kontext_family import pipeline_of
from tests.library.loading_in_small import to_original
from tests.library.networks.adapters_in_small import near, saved, velocity

KONTEXT, SPEC, CPU = Kontext(), LOADER.spec, torch.device("cpu")


@pytest.fixture
def parts() -> Parts:
    return KONTEXT.tiny()


def test_diffusers_pipeline_does_with_the_file_what_the_trained_model_does(parts: Parts, tmp_path: Path) -> None:
    """Under diffusers' names: its conversion of the others knows 19 double and 38 single blocks of 3072 alone."""
    live, before = saved(KONTEXT, parts, tmp_path / "lora.safetensors", "diffusers"), velocity(KONTEXT, parts)
    pipeline_of(parts).load_lora_weights(tmp_path / "lora.safetensors")
    assert (before - live).abs().max() > 1e-2 and near(velocity(KONTEXT, parts), live)


@pytest.mark.parametrize("blocks", ["0", "1-2", "3"])
def test_blocks_by_number_count_double_blocks_first(blocks: str, parts: Parts) -> None:
    options = BlocksNetworkOptions(network_dim=2, train_block_indices=blocks)
    network = attach(parts, options, {"backbone": KONTEXT.adapter_targets(parts, False)["backbone"]}, 0)
    found = {".".join(name.split(".")[1:3]) for name in network.adapters()}
    wanted = {"0": {"transformer_blocks.0"}, "3": {"single_transformer_blocks.1"}}
    assert found == wanted.get(blocks, {"transformer_blocks.1", "single_transformer_blocks.0"})


@pytest.mark.parametrize(
    ("prefix", "scaled"),
    [
        ("", True),
        ("model.diffusion_model.", False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("", False), ("diffusion_model.", True))),
    ],
)
def test_comfyuis_files_are_read(prefix: str, scaled: bool, parts: Parts, tmp_path: Path) -> None:
    """A transformer with its companions beside it; scaled: fp8 with a scale for each matrix."""
    KONTEXT.save(parts, tmp_path / "model", "diffusers", None, {})
    state = parts.backbone.state_dict()
    placed = places(SPEC.parts["backbone"].layout, state, parts.backbone.config)
    held = {f"{prefix}{name}": tensor.contiguous() for name, tensor in to_original(placed, state).items()}
    if scaled:
        for name in [name for name, tensor in held.items() if tensor.dim() == 2 and "blocks" in name]:
            scale = held[name].abs().max() / 448
            held |= {name: (held[name] / scale).to(torch.float8_e4m3fn), name.replace(".weight", ".scale_weight"): scale.float()}
        held["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    save_file(held, tmp_path / "model" / "kontext.safetensors")
    own = {"ae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"}
    given = {option: str(tmp_path / "model" / folder) for option, folder in own.items()}
    options = KontextModelOptions(pretrained_model_name_or_path=str(tmp_path / "model" / "kontext.safetensors"), **given)
    found = LOADER.load(options, CPU, torch.float32)
    read = found.backbone.state_dict()
    for key, tensor in state.items():
        torch.testing.assert_close(read[key], tensor, atol=0.01 if scaled else 0, rtol=0.07 if scaled else 0)
    assert near(KONTEXT.encode_prompts(found, ["cat"])[0]["text"], KONTEXT.encode_prompts(parts, ["cat"])[0]["text"])


def test_schnell_is_refused_with_a_sentence(parts: Parts, tmp_path: Path) -> None:
    parts.backbone = FluxTransformer2DModel.from_config(dict(parts.backbone.config) | {"guidance_embeds": False})
    KONTEXT.save(parts, tmp_path / "model", "diffusers", None, {})
    with pytest.raises(OptionError, match=r"embeds no guidance, so it is FLUX\.1 schnell"):
        LOADER.load(KontextModelOptions(pretrained_model_name_or_path=str(tmp_path / "model")), CPU, torch.float32)
