"""One VAE file for several bases: the trainers read it, rebuilding keeps it, and nobody loses it."""

import shutil

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from sd_scripts.library.loading import weights
from sd_scripts.toy import autoencoder, build, sharing
from sd_scripts.toy.build import Plan

SHARING = ["flux", "sd", "zimage"]


@pytest.fixture()
def bases(tmp_path):
    """An owner with a VAE and two bases beside it, one with the same weights, one with others."""
    for number, name in ((0, "sdxl"), (0, "sd"), (1, "flux")):
        folder = tmp_path / name / "vae"
        autoencoder.new_vae(number).save_pretrained(folder)
    return tmp_path


def _numbers(folder):
    return load_file(sharing.weights_of(folder / "vae"))


def test_equal_weights_are_kept_once_and_others_stay(bases):
    before = {name: _numbers(bases / name) for name in ("sdxl", "sd", "flux")}
    for name in before:
        sharing.share(bases / name)
    files = sorted(path.relative_to(bases).parts[0] for path in bases.rglob("*.safetensors"))
    assert files == ["flux", "sdxl"]
    assert sharing.users_of(bases / "sdxl") == ["sd"]
    assert sharing.users_of(bases / "flux") == []
    for name, tensors in before.items():
        after = _numbers(bases / name)
        assert after.keys() == tensors.keys()
        assert all(torch.equal(after[key], tensors[key]) for key in tensors)


def test_a_shared_vae_keeps_its_own_configuration(bases):
    vae = AutoencoderKL.from_pretrained(bases / "sd" / "vae")
    vae.register_to_config(scaling_factor=0.25)
    vae.save_config(bases / "sd" / "vae")
    sharing.share(bases / "sd")
    loaded = sharing.load_vae(bases / "sd" / "vae")
    assert loaded.config.scaling_factor == 0.25
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.encode(pixels).latent_dist.mean, vae.eval().encode(pixels).latent_dist.mean)


def test_the_trainers_read_a_shared_vae(bases):
    expected = _numbers(bases / "sd")
    sharing.share(bases / "sd")
    found = weights.folder_entries(bases / "sd" / "vae", "diffusion_pytorch_model", None, "base", "toy/vae")
    read = weights.Reader()
    assert found.keys() == expected.keys()
    assert all(torch.equal(read(found[name]), expected[name]) for name in expected)


def test_an_absent_owner_is_named(bases):
    sharing.share(bases / "sd")
    shutil.rmtree(bases / "sdxl")
    with pytest.raises(weights.OptionError, match=r"toy/vae lacks .*which its index lists"):
        weights.folder_entries(bases / "sd" / "vae", "diffusion_pytorch_model", None, "base", "toy/vae")


def test_a_build_beside_the_owner_shares_its_vae_and_no_new_vae_takes_it_away(tmp_path):
    owner, user = tmp_path / "sdxl", tmp_path / "sd"
    build.build(Plan("sdxl", owner, num_steps=1, vae=build.BASES / "sdxl" / "vae", num_pictures=8, num_prompts=1))
    build.build(Plan("sd", user, num_steps=1, vae=owner / "vae", num_pictures=8, num_prompts=1))
    assert [path.name for path in (user / "vae").iterdir() if path.suffix == ".safetensors"] == []
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    first, second = (sharing.load_pipeline(folder).vae.encode(pixels).latent_dist.mean for folder in (owner, user))
    assert torch.equal(first, second)
    build.build(Plan("sdxl", owner, num_steps=1, vae=owner / "vae", num_pictures=8, num_prompts=1))
    other = shutil.copytree(owner, tmp_path / "elsewhere" / "sdxl")
    tensors = _numbers(other)
    save_file(tensors | {"encoder.conv_in.bias": tensors["encoder.conv_in.bias"] + 1}, other / "vae" / sharing.WEIGHTS)
    with pytest.raises(ValueError, match=r"differs from that of .*, which sd beside it use"):
        build.build(Plan("sdxl", owner, num_steps=1, vae=other / "vae", num_pictures=8, num_prompts=1))
    assert sharing.users_of(owner) == ["sd"]
    assert torch.equal(sharing.load_pipeline(user).vae.encode(pixels).latent_dist.mean, first)


def test_the_stored_bases_share_the_vae_of_sdxl():
    assert sharing.users_of(build.BASES / "sdxl") == SHARING
    for family in SHARING:
        changed = _numbers(build.BASES / family)
        assert all(torch.equal(changed[name], tensor) for name, tensor in _numbers(build.BASES / "sdxl").items())


def test_a_damaged_copy_is_not_taken_for_the_same(bases):
    tensors = _numbers(bases / "sd")
    tensors["encoder.conv_in.bias"] = tensors["encoder.conv_in.bias"] + 1
    save_file(tensors, bases / "sd" / "vae" / sharing.WEIGHTS)
    sharing.share(bases / "sd")
    assert sharing.users_of(bases / "sdxl") == []
