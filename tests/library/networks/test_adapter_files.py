"""Files of adapters: what is written is what was trained, and every tool that reads it does the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.library.adapters.files import export, prove, read
from sd_scripts.library.adapters.layouts import LAYOUT, PEFT_CONFIG
from sd_scripts.library.adapters.maths import KINDS, AdapterLayer, low_rank_update, merged_weight
from sd_scripts.library.adapters.merge import apply, merge_into
from sd_scripts.library.adapters.names import names_of
from sd_scripts.library.adapters.network import AdapterNetwork
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.core.safetensors_file import read_file, serialise
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import UNetNetworkOptions
from tests.library.networks.adapters_in_small import attached, image, outputs, shaken
from tests.small_models import pipeline_of

LAYOUTS = ("kohya", "diffusers")
LONG = pytest.mark.long
EACH = [
    pytest.param(kind, layout, marks=[LONG] * ((row + column) % 2))
    for row, kind in enumerate(KINDS)
    for column, layout in enumerate(LAYOUTS)
]
"""Every kind and every layout once; all of both with --all."""


def options_for(kind: str, **changes: object) -> UNetNetworkOptions:
    conv = {} if kind == "oft" else {"conv_dim": 2, "conv_alpha": 3.0}
    return UNetNetworkOptions(
        **{"network_type": kind, "network_dim": 4, "network_alpha": 2.0, "train_text_encoder": True, **conv, **changes}
    )


@dataclass(frozen=True)
class Trained:
    """A model with an adapter of a kind, what it gives, and the adapter's files; to read alone."""

    kind: str
    folder: Path

    @cached_property
    def parts(self) -> Parts:
        return Sdxl().tiny()

    @cached_property
    def network(self) -> AdapterNetwork:
        return shaken(attached(self.parts, options_for(self.kind)))

    @cached_property
    def outputs(self) -> torch.Tensor:
        assert self.network.adapters()
        return outputs(self.parts)

    @cache  # noqa: B019
    def file(self, layout: str = "kohya", precision: str = "float") -> Path:
        file = self.folder / f"{self.kind}-{layout}-{precision}.safetensors"
        export(self.network, self.parts, file, save_model_as=layout, precision=precision)
        return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """By the kind of the adapter."""
    folder = tmp_path_factory.mktemp("trained")
    return cache(lambda kind: Trained(kind, folder))


def damaged_copy(file: Path, folder: Path) -> Path:
    """A copy of a file, to spoil."""
    return Path(shutil.copy(file, folder / "a.safetensors"))


VARIANTS = {
    "alpha equal to rank": {"network_alpha": 4.0, "conv_alpha": 2.0},
    "alpha below rank": {"network_alpha": 1.0, "conv_alpha": 1.0},
    "rank stabilised": {"rank_stabilized": True},
    "convolutions of another rank": {"conv_dim": 3, "conv_alpha": 1.0},
    "linear layers only": {"conv_dim": None, "conv_alpha": None},
    "a rank and alpha for each block": {
        "block_dims": (0, 0, 1, 2, 3, 4, 5, 6, 7),
        "block_alphas": (1, 1, 2, 3, 1, 2, 1.5, 4, 1),
        "conv_block_dims": (1, 1, 2, 2, 3, 3, 0, 1, 2),
    },
    "unet only": {"train_text_encoder": False},
    "text encoders only": {"train_unet": False, "conv_dim": None, "conv_alpha": None},
}


@pytest.fixture(scope="module")
def plain_image() -> torch.Tensor:
    """What the model paints without an adapter."""
    return image(pipeline_of(Sdxl().tiny()))


def check_images(parts: Parts, network: AdapterNetwork, layouts: tuple[str, ...], folder: Path, plain: torch.Tensor, subtests: Any) -> None:
    wanted = image(pipeline_of(parts))
    assert (wanted - plain).abs().max() > 1e-2
    for layout in layouts:
        with subtests.test(msg=layout):
            file = folder / f"{layout}.safetensors"
            export(network, parts, file, save_model_as=layout, precision="float")
            fresh = pipeline_of(Sdxl().tiny())
            fresh.load_lora_weights(file)
            assert (wanted - image(fresh)).abs().max() < 1e-4


SHORT = ("rank stabilised", "a rank and alpha for each block", "text encoders only")


