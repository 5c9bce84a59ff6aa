"""generate.py as a process: it draws with the built-in model, and says what is wrong before anything heavy is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from PIL import Image

SCRIPT = Path(__file__).resolve().parents[2] / "sd_scripts" / "generate.py"


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


def test_the_script_draws_with_the_built_in_model_as_its_options_file_and_flags_say(tmp_path: Path) -> None:
    file = tmp_path / "drawing.toml"
    file.write_text('[predict]\ndraw_with = "toy"\nfamily = "sd"\nprompt = "a red circle in the center"\nsteps = 3\ncfg_scale = 1\n')
    done = generate(
        "--config_file", str(file), "--steps", "2", "--seed", "5", "--out", str(tmp_path), "--report", str(tmp_path / "told.json")
    )
    assert done.returncode == 0, done.stderr
    (path,) = json.loads((tmp_path / "told.json").read_text())["files"]
    assert path in done.stdout
    with Image.open(path) as image:
        assert image.size == (64, 64) and "Steps: 2" in image.text["parameters"]  # type: ignore[attr-defined]


def test_wrong_options_end_it_with_all_sentences() -> None:
    done = generate("--draw_with", "/nowhere/run", "--prompt", "x")
    assert done.returncode == 2 and "draw_with: there is no file or folder /nowhere/run" in done.stderr
    done = generate("--draw_with", "toy", "--family", "sd", "--prompt", "x", "--true_cfg_scale", "3", "--steps", "0")
    assert done.returncode == 2 and "--true_cfg_scale: use cfg_scale" in done.stderr and "steps" in done.stderr
