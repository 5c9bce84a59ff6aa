"""The prediction script as users and the studio start it: exit codes, files, sentences, and a worker that writes nothing but events."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd_scripts.dataset.images import read_size
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.library.render.predicting import command
from sd_scripts.schema.command_line import parse_tool, to_argv
from sd_scripts.schema.flat import build, fields
from tests.forked import said_by_script

SCRIPT = Path(__file__).parents[2] / "sd_scripts" / QwenImagePredict.script
PATIENCE_SECONDS = 240


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    family = QwenEdit()
    family.save(family.tiny(), folder, "diffusers", None, {})
    return folder


@pytest.fixture
def control(tmp_path: Path) -> Path:
    path = tmp_path / "before.png"
    Image.fromarray(np.random.default_rng(random.getrandbits(64)).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return path


def started(*arguments: str, cwd: Path, lines_in: int | None = None) -> subprocess.Popen[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=cwd,
        env=env,
        stdin=lines_in,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_script_makes_images_from_any_folder_and_names_them(base: Path, control: Path, tmp_path: Path) -> None:
    model = ["--pretrained_model_name_or_path", str(base)]
    asked = ["--prompt", "make it red", "--images", control.name, "--steps", "2", "--num_images", "2", "--seed", "3", "--out", "made"]
    code, said = said_by_script(SCRIPT, [*model, *asked, "--report", "report.json"], tmp_path)
    assert code == 0, said
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    files = [Path(file) for file in report["files"]]
    assert [file.parent for file in files] == [tmp_path / "made"] * 2
    assert [read_size(file) for file in files] == [(64, 64)] * 2
    assert report["seeds"] == [3, 4] and [line for line in said.splitlines() if line in report["files"]] == report["files"]


def test_wrong_options_are_sentences_without_loading_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(
            QwenImagePredict,
            ["--steps", "0", "--size", "64,7", "--lora", "a", "--lora_weight", "1", "2", "--vae_device", "gpu", "--promt", "x"],
        )
    assert end.value.code == 2
    text = capsys.readouterr().err
    for part in ("steps", "size", "lora_weight has 2 numbers for 1 files", "'gpu' is not a device", "Did you mean prompt?"):
        assert part in text, part


def test_what_is_missing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(QwenImagePredict, [])
    text = capsys.readouterr().err
    assert "pretrained_model_name_or_path is missing" in text and "prompt is missing" in text


def test_files_that_are_not_there_end_with_code_2_and_all_their_names(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(
            QwenImagePredict,
            ["--pretrained_model_name_or_path", str(base), "--prompt", "x", "--images", "gone.png", "--lora", "none.safetensors"]
            + ["--out", str(tmp_path)],
        )
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert "gone.png is not there" in text and "no file none.safetensors" in text and list(tmp_path.iterdir()) == []


def test_the_command_line_gives_the_options_of_the_page() -> None:
    values = {"pretrained_model_name_or_path": "toy", "prompt": "a, b", "images": ["x y.png"], "lora": ["a", "b"], "lora_weight": [0.5, 1]}
    options = build(QwenImagePredict, {**values, "size": [64, 96], "offload": True, "negative_prompt": ""})
    assert parse_tool(QwenImagePredict, to_argv(options)) == options
    assert [name for name, field in fields(QwenImagePredict).items() if not field.help] == []


def test_every_option_is_read() -> None:
    from tests.test_options_are_used import read_attributes

    assert [name for name in fields(QwenImagePredict) if name not in read_attributes()] == []


def test_a_worker_writes_events_alone_and_ends_when_its_input_closes(base: Path, control: Path, tmp_path: Path) -> None:
    process = started("--serve", "--pretrained_model_name_or_path", str(base), "--steps", "2", cwd=tmp_path, lines_in=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    events: list[dict[str, Any]] = [json.loads(process.stdout.readline())]
    asked = {"op": "predict", "id": "ä", "prompt": "mach es größer", "images": [str(control)], "out": "made"}
    process.stdin.write(json.dumps(asked, ensure_ascii=False) + "\n")
    process.stdin.flush()
    while events[-1]["event"] not in ("done", "failed"):
        events.append(json.loads(process.stdout.readline()))
    assert events[-1]["event"] == "done" and events[-1]["id"] == "ä" and Path(events[-1]["files"][0]).parent == tmp_path / "made"
    process.stdin.write(json.dumps({**asked, "id": "b", "steps": 1000}) + "\n")
    process.stdin.flush()
    while json.loads(process.stdout.readline())["event"] != "step":
        pass
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["event"] == "cancelled"


def test_a_worker_ends_on_a_signal(tmp_path: Path) -> None:
    process = started("--serve", cwd=tmp_path, lines_in=subprocess.PIPE)
    assert process.stdout is not None and json.loads(process.stdout.readline())["event"] == "ready"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
