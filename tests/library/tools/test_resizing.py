"""Resized adapter files against float64 decompositions of the whole update."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sd_scripts.library.tools.resizing import resize
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.tools import ResizeSection

STEMS = {"lora_unet_a": (40, 30, 8.0, 4.0), "lora_unet_b": (24, 50, 8.0, 1.0)}
"""Outputs, inputs, rank, alpha."""


def lora(path: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """A file with two linear layers of different scales and a convolution, whose values fall."""
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for stem, (rows, columns, rank, alpha) in STEMS.items():
        tensors[f"{stem}.lora_up.weight"] = torch.randn(rows, int(rank), generator=rng) * torch.logspace(0, -1.5, int(rank))
        tensors[f"{stem}.lora_down.weight"] = torch.randn(int(rank), columns, generator=rng)
        tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    tensors["lora_unet_c.lora_up.weight"] = torch.randn(12, 6, 1, 1, generator=rng)
    tensors["lora_unet_c.lora_down.weight"] = torch.randn(6, 5, 3, 3, generator=rng)
    tensors["lora_unet_c.alpha"] = torch.tensor(3.0)
    save_file(tensors, path, metadata={"ss_network_dim": "8", "ss_tag": "kept", "sshs_model_hash": "old"})
    return tensors


def update(tensors: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    up, down = (tensors[f"{stem}.lora_{side}.weight"].double().flatten(1) for side in ("up", "down"))
    return float(tensors[f"{stem}.alpha"]) / len(down) * (up @ down)


def section(path: Path, **values: object) -> ResizeSection:
    return ResizeSection(model=str(path), save_to=str(path.with_name("new.safetensors")), **values)


@pytest.mark.parametrize(
    ("method", "parameter"), [("rank", None), ("sv_ratio", 4.0), ("sv_fro", 0.95), ("sv_cumulative", 0.8)], ids=lambda value: str(value)
)
def test_the_update_is_the_best_one_of_its_rank(method: str, parameter: float | None, tmp_path: Path) -> None:
    seed = random.getrandbits(31)
    old = lora(tmp_path / "old.safetensors", seed)
    report = resize(section(tmp_path / "old.safetensors", new_rank=5, new_conv_rank=4, dynamic_method=method, dynamic_param=parameter))
    new = load_file(tmp_path / "new.safetensors")
    assert len({float(new[f"{stem}.alpha"]) for stem in (*STEMS, "lora_unet_c")}) == 1
    for stem, cap in (("lora_unet_a", 5), ("lora_unet_b", 5), ("lora_unet_c", 4)):
        whole = update(old, stem)
        values = torch.linalg.svdvals(whole)
        counts = {
            "rank": cap,
            "sv_ratio": int((values > values[0] / 4).sum()),
            "sv_fro": int((values.square().cumsum(0) < 0.95**2 * values.square().sum()).sum()) + 1,
            "sv_cumulative": int((values.cumsum(0) < 0.8 * values.sum()).sum()) + 1,
        }
        rank = max(1, min(cap, counts[method]))
        assert new[f"{stem}.lora_down.weight"].shape[0] == rank == new[f"{stem}.lora_up.weight"].shape[1], (stem, seed)
        assert new[f"{stem}.lora_down.weight"].shape[1:] == old[f"{stem}.lora_down.weight"].shape[1:]
        error = float((update(new, stem) - whole).norm())
        assert error == pytest.approx(float(values[rank:].norm()), rel=1e-4, abs=1e-5), (stem, seed)
        assert report.values["layers"][stem]["energy_kept"] == pytest.approx(1 - (error / float(whole.norm())) ** 2, abs=1e-5)


def test_a_rank_that_is_large_enough_loses_nothing(tmp_path: Path) -> None:
    old = lora(tmp_path / "old.safetensors")
    report = resize(section(tmp_path / "old.safetensors", new_rank=64))
    new = load_file(tmp_path / "new.safetensors")
    assert report.values["energy_kept"] == pytest.approx(1, abs=1e-12)
    for stem in (*STEMS, "lora_unet_c"):
        assert torch.allclose(update(new, stem), update(old, stem), atol=1e-5)
    with safe_open(tmp_path / "new.safetensors", framework="pt") as file:
        texts = file.metadata()
    assert texts["ss_tag"] == "kept" and texts["ss_network_dim"] == "8" and texts["sshs_model_hash"] != "old"
    assert texts["ss_training_comment"].startswith("dimension is resized")


def test_scale_and_precision_of_a_file_without_alphas_are_kept(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    name = "unet.mid_block.attentions.0.proj_in"
    old = {
        f"{name}.lora_A.weight": torch.randn(6, 20, generator=rng).bfloat16(),
        f"{name}.lora_B.weight": torch.randn(20, 6, generator=rng).bfloat16(),
    }
    save_file(old, tmp_path / "old.safetensors", metadata={"lora_adapter_metadata": '{"unet.r": 6, "unet.lora_alpha": 3}'})
    resize(section(tmp_path / "old.safetensors", new_rank=6))
    new = load_file(tmp_path / "new.safetensors")
    wanted = 0.5 * old[f"{name}.lora_B.weight"].double() @ old[f"{name}.lora_A.weight"].double()
    found = new[f"{name}.lora_B.weight"].double() @ new[f"{name}.lora_A.weight"].double()
    assert new.keys() == old.keys() and all(tensor.dtype == torch.bfloat16 for tensor in new.values())
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2


def test_other_kinds_and_broken_files_are_refused(tmp_path: Path) -> None:
    loha = tmp_path / "loha.safetensors"
    save_file({f"lora_unet_a.hada_w{number}_{side}": torch.ones(4, 4) for number in (1, 2) for side in "ab"}, loha)
    with pytest.raises(OptionError, match="more than whole lora and dora"):
        resize(section(loha, new_rank=2))
    old = lora(tmp_path / "old.safetensors")
    old["lora_unet_a.lora_up.weight"][0, 0] = float("inf")
    save_file(old, tmp_path / "old.safetensors")
    with pytest.raises(OptionError, match="not finite"):
        resize(section(tmp_path / "old.safetensors", new_rank=2))
    assert not (tmp_path / "new.safetensors").exists() and not list(tmp_path.glob(".*"))
