"""Adapters on Z-Image: every kind and layout, files of other trainers, the training adapter, whole models, what headers say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts.families import RUNS
from sd_scripts.families.zimage.model import ZImage
from sd_scripts.families.zimage.options import ZImageFullOptions, ZImageModelOptions, ZImageNetworkOptions
from sd_scripts.library.adapters.applying import apply_adapters
from sd_scripts.library.adapters.files import export, read
from sd_scripts.library.adapters.full import train_whole
from sd_scripts.library.adapters.layer_names import layers_of
from sd_scripts.library.adapters.maths import KINDS
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.adapters.names import names_of
from sd_scripts.library.core.diffusion import anchor_sigmas
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.memory import quantize
from sd_scripts.library.memory.forecast.estimate import Forecaster
from sd_scripts.library.memory.forecast.values import Bucket, Forecast, Questions
from sd_scripts.library.tools.converting import convert
from sd_scripts.library.train.conditioned import Conditioned
from sd_scripts.library.train.describing import base_facts
from sd_scripts.library.train.metadata import build
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.tools import ConvertSection
from tests.library.networks.adapters_in_small import attached, outputs, shaken, zimage_output
from tests.small_models import zimage_pipeline_of

LAYOUTS = ("comfyui", "kohya", "diffusers")
CPU = torch.device("cpu")
LAYER = "backbone.layers.0.attention.to_q"
WIDTH = 48


def options_for(kind: str = "lora", **changes: object) -> ZImageNetworkOptions:
    return ZImageNetworkOptions(**{"network_type": kind, "network_dim": 4, "network_alpha": 2.0, "lora_targets": "all", **changes})


def saved(parts: Parts, path: Path, kind: str = "lora", layout: str = "comfyui", seed: int = 1, **changes: object) -> torch.Tensor:
    """Writes an adapter of random values and returns the model's output with it; the model stays as it was."""
    network = shaken(attached(parts, options_for(kind, **changes)), seed)
    export(network, parts, path, save_model_as=layout, precision="float")
    live = outputs(parts)
    network.detach()
    return live


def near(left: torch.Tensor, right: torch.Tensor, share: float = 2e-6) -> bool:
    return bool((left - right).abs().max() < share * max(1.0, float(right.abs().max())))


# Adapters and their files


@pytest.mark.parametrize("kind", KINDS)
def test_every_trained_tensor_gets_a_gradient(kind: str, zimage: Parts) -> None:
    before = outputs(zimage)
    network = attached(zimage, options_for(kind))
    assert near(outputs(zimage), before)
    shaken(network)
    zimage_output(zimage, torch.Generator().manual_seed(5)).square().mean().backward()
    parameters = network.named_parameters()
    assert not [key for key, tensor in parameters.items() if tensor.grad is None or not tensor.grad.any()]


@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_file_does_what_the_live_adapter_does_merged_too(
    kind: str, layout: str, zimage: Parts, zimage_twin: Parts, tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    live = saved(zimage, file, kind, layout)
    assert (live - outputs(zimage)).abs().max() > 1e-2
    assert merge_into(zimage_twin, file) == 31
    assert near(outputs(zimage_twin), live)


@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(changes, marks=pytest.mark.long) for changes in ({}, {"network_alpha": 12.0})),
        {"rank_stabilized": True},
        {"network_reg_dims": ("w1=8",)},
    ],
)
def test_diffusers_pipeline_does_with_the_file_what_the_trained_model_does(
    layout: str, changes: dict, zimage: Parts, zimage_twin: Parts, tmp_path: Path
) -> None:
    file = tmp_path / "lora.safetensors"
    live = saved(zimage, file, "lora", layout, **changes)
    before = outputs(zimage_twin)
    zimage_pipeline_of(zimage_twin).load_lora_weights(file)
    after = outputs(zimage_twin)
    assert (before - after).abs().max() > 1e-2
    assert near(after, live)


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_diffusers_pipeline_does_with_a_lokr_file_what_the_trained_model_does(
    layout: str, zimage: Parts, zimage_twin: Parts, tmp_path: Path
) -> None:
    """The one family for which it reads this kind; it takes no configuration from a header."""
    file = tmp_path / "lokr.safetensors"
    live = saved(zimage, file, "lokr", layout, network_alpha=1.0)
    zimage_pipeline_of(zimage_twin).load_lora_weights(file)
    assert near(outputs(zimage_twin), live)