@pytest.mark.parametrize("variant", [pytest.param(name, marks=[LONG] * (name not in SHORT)) for name in VARIANTS])
def test_diffusers_paints_the_same_image_from_the_file_as_the_trained_model(
    variant: str, parts: Parts, tmp_path: Path, plain_image: torch.Tensor, subtests: pytest.Subtests
) -> None:
    network = shaken(attached(parts, options_for("lora", **VARIANTS[variant])))
    check_images(parts, network, LAYOUTS, tmp_path, plain_image, subtests)


def test_diffusers_paints_the_same_image_from_a_dora_file(
    parts: Parts, tmp_path: Path, plain_image: torch.Tensor, subtests: pytest.Subtests
) -> None:
    network = shaken(attached(parts, options_for("dora", rank_stabilized=True)))
    check_images(parts, network, ("diffusers",), tmp_path, plain_image, subtests)


def test_names_of_diffusers_say_everything_without_our_header(trained: Callable[[str], Trained], subtests: pytest.Subtests) -> None:
    """ComfyUI knows neither peft's configuration nor peft's name of a dora's lengths."""
    for kind in ("lora", "dora", "loha", "lokr"):
        with subtests.test(msg=kind):
            live, tensors = trained(kind), load_file(trained(kind).file("diffusers"))
            names, factors, wrong = names_of(live.parts), [], []
            for name, adapter in live.network.adapters().items():
                stem, shape = f"{names.to_diffusers(name)}.", live.network.base_layer(name).weight.shape
                held = {key.removeprefix(stem): tensor for key, tensor in tensors.items() if key.startswith(stem)}
                assert not any("alpha" in key for key in held)
                told = low_rank_update(AdapterLayer(adapter.kind, held), shape)
                wanted = low_rank_update(adapter, shape)
                factors.append(adapter.scale)
                wrong += [name] if (told - wanted).norm() > 1e-5 * wanted.norm() else []
                if kind == "dora":
                    lengths = held["dora_scale"]
                    assert lengths.shape == (shape[0], *[1] * (len(shape) - 1))
                    assert torch.equal(lengths.flatten(), held["lora_magnitude_vector.weight"].flatten())
            assert wrong == [] and min(factors) == 0.5, wrong


