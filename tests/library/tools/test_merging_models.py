"""LoRA files merged into models on disk, against the sum by hand, and against merging into the loaded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.tools.merging import merge
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.tools import MergeSection
from tests.library.tools.tools_in_small import adapter, largest_difference, on_disk, tiny, weights


def section(**values: object) -> MergeSection:
    return MergeSection(**values)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("sd1", "folder"),
        ("sdxl", "file"),
        ("flux", "file"),
        ("flux", "folder"),
        ("qwen_edit", "file"),
        ("qwen_edit", "folder"),
        ("zimage", "file"),
    ],
)
def test_merging_on_disk_equals_merging_into_the_loaded_model(name: str, where: str, tmp_path: Path) -> None:
    parts = tiny(name)
    base = on_disk(name, parts, tmp_path)
    text = not (name == "flux" and where == "file")
    first = adapter(parts, tmp_path / "a.safetensors", "lora", "kohya", text=text)
    second = adapter(parts, tmp_path / "b.safetensors", "dora", "diffusers", text=text, seed=2)
    target = base.folder / "merged.safetensors" if where == "file" else tmp_path / "merged"
    report = merge(section(models=(str(first), str(second)), ratios=(0.7, -0.4), base_model=str(getattr(base, where)), save_to=str(target)))
    merge_into(parts, first, 0.7)
    merge_into(parts, second, -0.4)
    merged = base.load(target)
    assert largest_difference(merged, parts) <= 1e-6
    assert largest_difference(merged, base.load(base.folder)) > 1e-3
    assert report.values["layers"] >= 14 and report.values["rounding"] == 0
    assert not list(tmp_path.rglob("*.writing-*"))


@pytest.mark.parametrize("kind", ["loha", "lokr", "oft"])
def test_every_kind_can_be_merged_into_a_fused_layout(kind: str, tmp_path: Path) -> None:
    parts = tiny("flux")
    base = on_disk("flux", parts, tmp_path)
    file = adapter(parts, tmp_path / "a.safetensors", kind, text=False)
    target = base.folder / "merged.safetensors"
    merge(section(models=(str(file),), base_model=str(base.file), save_to=str(target)))
    merge_into(parts, file)
    assert largest_difference(base.load(target), parts) <= 2e-6


def test_rows_of_a_fused_matrix_get_the_update_of_their_layer(tmp_path: Path) -> None:
    parts = tiny("flux")
    base = on_disk("flux", parts, tmp_path)
    width = parts.backbone.inner_dim
    rng = torch.Generator().manual_seed(5)
    down, up = torch.randn(2, width, generator=rng), torch.randn(width, 2, generator=rng)
    key = "transformer.transformer_blocks.0.attn.to_k"
    save_file({f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}, tmp_path / "k.safetensors")
    target = tmp_path / "merged.safetensors"
    merge(section(models=(str(tmp_path / "k.safetensors"),), ratios=(0.5,), base_model=str(base.file), save_to=str(target)))
    before, after = load_file(base.file), load_file(target)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["double_blocks.0.img_attn.qkv.weight"]
    wanted = before[changed[0]].double()
    wanted[width : 2 * width] += 0.5 * (up.double() @ down.double())
    assert (after[changed[0]].double() - wanted).abs().max() <= 1e-6


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8_e4m3fn", torch.float8_e4m3fn)])
def test_sums_are_rounded_once_and_the_report_says_what_that_cost(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parts = tiny("flux")
    base = on_disk("flux", parts, tmp_path)
    file = adapter(parts, tmp_path / "a.safetensors", text=False)
    target = tmp_path / "merged.safetensors"
    report = merge(section(models=(str(file),), base_model=str(base.file), save_to=str(target), merge_precision=precision))
    exact = tmp_path / "exact.safetensors"
    merge(section(models=(str(file),), base_model=str(base.file), save_to=str(exact)))
    stored, sums, before = load_file(target), load_file(exact), load_file(base.file)
    matrices = [name for name, tensor in sums.items() if tensor.dim() >= 2]
    assert all(torch.equal(stored[name].float(), sums[name].to(dtype).float()) and stored[name].dtype == dtype for name in matrices)
    changed = [name for name in matrices if not torch.equal(before[name], sums[name])]
    lost = sum(float((stored[name].double() - sums[name].double()).square().sum()) for name in changed)
    made = sum(float((sums[name].double() - before[name].double()).square().sum()) for name in changed)
    assert report.values["rounding"] == pytest.approx((lost / made) ** 0.5, rel=1e-3)


def test_plain_fp8_is_added_in_float32_and_scaled_fp8_is_refused(tmp_path: Path) -> None:
    parts = tiny("flux")
    base = on_disk("flux", parts, tmp_path)
    tensors = load_file(base.file)
    fp8 = {name: tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    save_file(fp8, base.folder / "fp8.safetensors")
    file = adapter(parts, tmp_path / "a.safetensors", text=False)
    target = tmp_path / "merged.safetensors"
    report = merge(section(models=(str(file),), base_model=str(base.folder / "fp8.safetensors"), save_to=str(target)))
    name = "double_blocks.0.img_mod.lin.weight"
    lora = load_file(file)
    update = 0.5 * (
        lora["lora_unet_double_blocks_0_img_mod_lin.lora_up.weight"] @ lora["lora_unet_double_blocks_0_img_mod_lin.lora_down.weight"]
    )
    after = load_file(target)[name]
    assert after.dtype == torch.float8_e4m3fn
    assert torch.equal(after.float(), (fp8[name].float() + update).to(torch.float8_e4m3fn).float())
    assert report.values["rounding"] > 0.01
    save_file(fp8 | {"double_blocks.0.img_mod.lin.scale_weight": torch.tensor(0.5)}, base.folder / "scaled.safetensors")
    with pytest.raises(OptionError, match=r"quantised .*double|quantised .*transformer_blocks"):
        merge(section(models=(str(file),), base_model=str(base.folder / "scaled.safetensors"), save_to=str(tmp_path / "no.safetensors")))
    assert not (tmp_path / "no.safetensors").exists()


def test_sharded_folders_keep_their_shards_and_other_files(tmp_path: Path) -> None:
    parts = tiny("sdxl")
    base = on_disk("sdxl", parts, tmp_path)
    parts.backbone.save_pretrained(base.folder / "unet", max_shard_size="200KB")
    (base.folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    file = adapter(parts, tmp_path / "a.safetensors", conv_dim=2)
    target = tmp_path / "merged"
    merge(section(models=(str(file),), base_model=str(base.folder), save_to=str(target), merge_precision="fp16"))
    shards = sorted(path.name for path in (base.folder / "unet").glob("*.safetensors"))
    assert len(shards) > 2 and shards == sorted(path.name for path in (target / "unet").glob("*.safetensors"))
    index = json.loads((target / "unet" / "diffusion_pytorch_model.safetensors.index.json").read_text(encoding="utf-8"))
    sizes = {name: {key: t.nbytes for key, t in load_file(target / "unet" / name).items()} for name in shards}
    assert index["metadata"]["total_size"] == sum(sum(one.values()) for one in sizes.values())
    assert (target / "tokenizer" / "tokenizer.json").is_file() and not (target / "base.safetensors").exists()
    merge_into(parts, file)
    assert largest_difference(base.load(target), parts) <= 1e-3


def test_a_merged_folder_has_its_own_copy_of_a_vae_that_its_model_shares(tmp_path: Path) -> None:
    parts = tiny("sdxl")
    base = on_disk("sdxl", parts, tmp_path)
    vae, owner = base.folder / "vae" / "diffusion_pytorch_model.safetensors", tmp_path / "owner" / "vae" / "weights.safetensors"
    owner.parent.mkdir(parents=True)
    vae.rename(owner)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(owner), "../../owner/vae/weights.safetensors")}
    vae.with_name(f"{vae.name}.index.json").write_text(json.dumps(index), encoding="utf-8")
    file = adapter(parts, tmp_path / "a.safetensors")
    target = tmp_path / "elsewhere" / "deeper" / "merged"
    target.parent.mkdir(parents=True)
    merge(section(models=(str(file),), base_model=str(base.folder), save_to=str(target)))
    owner.unlink()
    merge_into(parts, file)
    assert largest_difference(base.load(target), parts) <= 1e-6


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    parts, other = tiny("sdxl"), tiny("flux")
    base = on_disk("sdxl", parts, tmp_path)
    wrong, oft = adapter(other, tmp_path / "wrong.safetensors"), adapter(parts, tmp_path / "oft.safetensors", "oft")
    target = tmp_path / "merged.safetensors"
    with pytest.raises(OptionError) as raised:
        merge(
            section(
                models=(str(wrong), str(oft), "nowhere.safetensors"), ratios=(1, 0.5, 1), base_model=str(base.file), save_to=str(target)
            )
        )
    text = str(raised.value)
    assert "wrong.safetensors" in text and "fit no layer" in text and "lora_te3" in text
    assert "oft" in text and "nowhere.safetensors" in text
    assert not target.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine", encoding="utf-8")
    for said, name in (("there already", "full"), (r"is the name of a file, but .* is a folder", "merged.safetensors")):
        with pytest.raises(OptionError, match=said):
            merge(section(models=(str(oft),), base_model=str(base.folder), save_to=str(tmp_path / name)))


def test_a_transformer_alone_needs_a_word_about_the_text_encoders_part(tmp_path: Path) -> None:
    parts = tiny("flux")
    base = on_disk("flux", parts, tmp_path)
    file = adapter(parts, tmp_path / "a.safetensors", text=True)
    target = base.folder / "merged.safetensors"
    with pytest.raises(OptionError, match="merge_text_encoder"):
        merge(section(models=(str(file),), base_model=str(base.file), save_to=str(target)))
    merge(section(models=(str(file),), base_model=str(base.file), save_to=str(target), merge_text_encoder=False))
    merge_into(parts, file)
    merged, wanted = weights(base.load(target)), weights(parts)
    assert all(torch.allclose(merged[name], wanted[name], atol=1e-6) for name in wanted if name.startswith("backbone."))


def test_a_broken_adapter_is_found_before_anything_is_written(tmp_path: Path) -> None:
    parts = tiny("sd1")
    base = on_disk("sd1", parts, tmp_path)
    file = adapter(parts, tmp_path / "a.safetensors")
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("lora_up.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(OptionError, match=f"{name}.*not finite"):
        merge(section(models=(str(file),), base_model=str(base.file), save_to=str(base.folder / "merged.safetensors")))
    assert not list(base.folder.glob("*merged*"))
