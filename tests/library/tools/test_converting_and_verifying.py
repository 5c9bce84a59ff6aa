"""Files of all layouts converted into one another; whole and broken files verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.families.zimage.model import ZImage
from sd_scripts.families.zimage.options import ZImageModelOptions
from sd_scripts.library.tools.converting import convert
from sd_scripts.library.tools.extracting import extract
from sd_scripts.library.tools.merging import merge
from sd_scripts.library.tools.resizing import resize
from sd_scripts.library.tools.verifying import verify
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.tools import ConvertSection, ExtractSection, MergeSection, ResizeSection, VerifySection
from tests.library.tools.tools_in_small import adapter, on_disk, tiny
from tests.made_here import lora_of

PUBLISHED = {
    "sd1": ("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k", 1280, 768),
    "sd2": ("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k", 1280, 1024),
    "sdxl": ("lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k", 1280, 2048),
    "flux": ("lora_unet_double_blocks_3_img_attn_proj", 3072, 3072),
    "qwen_edit": ("lora_unet_transformer_blocks_59_attn_to_out_0", 3072, 3072),
    "zimage": ("lora_unet_layers_29_attention_to_out_0", 3840, 3840),
}


def small_lora(path: Path, family: str, *, alpha: float = 1.0) -> dict[str, torch.Tensor]:
    """One layer of a published model."""
    stem, rows, columns = PUBLISHED[family]
    rng = torch.Generator().manual_seed(3)
    tensors = {f"{stem}.lora_down.weight": torch.randn(2, columns, generator=rng), f"{stem}.alpha": torch.tensor(alpha)}
    tensors[f"{stem}.lora_up.weight"] = torch.randn(rows, 2, generator=rng)
    save_file(tensors, path, metadata={"ss_tag": "kept", "sshs_legacy_hash": "old"})
    return tensors


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_family_is_found_by_the_keys_and_a_round_trip_keeps_every_update(family: str, tmp_path: Path) -> None:
    tensors = small_lora(tmp_path / "0.safetensors", family)
    for number, layout in enumerate(("diffusers", "comfyui", "kohya"), start=1):
        report = convert(
            ConvertSection(
                model=str(tmp_path / f"{number - 1}.safetensors"), save_to=str(tmp_path / f"{number}.safetensors"), save_model_as=layout
            )
        )
        assert report.values["family"] == family and report.values["layout"] == layout
        assert report.values["largest_relative_difference"] < 1e-6
    last = load_file(tmp_path / "3.safetensors")
    assert last.keys() == tensors.keys()
    stem = PUBLISHED[family][0]

    def update(held: dict[str, torch.Tensor]) -> torch.Tensor:
        return float(held[f"{stem}.alpha"]) / 2 * (held[f"{stem}.lora_up.weight"].double() @ held[f"{stem}.lora_down.weight"].double())

    assert torch.allclose(update(last), update(tensors), rtol=1e-5, atol=1e-5)
    with safe_open(tmp_path / "3.safetensors", framework="pt") as file:
        assert file.metadata()["ss_tag"] == "kept" and file.metadata()["sshs_legacy_hash"] != "old"


def test_files_of_other_trainers_and_precisions_are_read(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(4)
    down, up = torch.randn(2, 3072, generator=rng), torch.randn(3072, 2, generator=rng)
    for prefix in ("diffusion_model.", "transformer.", "base_model.model.transformer."):
        path = f"{prefix}{'double_blocks.1.img_attn.proj' if 'diffusion' in prefix else 'transformer_blocks.1.attn.to_out.0'}"
        save_file({f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}, tmp_path / "old.safetensors")
        convert(ConvertSection(model=str(tmp_path / "old.safetensors"), save_to=str(tmp_path / "new.safetensors"), save_precision="bf16"))
        new = load_file(tmp_path / "new.safetensors")
        stem = "lora_unet_double_blocks_1_img_attn_proj"
        assert torch.equal(new[f"{stem}.lora_down.weight"], down.bfloat16()) and torch.equal(new[f"{stem}.lora_up.weight"], up.bfloat16())
        assert float(new[f"{stem}.alpha"]) == 2


@pytest.mark.parametrize("kind", ["oft", "lokr"])
def test_what_has_no_common_names_keeps_its_configuration(kind: str, tmp_path: Path) -> None:
    parts = tiny("flux")
    base = on_disk("flux", parts, tmp_path)
    old = adapter(parts, tmp_path / "old.safetensors", kind, "diffusers", text=False)
    report = convert(
        ConvertSection(model=str(old), save_to=str(tmp_path / "new.safetensors"), save_model_as="diffusers", base_model=str(base.folder))
    )
    before, after = load_file(old), load_file(tmp_path / "new.safetensors")
    assert report.values["layout"] == "peft" and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = []
    for path in (old, tmp_path / "new.safetensors"):
        with safe_open(path, framework="pt") as file:
            config = json.loads(file.metadata()["kohya_like.peft_config"])["transformer"]
        configs.append(config | {"target_modules": sorted(config["target_modules"])})
    assert configs[0] == configs[1]


def test_names_of_no_known_model_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    save_file({"lora_unet_layers_0_attention.lora_down.weight": torch.ones(2, 4)}, tmp_path / "old.safetensors")
    with pytest.raises(OptionError, match="no model known here"):
        convert(ConvertSection(model=str(tmp_path / "old.safetensors"), save_to=str(tmp_path / "new.safetensors")))
    assert not (tmp_path / "new.safetensors").exists()


def test_a_whole_file_is_described(tmp_path: Path) -> None:
    tensors = small_lora(tmp_path / "a.safetensors", "flux")
    report = verify(VerifySection(model=str(tmp_path / "a.safetensors")))
    stem = PUBLISHED["flux"][0]
    norm = float((0.5 * tensors[f"{stem}.lora_up.weight"].double() @ tensors[f"{stem}.lora_down.weight"].double()).norm())
    assert not report.broken and report.values["family"] == "flux" and report.values["names"] == "kohya"
    assert report.values["largest_updates"] == {stem: pytest.approx(norm, rel=1e-6)}
    assert report.values["ranks"] == {"2": 1} and report.values["kinds"] == {"lora": 1}
    assert set(report.values["read_by"].values()) == {1} == {report.values["layers"]} and "no problems found" in report.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t, s: t[f"{s}.lora_up.weight"].__setitem__((0, 0), float("nan")), "not finite"),
        (lambda t, s: t.pop(f"{s}.lora_up.weight"), "not whole"),
        (lambda t, s: t.update({f"{s}.lora_up.weight": torch.ones(3072, 3)}), "do not fit together"),
        (lambda t, s: t.update({f"{s}.lora_up.weight": torch.ones(100, 2)}), "does not fit a layer of size"),
        (lambda t, s: t.update({"lora_unet_double_blocks_99_img_mod_lin.alpha": torch.tensor(1.0)}), "fit no layer of FLUX"),
        (lambda t, s: t.update({"something.else": torch.ones(2)}), "no kind of adapter"),
        (lambda t, s: t[f"{s}.lora_up.weight"].zero_(), "changes nothing"),
    ],
    ids=["nan", "missing", "ranks", "size", "unknown-layer", "unknown-key", "zero"],
)
def test_a_broken_file_is_found(change, problem: str, tmp_path: Path) -> None:
    tensors = small_lora(tmp_path / "a.safetensors", "flux")
    change(tensors, PUBLISHED["flux"][0])
    save_file(tensors, tmp_path / "a.safetensors")
    report = verify(VerifySection(model=str(tmp_path / "a.safetensors")))
    assert report.broken and any(problem in text for text in report.values["problems"]), report.text


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr", "oft"])
def test_every_kind_is_checked_against_its_own_model(kind: str, tmp_path: Path) -> None:
    parts = tiny("flux")
    base = on_disk("flux", parts, tmp_path)
    file = adapter(parts, tmp_path / "a.safetensors", kind, text=False)
    report = verify(VerifySection(model=str(file), base_model=str(base.folder)))
    assert not report.broken, report.text
    assert list(report.values["kinds"]) == [kind]
    report.write(tmp_path / "report.json")


@pytest.mark.parametrize("name", ["flux", "sd1"])
def test_a_file_for_a_smaller_model_of_the_same_form_is_not_called_broken_for_its_size(name: str, tmp_path: Path) -> None:
    """Fused matrices are taken apart by the proportions of their rows, which a smaller model shares."""
    file = adapter(tiny(name), tmp_path / "a.safetensors", text=False)
    report = verify(VerifySection(model=str(file)))
    assert not report.broken, report.text
    assert "give base_model to check the sizes" in report.text


def test_a_file_trained_on_a_built_in_model_is_checked_against_that_model(tmp_path: Path) -> None:
    """What the demo leaves behind, from the Runs tab: its header says which model it is for."""
    parts = Sdxl().load(SdxlModelOptions(pretrained_model_name_or_path="toy"), torch.device("cpu"), torch.float32)
    file = lora_of("sdxl", tmp_path / "a.safetensors", parts=parts)
    save_file(load_file(file), tmp_path / "silent.safetensors")
    assert verify(VerifySection(model=str(tmp_path / "silent.safetensors"))).broken, "without a header it looks like a file with odd names"
    report = verify(VerifySection(model=str(file)))
    assert not report.broken and "base_model" not in report.text, report.text


def test_a_file_for_another_family_or_for_none_is_broken(tmp_path: Path) -> None:
    base = on_disk("zimage", tiny("zimage"), tmp_path)
    small_lora(tmp_path / "other.safetensors", "sdxl")
    report = verify(VerifySection(model=str(tmp_path / "other.safetensors"), base_model=str(base.folder)))
    assert report.broken and report.values["family"] == "sdxl" and "but the model is Z-Image" in report.text, report.text
    tensors = {f"blocks.0.self_attn.q.{name}.weight": torch.ones(shape) for name, shape in (("lora_A", (2, 8)), ("lora_B", (8, 2)))}
    save_file(tensors, tmp_path / "none.safetensors")
    for base_model in (None, str(base.file)):
        report = verify(VerifySection(model=str(tmp_path / "none.safetensors"), base_model=base_model))
        assert report.broken and "none of its 2 keys belongs to a layer of" in report.text, report.text


def test_a_file_that_a_program_reads_in_part_is_not_said_to_be_read_by_it(tmp_path: Path) -> None:
    """ComfyUI leaves out Z-Image's attention under kohya's names; diffusers' names of a dora serve both of its readers."""
    parts, held = tiny("zimage"), {}
    for kind, layout in (("lora", "kohya"), ("dora", "diffusers"), ("oft", "kohya")):
        report = verify(VerifySection(model=str(adapter(parts, tmp_path / f"{kind}.safetensors", kind, layout, network_alpha=None))))
        held[kind] = (report.values["layers"], report.values["read_by"])
        assert not report.broken, report.text
        assert ("read in part" in report.text) == (kind == "lora") and "kohya_like" in report.text
    assert held == {
        "lora": (14, {"musubi-tuner": 14, "diffusers": 14, "ComfyUI": 6}),
        "dora": (14, {"ComfyUI": 14, "diffusers": 14, "musubi-tuner": 0}),
        "oft": (14, {"ComfyUI": 0, "musubi-tuner": 0, "diffusers": 0}),
    }
    assert resize(ResizeSection(model=str(tmp_path / "dora.safetensors"), save_to=str(tmp_path / "new.safetensors"), new_rank=2))
    assert verify(VerifySection(model=str(tmp_path / "new.safetensors"))).values["read_by"] == held["dora"][1], "with both names"


def test_toy_is_the_built_in_model_of_the_family_that_the_names_are_of(tmp_path: Path) -> None:
    parts = ZImage().load(ZImageModelOptions(pretrained_model_name_or_path="toy"), torch.device("cpu"), torch.float32)
    file = adapter(parts, tmp_path / "a.safetensors", target_modules=("layers.1",))
    report = verify(VerifySection(model=str(file), base_model="toy"))
    assert not report.broken, report.text
    merge(MergeSection(models=[str(file)], base_model="toy", save_to=str(tmp_path / "merged")))
    extract(ExtractSection(model_org="toy", model_tuned=str(tmp_path / "merged"), dim=4, save_to=str(tmp_path / "back.safetensors")))
    assert load_file(tmp_path / "back.safetensors").keys() == load_file(file).keys()
