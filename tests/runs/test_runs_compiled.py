"""torch.compile changes the speed of a run and nothing else: losses, files, states, previews."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from sd_scripts.families import RUNS
from sd_scripts.library.train.process import Process
from sd_scripts.library.train.session import train
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.stopping import StopRequest
from sd_scripts.schema.command_line import parse_cli
from tests.runs.conftest import Runs

KINDS = [
    pytest.param(kind, "aot_eager", scope, id=f"{'/'.join(kind)}/{scope}", marks=pytest.mark.long)
    for kind in RUNS
    for scope in ("network", "blocks")
]
KINDS += [pytest.param(("ddpm", "scratch"), "eager", "auto", id="ddpm/scratch/eager")]
KINDS += [pytest.param(("lgt", "scratch"), "eager", "blocks", id="lgt/scratch/eager/blocks", marks=pytest.mark.long)]
KINDS += [pytest.param(("ddpm", "scratch"), "inductor", "auto", id="ddpm/scratch/inductor", marks=pytest.mark.long)]


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


@pytest.mark.parametrize(("kind", "backend", "scope"), KINDS)
def test_a_compiled_run_is_the_plain_run_and_each_goes_on_from_the_others_state(
    kind: tuple[str, str], backend: str, scope: str, runs: Runs, tiny_bases: dict[str, Path], pairs: Path, styles: Path
) -> None:
    runs.family, runs.method = kind
    runs.base = tiny_bases[runs.family]
    runs.images = {"qwen_edit": pairs, "lgt": styles}.get(runs.family, runs.images)
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
        **({"sample_steps": 1} if runs.family == "lgt" else {"sample_prompts": f"image 3 --w 64 --h 64 --s 1 --l 1{control}"}),
    }
    output, on = runs.output, {"compile": True, "compile_backend": backend, "compile_scope": scope}

    def train(folder: str, **given: Any) -> RunDirectory:
        runs.output = output.with_name(folder)
        return runs.train(**options, **given)

    plain, compiled = train("plain"), train("compiled", **on)
    assert losses(compiled) == pytest.approx(losses(plain), abs=1e-5) and len(losses(plain)) == 3
    assert names_in(compiled) == names_in(plain) and not any("_orig_mod" in name for name in names_in(compiled))
    told = {kind: [event for event in compiled.events()[0] if event["kind"] == kind] for kind in ("compiling", "compiled", "warning")}
    (beforehand,) = told["compiling"]
    assert beforehand["scope"] == ("network" if scope == "auto" else scope) and beforehand["backend"] == backend
    assert 0 < sum(event["graphs"] for event in told["compiled"]) <= beforehand["expected"]
    assert not any("compiling" in event["text"] or "versions" in event["text"] for event in told["warning"])
    assert shown(compiled) == shown(plain) != []
    later = losses(plain)[3]
    assert losses(train("switched_on", resume=plain.state / "000002", **on)) == {3: pytest.approx(later, abs=1e-5)}
    assert losses(train("switched_off", resume=compiled.state / "000002")) == {3: pytest.approx(later, abs=1e-5)}


def test_a_run_without_a_compiler_says_so_and_trains_with_plain_code(runs: Runs) -> None:
    from torch._inductor import config

    arguments = runs.arguments(compile=True, compile_fallback=True, max_train_steps=1, save_state_on_train_end=None)
    asked = parse_cli(RUNS[runs.family, runs.method], arguments)
    process = Process.begin(asked, StopRequest(None))
    try:
        with config.patch("cpp.cxx", ("no-such-compiler",)):
            assert train(process, asked).finished
    finally:
        process.close()
    events = runs.newest().events()[0]
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert any(text.startswith("compile is off: inductor needs a C++ compiler") for text in warnings)
    assert not any(event["kind"] in ("compiling", "compiled") for event in events)
    assert [event["step"] for event in events if event["kind"] == "step"] == [1]
