"""One VAE file for several bases: the trainers read it, and a base with other weights keeps its own."""

import shutil

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from safetensors.torch import load_file, save_file

from sd_scripts.families import RUNS, family
from sd_scripts.library.loading import weights
from sd_scripts.schema import flat
from sd_scripts.toy import autoencoder, build, sharing
from sd_scripts.toy.build import BuildPlan

SHARING = {"vae": ["chroma", "flux", "flux2", "flux3", "kontext", "sd", "sdxl", "zimage"], "qwen_vae": ["anima", "krea2", "qwen_edit"]}


@pytest.fixture()
def bases(tmp_path):
    """Three bases that have their VAE: two with the same weights, one with others."""
    for number, name in ((0, "sdxl"), (0, "sd"), (1, "flux")):
        folder = tmp_path / name / "vae"
        autoencoder.new_vae(number).save_pretrained(folder)
    return tmp_path


def _numbers(folder):
    return sharing.weights_in(folder / "vae")


def test_equal_weights_are_kept_once_and_others_stay(bases):
    before = {name: _numbers(bases / name) for name in ("sdxl", "sd", "flux")}
    sharing.share(bases / "sd")
    assert not (bases / "common").exists(), "a base that stands alone stays whole"
    for name in before:
        sharing.share(bases / name, found=True)
    files = sorted(path.relative_to(bases).parts[0] for path in bases.rglob("*.safetensors"))
    assert files == ["common", "flux"]
    for name, tensors in before.items():
        after = _numbers(bases / name)
        assert after.keys() == tensors.keys()
        assert all(torch.equal(after[key], tensors[key]) for key in tensors)


def test_a_shared_vae_keeps_its_own_configuration(bases):
    vae = AutoencoderKL.from_pretrained(bases / "sd" / "vae")
    vae.register_to_config(scaling_factor=0.25)
    vae.save_config(bases / "sd" / "vae")
    sharing.share(bases / "sd", found=True)
    loaded = sharing.load_vae(bases / "sd" / "vae")
    assert loaded.config.scaling_factor == 0.25
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.encode(pixels).latent_dist.mean, vae.eval().encode(pixels).latent_dist.mean)


def test_the_trainers_read_a_shared_vae(bases):
    expected = _numbers(bases / "sd")
    sharing.share(bases / "sd", found=True)
    found = weights.folder_entries(bases / "sd" / "vae", "diffusion_pytorch_model", None, "base", "toy/vae")
    read = weights.Reader()
    assert found.keys() == expected.keys()
    assert all(torch.equal(read(found[name]), expected[name]) for name in expected)


def test_a_vae_of_squares_keeps_its_statistics_alone_beside_the_common_weights(bases):
    sharing.share(bases / "sd", found=True)
    common = autoencoder.new_vae(0)
    names = ("block_out_channels", "layers_per_block", "norm_num_groups", "sample_size", "latent_channels")
    vae = AutoencoderKLFlux2(**{name: common.config[name] for name in names})
    statistics = {name: torch.rand_like(tensor.float()) + 0.5 for name, tensor in vae.state_dict().items() if name.startswith("bn.running")}
    vae.load_state_dict(vae.state_dict() | common.state_dict() | statistics)
    vae.save_pretrained(bases / "flux2" / "vae")
    sharing.share(bases / "flux2", found=True)
    own = load_file(bases / "flux2" / "vae" / sharing.REST)
    assert set(own) == {name for name in vae.state_dict() if name.startswith("bn.")}
    assert not (bases / "flux2" / "vae" / sharing.WEIGHTS).exists()
    loaded, pixels = sharing.load_vae(bases / "flux2" / "vae"), torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.encode(pixels).latent_dist.mean, vae.eval().encode(pixels).latent_dist.mean)
    assert torch.equal(loaded.bn.running_var, vae.bn.running_var)
    found = weights.folder_entries(bases / "flux2" / "vae", "diffusion_pytorch_model", None, "base", "toy/vae")
    assert found.keys() == vae.state_dict().keys()