def test_the_default_file_has_the_names_that_comfyui_and_diffusers_read_and_an_alpha(zimage: Parts, tmp_path: Path) -> None:
    run = flat.build(RUNS["zimage", "network"], {"pretrained_model_name_or_path": "toy", "train_data_dir": "toy:star"})
    assert run.output.save_model_as == "comfyui"
    saved(zimage, tmp_path / "a.safetensors", layout=run.output.save_model_as)
    held = load_file(tmp_path / "a.safetensors")
    stem = "diffusion_model.layers.0.attention.to_q"
    assert held[f"{stem}.alpha"] == 2.0 and held[f"{stem}.lora_A.weight"].shape == (4, WIDTH)
    endings = {name.split(".", 1)[1].rpartition(".lora_")[2] for name in held if not name.endswith(".alpha")}
    assert all(name.startswith("diffusion_model.") for name in held) and endings == {"A.weight", "B.weight"}
    # As ComfyUI names the layers of Z-Image: the paths of diffusers.
    own = {name.removesuffix(".alpha").removeprefix("diffusion_model.") for name in held if name.endswith(".alpha")}
    assert own <= {f"{path}" for path, _ in zimage.backbone.named_modules()}


STEMS = {
    "musubi-tuner": ("lora_unet_layers_0_attention_to_q", "lora_down.weight", "lora_up.weight"),
    "None_Z-image-Turbo_trainer": ("diffusion_model.layers.0.attention.to_q", "lora_down.weight", "lora_up.weight"),
    "ai-toolkit": ("diffusion_model.layers.0.attention.to_q", "lora_A.weight", "lora_B.weight"),
    "diffusers": ("transformer.layers.0.attention.to_q", "lora_A.weight", "lora_B.weight"),
    "SimpleTuner": ("lycoris_layers_0_attention_to_q", "lora_down.weight", "lora_up.weight"),
    "DiffSynth": ("layers.0.attention.to_q", "lora_A.default.weight", "lora_B.default.weight"),
    "peft": ("base_model.model.layers.0.attention.to_q", "lora_A.weight", "lora_B.weight"),
}


@pytest.mark.parametrize("writer", STEMS)
def test_a_layer_is_found_under_every_writers_name_and_its_alpha_counts(writer: str, zimage: Parts, tmp_path: Path) -> None:
    stem, down, up = STEMS[writer]
    file = tmp_path / "a.safetensors"
    tensors = {f"{stem}.{down}": torch.ones(4, WIDTH), f"{stem}.{up}": torch.ones(WIDTH, 4)}
    for alpha, scale in ((None, 1.0), (1.0, 0.25)):
        save_file({**tensors, **({} if alpha is None else {f"{stem}.alpha": torch.tensor(alpha)})}, file)
        found = read(file, zimage)
        assert found.keys() == {LAYER} and found[LAYER].scale == scale


def test_a_lora_of_another_family_is_named(zimage: Parts, qwen: Parts, tmp_path: Path) -> None:
    saved(zimage, tmp_path / "z.safetensors")
    with pytest.raises(OptionError, match=r"z\.safetensors is a LoRA for Z-Image, but the model is Qwen-Image"):
        read(tmp_path / "z.safetensors", qwen)


def fused_file(parts: Parts, path: Path, source: Path) -> None:
    """What convert_lora_comfyui.py of the None_Z-image-Turbo_trainer makes of a file: one matrix for q, k and v, three times the alpha."""
    held = load_file(source)
    tensors: dict[str, torch.Tensor] = {}
    for name in names_of(parts).layers:
        stem = names_of(parts).to_comfyui(name)
        if f"{stem}.alpha" not in held:
            continue
        down, up, alpha = (held[f"{stem}.{rest}"] for rest in ("lora_A.weight", "lora_B.weight", "alpha"))
        block, attention, which = stem.removeprefix("diffusion_model.").partition(".attention.")
        if not attention or which == "to_out.0":
            flat_name = f"{block}.attention.out" if attention else block
            stem = "lora_unet_" + flat_name.replace(".", "_")
            tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.alpha": alpha}
        elif which == "to_q":
            members = [stem.replace("to_q", f"to_{letter}") for letter in "qkv"]
            fused = "lora_unet_" + f"{block}.attention.qkv".replace(".", "_")
            tensors[f"{fused}.lora_down.weight"] = torch.cat([held[f"{one}.lora_A.weight"] for one in members])
            tensors[f"{fused}.lora_up.weight"] = torch.block_diag(*(held[f"{one}.lora_B.weight"] for one in members))
            tensors[f"{fused}.alpha"] = 3 * alpha
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def test_files_fused_for_old_comfyui_are_read_and_converted(zimage: Parts, zimage_twin: Parts, tmp_path: Path) -> None:
    saved(zimage, tmp_path / "own.safetensors", lora_targets="attention_and_mlp")
    fused_file(zimage, tmp_path / "fused.safetensors", tmp_path / "own.safetensors")
    own, old = (read(tmp_path / f"{name}.safetensors", zimage) for name in ("own", "fused"))
    assert own.keys() == old.keys() and len(own) == 14
    for name, adapter in own.items():
        assert old[name].scale == adapter.scale == 0.5
        assert all(torch.equal(tensor, old[name].tensors[rest]) for rest, tensor in adapter.tensors.items())
    ZImage().save(zimage, tmp_path / "base", "diffusers", None, {})
    convert(
        ConvertSection(
            model=str(tmp_path / "fused.safetensors"),
            save_to=str(tmp_path / "converted.safetensors"),
            save_model_as="comfyui",
            base_model=str(tmp_path / "base"),
        )
    )
    live = outputs(zimage)
    merge_into(zimage_twin, tmp_path / "own.safetensors")
    pipeline = zimage_pipeline_of(zimage)
    pipeline.load_lora_weights(tmp_path / "converted.safetensors")
    assert near(outputs(zimage), outputs(zimage_twin)) and not near(outputs(zimage), live, 1e-3)