def test_a_file_that_the_disk_spoils_is_found_out_at_once(
    parts: Parts, trained: Callable[[str], Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, real = trained("lora"), os.fsync

    def spoil(handle: int) -> None:
        real(handle)
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            last = os.fstat(handle).st_size - 1
            os.pwrite(handle, bytes([os.pread(handle, 1, last)[0] ^ 0x40]), last)

    monkeypatch.setattr(os, "fsync", spoil)
    with pytest.raises(TrainingError, match=r"a\.safetensors does not do what was trained at "):
        export(live.network, live.parts, tmp_path / "a.safetensors", precision="float")


@pytest.mark.parametrize(
    ("kind", "layout", "precision"),
    [
        # Each pair of two of the three.
        pytest.param(kind, layout, precision, marks=[LONG] * ((first + second + third) % 2))
        for first, kind in enumerate(KINDS)
        for second, layout in enumerate(LAYOUTS)
        for third, precision in enumerate(("float", "fp16", "bf16"))
    ],
)
def test_a_file_read_back_updates_every_layer_as_trained(
    kind: str, layout: str, precision: str, parts: Parts, trained: Callable[[str], Trained]
) -> None:
    live = trained(kind)
    adapters, found = live.network.adapters(), read(live.file(layout, precision), parts)
    assert found.keys() == adapters.keys()
    tolerance = {"float": 1e-6, "fp16": 3e-3, "bf16": 3e-2}[precision]
    rng = torch.Generator().manual_seed(0)
    for name, adapter in adapters.items():
        module, _, path = name.partition(".")
        weight = live.parts.modules()[module].get_submodule(path).get_base_layer().weight
        weight = weight + torch.randn(weight.shape, generator=rng)
        want, got = merged_weight(weight.double(), adapter), merged_weight(weight.double(), found[name])
        assert (got - want).norm() <= tolerance * (want - weight).norm()


@pytest.mark.parametrize(("kind", "layout"), EACH)
def test_merging_a_file_does_what_the_live_adapter_does(kind: str, layout: str, twin: Parts, trained: Callable[[str], Trained]) -> None:
    live = trained(kind)
    assert merge_into(twin, live.file(layout)) == len(live.network.adapters())
    assert (live.outputs - outputs(twin)).abs().max() <= 2e-6 * max(1.0, float(live.outputs.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_comfyuis_names_does_what_the_live_adapter_does(kind: str, twin: Parts, trained: Callable[[str], Trained]) -> None:
    file, live = trained(kind).file("comfyui"), trained(kind).outputs
    stems = {key.partition(".")[0] for key in load_file(file)}
    assert stems == ({"unet", "text_encoder", "text_encoder_2"} if kind == "oft" else {"diffusion_model", "text_encoders"})
    merge_into(twin, file)
    assert (live - outputs(twin)).abs().max() <= 2e-6 * max(1.0, float(live.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_applying_a_file_does_what_the_live_adapter_does_and_comes_off_again(
    kind: str, twin: Parts, trained: Callable[[str], Trained]
) -> None:
    before, live = outputs(twin), trained(kind).outputs
    put_on = apply(twin, trained(kind).file())
    assert (outputs(twin) - live).abs().max() <= 2e-6 * float(live.abs().max())
    assert not put_on.parameters()
    put_on.detach()
    assert torch.equal(outputs(twin), before)


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=LONG), "loha", pytest.param("lokr", marks=LONG)])
def test_strength_means_the_same_for_applying_and_merging(kind: str, parts: Parts, twin: Parts, trained: Callable[[str], Trained]) -> None:
    file = trained(kind).file()
    apply(parts, file, 0.6)
    merge_into(twin, file, 0.6)
    wanted = outputs(parts)
    assert (outputs(twin) - wanted).abs().max() <= 2e-6 * float(wanted.abs().max())


def test_two_applied_files_add_up_and_the_trained_adapter_stays_trainable(
    parts: Parts, twin: Parts, tmp_path: Path, trained: Callable[[str], Trained]
) -> None:
    before, model, files = outputs(twin), Sdxl().tiny(), [trained("lora").file(), tmp_path / "other.safetensors"]
    export(shaken(attached(model, options_for("lora")), 2), model, files[1], precision="float")
    network = attached(parts, options_for("lora"))
    count = len(network.parameters())
    first, second = (apply(parts, file) for file in files)
    for file in files:
        merge_into(twin, file)
    wanted = outputs(parts)
    assert (outputs(twin) - wanted).abs().max() < 1e-5 * float(wanted.abs().max())
    assert len(network.parameters()) == count
    with network.disabled():
        assert len(network.parameters()) == count
    first.detach()
    second.detach()
    assert torch.equal(outputs(parts), before)
    assert len(network.parameters()) == count


def test_oft_has_no_strength_but_one(parts: Parts, trained: Callable[[str], Trained]) -> None:
    for use in (merge_into, apply):
        with pytest.raises(OptionError, match="no strength other than 1"):
            use(parts, trained("oft").file(), 0.5)


def test_merging_into_a_quantised_model_is_refused(twin: Parts, trained: Callable[[str], Trained]) -> None:
    file = trained("lora").file()
    layer = twin.backbone.mid_block.attentions[0].proj_in
    layer.weight = torch.nn.Parameter(layer.weight.mul(100).to(torch.int8), requires_grad=False)
    with pytest.raises(OptionError, match=r"quantised model \(backbone\.mid_block\.attentions\.0\.proj_in\)"):
        merge_into(twin, file)


def test_a_merge_into_half_precision_is_rounded_once(parts: Parts, twin: Parts, tmp_path: Path) -> None:
    network = shaken(attached(parts, UNetNetworkOptions(network_dim=4)))
    file = tmp_path / "a.safetensors"
    export(network, parts, file, precision="float")
    twin.backbone.half()
    name = "backbone.mid_block.attentions.0.proj_in"
    weight = twin.backbone.mid_block.attentions[0].proj_in.weight.clone()
    merge_into(twin, file)
    want = (weight.double() + low_rank_update(network.adapters()[name].to(torch.float64), weight.shape)).half()
    got = twin.backbone.mid_block.attentions[0].proj_in.weight
    assert got.dtype == torch.float16
    assert (got != want).float().mean() < 1e-3


def test_a_file_with_compiled_names_and_old_names_is_read(parts: Parts, tmp_path: Path) -> None:
    network = shaken(attached(parts, UNetNetworkOptions(network_dim=4, network_alpha=1.0, train_text_encoder=True)))
    file, foreign = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    export(network, parts, file, save_model_as="diffusers", precision="float")
    renamed = {}
    for key, tensor in load_file(file).items():
        key = key.replace("unet.mid_block.", "unet._orig_mod.mid_block.")
        key = key.replace("lora_A", "lora.down").replace("lora_B", "lora.up") if "up_blocks" in key else key
        renamed[key.replace("text_encoder.text_model.", "text_encoder.")] = tensor
    save_file(renamed, foreign)
    want, got = read(file, parts), read(foreign, parts)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name].tensors[rest], got[name].tensors[rest]) for name in want for rest in want[name].tensors)


