"""Adapters on FLUX: what kohya's files hold as one matrix is several layers here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts.families.flux.model import Flux
from sd_scripts.families.flux.options import FluxNetworkOptions
from sd_scripts.library.adapters.files import export, read
from sd_scripts.library.adapters.fusing import SHARED
from sd_scripts.library.adapters.maths import KINDS, low_rank_update
from sd_scripts.library.adapters.merge import apply, merge_into
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import OptionError
from tests.library.networks.adapters_in_small import attached, diffusers_pipeline, flux_output, image, outputs, render, shaken

LAYOUTS = ("kohya", "diffusers", "comfyui")
Q, K, V = (f"backbone.transformer_blocks.0.attn.to_{side}" for side in "qkv")
QKV = "lora_unet_double_blocks_0_img_attn_qkv"
LINEAR1 = "lora_unet_single_blocks_1_linear1"


def options_for(kind: str = "lora", **changes: object) -> FluxNetworkOptions:
    return FluxNetworkOptions(
        **{"network_type": kind, "network_dim": 4, "network_alpha": 2.0, "train_text_encoder": True, "train_t5xxl": True, **changes}
    )


def transformer_only(kind: str = "lora", **changes: object) -> FluxNetworkOptions:
    return options_for(kind, train_text_encoder=False, train_t5xxl=False, **changes)


@pytest.mark.parametrize("split_qkv", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_changes_nothing(kind: str, split_qkv: bool, flux: Parts) -> None:
    before = outputs(flux)
    network = attached(flux, options_for(kind, split_qkv=split_qkv))
    assert (outputs(flux) - before).abs().max() <= 1e-6 * before.abs().max()
    network.detach()
    assert torch.equal(outputs(flux), before)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha"])
def test_layers_of_a_fused_target_share_one_down_matrix_that_everything_sees_once(kind: str, flux: Parts) -> None:
    shared, single = attached(flux, options_for(kind)), {}
    names, rests = shared.named_parameters(), SHARED[kind]
    for rest in rests:
        assert f"{Q}.{rest}" in names
        assert f"{K}.{rest}" not in names
        assert torch.equal(shared.adapters()[Q].tensors[rest], shared.adapters()[V].tensors[rest])
    tensors = [tensor for group in shared.parameter_groups(options_for(kind), 1.0) for tensor in group["params"]]
    assert len({id(tensor) for tensor in tensors}) == len(tensors) == len(names) == len(shared.state())
    shared.detach()
    single = attached(flux, options_for(kind, split_qkv=True))
    assert f"{K}.{rests[0]}" in single.named_parameters()
    assert sum(tensor.numel() for tensor in shared.parameters()) < sum(tensor.numel() for tensor in single.parameters())


def test_a_shared_matrix_gets_the_sum_of_the_gradients_of_its_layers(flux: Parts, flux_twin: Parts) -> None:
    shared = shaken(attached(flux, transformer_only()))
    apart = attached(flux_twin, transformer_only(split_qkv=True))
    apart.set_adapters(shared.adapters())
    for parts in (flux, flux_twin):
        flux_output(parts, torch.Generator().manual_seed(5)).square().mean().backward()
    got = shared.named_parameters()[f"{Q}.lora_A.weight"].grad
    want = sum(apart.named_parameters()[f"{name}.lora_A.weight"].grad for name in (Q, K, V))
    assert got.abs().max() > 0
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))


def test_a_shared_matrix_stays_shared_when_the_model_moves(flux: Parts) -> None:
    network = attached(flux, transformer_only())
    flux.backbone.to(torch.float64).to(torch.float32)
    down = flux.backbone.get_submodule("transformer_blocks.0.attn.to_q").lora_A["default"].weight
    assert down is flux.backbone.get_submodule("transformer_blocks.0.attn.to_v").lora_A["default"].weight
    assert down is network.named_parameters()[f"{Q}.lora_A.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_at_the_start_follow_from_names_and_seed_alone(kind: str, flux: Parts, flux_twin: Parts) -> None:
    one = attached(flux, options_for(kind)).state()
    other = attached(flux_twin, transformer_only(kind, target_modules=("single_transformer",))).state()
    assert other
    assert all(torch.equal(one[key], tensor) for key, tensor in other.items())


def test_a_kohya_file_has_kohyas_fused_shapes(flux: Parts, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    network = attached(flux, options_for())
    export(shaken(network), flux, file, precision="float")
    tensors = load_file(file)
    width = 32
    assert tensors[f"{QKV}.lora_down.weight"].shape == (4, width)
    assert tensors[f"{QKV}.lora_up.weight"].shape == (3 * width, 4)
    assert tensors[f"{LINEAR1}.lora_up.weight"].shape == (7 * width, 4)
    assert {float(tensor) for key, tensor in tensors.items() if key.endswith("alpha")} == {2.0}
    trained = network.adapters()
    whole = tensors[f"{QKV}.lora_up.weight"].double() @ tensors[f"{QKV}.lora_down.weight"].double() * 0.5
    for at, name in enumerate((Q, K, V)):
        want = low_rank_update(trained[name].to(torch.float64), torch.Size((width, width)))
        assert torch.equal(whole[at * width : (at + 1) * width], want)


def test_separate_matrices_become_a_block_diagonal_of_three_and_four_times_the_rank(flux: Parts, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    network = attached(flux, options_for(split_qkv=True))
    export(shaken(network), flux, file, precision="float")
    tensors, trained = load_file(file), network.adapters()
    assert tensors[f"{QKV}.lora_down.weight"].shape == (12, 32)
    assert tensors[f"{LINEAR1}.lora_down.weight"].shape == (16, 32)
    assert float(tensors[f"{QKV}.alpha"]) == 6.0
    assert float(tensors[f"{LINEAR1}.alpha"]) == 8.0
    up, down = tensors[f"{QKV}.lora_up.weight"].double(), tensors[f"{QKV}.lora_down.weight"].double()
    for at, name in enumerate((Q, K, V)):
        rows = slice(32 * at, 32 * at + 32)
        want = trained[name].tensors["lora_B.weight"].double() @ trained[name].tensors["lora_A.weight"].double() * 0.5
        assert torch.equal(up[rows, 4 * at : 4 * at + 4] @ down[4 * at : 4 * at + 4] * 0.5, want)
        assert torch.allclose(up[rows] @ down * 0.5, want, rtol=1e-14, atol=1e-15)
    found = read(file, flux)
    assert all(torch.equal(found[name].tensors[rest], tensor) for name in trained for rest, tensor in trained[name].tensors.items())


LONG = pytest.mark.long
# Split matrices are of the layers, whatever is put on them: of two kinds always.
FILES = [pytest.param(kind, False, LAYOUTS) for kind in KINDS]
FILES += [pytest.param("lora", True, ("kohya", "comfyui"))]
FILES += [pytest.param(kind, True, ("kohya",), marks=[LONG] * (kind != "lokr")) for kind in KINDS if kind != "lora"]


@pytest.mark.parametrize(("kind", "split_qkv", "layouts"), FILES)
def test_merging_a_file_does_what_the_live_adapter_does(
    kind: str, split_qkv: bool, layouts: tuple[str, ...], flux: Parts, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    network = shaken(attached(flux, options_for(kind, split_qkv=split_qkv)))
    live = outputs(flux)
    for layout in layouts:
        with subtests.test(msg=layout):
            file, twin = tmp_path / f"{layout}.safetensors", Flux().tiny()
            export(network, flux, file, save_model_as=layout, precision="float")
            assert merge_into(twin, file) == len(network.adapters())
            assert (live - outputs(twin)).abs().max() <= 5e-6 * max(1.0, float(live.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_applying_a_file_does_what_the_live_adapter_does_and_comes_off_again(
    kind: str, flux: Parts, flux_twin: Parts, tmp_path: Path
) -> None:
    before = outputs(flux_twin)
    network = shaken(attached(flux, options_for(kind, in_dims=(2, 3, 2, 3, 2))))
    file = tmp_path / "a.safetensors"
    export(network, flux, file, precision="float")
    put_on = apply(flux_twin, file)
    assert (outputs(flux_twin) - outputs(flux)).abs().max() <= 5e-6 * float(outputs(flux).abs().max())
    put_on.detach()
    assert torch.equal(outputs(flux_twin), before)


@pytest.mark.parametrize(
    "changes", [{}, {"network_alpha": 4.0}, {"rank_stabilized": True}, {"split_qkv": True}, {"single_dim": 2, "img_attn_dim": 8}]
)
def test_diffusers_paints_the_same_image_from_the_file_as_the_trained_model(
    changes: dict, flux: Parts, flux_twin: Parts, tmp_path: Path
) -> None:
    # diffusers' FLUX pipeline takes adapters of CLIP, not of T5.
    network = shaken(attached(flux, options_for(train_t5xxl=False, **changes)))
    file = tmp_path / "lora.safetensors"
    export(network, flux, file, save_model_as="diffusers", precision="float")
    fresh = diffusers_pipeline(flux_twin)
    before = image(fresh)
    fresh.load_lora_weights(file)
    after = image(fresh)
    assert (render(flux) - after).abs().max() < 1e-4
    assert (before - after).abs().max() > 1e-2


def test_an_adapter_of_some_layers_of_a_target_leaves_the_others_alone(flux: Parts, flux_twin: Parts, tmp_path: Path) -> None:
    live = {}
    for kind, names in (("lora", True), ("dora", False), ("loha", True), ("lokr", False)):
        for split_qkv in (False, True):
            options = transformer_only(kind, target_modules=(r"attn\.to_(q|v)$",), split_qkv=split_qkv)
            network = shaken(attached(flux, options))
            file = tmp_path / f"{kind}{split_qkv}.safetensors"
            export(network, flux, file, precision="float")
            assert (f"{QKV}.alpha" in load_file(file)) == names
            live[file] = outputs(flux)
            assert read(file, flux).keys() == network.adapters().keys()
            network.detach()
    base = outputs(flux)
    for file, want in live.items():
        put_on = apply(flux_twin, file)
        assert (outputs(flux_twin) - want).abs().max() <= 5e-6 * float(base.abs().max())
        put_on.detach()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(pytest.param(kind, "kohya", marks=[LONG] * (kind in ("lora", "loha"))) for kind in KINDS),
        ("lora", "diffusers"),
        ("loha", "comfyui"),
    ],
)
def test_training_starts_from_a_file_and_its_sizes_may_come_from_it(
    kind: str, layout: str, flux: Parts, flux_twin: Parts, tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    export(shaken(attached(flux, options_for(kind))), flux, file, save_model_as=layout, precision="float")
    live = outputs(flux)
    network = attached(flux_twin, options_for(kind, network_weights=str(file), network_alpha=4.0))
    assert (outputs(flux_twin) - live).abs().max() <= 5e-6 * float(live.abs().max())
    count = len(network.parameters())
    network.detach()
    again = attached(flux_twin, options_for(kind, network_weights=str(file), dim_from_weights=True, network_dim=64))
    assert (outputs(flux_twin) - live).abs().max() <= 5e-6 * float(live.abs().max())
    assert len(again.parameters()) == count


def test_separate_matrices_are_not_pressed_into_a_shared_one(flux: Parts, flux_twin: Parts, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    export(shaken(attached(flux, options_for(split_qkv=True))), flux, file)
    with pytest.raises(OptionError, match=r"does not share its down matrix.*split_qkv = true"):
        attached(flux_twin, options_for(network_weights=str(file)))
    network = attached(flux_twin, options_for(network_weights=str(file), dim_from_weights=True))
    assert f"{K}.lora_A.weight" in network.named_parameters()


def test_a_down_matrix_that_layers_share_is_limited_by_the_norm_of_the_whole_matrix(flux: Parts) -> None:
    network = shaken(attached(flux, transformer_only(scale_weight_norms=0.5)))
    before, state = network.adapters(), network.state()
    network.after_step()

    def norm(adapters: dict) -> float:
        return float(sum(low_rank_update(adapters[name], torch.Size((32, 32))).double().square().sum() for name in (Q, K, V)).sqrt())

    assert norm(before) > 0.5
    assert norm(network.adapters()) == pytest.approx(0.5, rel=1e-5)
    # 10 layers of a double block of which 6 are 2 matrices, 6 of a single one of which 4 are 1.
    shrunk = [key for key, tensor in network.state().items() if key.endswith("lora_A.weight") and not torch.equal(tensor, state[key])]
    assert len(shrunk) == 2 * 10 + 2 * 3


GROUPS = {
    "img_attn_dim": ("attn.to_q", "attn.to_out.0"),
    "txt_attn_dim": ("attn.add_k_proj", "attn.to_add_out"),
    "img_mlp_dim": ("ff.net.0.proj", "ff.net.2"),
    "txt_mlp_dim": ("ff_context.net.2",),
    "img_mod_dim": ("norm1.linear",),
    "txt_mod_dim": ("norm1_context.linear",),
}


@pytest.mark.parametrize("option", GROUPS)
def test_ranks_are_given_by_kind_of_layer(option: str, flux: Parts) -> None:
    plain = transformer_only()
    network = attached(flux, plain.model_copy(update={option: 2}))
    ranks = {plan.name: plan.rank for plan in network.plans}
    network.detach()
    left_out = {plan.name for plan in attached(flux, plain.model_copy(update={option: 0})).plans}
    for other, layers in GROUPS.items():
        for layer in layers:
            assert ranks[f"backbone.transformer_blocks.1.{layer}"] == (2 if other == option else 4)
            assert (f"backbone.transformer_blocks.1.{layer}" in left_out) == (other != option)


def test_single_blocks_and_inputs_have_ranks_of_their_own(flux: Parts) -> None:
    options = transformer_only(single_dim=3, single_mod_dim=5, in_dims=(1, 2, 0, 7, 8))
    ranks = {plan.layer: plan.rank for plan in attached(flux, options).plans}
    assert {ranks[f"single_transformer_blocks.0.{layer}"] for layer in ("attn.to_q", "proj_mlp", "proj_out")} == {3}
    assert ranks["single_transformer_blocks.0.norm.linear"] == 5
    assert ranks["x_embedder"] == 1
    assert ranks["time_text_embed.timestep_embedder.linear_2"] == 2
    assert "time_text_embed.text_embedder.linear_1" not in ranks
    assert ranks["time_text_embed.guidance_embedder.linear_1"] == 7
    assert ranks["context_embedder"] == 8
    assert ranks["transformer_blocks.0.attn.to_q"] == 4
    assert "proj_out" not in ranks


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, {"transformer_blocks.0", "transformer_blocks.1", "single_transformer_blocks.0", "single_transformer_blocks.1"}),
        ({"train_blocks": "double"}, {"transformer_blocks.0", "transformer_blocks.1"}),
        ({"train_blocks": "single"}, {"single_transformer_blocks.0", "single_transformer_blocks.1"}),
        ({"train_double_block_indices": "1", "train_single_block_indices": "0-1"},
         {"transformer_blocks.1", "single_transformer_blocks.0", "single_transformer_blocks.1"}),
        ({"train_double_block_indices": "none", "train_single_block_indices": "0"}, {"single_transformer_blocks.0"}),
    ],
)  # fmt: skip
def test_blocks_are_chosen_by_kind_and_number(changes: dict, blocks: set[str], flux: Parts) -> None:
    network = attached(flux, transformer_only(**changes))
    assert {".".join(plan.layer.split(".")[:2]) for plan in network.plans} == blocks


def test_a_block_that_the_model_does_not_have_is_refused(flux: Parts) -> None:
    with pytest.raises(OptionError, match=r"train_single_block_indices: this model has 2 such blocks, numbered 0 to 1, so 2 is none"):
        attached(flux, options_for(train_single_block_indices="0-3"))


def test_rates_are_given_by_module_and_name(flux: Parts) -> None:
    options = options_for(unet_lr=1e-4, text_encoder_lr=(1e-5, 2e-5), network_reg_lrs=(r"single_blocks_1=3e-4", r"norm\.linear=0"))
    network = attached(flux, options)
    rates = {group["name"]: group["lr"] for group in network.parameter_groups(options, 1.0)}
    assert rates == {"unet": 1e-4, "te1": 1e-5, "te3": 2e-5, "unet_reg0": 3e-4}
    names = {plan.layer for plan in network.plans}
    assert "single_transformer_blocks.0.norm.linear" not in names
    assert "single_transformer_blocks.1.norm.linear" in names


def test_ranks_are_given_by_name_and_layers_of_other_ranks_do_not_share(flux: Parts, flux_twin: Parts, tmp_path: Path) -> None:
    options = transformer_only(network_reg_dims=(r"attn\.to_q$=2", "double_blocks_1_txt_mlp=0"))
    network = shaken(attached(flux, options))
    ranks = {plan.name: plan.rank for plan in network.plans}
    assert ranks[Q] == 2
    assert ranks[K] == 4
    assert "backbone.transformer_blocks.1.ff_context.net.2" not in ranks
    assert "backbone.transformer_blocks.0.ff_context.net.2" in ranks
    file = tmp_path / "a.safetensors"
    export(network, flux, file, precision="float")
    merge_into(flux_twin, file)
    assert (outputs(flux) - outputs(flux_twin)).abs().max() <= 5e-6 * float(outputs(flux).abs().max())


def test_t5_is_trained_only_when_asked_for(flux: Parts) -> None:
    modules = {plan.module for plan in attached(flux, options_for(train_t5xxl=False)).plans}
    assert modules == {"backbone", "te1"}


def test_an_expression_that_decides_about_nothing_is_refused(flux: Parts) -> None:
    with pytest.raises(OptionError, match="network_reg_dims: 'attn2' decides about no layer; names look like"):
        attached(flux, options_for(network_reg_dims=("attn2=4",)))


def test_the_last_layers_of_a_foreign_file_are_merged_with_their_halves_in_the_right_order(flux: Parts, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    up, down = torch.randn(64, 3, generator=rng), torch.randn(3, 32, generator=rng)
    file = tmp_path / "a.safetensors"
    save_file({"diffusion_model.final_layer.adaLN_modulation.1.lora_A.weight": down,
               "diffusion_model.final_layer.adaLN_modulation.1.lora_B.weight": up}, file)  # fmt: skip
    before = flux.backbone.norm_out.linear.weight.clone()
    merge_into(flux, file)
    change = flux.backbone.norm_out.linear.weight - before
    # The published layer gives shift, then scale; diffusers' gives scale, then shift.
    assert torch.allclose(change, (up @ down).roll(32, 0), atol=1e-5)
