"""What is known of models and optimizers before torch is loaded is what they are."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sd_scripts.families import FACTS, NAMES, RUNS
from sd_scripts.library.train.lion import Lion
from sd_scripts.runs.early_checks import check_settings
from sd_scripts.runs.layers import LayerTable, blocks_in, file_of, layers_of
from sd_scripts.runs.optimizer_arguments import ARGUMENTS
from sd_scripts.runs.told import adapter_kind, adapter_of_another, header_of
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from tests.layer_tables import patterns, table_of
from tests.made_here import lora_of

WITH_ADAPTERS = [family for family, method in RUNS if method == "network"]


@pytest.mark.parametrize("family", [name if name == "krea2" else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_the_table_of_layers_is_that_of_the_published_models(family: str) -> None:
    file = file_of(family)
    assert table_of(family) == (file.read_text() if file.is_file() else ""), "python -m tests.layer_tables writes it anew"


def test_every_family_with_adapters_has_a_table_of_layers() -> None:
    assert [name for name in WITH_ADAPTERS if layers_of(name) is None] == []


def test_an_expression_finds_layers_by_their_numbers() -> None:
    table = LayerTable(2, tuple(patterns(["blocks.0.attn.to_q", "blocks.11.attn.to_q", "img_in", "blocks.3.to_out.0"])))
    assert table.layers == ("blocks.{12}.attn.to_q", "blocks.{4}.to_out.{1}", "img_in")
    asked = {r"blocks\.1[01]\.": True, r"blocks\.12\.": False, "^img_in$": True, "to_k": False, r"blocks\.[0-3]\.to_out\.0$": True}
    assert {text: table.finds(text) for text in asked} == asked


def test_the_table_of_optimizers_has_the_arguments_of_their_classes() -> None:
    adafactor = importlib.import_module("transformers.optimization").Adafactor
    prodigy = importlib.import_module("prodigyopt").Prodigy
    made = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Lion": Lion, "Adafactor": adafactor, "Prodigy": prodigy}
    for name, make in made.items():
        signature = inspect.signature(make).parameters
        assert [key for key in signature if key not in ("params", "lr")] == list(ARGUMENTS[name])
        refused = [key for key, (_, fits) in ARGUMENTS[name].items() if not fits(signature[key].default) and key != "growth_rate"]
        assert refused == [], "its own defaults are allowed"


@pytest.mark.parametrize("family", [name if name == "flux" else pytest.param(name, marks=pytest.mark.long) for name in WITH_ADAPTERS])
def test_a_run_takes_the_adapters_of_its_family_and_knows_their_kind(family: str, tmp_path: Path) -> None:
    file = lora_of(family, tmp_path / "mine.safetensors", "owner/model")
    header = header_of(file)
    assert adapter_of_another(file.name, header, family) is None and adapter_kind(header) == "lora"
    modules = {name: FACTS[name].lora_module for name in WITH_ADAPTERS}
    alike = {name for name in WITH_ADAPTERS if adapter_of_another(file.name, header, name) is None}
    assert all((modules[name] or "").startswith(modules[family] or "") for name in alike), alike
    assert {"sd": "sdxl", "sdxl": "sd", "zimage": "krea2"}.get(family) not in alike


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_says_itself_how_many_blocks_it_has(prefix: str, tmp_path: Path) -> None:
    """Models that somebody has cut shorter, or made longer, than the published one: 57 blocks, of which 19 are double."""
    made = {"train_data_dir": "toy:star", "output_dir": str(tmp_path), "pretrained_model_name_or_path": str(tmp_path / "base.safetensors")}
    for double, single, blocks, target, told in (
        (21, 40, 61, r"^single_transformer_blocks\.39\.", []),
        (21, 40, 62, r"^transformer_blocks\.90\.", ["has 61 blocks, not 62; set it to 61 or less", "matches no layer"]),
        (8, 38, 57, "attn", ["has 46 blocks, not 57; set it to 46 or less"]),
    ):
        names = [f"double_blocks.{n}.img_attn.qkv.weight" for n in range(double)]
        names += [f"single_blocks.{n}.linear1.weight" for n in range(single)]
        names += ["img_in.weight", "txt_in.weight", "guidance_in.in_layer.weight"]
        tensors = {prefix + name: torch.zeros(64, 64) if name == "img_in.weight" else torch.zeros(1) for name in names}
        save_file(tensors, tmp_path / "base.safetensors")
        options = flat.build(RUNS["flux", "network"], {**made, "blocks_to_swap": blocks, "target_modules": [target]})
        try:
            check_settings(options)
            said = []
        except OptionError as err:
            said = [problem.message for problem in err.problems if problem.option in ("blocks_to_swap", "target_modules")]
        assert len(said) == len(told) and all(part in text for part, text in zip(told, said, strict=True)), said


def test_the_blocks_of_published_models_are_counted_by_their_names() -> None:
    """In the layouts of this program; a layer of each block and what is beside them is enough."""
    wrong = {}
    for family in WITH_ADAPTERS:
        table = layers_of(family)
        assert table is not None
        # The table has text encoders too, Anima's Qwen3 among them, and its adapter of texts, whose blocks lie beside the transformer's.
        beside = re.compile(r"encoder\.|text_model\.|blocks\.|layers\.\{28\}\.(self_attn|mlp)\.")
        names = [layer for layer in table.layers if not beside.match(layer)]
        paths = (
            re.sub(r"\{\d+\}", str(n), layer, count=1) + ".weight"
            for layer in names
            for n in range(int((re.findall(r"\{(\d+)\}", layer) or ["1"])[0]))
        )
        if (counted := blocks_in(paths)) not in (None, table.blocks):
            wrong[family] = (counted, table.blocks)
    assert wrong == {}


def test_what_works_is_not_refused(tmp_path: Path) -> None:
    made = {
        "train_data_dir": "toy:star", "output_dir": str(tmp_path), "pretrained_model_name_or_path": "toy", "blocks_to_swap": 57,
        "target_modules": ["attn", r"^single_transformer_blocks\.37\."], "exclude_modules": ["norm"],
        "optimizer_args": ["betas=[0.9,0.95]", "weight_decay=1e-2", "amsgrad=1"],
    }  # fmt: skip
    check_settings(flat.build(RUNS["flux", "network"], made))