def test_the_alpha_in_a_header_of_diffusers_is_respected(parts: Parts, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    layer = "mid_block.attentions.0.proj_in"
    tensors = {f"unet.{layer}.lora_A.weight": torch.ones(4, 32), f"unet.{layer}.lora_B.weight": torch.ones(32, 4)}
    for header, scale in (
        ({"unet.r": 4, "unet.lora_alpha": 2}, 0.5),
        ({"unet.r": 4, "unet.lora_alpha": 2, "unet.use_rslora": True}, 1.0),
        ({"unet.r": 4, "unet.lora_alpha": 2, "unet.alpha_pattern": {"proj_in": 12}}, 3.0),
        (None, 1.0),
    ):
        save_file(tensors, file, {"lora_adapter_metadata": json.dumps(header)} if header else {})
        assert read(file, parts)[f"backbone.{layer}"].scale == scale


def test_lycoris_lengths_by_input_are_merged_as_lycoris_defines_them(parts: Parts, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    layer = parts.backbone.mid_block.attentions[0].proj_in
    down, up, lengths = torch.randn(2, 32, generator=rng), torch.randn(32, 2, generator=rng), torch.rand(1, 32, generator=rng) + 0.5
    stem = names_of(parts).to_kohya("backbone.mid_block.attentions.0.proj_in")
    file = tmp_path / "a.safetensors"
    values = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(1.0), "dora_scale": lengths}
    save_file({f"{stem}.{rest}": tensor for rest, tensor in values.items()}, file)
    updated = layer.weight.detach().double() + (up.double() @ down.double()) * 0.5
    merge_into(parts, file)
    assert torch.allclose(layer.weight.double(), updated * lengths.double() / updated.norm(dim=0, keepdim=True), atol=1e-6)
    with pytest.raises(OptionError, match="each input channel"):
        apply(Sdxl().tiny(), file)


@pytest.mark.parametrize(("kind", "layout"), EACH)
def test_training_starts_from_a_file_and_its_sizes_may_come_from_it(
    kind: str, layout: str, twin: Parts, tmp_path: Path, trained: Callable[[str], Trained]
) -> None:
    options, file, live = options_for(kind), trained(kind).file(layout), trained(kind).outputs
    # Another alpha rules the training from here on; the start is what the file does all the same.
    changed = options.model_copy(update={"network_alpha": 4.0, "network_weights": str(file)})
    network = attached(twin, changed)
    assert (outputs(twin) - live).abs().max() <= 2e-6 * float(live.abs().max())
    assert network.parameters()
    network.detach()
    from_file = UNetNetworkOptions(
        network_type=kind, train_text_encoder=True, network_dim=64, network_weights=str(file), dim_from_weights=True
    )
    network = attached(twin, from_file)
    assert (outputs(twin) - live).abs().max() <= 2e-6 * float(live.abs().max())
    again = tmp_path / "again.safetensors"
    export(network, twin, again, save_model_as=layout, precision="float")
    assert read(again, twin).keys() == read(file, twin).keys()


def test_parts_of_a_file_with_rate_zero_stay_in_effect_and_are_saved(twin: Parts, trained: Callable[[str], Trained]) -> None:
    file, live = trained("lora").file(), trained("lora").outputs
    options = options_for("lora", network_weights=str(file), text_encoder_lr=(0.0,), block_lr_weight=(1, 1, 1, 1, 0, 1, 1, 1, 1))
    network = attached(twin, options)
    assert (outputs(twin) - live).abs().max() < 2e-6 * float(live.abs().max())
    moving = {key for key, tensor in network.named_parameters().items() if tensor.requires_grad}
    assert moving
    assert all(key.startswith("backbone.") and "mid_block" not in key for key in moving)
    assert {group["name"] for group in network.parameter_groups(options, 1.0)} == {"unet"}
    assert len(network.state()) > len(moving)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network_dim": 8}, ["does not fit the network", "instead of", "dim_from_weights"]),
        ({"conv_dim": None, "conv_alpha": None}, ["has no adapter in this network"]),
        ({"network_type": "dora"}, ["network_weights holds lora, but network_type is dora", "network_type = lora"]),
        ({"train_text_encoder": False, "dim_from_weights": True}, ["train_text_encoder is off"]),
    ],
)
def test_a_file_that_does_not_fit_the_options_is_refused_in_a_sentence(
    parts: Parts, twin: Parts, changes: dict, words: list[str], trained: Callable[[str], Trained]
) -> None:
    with pytest.raises(OptionError) as caught:
        attached(twin, options_for("lora", network_weights=str(trained("lora").file()), **changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert torch.equal(outputs(twin), outputs(parts))


def damaged(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    key = sorted(key for key in tensors if key.endswith("lora_down.weight"))[0]
    if how == "unknown key":
        return {**tensors, "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": torch.zeros(1)}
    if how == "missing half":
        return {name: tensor for name, tensor in tensors.items() if name != key}
    return {**tensors, key: tensors[key][:, :3].contiguous()}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unknown key", "1 of 427 keys fit no layer of this model, such as lora_unet_double_blocks_0_img_attn_qkv"),
        ("missing half", "which is not a whole adapter"),
        ("wrong size", "it is for another model"),
    ],
)
def test_a_file_that_fits_no_model_is_refused_in_a_sentence(
    twin: Parts, tmp_path: Path, how: str, words: str, trained: Callable[[str], Trained]
) -> None:
    file = damaged_copy(trained("lora").file(), tmp_path)
    tensors = load_file(file)
    words = words.replace("427", str(len(tensors) + 1))
    save_file(damaged(tensors, how), file)
    before = outputs(twin)
    for use in (read, merge_into, apply):
        with pytest.raises(OptionError, match=r"a\.safetensors") as caught:
            use(file, twin) if use is read else use(twin, file)
        assert words in str(caught.value)
    assert torch.equal(outputs(twin), before)


def test_what_is_no_safetensors_file_is_refused_in_a_sentence(parts: Parts, tmp_path: Path, trained: Callable[[str], Trained]) -> None:
    truncated, pickled = damaged_copy(trained("lora").file(), tmp_path), tmp_path / "a.pt"
    truncated.write_bytes(truncated.read_bytes()[:5000])
    pickled.write_bytes(b"")
    for file, words in ((truncated, "truncated"), (pickled, "only .safetensors"), (tmp_path / "b.safetensors", "does not exist")):
        with pytest.raises(OptionError, match=words):
            read(file, parts)


def test_the_proof_names_the_layer_whose_values_did_not_survive(parts: Parts, tmp_path: Path) -> None:
    network = shaken(attached(parts, UNetNetworkOptions(network_dim=4, network_alpha=1.0)))
    file = tmp_path / "a.safetensors"
    export(network, parts, file, precision="fp16")
    tensors, header = read_file(file)
    stem = network.names.to_kohya("backbone.mid_block.attentions.0.proj_in")
    for change in ({f"{stem}.alpha": torch.tensor(1.01)}, {f"{stem}.lora_up.weight": tensors[f"{stem}.lora_up.weight"] * 1.01}):
        file.write_bytes(serialise({**tensors, **change}, header))
        with pytest.raises(TrainingError, match=r"unet\.mid_block\.attentions\.0\.proj_in"):
            prove(file, network.adapters(), parts, network.names, "fp16")
    file.write_bytes(serialise({key: tensor for key, tensor in tensors.items() if not key.startswith(stem)}, header))
    with pytest.raises(TrainingError, match=r"lacks layers: backbone\.mid_block\.attentions\.0\.proj_in"):
        prove(file, network.adapters(), parts, network.names, "fp16")


def test_a_value_that_fp16_cannot_hold_stops_the_export_and_leaves_the_old_file(parts: Parts, tmp_path: Path) -> None:
    network = shaken(attached(parts, UNetNetworkOptions(network_dim=4)))
    file = tmp_path / "a.safetensors"
    export(network, parts, file)
    old = file.read_bytes()
    key = "backbone.mid_block.attentions.0.proj_in.lora_B.weight"
    network.load({**network.state(), key: torch.full_like(network.state()[key], 1e5)})
    with pytest.raises(TrainingError, match=r"middle_block_1_proj_in.*save_precision = fp16"):
        export(network, parts, file)
    assert file.read_bytes() == old
    export(network, parts, file, precision="bf16")


def test_values_smaller_than_fp16_resolves_are_saved_without_complaint(tmp_path: Path, trained: Callable[[str], Trained]) -> None:
    for kind in KINDS:
        live = trained(kind)
        small = {key: tensor if "magnitude" in key else tensor * 3e-6 for key, tensor in live.network.state().items()}
        export(live.network, live.parts, tmp_path / f"{kind}.safetensors", precision="fp16", state=small)


def test_values_given_to_the_export_are_written_instead_of_the_live_ones(parts: Parts, tmp_path: Path) -> None:
    network = shaken(attached(parts, UNetNetworkOptions(network_dim=4)))
    average = {key: tensor * 0.5 for key, tensor in network.state().items()}
    file = tmp_path / "a.safetensors"
    export(network, parts, file, precision="float", state=average)
    name = "backbone.mid_block.attentions.0.proj_in"
    assert torch.equal(read(file, parts)[name].tensors["lora_A.weight"], average[f"{name}.lora_A.weight"])


def test_kinds_without_common_names_carry_peft_s_configuration_and_no_path(trained: Callable[[str], Trained]) -> None:
    for kind, layout, want in (
        ("oft", "kohya", "peft"),
        ("loha", "diffusers", "peft"),
        ("loha", "kohya", "kohya"),
        ("lokr", "kohya", "kohya"),
    ):
        file = trained(kind).file(layout)
        _, header = read_file(file)
        assert header[LAYOUT] == want
        if want == "peft":
            config = json.loads(header[PEFT_CONFIG])
            assert config["unet"]["peft_type"] == kind.upper()
            assert {part["base_model_name_or_path"] for part in config.values()} == {None}
        assert str(file.parent) not in json.dumps(header)


def test_a_file_of_an_earlier_version_has_its_factor_in_the_header(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    live = trained("loha")
    tensors, header = read_file(live.file("diffusers"))
    config = json.loads(header[PEFT_CONFIG])
    for part in config.values():
        part["alpha_pattern"] = {layer: alpha * 0.5 for layer, alpha in part["alpha_pattern"].items()}
    (tmp_path / "old.safetensors").write_bytes(serialise(tensors, header | {PEFT_CONFIG: json.dumps(config)}))
    now, old = read(live.file("diffusers"), live.parts), read(tmp_path / "old.safetensors", live.parts)
    assert {adapter.scale for adapter in now.values()} == {1.0} and {adapter.scale for adapter in old.values()} == {0.5}


def test_lokr_with_full_and_with_factored_matrices_goes_through_kohya_s_names(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for changes in ({"network_dim": 64, "conv_dim": 64}, {"lokr_decompose_both": True, "network_dim": 1}, {"lokr_factor": 4}):
        model = Sdxl().tiny()
        network = shaken(attached(model, options_for("lokr", **changes)))
        export(network, model, file, precision="float")
        other = Sdxl().tiny()
        merge_into(other, file)
        wanted = outputs(model)
        assert (outputs(other) - wanted).abs().max() <= 5e-6 * max(1.0, float(wanted.abs().max()))


def test_equal_content_gives_equal_bytes_in_every_process(tmp_path: Path) -> None:
    """Those that a process of another day wrote: each process has an order of its own for what is without one."""
    file = tmp_path / "a.safetensors"
    tensors = {"b": torch.arange(3, dtype=torch.float16), "a": torch.ones(2, 2), "alpha": torch.tensor(2.0, dtype=torch.bfloat16)}
    file.write_bytes(serialise(tensors, {f"key {n}": "ü" for n in range(20)}))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == "747ce999d2d030acc95f336d6443aa998d88f74cedd9e98c284e859b76be5746"
    tensors, header = read_file(file)
    assert tensors["a"].shape == (2, 2)
    assert tensors["alpha"].shape == ()
    assert tensors["alpha"].dtype == torch.bfloat16
    assert torch.equal(tensors["b"], torch.arange(3, dtype=torch.float16))
    assert header == {f"key {n}": "ü" for n in range(20)}
