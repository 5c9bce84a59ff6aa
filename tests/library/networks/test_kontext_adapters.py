"""Files of FLUX.1 Kontext: diffusers' own pipeline on adapters that are written here, ComfyUI's files of the model, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file

from sd_scripts.families.kontext.loading import LOADER
from sd_scripts.families.kontext.model import Kontext
from sd_scripts.families.kontext.options import KontextModelOptions
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.adapters.maths import KINDS
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.loading.layouts import places
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import BlocksNetworkOptions
from tests.library.families.test_kontext_family import pipeline_of
from tests.library.loading_in_small import to_original
from tests.library.networks.adapters_in_small import shaken

KONTEXT, SPEC, CPU = Kontext(), LOADER.spec, torch.device("cpu")
LAYOUTS = ("kohya", "diffusers", "comfyui")


@pytest.fixture
def parts() -> Parts:
    return copy.deepcopy(KONTEXT.tiny())


@torch.no_grad()
def output(parts: Parts) -> torch.Tensor:
    rng = torch.Generator().manual_seed(2)
    x, text, control = (torch.randn(shape, generator=rng) for shape in ((1, 16, 6, 10), (8, 24), (16, 4, 8)))
    return KONTEXT.denoise(parts, x, torch.tensor([0.4]), [{"text": text, "control_0": control}])


def saved(parts: Parts, file: Path, layout: str, kind: str = "lora") -> torch.Tensor:
    """Writes an adapter of random values and returns the model's output with it; the model stays as it was."""
    options = BlocksNetworkOptions(network_type=kind, network_dim=4, network_alpha=2.0)
    network = attach(parts, options, {"backbone": KONTEXT.adapter_targets(parts, False)["backbone"]}, 0)
    shaken(network)
    export(network, parts, file, save_model_as=layout, precision="float")
    live = output(parts)
    network.detach()
    return live


def near(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() < 4e-6 * max(1.0, float(right.abs().max())))


def test_diffusers_pipeline_does_with_the_file_what_the_trained_model_does(parts: Parts, tmp_path: Path) -> None:
    """Under diffusers' names: its conversion of the others knows 19 double and 38 single blocks of 3072 alone."""
    live, before = saved(parts, tmp_path / "lora.safetensors", "diffusers"), output(parts)
    pipeline_of(parts).load_lora_weights(tmp_path / "lora.safetensors")
    assert (before - live).abs().max() > 1e-2 and near(output(parts), live)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[pytest.mark.long] * ((row + column) % 3 > 0))
        for row, kind in enumerate(KINDS)
        for column, layout in enumerate(LAYOUTS)
    ],
)
def test_a_file_of_any_kind_merges_into_what_was_trained(kind: str, layout: str, parts: Parts, tmp_path: Path) -> None:
    live = saved(parts, tmp_path / "adapter.safetensors", layout, kind)
    merge_into(parts, tmp_path / "adapter.safetensors")
    assert near(output(parts), live)


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
    for key, tensor in state.items():
        torch.testing.assert_close(found.backbone.state_dict()[key], tensor, atol=0.01 if scaled else 0, rtol=0.07 if scaled else 0)
    assert near(KONTEXT.encode_prompts(found, ["cat"])[0]["text"], KONTEXT.encode_prompts(parts, ["cat"])[0]["text"])


def test_schnell_is_refused_with_a_sentence(parts: Parts, tmp_path: Path) -> None:
    parts.backbone = FluxTransformer2DModel.from_config(dict(parts.backbone.config) | {"guidance_embeds": False})
    KONTEXT.save(parts, tmp_path / "model", "diffusers", None, {})
    with pytest.raises(OptionError, match=r"embeds no guidance, so it is FLUX\.1 schnell"):
        LOADER.load(KontextModelOptions(pretrained_model_name_or_path=str(tmp_path / "model")), CPU, torch.float32)


def test_a_training_adapter_is_on_in_training_and_off_in_previews(parts: Parts, tmp_path: Path) -> None:
    KONTEXT.save(parts, tmp_path / "base", "diffusers", None, {})
    live, plain = saved(parts, tmp_path / "undo.safetensors", "kohya"), output(parts)
    options = {"pretrained_model_name_or_path": str(tmp_path / "base"), "training_adapter": str(tmp_path / "undo.safetensors")}
    helped = KONTEXT.load(KontextModelOptions(**options), CPU, torch.float32)
    request = Preview("a cat", "", 64, 64, seed=3, steps=2, cfg_scale=1.0)
    assert near(output(helped), live) and not near(live, plain)
    with helped.without_training_adapter():
        assert near(output(helped), plain)
    assert torch.allclose(KONTEXT.render(helped, [request]), KONTEXT.render(parts, [request]), atol=1e-4)
