"""torch.compile changes the speed of a run and nothing else: losses, files, states, previews."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from sd_scripts.schema.rundir import RunDirectory
from sd_scripts.schema.runs import RUNS
from tests.runs.conftest import Runs

KINDS = [pytest.param(kind, "aot_eager", id="/".join(kind), marks=pytest.mark.long) for kind in RUNS]
KINDS += [pytest.param((family, "scratch"), "eager", id=f"{family}/scratch/eager") for family in ("ddpm", "lgt")]
KINDS += [pytest.param(("ddpm", "scratch"), "inductor", id="ddpm/scratch/inductor", marks=pytest.mark.long)]


def losses(run: RunDirectory) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events()[0] if event["kind"] == "step"}


def names_in(run: RunDirectory) -> set[str]:
    """Names of weights in the saved file."""
    (file,) = run.path.glob("trained.safetensors")
    with safe_open(file, "pt") as tensors:
        return set(tensors.keys())


def shown(run: RunDirectory) -> list[str]:
    """Names of previews, and of evaluations."""
    return sorted(path.name for folder in (run.samples, run.inference) if folder.is_dir() for path in folder.iterdir())


@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_a_compiled_run_is_the_plain_run_and_each_goes_on_from_the_others_state(
    kind: tuple[str, str], backend: str, runs: Runs, tiny_bases: dict[str, Path], pairs: Path, styles: Path
) -> None:
    runs.family, runs.method = kind
    runs.base = tiny_bases[runs.family]
    runs.pictures = {"qwen_edit": pairs, "lgt": styles}.get(runs.family, runs.pictures)
    control = f" --ci {pairs / 'control' / 'p03.png'}" if runs.family == "qwen_edit" else ""
    options: dict[str, Any] = {
        # One size, which is one version of the code.
        "no_enable_bucket": True,
        "max_train_steps": 3,
        "learning_rate": 1e-3,
        "save_every_n_steps": 2,
        "save_precision": "float",
        "sample_every_n_steps": 3,
        "output_name": "trained",
        **({"sample_steps": 1} if runs.family == "lgt" else {"sample_prompts": f"picture 3 --w 64 --h 64 --s 1 --l 1{control}"}),
    }
    output, on = runs.output, {"compile": True, "compile_backend": backend}

    def train(folder: str, **given: Any) -> RunDirectory:
        runs.output = output.with_name(folder)
        return runs.train(**options, **given)

    plain, compiled = train("plain"), train("compiled", **on)
    assert losses(compiled) == pytest.approx(losses(plain), abs=1e-5) and len(losses(plain)) == 3
    assert names_in(compiled) == names_in(plain) and not any("_orig_mod" in name for name in names_in(compiled))
    assert shown(compiled) == shown(plain) != []
    later = losses(plain)[3]
    assert losses(train("switched_on", resume=plain.state / "000002", **on)) == {3: pytest.approx(later, abs=1e-5)}
    assert losses(train("switched_off", resume=compiled.state / "000002")) == {3: pytest.approx(later, abs=1e-5)}
