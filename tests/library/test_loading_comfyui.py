"""Whole models as ComfyUI's node CheckpointSave writes them: networks and names as those of version 0.33.0 (August 2026)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sd_scripts import families
from sd_scripts.families import RUNS
from tests.library.loading_in_small import assert_same, original_state, prefixed

pytestmark = pytest.mark.usefixtures("no_network")
CLIP_T5 = {"te1": "text_encoders.clip_l.transformer.", "te3": "text_encoders.t5xxl.transformer.", "vae": "vae."}
SAVED = {
    "flux": CLIP_T5,
    "kontext": CLIP_T5,
    "chroma": {"te3": "cond_stage_model.t5xxl.transformer.", "vae": "first_stage_model."},
    "flux2": {"te1": "text_encoders.qwen3_4b.transformer.", "vae": "vae."},
    "flux2_dev": {"te1": "text_encoders.mistral3_24b.transformer.", "vae": "vae."},
    "zimage": {"te1": "text_encoders.qwen3_4b.transformer.", "vae": "vae."},
    "qwen_edit": {"te1": "text_encoders.qwen25_7b.transformer.", "vae": "vae."},
    "krea2": {"te1": "text_encoders.qwen3vl_4b.transformer.", "vae": "vae."},
    "anima": {
        "te1": "cond_stage_model.qwen3_06b.transformer.",
        "te2": "model.diffusion_model.llm_adapter.",
        "vae": "first_stage_model.",
    },
}
"""What stands before the names of a network, by the family. Before those of all transformers it is `model.diffusion_model.`."""
RENAMED = ("flux", "kontext", "chroma", "flux2", "flux2_dev")
"""Families of whose transformers every `.scale` of a norm is saved as `.weight`."""


@pytest.mark.parametrize("name", SAVED)
def test_a_model_that_comfyui_has_saved_is_read_whole(name: str, tmp_path: Path) -> None:
    family, loading = families.family(name), importlib.import_module(f"sd_scripts.families.{name}.loading")
    spec: Any = vars(loading).get("SPEC") or loading.LOADER.spec
    parts = family.tiny()
    transformer = original_state(spec, parts, "backbone")
    if name in RENAMED:
        assert any(key.endswith(".scale") for key in transformer)
        transformer = {key.removesuffix(".scale") + ".weight" * key.endswith(".scale"): tensor for key, tensor in transformer.items()}
    held = prefixed(transformer, "model.diffusion_model.")
    for part, prefix in SAVED[name].items():
        held |= prefixed(original_state(spec, parts, part), prefix)
    # Configurations and tokenizers beside it, and no other weights.
    family.save(parts, tmp_path / "model", "diffusers", None, {})
    for weights in (tmp_path / "model").glob("*/*.safetensors"):
        weights.unlink()
    save_file({key: tensor.clone() for key, tensor in held.items()}, tmp_path / "model" / "saved.safetensors")
    given = {"pretrained_model_name_or_path": str(tmp_path / "model" / "saved.safetensors")}
    if name == "qwen_edit":
        given["model_version"] = parts.settings["model_version"]
    options: Any = RUNS[name, "network"].model_fields["model"].annotation
    assert_same(family.load(options(**given), torch.device("cpu"), torch.float32), parts)