def test_a_file_on_fewer_layers_leaves_an_earlier_one_on_everywhere(zimage: Parts, zimage_twin: Parts, tmp_path: Path) -> None:
    files = [(tmp_path / "all.safetensors", 1.0), (tmp_path / "few.safetensors", 1.0)]
    saved(zimage, files[0][0])
    saved(zimage, files[1][0], seed=2, lora_targets="attention")
    apply_adapters(zimage, files)
    for file, _ in files:
        merge_into(zimage_twin, file)
    assert near(outputs(zimage), outputs(zimage_twin))


def test_merging_into_a_quantised_base_is_refused(zimage: Parts, tmp_path: Path) -> None:
    saved(zimage, tmp_path / "a.safetensors")
    quantize.quantize_network(zimage.backbone, "qint8")
    with pytest.raises(OptionError, match="cannot be merged into a quantised model"):
        merge_into(zimage, tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"lora_targets": "attention", "train_block_indices": "1"},
            {f"1.attention.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0")},
        ),
        ({"target_modules": (r"layers\.0\.adaLN",), "lora_targets": "attention"}, {"0.adaLN_modulation.0"}),
        ({"exclude_modules": ("attention", "feed_forward", "refiner")}, {"0.adaLN_modulation.0", "1.adaLN_modulation.0"}),
    ],
)
def test_options_choose_layers(changes: dict, names: set[str], zimage: Parts) -> None:
    network = attached(zimage, options_for(**changes))
    assert {plan.layer.removeprefix("layers.") for plan in network.plans} == names


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train_block_indices": "0-5"}, "this model has 2 such blocks, numbered 0 to 1, so 2 is none"),
        ({"train_block_indices": "none"}, "train_block_indices = none leaves nothing to train"),
        ({"exclude_modules": (".",)}, "leave no layer of the transformer to train"),
    ],
)
def test_options_that_leave_nothing_are_refused(changes: dict, sentence: str, zimage: Parts) -> None:
    with pytest.raises(OptionError, match=sentence):
        attached(zimage, options_for(**changes))


# Whole models


@pytest.mark.parametrize(
    ("layers", "count", "example"),
    [
        ("attention", 4 * 6, "layers.1.attention.norm_q.weight"),
        ("mlp", 4 * 3, "noise_refiner.0.feed_forward.w2.weight"),
        ("norm", 4 * 6, "layers.0.ffn_norm1.weight"),
    ],
)
def test_trained_layers_chooses_weights_of_the_blocks(layers: str, count: int, example: str, zimage: Parts) -> None:
    network = train_whole(zimage, ZImageFullOptions(trained_layers=layers), ZImage())
    names = network.named_parameters()
    assert len(names) == count and f"backbone.{example}" in names
    trained = {name for name, tensor in zimage.backbone.named_parameters() if tensor.requires_grad}
    assert {f"backbone.{name}" for name in trained} == names.keys()


