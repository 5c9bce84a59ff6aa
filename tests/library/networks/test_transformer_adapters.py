"""Adapters of the families that are a transformer with its companions: what every one of them does with files that were written here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sd_scripts.families import RUNS
from sd_scripts.families import family as family_of
from sd_scripts.library.adapters.applying import put_on_for_training
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.maths import KINDS
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.model import FewStepModelOptions
from tests.library.networks.adapters_in_small import LAYOUTS, near, saved, velocity

FAMILIES = ("anima", "chroma", "flux2", "flux2_dev", "flux3", "kontext", "krea2", "qwen_image21")
MODELS_OF_ALL = {name: run.model_fields["model"].annotation for (name, method), run in RUNS.items() if method == "network"}
MODELS = {name: MODELS_OF_ALL[name] for name in FAMILIES}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[pytest.mark.long] * ((row + column) % 3 > 0))
        for row, kind in enumerate(KINDS)
        for column, layout in enumerate(LAYOUTS)
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_any_kind_merges_into_what_was_trained(name: str, kind: str, layout: str, tmp_path: Path) -> None:
    parts, family = family_of(name).tiny(), family_of(name)
    before, live = velocity(family, parts), saved(family, parts, tmp_path / "adapter.safetensors", layout, kind)
    merge_into(parts, tmp_path / "adapter.safetensors")
    assert (before - live).abs().max() > 1e-2 and near(velocity(family, parts), live)


@pytest.mark.parametrize("name", [name for name in FAMILIES if issubclass(MODELS[name], FewStepModelOptions)])
def test_a_training_adapter_is_on_in_training_and_off_in_previews(name: str, tmp_path: Path) -> None:
    parts, family = family_of(name).tiny(), family_of(name)
    family.save(parts, tmp_path / "base", "diffusers", None, {})
    live, plain = saved(family, parts, tmp_path / "undo.safetensors", "kohya"), velocity(family, parts)

    def loaded(adapter: str) -> Parts:
        given = {"pretrained_model_name_or_path": str(tmp_path / "base"), "training_adapter": adapter}
        return family.load(MODELS[name](**given), torch.device("cpu"), torch.float32)

    helped, request = loaded(str(tmp_path / "undo.safetensors")), Preview("a cat", "", 64, 64, seed=3, steps=2, cfg_scale=1.0)
    assert near(velocity(family, helped), live) and not near(live, plain)
    with helped.without_training_adapter():
        assert near(velocity(family, helped), plain)
    assert torch.allclose(family.render(helped, [request]), family.render(parts, [request]), atol=1e-4)
    with pytest.raises(OptionError, match="training_adapter: there is no file"):
        loaded("nowhere.safetensors")


@pytest.mark.parametrize("name", [name for name, model in MODELS_OF_ALL.items() if issubclass(model, FewStepModelOptions)])
def test_a_run_with_a_training_adapter_trains_the_layers_that_it_trains_without(name: str, tmp_path: Path) -> None:
    family = family_of(name)
    parts = family.tiny()
    targets = family.adapter_targets(parts, False)
    saved(family, parts, tmp_path / "undo.safetensors", "kohya")
    parts.training_adapter = put_on_for_training(parts, tmp_path / "undo.safetensors", 1.0)
    assert family.adapter_targets(parts, False) == targets
    options = RUNS[name, "network"].model_fields["network"].default
    network = attach(parts, options, {"backbone": targets["backbone"]}, 0)
    trained = [key for key in network.named_parameters() if key.endswith("lora_A.weight")]
    assert trained and {key.removesuffix(".lora_A.weight").removeprefix("backbone.") for key in trained} <= {*targets["backbone"]}
