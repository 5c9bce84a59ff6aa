"""Runs with settings drawn at random: each is trained or refused in sentences, and one that is killed goes on to the same bytes."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sd_scripts.families import RUNS
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.schema import flat
from sd_scripts.schema.flat import FlatField
from sd_scripts.schema.optimizer import OPTIMIZERS
from tests.forked import forked_script
from tests.runs.conftest import PATIENCE_SECONDS, Runs
from tests.runs.test_runs_of_every_kind import control_flag, of_kind

GIVEN: dict[str, Any] = {
    "max_train_steps": 4,
    "save_every_n_steps": 2,
    "save_state_every_n_steps": 2,
    "preflight": "off",
    # Control images of a million pixels take minutes.
    "control_resolution": 64,
}
SPECIAL = {
    "optimizer_type": OPTIMIZERS,
    "learning_rate": (1e-4, 1e-3),
    "network_dim": (1, 2, 8),
    "sample_steps": (1, 2, 3),
    "train_block_indices": ("0", "all"),
    "keep_tokens_separator": ("|||",),
}
"""What is drawn for options for which a number within their bounds, or no text at all, would say little."""
LEFT_OUT = re.compile(
    "compile$|compile_(backend|mode)|resolution|_reso|multi_gpu|num_gpus|global_batch_size|distributed_|num_machines|machine_rank|"
    "main_process|max_restarts|launcher|max_train|_epochs$|save_(last|state|n_)|early_stop|profile|log_with|class_images|unet_lr|resume|"
    "allow_custom|huggingface|max_data_loader"
)
"""Options that other tests are about: compiling takes long, several processes and machines, when a run ends and what it keeps."""


def value(field: FlatField) -> Any:
    """A value that is not the default; None where there is none to draw."""
    if field.name in SPECIAL:
        return random.choice(SPECIAL[field.name])
    if field.choices or field.type is bool:
        return random.choice([one for one in field.choices or (True, False) if one != field.default])
    if field.type not in (int, float):
        return None
    numbers = (0, 1, 2, 3, 5, 32) if field.type is int else (0.0, 0.1, 0.5, 0.9, 1.0, 2.0)
    return random.choice([None, *(number for number in numbers if number != field.default and fits(field, number))])


def fits(field: FlatField, number: float) -> bool:
    try:
        field.reader.validate_python(number)
    except ValidationError:
        return False
    return True


def drawn(kind: Runs) -> dict[str, Any]:
    """Settings of a run; previews in half of them."""
    known = flat.fields(RUNS[kind.family, kind.method])
    free = [field for field in known.values() if field.name not in GIVEN and not LEFT_OUT.search(field.name)]
    found = {field.name: value(field) for field in random.sample(free, random.choice((4, 8, 14)))}
    found |= {"train_batch_size": random.choice((1, 2, 3))} | {name: given for name, given in GIVEN.items() if name in known}
    if "sample_prompts" in known and random.random() < 0.5:
        found["sample_prompts"] = f"an image --w 64 --h 64 --s 2{control_flag(kind)}"
    return {name if one is not False else f"no_{name}": one is False or one for name, one in found.items() if one is not None}


def trained(kind: Runs, console: Path, options: dict[str, Any]) -> tuple[int | None, str]:
    """Exit code of a run that nobody disturbs, and what it said."""
    console.unlink(missing_ok=True)
    process = forked_script(SCRIPTS / RUNS[kind.family, kind.method].script, kind.arguments(**options), console)
    process.join(PATIENCE_SECONDS)
    return process.exitcode, console.read_text(encoding="utf-8", errors="replace")


def files_of(kind: Runs) -> dict[Path, bytes]:
    """What a run has saved, by its place in the run's folder."""
    run = kind.newest().path
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*.safetensors") if "state" not in path.relative_to(run).parts}


@pytest.mark.long
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("method", RUNS, ids="/".join)
def test_a_run_with_any_settings_ends_or_is_refused_and_goes_on_when_it_is_killed(
    method: tuple[str, str], number: int, runs: Runs, tiny_bases: dict[str, Path], pairs: Path, styles: Path, tmp_path: Path
) -> None:
    kind, console = of_kind(runs, method, tiny_bases, pairs, styles), tmp_path / "console.txt"
    options = drawn(kind)
    code, said = trained(kind, console, options)
    while code == 2 and (
        refused := [name for name in options if re.search(rf"\b{name.removeprefix('no_')}\b", said) and name not in GIVEN]
    ):
        assert re.search(r"^  - ", said, re.MULTILINE) and "Traceback" not in said, said
        options.pop(refused[0])
        shutil.rmtree(kind.output, ignore_errors=True)
        code, said = trained(kind, console, options)
    assert code == 0 and "Traceback" not in said, f"{options}\n{said}"
    whole = files_of(kind)
    assert whole
    shutil.rmtree(kind.output)
    kind.killed("a step", 3, **options)
    code, said = trained(kind, console, options)
    assert code == 0, f"{options}\n{said}"
    again = files_of(kind)
    assert again.keys() == whole.keys(), options
    assert not [path for path in whole if whole[path] != again[path]], options