def test_target_modules_choose_among_trained_layers(zimage: Parts) -> None:
    network = train_whole(zimage, ZImageFullOptions(trained_layers="attention", target_modules=("to_q",)), ZImage())
    assert len(network.named_parameters()) == 4
    with pytest.raises(OptionError, match="'feed_forward' matches no weight"):
        train_whole(ZImage().tiny(), ZImageFullOptions(trained_layers="attention", target_modules=("feed_forward",)), ZImage())
    everything = train_whole(ZImage().tiny(), ZImageFullOptions(), ZImage()).named_parameters()
    assert len(everything) == len(list(zimage.backbone.parameters()))


# The training adapter

PREVIEW = Preview("a red star", width=64, height=64, seed=3, steps=2, cfg_scale=1.0)


@pytest.fixture
def helped(zimage: Parts, tmp_path: Path) -> dict[str, str]:
    """Options of a model with a training adapter, which is on all layers; alpha is not the rank."""
    saved(zimage, tmp_path / "undo.safetensors", seed=7)
    ZImage().save(zimage, tmp_path / "base", "diffusers", None, {})
    return {"pretrained_model_name_or_path": str(tmp_path / "base"), "training_adapter": str(tmp_path / "undo.safetensors")}


def loaded(options: dict[str, str], dtype: torch.dtype = torch.float32, **more: object) -> Parts:
    return ZImage().load(ZImageModelOptions(**{**options, **more}), CPU, dtype)


@pytest.mark.parametrize("quantization", ["none", "qint8"])
def test_the_training_adapter_is_on_in_training_and_off_in_previews_and_no_weight_changes(quantization: str, helped: dict) -> None:
    plain = loaded({**helped}, training_adapter=None, transformer_quantization=quantization)
    parts = loaded(helped, transformer_quantization=quantization)
    want, weights = outputs(plain), {name: layer.weight for name, layer in layers_of(plain).items()}

    def numbers(weight: torch.Tensor) -> torch.Tensor:
        return weight.dequantize() if hasattr(weight, "qtype") else weight

    helped_output = outputs(parts)
    assert not near(helped_output, want, 1e-3)
    if quantization == "none":
        merge_into(plain, Path(helped["training_adapter"]))
        assert near(helped_output, outputs(plain))
        plain = loaded({**helped}, training_adapter=None)
        weights = {name: layer.weight for name, layer in layers_of(plain).items()}
    network = shaken(attached(parts, options_for(lora_targets="attention")))
    both = outputs(parts)
    with parts.without_training_adapter(), network.disabled():
        assert torch.equal(outputs(parts), want)
    assert torch.equal(outputs(parts), both)
    with network.disabled():
        assert torch.equal(outputs(parts), helped_output)
        assert torch.equal(ZImage().render(parts, [PREVIEW]), ZImage().render(plain, [PREVIEW]))
    # A preview shows the trained adapter on the model alone.
    trained = shaken(attached(plain, options_for(lora_targets="attention")))
    assert torch.equal(ZImage().render(parts, [PREVIEW]), ZImage().render(plain, [PREVIEW]))
    trained.detach()
    zimage_output(parts, torch.Generator().manual_seed(5)).square().mean().backward()
    own = set(network.parameters())
    assert all((tensor.grad is not None) == (tensor in own) for tensor in parts.backbone.parameters() if not hasattr(tensor, "qtype"))
    for name, layer in layers_of(parts).items():
        assert torch.equal(numbers(layer.weight), numbers(weights[name])), name


def test_the_base_that_the_prior_compares_with_has_the_training_adapter_too(helped: dict) -> None:
    """Else a network that changes nothing would be pulled to undo the training adapter, in a file that is used without it."""
    parts = loaded(helped)
    network = attached(parts, options_for(lora_targets="attention"))
    conditions = ZImage().encode_prompts(parts, ["a red star"])
    conditioned = Conditioned(ZImage(), parts, network, conditions, lambda: conditions[0])
    x, t = torch.randn(1, parts.vae.config.latent_channels, 4, 4), torch.rand(1)
    with torch.no_grad():
        untrained = conditioned(x, t)
        assert torch.equal(conditioned.base(x, t), untrained)
        shaken(network)
        assert torch.equal(conditioned.base(x, t), untrained) and not torch.equal(conditioned(x, t), untrained)
        with parts.without_training_adapter():
            assert not near(conditioned.base(x, t), untrained, 1e-3)


def test_a_saved_file_holds_nothing_of_the_training_adapter(helped: dict, tmp_path: Path) -> None:
    parts, plain = loaded(helped), loaded({**helped}, training_adapter=None)
    for name, one in (("with", parts), ("without", plain)):
        network = shaken(attached(one, options_for(lora_targets="attention")))
        export(network, one, tmp_path / f"{name}.safetensors", save_model_as="comfyui", precision="float")
    assert (tmp_path / "with.safetensors").read_bytes() == (tmp_path / "without.safetensors").read_bytes()


