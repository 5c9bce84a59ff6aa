"""Models that other programs saved from compiled networks, with `_orig_mod.` in their names, are read as what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.tools.tensor_files import open_file
from sd_scripts.runs.model_headers import what_is
from tests.library.loading_in_small import assert_same

pytestmark = pytest.mark.usefixtures("no_network")
WHERE = {"sdxl": "unet", "flux": "transformer"}


def renamed(path: Path) -> None:
    """Writes the file again as if each block, or the whole network, had been wrapped."""
    state = load_file(path)

    def wrapped(name: str) -> str:
        inside, dot, rest = name.partition(".0.")
        return f"{inside}.0._orig_mod.{rest}" if dot else f"_orig_mod.{name}"

    compiled = {wrapped(name): tensor for name, tensor in state.items()}
    assert len(compiled) == len(state) and all("_orig_mod." in name for name in compiled)
    save_file(compiled, path)


@pytest.mark.parametrize("name", list(WHERE))
def test_a_folder_of_a_compiled_network_is_read(name: str, tmp_path: Path) -> None:
    family = families.family(name)
    parts = family.tiny()
    with torch.no_grad():
        for weight in parts.backbone.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
    family.save(parts, tmp_path / "model", "diffusers", None, {})
    file = tmp_path / "model" / WHERE[name] / "diffusion_pytorch_model.safetensors"
    renamed(file)
    options = RUNS[name, "full"].model_fields["model"].annotation(pretrained_model_name_or_path=str(tmp_path / "model"))  # type: ignore[misc]
    assert_same(family.load(options, torch.device("cpu"), torch.float32), parts)
    assert set(open_file(file, "model").slots) == set(load_file(file)), "tools see the names as they are stored"


def test_a_file_in_the_published_layout_is_recognised_and_read(tmp_path: Path) -> None:
    family = families.family("sdxl")
    parts = family.tiny()
    file = tmp_path / "model.safetensors"
    family.save(parts, file, "safetensors", None, {})
    plain = read_header(file, "model")
    inside = "model.diffusion_model."
    save_file({name.replace(inside, f"{inside}_orig_mod."): tensor for name, tensor in load_file(file).items()}, file)
    header = read_header(file, "model")
    assert what_is(header) == what_is(plain) and header.shapes == plain.shapes and len(header.stored) > 10
