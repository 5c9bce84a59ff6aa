"""LoRA files merged into one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sd_scripts.library.tools.merging import merge
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.tools import MergeSection

WIDTH = 3072


def qkv(path: Path, rank: int, seed: int, alpha: float, *, fused: bool = True) -> None:
    """A FLUX LoRA on the first block's query, key and value, in kohya's or in diffusers' names."""
    rng = torch.Generator().manual_seed(seed)
    if fused:
        stem = "lora_unet_double_blocks_0_img_attn_qkv"
        tensors = {f"{stem}.lora_down.weight": torch.randn(rank, WIDTH, generator=rng), f"{stem}.alpha": torch.tensor(alpha)}
        tensors[f"{stem}.lora_up.weight"] = torch.randn(3 * WIDTH, rank, generator=rng)
    else:
        tensors = {}
        for side in "qkv":
            stem = f"transformer.transformer_blocks.0.attn.to_{side}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, WIDTH, generator=rng)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(WIDTH, rank, generator=rng)
    save_file(tensors, path)


def update(path: Path) -> torch.Tensor:
    """What a file adds to the fused matrix, float64."""
    tensors = {name: tensor.double() for name, tensor in load_file(path).items()}
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    if f"{stem}.alpha" in tensors:
        down = tensors[f"{stem}.lora_down.weight"]
        return float(tensors[f"{stem}.alpha"]) / len(down) * (tensors[f"{stem}.lora_up.weight"] @ down)
    paths = [f"transformer.transformer_blocks.0.attn.to_{side}" for side in "qkv"]
    return torch.cat([tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"] for path in paths])


def merged(tmp_path: Path, **values: object) -> tuple[Path, dict[str, object]]:
    files = sorted(path for path in tmp_path.glob("*.safetensors") if path.name != "merged.safetensors")
    target = tmp_path / "merged.safetensors"
    report = merge(MergeSection(models=tuple(map(str, files)), save_to=str(target), save_precision="float", **values))
    return target, dict(report.values)


def test_without_a_new_rank_the_sum_is_exact_and_fused_files_keep_their_shape(tmp_path: Path) -> None:
    qkv(tmp_path / "a.safetensors", 4, 0, 2.0)
    qkv(tmp_path / "b.safetensors", 3, 1, 3.0)
    wanted = 0.5 * update(tmp_path / "a.safetensors") - 1.5 * update(tmp_path / "b.safetensors")
    target, values = merged(tmp_path, ratios=(0.5, -1.5))
    assert values["ranks"] == {"7": 1} and values["relative_error"] == 0
    assert float((update(target) - wanted).norm() / wanted.norm()) < 1e-6
    with safe_open(target, framework="pt") as file:
        assert file.metadata()["modelspec.merged_from"] == "a, b" and file.metadata()["ss_network_dim"] == "7"


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_files_of_different_trainers_are_added(layout: str, tmp_path: Path) -> None:
    qkv(tmp_path / "a.safetensors", 4, 0, 2.0)
    qkv(tmp_path / "b.safetensors", 2, 1, 2.0, fused=False)
    wanted = update(tmp_path / "a.safetensors") + update(tmp_path / "b.safetensors")
    target, _ = merged(tmp_path, save_model_as=layout)
    assert float((update(target) - wanted).norm() / wanted.norm()) < 1e-6


def test_a_new_rank_gives_the_best_sum_of_that_rank_and_its_error(tmp_path: Path) -> None:
    qkv(tmp_path / "a.safetensors", 4, 2, 4.0)
    qkv(tmp_path / "b.safetensors", 4, 3, 4.0)
    wanted = update(tmp_path / "a.safetensors") + update(tmp_path / "b.safetensors")
    target, values = merged(tmp_path, new_rank=5)
    # All eight singular values, from the small matrices of a QR decomposition of both sides.
    ups, downs = [], []
    for name in ("a", "b"):
        tensors = load_file(tmp_path / f"{name}.safetensors")
        ups.append(next(t for k, t in tensors.items() if "up" in k).double())
        downs.append(next(t for k, t in tensors.items() if "down" in k).double())
    sides = torch.linalg.qr(torch.cat(ups, dim=1)).R, torch.linalg.qr(torch.cat(downs).T).R
    singular = torch.linalg.svdvals(sides[0] @ sides[1].T)
    best = float(singular[5:].norm() / singular.norm())
    assert values["relative_error"] == pytest.approx(best, rel=1e-6)
    assert float((update(target) - wanted).norm() / wanted.norm()) == pytest.approx(best, rel=1e-4)
    down = next(tensor for name, tensor in load_file(target).items() if "down" in name)
    assert down.shape == (5, WIDTH)


def test_kinds_and_families_that_cannot_be_added_are_told_together(tmp_path: Path) -> None:
    qkv(tmp_path / "a.safetensors", 2, 0, 2.0)
    stem = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q"
    save_file({f"{stem}.lora_down.weight": torch.ones(2, 1280), f"{stem}.lora_up.weight": torch.ones(1280, 2)}, tmp_path / "b.safetensors")
    stem = "lora_unet_double_blocks_0_img_attn_proj"
    loha = {f"{stem}.hada_w{number}_a": torch.ones(WIDTH, 2) for number in (1, 2)}
    loha |= {f"{stem}.hada_w{number}_b": torch.ones(2, WIDTH) for number in (1, 2)}
    save_file(loha, tmp_path / "c.safetensors")
    with pytest.raises(OptionError) as raised:
        merged(tmp_path)
    assert "different models" in str(raised.value) and "c.safetensors holds loha" in str(raised.value)
    assert not (tmp_path / "merged.safetensors").exists()