def test_the_training_adapter_is_held_in_the_models_precision_and_its_strength_counts(helped: dict) -> None:
    parts = loaded(helped, torch.bfloat16)
    assert {tensor.dtype for tensor in parts.backbone.parameters()} == {torch.bfloat16}
    off = loaded(helped, training_adapter_multiplier=0.0)
    assert torch.equal(outputs(off), outputs(loaded({**helped}, training_adapter=None)))
    half = loaded(helped, training_adapter_multiplier=0.5)
    assert not near(outputs(half), outputs(off), 1e-3) and not near(outputs(half), outputs(loaded(helped)), 1e-3)


def test_a_forecast_counts_the_training_adapter(helped: dict) -> None:
    held = sum(tensor.numel() * 2 for name, tensor in load_file(helped["training_adapter"]).items() if not name.endswith("alpha"))

    def forecast(**more: object) -> Forecast:
        given = {**helped, "train_data_dir": "toy:star", "mixed_precision": "bf16", "gradient_checkpointing": True, **more}
        questions = Questions((Bucket((64, 64)),), "a star")
        return Forecaster(ZImage(), questions, (64, 64))(flat.build(RUNS["zimage", "network"], given))

    counted, without, elsewhere = forecast(), forecast(training_adapter=None), forecast(training_adapter="/nowhere/undo.safetensors")
    base, plain = (one.of("training").parts["base model"] for one in (counted, without))
    # Each tensor takes whole blocks of 512 bytes.
    assert held <= base - plain <= held + 512 * len(load_file(helped["training_adapter"]))
    assert set(elsewhere.notes) - set(counted.notes) == {"The training adapter is not on this disk and not counted."}
    assert elsewhere.of("training").parts["base model"] == plain


def test_a_training_adapter_that_is_none_is_a_sentence(helped: dict, qwen: Parts, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="training_adapter: there is no file"):
        loaded({**helped, "training_adapter": str(tmp_path / "none.safetensors")})
    model = tmp_path / "base" / "vae" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(OptionError, match=r"training_adapter: .* is a VAE alone; a LoRA file belongs here"):
        loaded({**helped, "training_adapter": str(model)})
    names = names_of(qwen)
    save_file({f"{names.to_diffusers(name)}.lora_A.weight": torch.ones(1, 1) for name in names.layers}, tmp_path / "qwen.safetensors")
    with pytest.raises(OptionError, match=r"training_adapter: .* is a LoRA for Qwen-Image, but the model is Z-Image"):
        loaded({**helped, "training_adapter": str(tmp_path / "qwen.safetensors")})


# Headers


def test_the_header_says_what_was_trained_at_which_noise_levels_and_with_which_training_adapter(helped: dict) -> None:
    parts = loaded(helped, training_adapter_multiplier=0.5, scheduler_shift=2.0)
    values = {**helped, "training_adapter_multiplier": 0.5, "train_data_dir": "toy:star", "network_dim": 16}
    values |= {"objective": "acrf", "turbo_steps": 4}
    run = flat.build(RUNS["zimage", "network"], values)
    texts = build(run, base_facts(ZImage(), parts), step=5, epoch=1)
    assert (texts["modelspec.architecture"], texts["modelspec.prediction_type"]) == ("Z-Image/lora", "flow")
    assert texts["modelspec.implementation"] == "https://github.com/Tongyi-MAI/Z-Image"
    assert (texts["ss_base_model_version"], texts["ss_network_module"]) == ("z_image", "networks.lora_zimage")
    assert json.loads(texts["ss_acrf_sigmas"]) == anchor_sigmas(4, 2.0)
    assert (texts["ss_turbo_steps"], texts["ss_scheduler_shift"]) == ("4", "2.0")
    file = Path(helped["training_adapter"])
    assert texts["ss_training_adapter"] == "undo.safetensors" and texts["ss_training_adapter_multiplier"] == "0.5"
    assert texts["ss_training_adapter_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert not [text for text in texts.values() if str(file.parent) in text]
    plain = build(
        flat.build(RUNS["zimage", "network"], {**values, "objective": "flow", "turbo_steps": 8}),
        base_facts(ZImage(), parts),
        step=5,
        epoch=1,
    )
    assert "ss_acrf_sigmas" not in plain and "ss_turbo_steps" not in plain
