"""What is said of other programs, against what they read: tests/data/lora_readers.tsv was written by their own loaders."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch

from sd_scripts.families import RUNS
from sd_scripts.library.adapters import readers
from sd_scripts.library.adapters.architectures import architectures
from sd_scripts.library.adapters.fusing import MAGNITUDE
from sd_scripts.library.adapters.layer_names import LayerNames
from sd_scripts.library.adapters.layouts import layout_for, tensors_of
from sd_scripts.library.adapters.maths import KINDS, AdapterLayer, Kind
from sd_scripts.library.adapters.readers import StoredAdapter
from sd_scripts.library.adapters.reading import place_of
from sd_scripts.library.tools.models import published
from sd_scripts.schema import flat

TABLE = Path(__file__).parents[2] / "data" / "lora_readers.tsv"
SMALL = ("sd1", "flux2", "flux3", "chroma", "qwen_image21", "krea2", "zimage")
"""Those with fewer layers always run."""
LARGE = ("sdxl", "sd2", "flux", "qwen_edit", "anima")
RUN_OF = {"sd1": "sd"}
CASES = (*SMALL, *(pytest.param(name, marks=pytest.mark.long) for name in LARGE))
_KEY = re.compile(r"(.+?)\.((?:lora|hada|lokr|oft)_.+|alpha|dora_scale)")


def held(kind: Kind, rows: int, is_wide: bool) -> AdapterLayer:
    """An adapter of a layer with very few numbers: names alone matter."""
    tails = (1, 1) if is_wide else ()
    shapes: dict[Kind, dict[str, tuple[int, ...]]] = {
        "lora": {"lora_A.weight": (1, 1, *tails), "lora_B.weight": (rows, 1, *tails)},
        "loha": {"hada_w1_a": (rows, 1), "hada_w1_b": (1, 1), "hada_w2_a": (rows, 1), "hada_w2_b": (1, 1)},
        "lokr": {"lokr_w1": (1, 1), "lokr_w2_a": (rows, 1), "lokr_w2_b": (1, 1)},
        "oft": {"oft_R.weight": (1, 1)},
    }
    shapes["dora"] = {**shapes["lora"], MAGNITUDE: (rows,)}
    return AdapterLayer(kind, {rest: torch.zeros(shape) for rest, shape in shapes[kind].items()}, 1.0)


def stored(architecture: str, layout: str, kind: Kind) -> tuple[dict[str, StoredAdapter], LayerNames]:
    """The layers of a file with an adapter on everything that this kind can stand on, as our own code writes it."""
    layers = published(architecture)
    adapters = {}
    for name, module in layers.modules.items():
        target = layers.names.fused(name)
        rows = 2 if target is None or target.is_plain else dict(zip(target.layers, target.shares))[name] * 2
        if kind != "oft" or module.weight.dim() == 2:
            adapters[name] = held(kind, rows, module.weight.dim() == 4)
    tensors, _ = tensors_of(adapters, layers.names, layout, torch.float32)
    found: dict[str, StoredAdapter] = {}
    for key in tensors:
        stem, ending = _KEY.fullmatch(key).groups()
        endings = [*found[stem].endings, ending] if stem in found else [ending]
        found[stem] = StoredAdapter(place_of(key, layers.names)[0].layers[0], kind, endings)
    return found, layers.names


def test_every_architecture_has_been_measured() -> None:
    assert {*SMALL, *LARGE} == architectures().keys()


@pytest.mark.parametrize("architecture", CASES)
def test_the_layers_said_to_be_read_are_those_that_other_programs_read(architecture: str) -> None:
    rows = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    measured = {tuple(row[1:4]): {} for row in rows}
    for program, *about, read, there, digest in rows:
        measured[tuple(about)][program] = (int(read), int(there), digest)
    wrong = []
    for kind in KINDS:
        for layout in dict.fromkeys(layout_for(kind, asked) for asked in ("kohya", "diffusers", "comfyui")):
            found, names = stored(architecture, layout, kind)
            told = {
                program: (len(read), len(found), hashlib.sha256("\n".join(sorted(read)).encode()).hexdigest()[:12])
                for program, read in readers.layers_read(found, names).items()
            }
            expected = measured[architecture, layout, kind]
            wrong += [] if told == expected else [f"{layout} {kind}: {told}, measured {expected}"]
    assert wrong == []


@pytest.mark.parametrize("architecture", CASES)
def test_the_default_names_are_those_that_most_programs_read_and_the_option_says_which(architecture: str) -> None:
    """For a LoRA on the layers that get one by default."""
    runs = [RUN_OF.get(architecture, architecture), *(["kontext"] if architecture == "flux" else [])]
    options = [flat.fields(RUNS[run, "network"])["save_model_as"] for run in runs]
    option = options[0]
    assert len({(other.help, other.default) for other in options}) == 1
    saying = re.finditer(r"(kohya|diffusers|comfyui)'s?(?: \([^)]*\))? by ([A-Za-z-]+(?:, [A-Za-z-]+)*)", option.help)
    told = {match[1]: match[2].split(", ") for match in saying}
    layers, measured = published(architecture), {}
    for layout in option.choices:
        found, names = stored(architecture, layout, "lora")
        usual = {
            stem: layer
            for stem, layer in found.items()
            if names.block(layer.name) is not None and layers.modules[layer.name].weight.shape[2:] != (3, 3)
        }
        measured[layout] = [program for program, read in readers.layers_read(usual, names).items() if len(read) == len(usual)]
    assert told == {layout: programs for layout, programs in measured.items() if programs}
    assert len(measured[option.default]) == max(len(programs) for programs in measured.values())
