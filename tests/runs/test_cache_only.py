"""`--cache_only`: encoders fill the caches of a run, without the network that is trained, on any number of processes."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from sd_scripts.families import RUNS
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.runs.rundir import RunDirectory
from tests.forked import said_by_script
from tests.runs.conftest import PATIENCE_SECONDS, Runs
from tests.runs.together import Together

TEXTS: dict[str, Any] = {"caption_dropout_rate": 0.3, "shuffle_caption": True, "caption_variants": 2}


def without_backbone(base: Path, folder: str, copy: Path) -> Path:
    """A copy of a model that lacks the weights of the network that is trained."""
    shutil.copytree(base, copy)
    for weights in (copy / folder).glob("*.safetensors"):
        weights.unlink()
    return copy


def said_by(runs: Runs, **options: Any) -> str:
    """What the script itself says, in one process."""
    script = SCRIPTS / RUNS[runs.family, runs.method].script
    code, said = said_by_script(script, runs.arguments(cache_only=True, **options), Path.cwd(), PATIENCE_SECONDS)
    assert code == 0, said[-4000:]
    return said


def refused(runs: Runs, folder: Path, **options: Any) -> str:
    """What a start says that ends with exit code 2."""
    started = Together(runs, 1, folder, cache_only=True, **options)
    codes, said = started.end(), started.said()
    assert codes == [2], said[-4000:]
    return said


def kept(runs: Runs) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (runs.output / ".cache").rglob("*.safetensors")}


def test_two_processes_fill_the_caches_without_the_backbone_and_training_finds_everything(
    runs: Runs, tiny_bases: dict[str, Path], pairs: Path, tmp_path: Path
) -> None:
    runs.family, runs.images = "qwen_edit", pairs
    runs.base = without_backbone(tiny_bases["qwen_edit"], "transformer", tmp_path / "encoders")
    started = Together(runs, 2, tmp_path / "start", cache_only=True, train_batch_size=1, **TEXTS)
    codes, said = started.end(), started.said()
    assert codes == [0, 0], said[-4000:]
    assert not runs.folders() and not list(runs.output.glob("*/events.jsonl")), "no run folder is made"
    entries = kept(runs)
    told = re.search(r"instructions \d+ entries .* together (\d+) entries, ([\d.]+) MiB", said)
    assert told is not None and int(told[1]) == len(entries) > 48 and float(told[2]) > 0, said

    runs.base = tiny_bases["qwen_edit"]
    run = runs.train(max_train_steps=8, train_batch_size=2, **TEXTS)
    assert kept(runs) == entries
    assert "encoded" not in run.console.read_text(encoding="utf-8")


def test_a_run_folder_that_was_given_gets_the_last_word(runs: Runs, tmp_path: Path) -> None:
    runs.base, folder = without_backbone(runs.base, "unet", tmp_path / "encoders"), tmp_path / "given"
    said = said_by(runs, run_dir=folder)
    last = RunDirectory(folder).events()[0][-1]
    assert last["kind"] == "finished" and last["text"] in said and f"together {len(kept(runs))} entries" in last["text"]


def test_caches_in_memory_and_devices_that_are_not_here_are_sentences(runs: Runs, tmp_path: Path) -> None:
    options = {"no_cache_latents_to_disk": True, "no_cache_text_encoder_outputs_to_disk": True}
    assert "cache_only fills the caches on disk, and all are off" in refused(runs, tmp_path / "memory", **options)
    runs.family = "qwen_edit"
    said = refused(runs, tmp_path / "devices", vae_device="cuda:5", text_encoder_device="cuda:7")
    assert "vae_device: cuda:5 is not there" in said and "text_encoder_device: cuda:7 is not there" in said
