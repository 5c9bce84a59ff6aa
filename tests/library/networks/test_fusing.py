"""Adapters of several layers as one of the matrix that they are in the original layout, and back."""

from __future__ import annotations

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

from sd_scripts.library.adapters.fusing import fuse, split, take_rows
from sd_scripts.library.adapters.layer_names import Target
from sd_scripts.library.adapters.layouts import tensors_of
from sd_scripts.library.adapters.maths import AdapterLayer, low_rank_update, merged_weight
from sd_scripts.library.adapters.names import names_for

WIDTH = 6
LINEAR1 = Target(("q", "k", "v", "mlp"), (1, 1, 1, 4))


def adapter(kind: str, rows: int, rank: int, scale: float, rng: torch.Generator, downs: AdapterLayer | None = None) -> AdapterLayer:
    """Random values in float64; the down matrices of another adapter, if given."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    if kind == "loha":
        tensors = {
            f"hada_w{number}_{side}": draw(*shape) for number in (1, 2) for side, shape in (("a", (rows, rank)), ("b", (rank, WIDTH)))
        }
    elif kind == "lokr":
        tensors = {"lokr_w1": draw(rows // 3, 2), "lokr_w2": draw(3, WIDTH // 2)}
    else:
        tensors = {"lora_A.weight": draw(rank, WIDTH), "lora_B.weight": draw(rows, rank)}
    if kind == "dora":
        tensors["lora_magnitude_vector.weight"] = draw(rows).abs() + 0.5
    shared = {} if downs is None else {name: downs.tensors[name] for name in ("lora_A.weight", "hada_w1_b", "hada_w2_b") if name in tensors}
    return AdapterLayer(kind, {**tensors, **shared}, scale)


def members_of(kind: str, shared: bool, rng: torch.Generator, ranks: tuple[int, ...] = (2, 2, 2, 2)) -> dict[str, AdapterLayer]:
    first = adapter(kind, WIDTH, ranks[0], 0.5, rng)
    members = {"q": first}
    for name, share, rank in zip(("k", "v", "mlp"), (1, 1, 4), ranks[1:]):
        members[name] = adapter(kind, share * WIDTH, rank, 0.5 if shared else float(rank), rng, first if shared else None)
    return members


def rows_of(members: dict[str, AdapterLayer], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([merged_weight(weights[name], members[name]) if name in members else weights[name] for name in LINEAR1.layers])


@pytest.mark.parametrize("ranks", [(2, 2, 2, 2), (1, 3, 2, 2)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["lora", "dora", "loha"])
def test_the_one_adapter_updates_every_row_as_its_layer_does(kind: str, shared: bool, ranks: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(len(kind) + 10 * shared)
    members = members_of(kind, shared, rng, (2, 2, 2, 2) if shared else ranks)
    weights = {
        name: torch.randn(share * WIDTH, WIDTH, generator=rng, dtype=torch.float64)
        for name, share in zip("q k v mlp".split(), LINEAR1.shares)
    }
    whole = fuse(LINEAR1, members)
    assert whole.rank == (2 if shared else sum(ranks))
    got = merged_weight(torch.cat([weights[name] for name in LINEAR1.layers]), whole)
    assert torch.allclose(got, rows_of(members, weights), rtol=1e-13, atol=1e-13)
    back = split(LINEAR1, whole)
    assert {name: member.rank for name, member in back.items()} == {name: member.rank for name, member in members.items()}
    assert torch.allclose(rows_of(back, weights), rows_of(members, weights), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["lora", "loha"])
@pytest.mark.parametrize("present", [("q",), ("q", "mlp"), ("k", "v", "mlp")])
def test_layers_without_an_adapter_have_none_afterwards(present: tuple[str, ...], kind: str, shared: bool) -> None:
    members = {name: member for name, member in members_of(kind, shared, torch.Generator().manual_seed(3)).items() if name in present}
    whole = fuse(LINEAR1, members)
    assert whole.tensors["lora_B.weight" if kind == "lora" else "hada_w1_a"].shape[0] == 7 * WIDTH
    back = split(LINEAR1, whole)
    assert back.keys() == members.keys()
    for name, member in members.items():
        shape = torch.Size((LINEAR1.shares[LINEAR1.layers.index(name)] * WIDTH, WIDTH))
        assert torch.allclose(low_rank_update(back[name], shape), low_rank_update(member, shape), rtol=1e-13, atol=1e-13)
        assert back[name].rank == member.rank


def test_an_untrained_adapter_keeps_its_rank_and_all_layers() -> None:
    members = members_of("lora", True, torch.Generator().manual_seed(4))
    for member in members.values():
        member.tensors["lora_B.weight"].zero_()
    back = split(LINEAR1, fuse(LINEAR1, members))
    assert {name: member.rank for name, member in back.items()} == dict.fromkeys(LINEAR1.layers, 2)


def test_what_no_single_adapter_can_say_is_not_fused() -> None:
    rng = torch.Generator().manual_seed(5)
    assert fuse(LINEAR1, members_of("lokr", False, rng)) is None
    some = members_of("dora", True, rng)
    del some["v"]
    assert fuse(LINEAR1, some) is None


def test_a_kronecker_product_is_taken_apart_where_its_blocks_end_at_the_borders() -> None:
    whole = adapter("lokr", 7 * WIDTH, 0, 0.7, torch.Generator().manual_seed(6))
    update = low_rank_update(whole, torch.Size((7 * WIDTH, WIDTH)))
    members = split(LINEAR1, whole)
    got = [low_rank_update(member, torch.Size((share * WIDTH, WIDTH))) for member, share in zip(members.values(), LINEAR1.shares)]
    assert torch.allclose(torch.cat(got), update, rtol=1e-14)
    odd = AdapterLayer("lokr", {"lokr_w1": torch.ones(3, 2), "lokr_w2": torch.ones(14, 3)})
    with pytest.raises(ValueError, match="do not divide at the borders"):
        split(LINEAR1, odd)


def test_swapped_halves_are_swapped_back() -> None:
    target = Target(("last",), swapped=True)
    member = adapter("dora", 8, 2, 1.0, torch.Generator().manual_seed(7))
    weight = torch.randn(8, WIDTH, dtype=torch.float64)
    whole = fuse(target, {"last": member})
    assert torch.allclose(merged_weight(weight.roll(4, 0), whole), merged_weight(weight, member).roll(4, 0))
    back = split(target, whole)["last"]
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in member.tensors.items())


def test_lengths_by_input_belong_to_the_whole_matrix() -> None:
    by_input = adapter("dora", 7 * WIDTH, 2, 1.0, torch.Generator().manual_seed(8))
    tensors = {**by_input.tensors, "lora_magnitude_vector.weight": torch.ones(1, WIDTH)}
    with pytest.raises(ValueError, match="lengths are for inputs"):
        take_rows(AdapterLayer("dora", tensors), [(0, WIDTH)])


@pytest.mark.parametrize("shared", [True, False])
def test_diffusers_reader_of_kohyas_files_finds_the_same_update_at_flux_s_real_size(shared: bool) -> None:
    names, rng = names_for("flux"), torch.Generator().manual_seed(9)
    sizes = {"attn.to_q": 3072, "attn.to_k": 3072, "attn.to_v": 3072, "proj_mlp": 12288}
    blocks = {
        "backbone.single_transformer_blocks.5": sizes,
        "backbone.transformer_blocks.18": {"attn.add_q_proj": 3072, "attn.add_k_proj": 3072, "attn.add_v_proj": 3072, "ff.net.2": 3072},
    }
    adapters: dict[str, AdapterLayer] = {}
    for block, layers in blocks.items():
        down = torch.randn(4, 3072, generator=rng)
        for layer, rows in layers.items():
            inputs = 12288 if layer == "ff.net.2" else 3072
            own = down if shared and inputs == 3072 else torch.randn(4, inputs, generator=rng)
            tensors = {"lora_A.weight": own, "lora_B.weight": torch.randn(rows, 4, generator=rng)}
            adapters[f"{block}.{layer}"] = AdapterLayer("lora", tensors, 1.5 / 4)
    tensors, _ = tensors_of(adapters, names, "kohya", torch.float32)
    assert tensors["lora_unet_single_blocks_5_linear1.lora_down.weight"].shape == ((4 if shared else 16), 3072)
    read = _convert_kohya_flux_lora_to_diffusers(tensors)
    assert len(read) == 2 * len(adapters)
    for name, adapter_layer in adapters.items():
        stem = names.to_diffusers(name)
        x = torch.randn(read[f"{stem}.lora_A.weight"].shape[1], generator=rng, dtype=torch.float64)
        got = read[f"{stem}.lora_B.weight"].double() @ (read[f"{stem}.lora_A.weight"].double() @ x)
        t = adapter_layer.to(torch.float64).tensors
        want = t["lora_B.weight"] @ (t["lora_A.weight"] @ x) * adapter_layer.scale
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-4)