def test_a_base_that_continues_another_shares_what_it_left_as_it_was(tmp_path):
    for name in ("common", "flux"):
        shutil.copytree(build.BASES / name, tmp_path / name)
    second = shutil.copytree(build.BASES / "flux", tmp_path / "second")
    file = second / "transformer" / sharing.WEIGHTS
    tensors = load_file(file)
    tensors["proj_out.bias"] = tensors["proj_out.bias"] + 1
    save_file(tensors, file)
    sharing.share(second, first="flux")
    own = {path.relative_to(second).as_posix(): set(load_file(path)) for path in second.rglob("*.safetensors")}
    assert own == {f"transformer/{sharing.REST}": {"proj_out.bias"}}
    options = flat.build(RUNS["flux", "network"], {"pretrained_model_name_or_path": str(second), "train_data_dir": ".", "output_dir": "."})
    read = family("flux").load(options.model, torch.device("cpu"), torch.float32)
    pipeline, first = sharing.load_pipeline(second), sharing.load_pipeline(tmp_path / "flux")
    for part, of_trainer in (("transformer", read.backbone), ("text_encoder", read.text_encoders["te1"])):
        before, after = (getattr(one, part).state_dict() for one in (first, pipeline))
        changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        assert {tensor.dtype for tensor in after.values()} == {torch.float32}
        assert changed == ({"proj_out.bias"} if part == "transformer" else set())
        assert all(torch.equal(tensor, after[name]) for name, tensor in of_trainer.state_dict().items())


def test_an_absent_common_vae_is_named(bases):
    sharing.share(bases / "sd", found=True)
    shutil.rmtree(bases / "common")
    with pytest.raises(weights.OptionError, match=r"toy/vae lacks .*which its index lists"):
        weights.folder_entries(bases / "sd" / "vae", "diffusion_pytorch_model", None, "base", "toy/vae")


def test_a_base_shares_the_vae_of_those_beside_it_and_one_with_another_vae_keeps_its_own(tmp_path):
    first, second = tmp_path / "sdxl", tmp_path / "sd"
    shutil.copytree(build.BASES / "common", tmp_path / "common")
    build.build(BuildPlan("sdxl", first, num_steps=1, vae=build.existing_vae("sdxl"), num_images=8, num_prompts=1))
    build.build(BuildPlan("sd", second, num_steps=1, vae=tmp_path / "common" / "vae", num_images=8, num_prompts=1))
    assert [path.parent.parent.name for path in tmp_path.glob(f"*/vae/{sharing.WEIGHTS}")] == ["common"]
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    shown = [sharing.load_pipeline(folder).vae.encode(pixels).latent_dist.mean for folder in (first, second)]
    assert torch.equal(*shown)
    other = shutil.copytree(tmp_path / "common", tmp_path / "elsewhere" / "base")
    tensors = load_file(other / "vae" / sharing.WEIGHTS)
    save_file(tensors | {"encoder.conv_in.bias": tensors["encoder.conv_in.bias"] + 1}, other / "vae" / sharing.WEIGHTS)
    build.build(BuildPlan("sdxl", first, num_steps=1, vae=other / "vae", num_images=8, num_prompts=1))
    assert (first / "vae" / sharing.WEIGHTS).is_file()
    assert torch.equal(sharing.load_pipeline(second).vae.encode(pixels).latent_dist.mean, shown[1])


def test_the_stored_bases_share_one_vae_of_each_kind():
    users = [path.parents[1].name for path in build.BASES.glob(f"*/vae/{sharing.INDEX}")]
    assert sorted(users) == sorted(family for families in SHARING.values() for family in families)
    for kind, families in SHARING.items():
        common = build.BASES / "common" / kind / sharing.WEIGHTS
        assert all(common.resolve() in {file.resolve() for file in sharing.files_of(build.BASES / family / "vae")} for family in families)


def test_a_damaged_copy_is_not_taken_for_the_same(bases):
    tensors = _numbers(bases / "sd")
    tensors["encoder.conv_in.bias"] = tensors["encoder.conv_in.bias"] + 1
    save_file(tensors, bases / "sd" / "vae" / sharing.WEIGHTS)
    sharing.share(bases / "sdxl", found=True)
    sharing.share(bases / "sd")
    assert (bases / "sd" / "vae" / sharing.WEIGHTS).is_file() and not (bases / "sdxl" / "vae" / sharing.WEIGHTS).exists()
